"""Images of rows: as users write them, as prepared rows store them, and as pixels.

A prepared row stores where an image comes from, never its pixels: a path with the file's SHA-256, or the bytes of an
encoded image. `data.image_processor` decodes them when a batch is collated.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from datasets import Value

from ..batch import IMAGES as IMAGES
from ..reading.boundary import text_of
from ..reading.files import open_bytes
from ..utils.errors import ConfigError, DataError
from .formats import Document, described, has_images, image_parts
from .sources import Row

if TYPE_CHECKING:
    from PIL.Image import Image

STORED = datasets.List(
    {
        "path": Value("string"),
        "bytes": Value("binary"),
        "sha256": Value("string"),
        "location": Value("string"),
        "tokens": Value("int32"),
        "pixels": Value("int64"),
        "nbytes": Value("int64"),
    }
)
COLUMNS = ("images", "image")  # columns of rows whose images belong to placeholders, in order
PLACEHOLDER = "<image>"  # in texts of rows that have such a column (LLaVA, LLaMA-Factory)
ROLES = ("user", "tool")  # of turns that may have images
MOST_BYTES = 256 * 2**20  # of an image file
MOST_PIXELS = 2**26  # 8192 x 8192: 200 MB as 8-bit RGB
SECONDS = 20.0  # to download an image
THUMBNAIL = 128  # pixels of the longer side of pictures in reports
DATA_URL = re.compile(r"data:[\w/+.-]*;base64,", re.IGNORECASE)
WEB_URL = re.compile(r"https?://", re.IGNORECASE)
MATCH = "write as many placeholders as the row has images, in their order"


class ImageSource:
    """Finds the images of rows.

    Args:
        media_dir: folder of relative paths, outside of which no image is read; None: the folder of the data file.
        allow_urls: whether to download images.
    """

    def __init__(self, media_dir: str | None, allow_urls: bool):
        self.media_dir = None if media_dir is None else Path(media_dir).expanduser()
        self.allow_urls = allow_urls

    def take(self, document: Document, row: Row, data_file: str, location: str) -> list[dict[str, Any]]:
        """Return the stored images of a conversation in their order, and remove them from its turns.

        Image parts of the document become `{"type": "image"}`. Parts without an image, and `<image>` in texts, get the
        images of the row's column.

        Args:
            row: the row of the document.
            data_file: path of the file that holds it.

        Raises:
            DataError: an image cannot be read, a turn of another role has one, or placeholders and images differ in
                number.
        """
        column_images = images_in(row)
        messages = document["messages"]
        if column_images and not has_images(document):
            for message in messages:
                if message["role"] in ROLES:
                    message["content"] = split_placeholders(message["content"])
        images: list[dict[str, Any]] = []
        used = 0
        for number, message in enumerate(messages, 1):
            turn = f"{location}, turn {number}"
            for part in image_parts(message):
                if message["role"] not in ROLES:
                    wrong = f"{turn}: an image in a turn of role {message['role']}"
                    raise DataError(wrong, "move it to a user or tool turn: models read images, and write text")
                value = part.pop("image", None)
                if value is None:
                    if used == len(column_images):
                        wrong = f"{turn}: placeholder {used + 1} has no image: the row has {used}"
                        raise DataError(wrong, MATCH)
                    value, used = column_images[used], used + 1
                images.append(self.stored(value, data_file, f"{turn}, image {len(images) + 1}"))
        if used < len(column_images):
            wrong = f"{location}: the row has {len(column_images)} images, and its turns have {used} placeholders"
            raise DataError(wrong, f'{MATCH}: {PLACEHOLDER} in a text, or {{"type": "image"}} in its content')
        return images

    def stored(self, value: Any, data_file: str, location: str) -> dict[str, Any]:
        """Return an image as prepared rows store it: `path` or `bytes`, `sha256`, `location` (the row, for errors), and
        its `tokens`, the `pixels` that the tower reads, and the bytes of its inputs, `nbytes` (0: not known yet).

        Args:
            value: a path, URL, `data:` URL, base64 text, bytes, PIL image, or a dictionary that holds one of them.

        Raises:
            DataError: there is no such image.
        """
        value = _unwrapped(value)
        if hasattr(value, "save") and hasattr(value, "getexif"):  # a PIL image
            buffer = io.BytesIO()
            value.save(buffer, format="PNG")
            value = buffer.getvalue()
        path = None
        if isinstance(value, str):
            content = _encoded(value, location)
            if content is None and WEB_URL.match(value):
                content = self._downloaded(value, location)
            path = None if content is not None else self._path(value, data_file, location)
            value = _file(path, location) if path is not None else content
        if not isinstance(value, bytes):
            raise DataError(f"{location}: {described(value)} is no image", "give a path, bytes or base64 text")
        if not value:
            raise DataError(f"{location}: {path or 'the image'} is empty (0 bytes)", "copy the file again")
        digest = hashlib.sha256(value).hexdigest()
        source = {"path": str(path), "bytes": None} if path is not None else {"path": None, "bytes": value}
        return {**source, "sha256": digest, "location": location, "tokens": 0, "pixels": 0, "nbytes": 0}

    def _path(self, text: str, data_file: str, location: str) -> Path:
        folder = self.media_dir or Path(data_file).parent
        path = folder / Path(text.removeprefix("file://")).expanduser()
        if self.media_dir is not None and not path.resolve().is_relative_to(self.media_dir.resolve()):
            wrong = f"{location}: {text} is outside of media_dir {self.media_dir}"
            raise DataError(wrong, "move the image, or set media_dir to a folder above it")
        if not path.is_file():
            fix = "set media_dir to the folder of the images" if self.media_dir is None else "check the path"
            raise DataError(f"{location}: no such image: {path}", fix)
        return path

    def _downloaded(self, url: str, location: str) -> bytes:
        if not self.allow_urls:
            wrong = f"{location}: the image is a URL ({described(url)})"
            raise DataError(wrong, "download the images, or set allow_image_urls: true")
        try:
            with urllib.request.urlopen(url, timeout=SECONDS) as response:
                return _bounded(response.read(MOST_BYTES + 1), location)
        except (OSError, ValueError) as error:  # URLError is an OSError
            raise DataError(f"{location}: cannot download {url}: {error}", "check the URL, or give a file") from error


def split_placeholders(content: Any) -> Any:
    """Return a text with `<image>` as a list of text and image parts; any other content unchanged."""
    if not isinstance(content, str) or PLACEHOLDER not in content:
        return content
    texts = content.split(PLACEHOLDER)
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def has_placeholders(document: Document) -> bool:
    """Return whether a text of a turn that may have images contains `<image>`."""
    turns = (message for message in document["messages"] if message["role"] in ROLES)
    return any(isinstance(split_placeholders(message.get("content")), list) for message in turns)


def images_in(row: Row) -> list[Any]:
    """Return the images in the columns of a row."""
    return [value for name in COLUMNS for value in _listed(row.get(name))]


def image_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns of `COLUMNS` that hold images."""
    return [name for name in COLUMNS if any(_listed(row.get(name)) for row in rows)]


