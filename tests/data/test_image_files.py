"""Images as rows name and hold them: every form of a text, kinds of files, and names that lead nowhere."""

import base64
import io
import os

import numpy as np
import pytest
from PIL import Image

from halfbyte.data.images import ImageSource, opened
from halfbyte.data.sources import read_sources
from halfbyte.utils.errors import DataError
from tests.helpers.image_models import picture

SOURCE = ImageSource(None, allow_urls=False)
DOT = "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"  # a GIF of one pixel


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def read(value, folder):
    return opened(SOURCE.stored(value, str(folder / "d.jsonl"), "d.jsonl:1"))


def test_a_text_names_or_holds_an_image_in_every_spelling(tmp_path):
    content = encoded(picture(1))
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub/ü b.png"
    path.write_bytes(content)
    (tmp_path / ("x" * 64)).write_bytes(content)  # as long as base64 may be
    for_urls = base64.urlsafe_b64encode(content).decode()
    assert "_" in for_urls
    values = [
        path.as_uri(), f"file://{path}", "sub\\ü b.png", "x" * 64, for_urls, for_urls.rstrip("="),
        {"base64": for_urls}, {"bytes": base64.encodebytes(content).decode()}, {"bytes": content, "path": "gone.png"},
        f"data:image/png;name=a.png;base64,{base64.b64encode(content).decode()}",
    ]  # fmt: skip
    for value in values:
        np.testing.assert_array_equal(np.asarray(read(value, tmp_path)), np.asarray(picture(1)))
    assert read({"base64": DOT}, tmp_path).size == (1, 1)


@pytest.mark.parametrize(
    "value",
    ["~nobody/a.png", "a\0.png", "a./" * 2000, "s3://bucket/a.png", "ftp://host/a.png", "data:text/plain;base64,aGk=",
     "data:image/svg+xml;utf8,<svg/>", {"base64": "ä!"}, {"base64": "a"}, "pipe.png", "folder.png", "link.png",
     "loop.png", "/dev/zero", 3, {}],
    ids=lambda value: str(value)[:16].replace("\0", "0"),
)  # fmt: skip
def test_a_name_of_no_image_is_an_error_with_the_row(value, tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to("nowhere")
    (tmp_path / "loop.png").symlink_to("loop.png")
    for source in (SOURCE, ImageSource(str(tmp_path), False)):
        with pytest.raises(DataError, match=r"d\.jsonl:1"):
            source.stored(value, str(tmp_path / "d.jsonl"), "d.jsonl:1")


def test_a_photo_with_a_second_picture_is_its_first(tmp_path):
    """Phones write such files (MPO) with the suffix of a JPEG."""
    photo = encoded(picture(1), "MPO", save_all=True, append_images=[picture(2)], quality=95)
    plain = encoded(picture(1), "JPEG", quality=95)
    np.testing.assert_array_equal(np.asarray(read(photo, tmp_path)), np.asarray(read(plain, tmp_path)))


@pytest.mark.parametrize(
    "content",
    [encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), encoded(picture(1), "EPS"),
     encoded(picture(1), "TIFF", save_all=True, append_images=[picture(2)]), b"<svg/>", b"%PDF-1.7", b"\0" * 90,
     b"\0\0\0\x18ftypheic" + b"\0" * 90],
    ids=["floats", "EPS", "pages", "SVG", "PDF", "zeros", "HEIC"],
)  # fmt: skip
def test_a_file_of_another_kind_is_an_error_with_the_row(content, tmp_path):
    with pytest.raises(DataError, match=r"d\.jsonl:1"):
        read(content, tmp_path)


def test_an_image_in_memory_keeps_its_rotation_and_colours(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    rotated = Image.open(io.BytesIO(encoded(picture(3), exif=exif)))
    np.testing.assert_array_equal(
        np.asarray(read(rotated, tmp_path)), np.asarray(picture(3).transpose(Image.Transpose.ROTATE_270))
    )
    inks = picture(5).convert("CMYK")
    np.testing.assert_array_equal(np.asarray(read(inks, tmp_path)), np.asarray(inks.convert("RGB")))


def test_the_table_of_an_image_folder_names_its_images(tmp_path):
    picture(1).save(tmp_path / "1.png")
    (tmp_path / "metadata.csv").write_text("file_name,prompt,completion\n1.png,<image> what,ok\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test/metadata.jsonl").write_text(
        '{"images_file_names": ["a.png"], "image": "b.png", "file_name": "c.png"}'
    )
    [source] = read_sources(str(tmp_path))
    assert source.rows == [{"image": "1.png", "prompt": "<image> what", "completion": "ok"}]
    [source] = read_sources(str(tmp_path), "test")
    assert source.rows == [{"images": ["a.png"], "image": "b.png", "file_name": "c.png"}]
