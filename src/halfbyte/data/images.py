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
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
from datasets import Value

from ..batch import IMAGES as IMAGES
from ..reading import parse_json
from ..reading.boundary import text_of
from ..reading.files import look, open_bytes
from ..utils.errors import ConfigError, DataError
from ..utils.text import brief
from .formats import IMAGE_ROLES as ROLES
from .formats import Document, described, has_images, image_parts
from .sources import Row, Source, closest

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
OTHER_MEDIA = {"videos": "<video>", "video": "<video>", "audios": "<audio>", "audio": "<audio>"}  # that are refused
MOST_BYTES = 256 * 2**20  # of an image file
MOST_PIXELS = 2**26  # 8192 x 8192: 200 MB as 8-bit RGB
SECONDS = 20.0  # to download an image
THUMBNAIL = 128  # pixels of the longer side of pictures in reports
LONGEST_PATH = 4096  # characters; a longer text is no path
ENCODED_KEYS = ("base64", "bytes")  # of a dictionary whose text is base64 in any case
BASE64 = re.compile(r"[A-Za-z0-9+/_\s-]{64,}={0,2}\s*")
DATA_URL = re.compile(r"data:(?P<type>[^;,]*)(;[^;,]*)*;base64,", re.IGNORECASE)
IMAGE_MEDIA = re.compile(r"(image/.*|application/octet-stream)?", re.IGNORECASE)  # media types of images' `data:` URLs
URL = re.compile(r"(?!file:)(data:|[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
WEB_URL = re.compile(r"https?://", re.IGNORECASE)
# Kinds that Pillow decodes by itself: for EPS it would run Ghostscript on the file. Phones write MPO: a JPEG with a
# second picture, such as a depth map.
KINDS = (
    *("PNG", "JPEG", "MPO", "WEBP", "AVIF", "HEIF", "GIF", "BMP", "DIB", "TIFF", "JPEG2000", "PPM", "TGA", "ICO"),
    "PCX",
)
# First bytes of files that are taken for images and are none that can be read.
UNREAD = {
    re.compile(rb"\s*(<\?xml.*?\?>\s*)?(<!.*?>\s*)*<svg", re.DOTALL): "it is an SVG drawing",
    re.compile(rb"\s*<(!doctype\s+html|html)", re.IGNORECASE): "it is a web page, as of a failed download",
    re.compile(rb".{4}ftyp(hei|hev|mif1|msf1)", re.DOTALL): "it is a HEIC file",
    re.compile(rb".{4}ftypavi", re.DOTALL): "it is an AVIF file, which this Pillow does not read",
    re.compile(rb".{4}ftyp|\x1aE\xdf\xa3|RIFF.{4}AVI", re.DOTALL): "it is a video",
    re.compile(rb"%PDF"): "it is a PDF",
    re.compile(rb"%!PS|\xc5\xd0\xd3\xc6"): "it is PostScript",
}
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
            data_file: path of the file that holds it; "" if it is in no file, so that paths are relative to the
                working directory.

        Raises:
            DataError: an image cannot be read, or placeholders and images differ in number.
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
                value = part.pop("image", None)
                if value is None:
                    if used == len(column_images):
                        wrong = f"{turn}: placeholder {used + 1} has no image: the row has {used}"
                        raise DataError(wrong, MATCH)
                    value, used = column_images[used], used + 1
                images.append(self.stored(value, data_file, f"{turn}, image {len(images) + 1}"))
        if used < len(column_images):
            wrong = (
                f"{location}: the row has {len(column_images)} images, and its user and tool turns {used} placeholders"
            )
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
        key, value = _unwrapped(value)
        if hasattr(value, "save") and hasattr(value, "getexif"):  # a PIL image
            value = _as_png(value, location)
        path = None
        if isinstance(value, str):
            path, value = self._read(value, key, data_file, location)
        if not isinstance(value, bytes):
            raise DataError(f"{location}: {described(value)} is no image", "give a path, bytes or base64 text")
        if not value:
            raise DataError(f"{location}: {path or 'the image'} is empty (0 bytes)", "copy the file again")
        digest = hashlib.sha256(value).hexdigest()
        source = {"path": str(path), "bytes": None} if path is not None else {"path": None, "bytes": value}
        return {**source, "sha256": digest, "location": location, "tokens": 0, "pixels": 0, "nbytes": 0}

    def _read(self, text: str, key: str, data_file: str, location: str) -> tuple[Path | None, bytes]:
        """Return the bytes of the image that a text holds or names, and its path if it is a file.

        Args:
            key: of the dictionary that holds the text; "" without one.
        """
        if key in ENCODED_KEYS or DATA_URL.match(text):
            return None, _decoded(text, location)
        if URL.match(text):
            return None, self._downloaded(text, location)
        path = self._path(text, data_file)
        if (path is None or not path.is_file()) and BASE64.fullmatch(text):
            with contextlib.suppress(binascii.Error):
                return None, _bounded(_base64(text), location)
        path = self._checked(text, path, data_file, location)
        return path, _file(path, location)

    def _path(self, text: str, data_file: str) -> Path | None:
        """Return the path that a text names: as written, or with the escapes of a `file://` URL or Windows' separators
        replaced if only that is a file; None: the text is too long."""
        if len(text) > LONGEST_PATH:
            return None
        name = text.removeprefix("file://")
        names = (name, urllib.parse.unquote(name) if name != text else name.replace("\\", "/"))
        folder = self.media_dir or Path(data_file).parent
        paths = [folder / os.path.expanduser(written) for written in names]
        return next((path for path in paths if os.path.isfile(path)), paths[0])

    def _checked(self, text: str, path: Path | None, data_file: str, location: str) -> Path:
        """Return the path of a file that may be read.

        Raises:
            DataError: it is none.
        """
        if path is None:
            wrong = f"{location}: a text of {len(text):,} characters is neither a path nor base64: {described(text)}"
            raise DataError(wrong, "give a path, or encode the image again")
        if self.media_dir is not None and not _is_inside(path, self.media_dir):
            wrong = f"{location}: {text} is outside of media_dir {self.media_dir}"
            raise DataError(wrong, "move the image, or set media_dir to a folder above it")
        if self.media_dir is not None and not self.media_dir.is_dir():
            raise DataError(f"{location}: media_dir {self.media_dir} is no folder", "set media_dir to one")
        with _located(location):
            kind = look(path, DataError, "check the path")
        if kind == "folder":
            raise DataError(f"{location}: {path} is a folder, no image", "give the path of an image")
        if not kind:
            is_beside = self.media_dir is None and bool(data_file) and not os.path.isabs(text)
            fix = "set media_dir to the folder of the images" if is_beside else "check the path"
            raise DataError(f"{location}: no such image: {path}{closest(path)}", fix)
        return path

    def _downloaded(self, url: str, location: str) -> bytes:
        if not WEB_URL.match(url):
            raise DataError(f"{location}: halfbyte does not read {described(url)}", "download the image, give its path")
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
    """Return whether a text of a turn that may have images, or the question of a document without turns, contains
    `<image>`."""
    turns = [message.get("content") for message in document.get("messages", ()) if message["role"] in ROLES]
    texts = [*turns, document.get("text"), document.get("prompt")]
    return any(isinstance(text, str) and PLACEHOLDER in text for text in texts)


def images_in(row: Row) -> list[Any]:
    """Return the images in the columns of a row."""
    return [value for name in COLUMNS for value in _listed(row.get(name))]


def with_image_column(source: Source, mapping: Mapping[str, str] | None) -> Source:
    """Return a source whose column of images, as `column_mapping` names it, is called `images`."""
    column = (mapping or {}).get(IMAGES, IMAGES)
    if column == IMAGES:
        return source
    rows = [
        {name: value for name, value in row.items() if name not in (column, IMAGES)} | {IMAGES: row.get(column)}
        for row in source.rows
    ]
    return replace(source, rows=rows)


def refuse_other_media(row: Row, document: Document, reads_images: bool, location: str) -> None:
    """Check that a row has no column of videos or audio that belongs to its turns.

    Args:
        reads_images: whether the model takes images, so that such a column belongs to the turns in any case.

    Raises:
        DataError: it has one.
    """
    for name, placeholder in OTHER_MEDIA.items():
        if _listed(row.get(name)) and (reads_images or placeholder in str(document)):
            wrong = f"{location}: column {name} has {placeholder[1:-1]}s, and halfbyte trains on text and images"
            raise DataError(wrong.replace("audios", "audio"), "remove the row, or the column")


def any_values(row: Row, columns: Iterable[str] = COLUMNS) -> list[str]:
    """Return the columns of a row that hold images, or other media."""
    return [name for name in columns if _listed(row.get(name))]


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
    label = f"{stored['location']}: {stored['path'] or 'the image'}"
    content = stored["bytes"] if stored["bytes"] is not None else _file(Path(stored["path"]), stored["location"])
    if hashlib.sha256(content).hexdigest() != stored["sha256"]:
        raise DataError(f"{label} has changed since the rows were prepared", "start the run again")
    from PIL import Image

    with _decoding(label, content):
        Image.init()
        image = Image.open(io.BytesIO(content), formats=[kind for kind in KINDS if kind in Image.OPEN])
        width, height = image.size
        if width * height > MOST_PIXELS:
            wrong = f"{label} has {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}"
            raise DataError(wrong, "scale it down: models read far fewer pixels")
        frames = getattr(image, "n_frames", 1)
        if frames > 1 and image.format != "MPO":
            raise DataError(f"{label} has {frames} frames or pages", "save one of them as an image")
        yield image


@contextlib.contextmanager
def _decoding(label: str, content: bytes = b"") -> Iterator[None]:
    """Raise errors of PIL's decoders as DataErrors whose message begins with `label`.

    Args:
        content: of the file, whose first bytes name its kind if PIL does not know it.
    """
    from PIL import Image

    try:
        yield
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{label} has too many pixels: {error}", "scale it down") from error
    except Exception as error:  # decoders raise errors of any type for damaged files
        reason = _kind_of(content) if isinstance(error, Image.UnidentifiedImageError) else text_of(error)
        raise DataError(f"{label} cannot be decoded: {reason}", "save it again as PNG or JPEG") from error


def _rgb(image: Image) -> Image:
    """Return 8-bit RGB: 16-bit values are divided by 257, which PIL would clip to 255."""
    from PIL import Image as images

    if image.mode == "F":
        raise ValueError("its values are floating-point numbers, of which nothing says what is white")
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


def _kind_of(content: bytes) -> str:
    """Return the kind of a file that PIL cannot identify, guessed from its first bytes."""
    return next((name for pattern, name in UNREAD.items() if pattern.match(content[:1024])), "it is of no known kind")


def _as_png(image: Any, location: str) -> bytes:
    """Return a PIL image as the bytes of a PNG, 8-bit RGB and turned as its EXIF says, which PNG files drop."""
    from PIL import ImageOps

    buffer = io.BytesIO()
    with _decoding(f"{location}: the image"):
        _rgb(ImageOps.exif_transpose(image)).save(buffer, format="PNG")
    return buffer.getvalue()


def _unwrapped(value: Any) -> tuple[str, Any]:
    """Return the key and the value in a dictionary that holds an image: of a hub `Image` feature, or OpenAI's
    `image_url`; "" and the value if it is none."""
    name = ""
    for _ in range(4):
        if not isinstance(value, Mapping):
            break
        keys = ("bytes", "path", "image", "image_url", "url", "base64")
        name = next((key for key in keys if value.get(key) is not None), "")
        value = value.get(name)
    return name, value


def _decoded(text: str, location: str) -> bytes:
    """Return the bytes of a `data:` URL or of base64 text.

    Raises:
        DataError: it is no base64, or the URL says that it is no image.
    """
    url = DATA_URL.match(text)
    if url and not IMAGE_MEDIA.fullmatch(url["type"]):
        raise DataError(f"{location}: the data URL has the type {brief(url['type'])}, no image's", "give an image")
    try:
        return _bounded(_base64(text[url.end() :] if url else text), location)
    except (binascii.Error, ValueError) as error:  # a ValueError for letters outside of ASCII
        name = "data URL" if url else "text"
        raise DataError(f"{location}: the {name} is no base64: {error}", "encode the image again") from error


def _base64(text: str) -> bytes:
    """Decode base64 text, also of the alphabet for URLs, with white space and without padding."""
    text = "".join(text.split()).translate({ord("-"): "+", ord("_"): "/"})
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


@contextlib.contextmanager
def _located(location: str) -> Iterator[None]:
    """Add the row's location to the beginning of a DataError's message."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{location}: {error.message}", error.fix) from error


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is in a folder after all links are followed; True for a name that no file can have."""
    return "\0" in str(path) or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _file(path: Path, location: str) -> bytes:
    with _located(location), open_bytes(path, DataError, "start the run again with the file in its place") as file:
        content = file.read(MOST_BYTES + 1)
    return _bounded(content, location)


def _bounded(content: bytes, location: str) -> bytes:
    if len(content) > MOST_BYTES:
        raise DataError(f"{location}: the file is larger than {MOST_BYTES // 2**20} MiB", "scale the image down")
    return content


def _listed(value: Any) -> list[Any]:
    """Return the images in a column's value: one, several, as JSON (CSV files), or none."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        with contextlib.suppress(DataError):
            value = parse_json(value, "", DataError)
    values = list(value) if isinstance(value, list | tuple) else [value]
    return [value for value in values if not _is_nothing(value)]


def _is_nothing(value: Any) -> bool:
    """Return whether a value holds no image, as in rows of text of a table with a column of images."""
    return value is None or value == "" or (isinstance(value, Mapping) and all(map(_is_nothing, value.values())))