def opened(stored: Mapping[str, Any]) -> Image:
    """Return a stored image as 8-bit RGB, turned as its EXIF says, on white where it is transparent.

    Its size is checked before its pixels are decoded. Errors name its row.

    Raises:
        DataError: it is damaged, animated, larger than `MOST_PIXELS`, of an unknown kind, or changed since the rows
            were prepared.
    """
    with _undecoded(stored) as image:
        from PIL import ImageOps

        image.load()
        return _rgb(ImageOps.exif_transpose(image))


def size_of(stored: Mapping[str, Any]) -> tuple[int, int]:
    """Return width and height of a stored image as its header says; raises as `opened`, except for damaged pixels."""
    with _undecoded(stored) as image:
        return image.size


def thumbnail(stored: Mapping[str, Any]) -> str:
    """Return a stored image as a `data:` URL of a JPEG of at most `THUMBNAIL` pixels a side."""
    image = opened(stored)
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextlib.contextmanager
def _undecoded(stored: Mapping[str, Any]) -> Iterator[Image]:
    """Open an image of a supported size without decoding its pixels; errors of PIL's decoders become DataErrors."""
    name = stored["path"] or "the image"
    label = f"{stored['location']}: {name}"
    content = stored["bytes"] if stored["bytes"] is not None else _file(Path(stored["path"]), label)
    if hashlib.sha256(content).hexdigest() != stored["sha256"]:
        raise DataError(f"{label} has changed since the rows were prepared", "start the run again")
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content))
        width, height = image.size
        if width * height > MOST_PIXELS:
            wrong = f"{label} has {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}"
            raise DataError(wrong, "scale it down: models read far fewer pixels")
        frames = getattr(image, "n_frames", 1)
        if frames > 1:
            raise DataError(f"{label} is animated ({frames} frames)", "save one frame as an image")
        yield image
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{label} has too many pixels: {error}", "scale it down") from error
    except Exception as error:  # decoders raise errors of any type for damaged files
        reason = "it is of no known kind" if isinstance(error, Image.UnidentifiedImageError) else text_of(error)
        raise DataError(f"{label} cannot be decoded: {reason}", "save it again as PNG or JPEG") from error


def _rgb(image: Image) -> Image:
    """Return 8-bit RGB: 16-bit values are divided by 257, which PIL would clip to 255."""
    from PIL import Image as images

    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.float64)
        if values.min() < 0 or values.max() > 65_535:
            raise ValueError(f"its values, {values.min():g} to {values.max():g}, are no 16-bit grey levels")
        image = images.fromarray((values / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def require_pillow() -> None:
    """Raise a ConfigError if Pillow, which decodes images, is not installed."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError("rows with images need Pillow, which is not installed", "pip install pillow") from error


def _unwrapped(value: Any) -> Any:
    """Return the value of a dictionary that holds an image: of a hub `Image` feature, or OpenAI's `image_url`."""
    for _ in range(3):
        if not isinstance(value, Mapping):
            return value
        keys = ("bytes", "path", "image", "image_url", "url", "base64")
        value = next((value[key] for key in keys if value.get(key) is not None), None)
    return value


def _encoded(text: str, location: str) -> bytes | None:
    """Return the bytes of a `data:` URL or of base64 text; None: the text is something else."""
    is_url = DATA_URL.match(text)
    payload = text[is_url.end() :] if is_url else text
    if not is_url and (len(text) < 64 or not re.fullmatch(r"[A-Za-z0-9+/\s]+={0,2}\s*", text)):
        return None
    try:
        return _bounded(base64.b64decode("".join(payload.split()), validate=True), location)
    except binascii.Error as error:
        if not is_url:
            return None
        raise DataError(f"{location}: the data URL is no base64: {error}", "encode the image again") from error


def _file(path: Path, location: str) -> bytes:
    with open_bytes(path, DataError) as file:
        return _bounded(file.read(MOST_BYTES + 1), location)


def _bounded(content: bytes, location: str) -> bytes:
    if len(content) > MOST_BYTES:
        raise DataError(f"{location}: the file is larger than {MOST_BYTES // 2**20} MiB", "scale the image down")
    return content


def _listed(value: Any) -> list[Any]:
    """Return the images in a column's value: one, several or none."""
    if value is None or value == "" or value == []:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
