"""transformers' processor of a model that takes images: tokens of an image in a text, and pixels in a batch.

A conversation is rendered with one placeholder per image. Trained characters are found in that text, as without images.
The processor's own code then says which text replaces a placeholder for an image of a size, and character positions
move with it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers import BatchEncoding

from ..batch import INPUT_IDS, ROPE_POSITIONS
from ..reading.boundary import answered, text_of
from ..reading.json import read_json
from ..utils.errors import ConfigError, DataError, ModelError
from ..utils.files import write_json
from ..utils.text import brief
from .image_features import FEATURES, feature_columns
from .images import ImageSource, opened, require_pillow
from .pixel_table import order_levels_first
from .turns import Turn

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from ..config.schema import RunKeys

# Files of a model; the first two describe how images are prepared.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
PIXEL_KEYS = ("image_min_pixels", "image_max_pixels")
EDGES = dict(zip(PIXEL_KEYS, ("shortest_edge", "longest_edge"), strict=True))  # their names in `size` of a processor
MISSING = "add preprocessor_config.json and processor_config.json of the original model to its folder"
ESCAPE = "\uf8f0"  # of the private use area, in place of the first character of a typed token
LOADED = ("processor", "model_config", "position_model", "token_types")  # attributes that are made on demand
CHANNELS = 3
AXES = ("time", "height", "width")  # of M-RoPE
PROBE_SIDE = 64  # pixels
PATCHES = {"patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": "temporal_patch_size"}
OTHER = "use another model"
WITHOUT_IMAGES = "remove the images from the rows, or use another model"


@dataclass(frozen=True)
class ImageFamily:
    """How models of a type take images.

    Attributes:
        resizes: whether the number of an image's tokens follows its size, within limits on its pixels.
        by_count: whether an image has other tokens if its row has several.
        frames: how often the processor's limits on pixels count an image (GLM's count two frames of a video).
        cross_attention: whether the text reads images by cross-attention, so that a batch has inputs for each row.
        refused: why models of the type do not train on images; "": they do.
    """

    resizes: bool = False
    by_count: bool = False
    frames: int = 1
    cross_attention: bool = False
    refused: str = ""


FOLLOWS_SIZE = ImageFamily(resizes=True)
GLM = ImageFamily(resizes=True, frames=2)
ANY = ImageFamily()
# model_type → how its models take images. Types that are not listed run as `ANY`, if their processor passes its checks.
IMAGE_FAMILIES = {
    "diffusion_gemma": ImageFamily(refused="it denoises blocks of tokens, and is no causal language model"),
    "evolla": ImageFamily(refused="it reads proteins"),
    "gemma3": ANY,
    "gemma4": ANY,
    "glm46v": GLM,
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "idefics3": ANY,
    "internvl": ANY,
    "lfm2_vl": ANY,
    "llama4": ANY,
    "llava": ANY,
    "llava_next": ANY,
    "llava_onevision": ImageFamily(by_count=True),
    "mistral3": ANY,
    "mllama": ImageFamily(cross_attention=True),
    "paligemma": ImageFamily(refused="its prompts attend in both directions, which the masks of chats do not say"),
    "pi0": ImageFamily(refused="it writes a robot's actions"),
    "qwen2_5_vl": FOLLOWS_SIZE,
    "qwen2_vl": FOLLOWS_SIZE,
    "qwen3_5": FOLLOWS_SIZE,
    "qwen3_5_moe": FOLLOWS_SIZE,
    "qwen3_vl": FOLLOWS_SIZE,
    "qwen3_vl_moe": FOLLOWS_SIZE,
    "smolvlm": ANY,
}


def refusal_of(config: Any) -> str:
    """Return why models of a config that take images are not trained; "": they are."""
    if config.is_encoder_decoder:
        return "it has an encoder and a decoder"
    return IMAGE_FAMILIES.get(config.model_type, ANY).refused


@dataclass(frozen=True)
class Expansion:
    """Text, tokens and pixels that a processor gives an image of some size.

    Attributes:
        text: replaces the placeholder.
        tokens: number of tokens that hold the image's features.
        pixels: number of pixels that the tower reads.
        nbytes: bytes of the tower's inputs.
    """

    text: str
    tokens: int
    pixels: int
    nbytes: int


@dataclass(frozen=True)
class ExpandedText:
    """A rendered conversation in which images have their tokens.

    Attributes:
        text: with the text of an image's tokens in place of each placeholder.
        turns: the turns, moved; None: as given.
        spans: character positions of each image in `text`.
        placeholders: character positions of each placeholder in the text before.
        images: what the processor makes of each image.
    """

    text: str
    turns: list[Turn] | None
    spans: list[tuple[int, int]]
    placeholders: list[tuple[int, int]]
    images: list[Expansion]


class ImageProcessor:
    """The processor of a run's model, loaded when it is first used: a run on text needs none.

    Args:
        config: names the model and limits pixels.
        tokenizer: the run's.
    """

    def __init__(self, config: RunKeys, tokenizer: PreTrainedTokenizerBase):
        self.origin, self.tokenizer = config.origin, tokenizer
        self.limits: dict[str, int] = {key: limit for key in PIXEL_KEYS if (limit := getattr(config, key)) is not None}
        self._expansions: dict[tuple[tuple[int, int], bool], Expansion] = {}

    def __getstate__(self) -> dict[str, Any]:  # tokenizing processes load their own
        return {name: value for name, value in vars(self).items() if name not in LOADED}

    @cached_property
    def model_config(self) -> Any:
        from transformers import AutoConfig

        # A GGUF file has its config in the folder that it is unpacked in, like its tokenizer.
        name = self.tokenizer.name_or_path if Path(self.origin.name).is_file() else self.origin.name
        revision = self.origin.revision
        trust = self.origin.trust_remote_code
        with answered(f"cannot read the config of {name}", error=ModelError):
            return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)

    @cached_property
    def takes_images(self) -> bool:
        """Whether the model's type takes images, as transformers lists it."""
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        return type(self.model_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    @property
    def family(self) -> ImageFamily:
        """How the model takes images.

        Raises:
            ModelError: it takes none, or halfbyte does not train it on images yet.
        """
        name, model_type = self.origin.name, self.model_config.model_type
        if not self.takes_images:
            raise ModelError(f"the rows have images, but {name} ({model_type}) reads text only", WITHOUT_IMAGES)
        if refusal := refusal_of(self.model_config):
            raise ModelError(f"the rows have images, on which {model_type} is not trained: {refusal}", OTHER)
        return IMAGE_FAMILIES.get(model_type, ANY)

    @property
    def image_token_id(self) -> int:
        """Id of the token whose embedding a feature of an image replaces."""
        return int(self.model_config.image_token_id)

    @cached_property
    def processor(self) -> Any:
        """transformers' processor with the PIL backend and the run's tokenizer, without a video processor.

        Raises:
            ModelError: its files are missing or damaged.
            ConfigError: Pillow is missing, or a limit on pixels does not apply to the model.
        """
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        require_pillow()
        family, (name, revision) = self.family, (self.origin.name, self.origin.revision)
        if self.limits and not family.resizes:
            wrong = f"{next(iter(self.limits))}: images of {self.model_config.model_type} have one number of tokens"
            raise ConfigError(wrong, "remove it")
        with answered(f"cannot load the image processor of {name}", MISSING, ModelError), _packages_named(name):
            load = partial(AutoImageProcessor.from_pretrained, name, revision=revision, backend="pil")
            image_processor = load()
            if self.limits:
                image_processor = load(**self.size_options(image_processor))
            order_levels_first(image_processor)
            stored, _ = transformers.ProcessorMixin.get_processor_dict(name, revision=revision)
            processor_class = _processor_class(self.model_config, stored.get("processor_class"))
            parts = {"image_processor": image_processor, "tokenizer": self.tokenizer}
            attributes = [parts.get(attribute) for attribute in processor_class.get_attributes()]
            processor = processor_class.from_args_and_dict(attributes, stored)
        missing = {
            "the processor has no placeholder for an image": getattr(processor, "image_token", None) is None,
            "the config names no image_token_id": getattr(self.model_config, "image_token_id", None) is None,
        }
        for reason in (reason for reason, applies in missing.items() if applies):
            raise ModelError(f"{self.model_config.model_type} is not trained on images: {reason}", OTHER)
        return processor

    def size_options(self, image_processor: Any) -> dict[str, Any]:
        """Return the options of a transformers image processor that set the run's limits on pixels.

        Raises:
            ConfigError: the smallest number is above the largest.
        """
        frames = self.family.frames
        stored = (int(image_processor.size[edge]) // frames for edge in EDGES.values())
        pixels = dict(zip(PIXEL_KEYS, stored, strict=True)) | self.limits
        least, most = pixels.values()
        if least > most:
            bounds = f"from {least:,} to {most:,} pixels"
            wrong = f"{' and '.join(self.limits)}: images would have {bounds}, with the model's own limits"
            raise ConfigError(wrong, f"set both {' and '.join(PIXEL_KEYS)}, the first below the second")
        size = {EDGES[key]: number * frames for key, number in pixels.items()}
        return {"size": size, "min_pixels": least, "max_pixels": most}

    def check(self) -> None:
        """Check that the processor takes a small image, and has the patches of the model's vision tower.

        Raises:
            ModelError: its files are of another model.
        """
        tower, name = getattr(self.model_config, "vision_config", None), self.origin.name
        for key, of_tower in PATCHES.items():  # key of processors → key of towers
            expected = getattr(tower, of_tower, None)
            for part in (self.processor.image_processor, self.processor):
                size = getattr(part, key, None)
                if isinstance(size, int) and isinstance(expected, int) and size != expected:
                    wrong = (
                        f"the image processor of {name} has {key} {size}, and its vision tower {of_tower} {expected}"
                    )
                    raise ModelError(wrong, MISSING)
        try:
            self.expansion((PROBE_SIDE, PROBE_SIDE), several=False, location="a small image")
        except DataError as error:
            raise ModelError(error.message, MISSING) from error

    def expanded(
        self, text: str, turns: Sequence[Turn] | None, images: Sequence[Mapping[str, Any]], location: str, longest: int
    ) -> ExpandedText:
        """Return a rendered conversation with the text of the images' tokens in place of placeholders.

        Args:
            images: stored images; they are decoded, so that a damaged one is named before the run.
            location: the row, for errors.
            longest: tokens that a row may have.

        Raises:
            DataError: placeholders and images differ in number, an image cannot be decoded, or one has more tokens than
                a row.
        """
        placeholder: str = self.processor.image_token
        pieces = text.split(placeholder)  # typed ones are escaped
        if len(pieces) - 1 != len(images):
            raise DataError(
                f"{location}: the rendered conversation has {len(pieces) - 1} times {placeholder}, and the row"
                f" {len(images)} images",
                "give a chat_template_path that writes a placeholder for each image",
            )
        expansions = []
        for number, image in enumerate(images, 1):
            width, height = opened(image).size
            expansion = self.expansion((width, height), len(images) > 1, f"{location}, image {number}")
            if expansion.tokens >= longest:
                fitting = int(width * height * longest / expansion.tokens * 0.8)
                wrong = f"{location}, image {number}: {width} x {height} pixels are {expansion.tokens} tokens"
                limit = f", or set image_max_pixels: {fitting}" if self.family.resizes else f" above {expansion.tokens}"
                raise DataError(f"{wrong}, more than max_length {longest}", f"raise max_length{limit}")
            expansions.append(expansion)
        new = pieces[0]
        spans = []
        placeholders = []
        position = len(pieces[0])
        for expansion, piece in zip(expansions, pieces[1:], strict=True):
            spans.append((len(new), len(new) + len(expansion.text)))
            placeholders.append((position, position + len(placeholder)))
            new += expansion.text + piece
            position += len(placeholder) + len(piece)
        moved = None if turns is None else [_moved(turn, placeholders, spans) for turn in turns]
        return ExpandedText(new, moved, spans, placeholders, expansions)

    def expansion(self, size: tuple[int, int], several: bool, location: str) -> Expansion:
        """Return what the processor makes of an image of (width, height).

        Args:
            several: whether the row has more images.
            location: of the image, for errors.

        Raises:
            DataError: the processor takes no image of this size.
        """
        several = several and self.family.by_count
        if (size, several) not in self._expansions:
            from PIL import Image

            count = 2 if several else 1
            images = [Image.new("RGB", size)] * count
            refused = f"{location}: the processor of {self.origin.name} refuses {size[0]} x {size[1]} pixels"
            with answered(refused, "cut or pad the image to another shape, or remove the row", DataError):
                [text], encoded = self._processed([images])
            tokens = int((encoded[INPUT_IDS] == self.image_token_id).sum()) // count
            text = text.removesuffix(self.tokenizer.bos_token or "")  # Llama 3.2 Vision's processor adds it
            frames = getattr(self.processor.image_processor, "temporal_patch_size", 1)  # Qwen's read an image twice
            values = sum(np.asarray(pixels).size for pixels in encoded["pixel_values"])
            pixels = values // (CHANNELS * frames * count)
            inputs = [value for name, value in encoded.items() if name not in (INPUT_IDS, self.token_types)]
            nbytes = sum(value.nbytes for value in inputs if torch.is_tensor(value)) // count
            self._expansions[size, several] = Expansion(text[: len(text) // count], tokens, pixels, nbytes)
        return self._expansions[size, several]

    def _processed(self, images: list[list[Image]], ids: list[list[int]] | None = None) -> tuple[list[str], Any]:
        """Return texts with the tokens of images alone, and what the processor makes of them and the images.

        Args:
            images: one list for each text.
            ids: tokens of each row, in place of those of the texts.
        """
        processor, recorder = copy.copy(self.processor), _Recorder(self.tokenizer, ids)
        processor.tokenizer = recorder
        texts = [processor.image_token * len(row) for row in images]
        encoded = processor(text=texts, images=images, return_tensors="pt")
        return recorder.texts, encoded

    @cached_property
    def typed(self) -> dict[str, str]:
        """Escaped text → text of the tokens that stand for images, videos and audio, which a user may have typed.

        Without its first character a token is plain text. It is escaped before a conversation is rendered, so that
        placeholders of the template can be told from typed ones.
        """
        return {ESCAPE + token[1:]: token for token in self._placeholders}

    @property
    def placeholder_ids(self) -> list[int]:
        """Ids of the tokens that stand for images, videos and audio."""
        return [int(self.tokenizer.convert_tokens_to_ids(token)) for token in self._placeholders]

    @property
    def _placeholders(self) -> list[str]:
        placeholders = [getattr(self.processor, name, None) for name in ("image_token", "video_token", "audio_token")]
        feature = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        return list(dict.fromkeys(token for token in (*placeholders, feature) if token))

    def escaped(self, texts: Sequence[str]) -> list[str]:
        """Return texts, or conversations as JSON, with tokens of images escaped."""
        if not texts:
            return []
        marks = {token: escaped for escaped, token in self.typed.items()}
        pattern = re.compile("|".join(map(re.escape, marks)))
        return [pattern.sub(lambda match: marks[match[0]], text) for text in texts]

    @cached_property
    def token_types(self) -> str | None:
        """Input of the forward that marks the tokens of images, int64 [B, T]; None: there is none."""
        from PIL import Image

        _, encoded = self._processed([[Image.new("RGB", (64, 64))]])
        return next((name for name in ("mm_token_type_ids", "token_type_ids") if name in encoded), None)

    def copies(self, image: Mapping[str, Any]) -> int:
        """Return how many copies of a stored image a row needs for the image to have its stored number of tokens.

        In some families an image has more tokens if it is the only one of its row; then 2 for one of a row of several.
        """
        if not self.family.by_count:
            return 1
        alone = self.expansion(opened(image).size, several=False, location=image["location"])
        return 1 if alone.tokens == image["tokens"] else 2

    def image_columns(self, image: Mapping[str, Any], count: int = 1) -> dict[str, torch.Tensor]:
        """Return the inputs of the vision tower for one stored image.

        Args:
            count: how often it stands in its row.

        Raises:
            DataError: it changed since the rows were prepared.
        """
        return self._inputs([[image] * count], [[self.image_token_id] * (count * image["tokens"])])

    def columns(self, images: Sequence[Sequence[Mapping[str, Any]]], input_ids: torch.Tensor) -> dict[str, Any]:
        """Return the model's inputs for the stored images of each row of a batch [B, T].

        Raises:
            DataError: an image changed since the rows were prepared.
            ModelError: the processor gives other inputs than tokens expect.
        """
        marks = input_ids == self.image_token_id
        expected = [sum(image["tokens"] for image in row) for row in images]
        if marks.sum(1).tolist() != expected:
            wrong = f"rows of a batch have {marks.sum(1).tolist()} tokens of images, and their images have {expected}"
            raise ModelError(wrong, "please report the model")
        columns = self._inputs(images, input_ids.tolist())
        if self.token_types is not None:
            columns[self.token_types] = marks.long()
        return columns

    def packed_columns(
        self, images: Sequence[Mapping[str, Any]], input_ids: torch.Tensor, lengths: Sequence[int]
    ) -> dict[str, Any]:
        """Return the model's inputs for the stored images of packed rows [B, T], in the order of their documents.

        M-RoPE's positions are `batch.ROPE_POSITIONS`: time, height and width, int64 [B, T, 3], from 0 in each document.

        Args:
            lengths: tokens of each document, padding included.

        Raises:
            DataError: an image changed since the rows were prepared.
            ModelError: the processor gives other inputs than tokens expect.
        """
        documents = input_ids.flatten().split(list(lengths))
        remaining, images_of = deque(images), []
        for ids in documents:
            left, own_images = int((ids == self.image_token_id).sum()), []
            while left > 0 and remaining:
                own_images.append(remaining.popleft())
                left -= own_images[-1]["tokens"]
            images_of.append(own_images)
            if left:
                break
        if left or remaining:
            wrong = f"the {len(images)} images of packed rows have other numbers of tokens than the rows' documents"
            raise ModelError(wrong, "please report the model")
        longest = max(lengths)  # of the processor's input, which is discarded
        columns = self._inputs(images_of, [[*ids.tolist(), *[0] * (longest - len(ids))] for ids in documents])
        marks = (input_ids == self.image_token_id).long()
        if self.token_types is not None:
            columns[self.token_types] = marks
        if self.position_model is None:
            return columns
        positions, grids = [], iter(columns.get("image_grid_thw", ()))
        for ids, types, own_images in zip(documents, marks.flatten().split(list(lengths)), images_of, strict=True):
            if own_images:
                document_grids = torch.stack([next(grids) for _ in own_images])
                axes, _ = self.position_model.get_rope_index(
                    ids.unsqueeze(0), mm_token_type_ids=types.unsqueeze(0), image_grid_thw=document_grids
                )
                positions.append(axes[:, 0].T)
            else:
                positions.append(torch.arange(len(ids)).unsqueeze(1).expand(-1, len(AXES)))
        columns[ROPE_POSITIONS] = torch.cat(positions).view(*input_ids.shape, len(AXES))
        return columns

    def _inputs(self, images: Sequence[Sequence[Mapping[str, Any]]], ids: Sequence[list[int]]) -> dict[str, Any]:
        """Return what the processor makes of the images of texts, without tokens; or features that were made before.

        Args:
            ids: tokens of each text, equally many.
        """
        if not any(images):
            return {}
        if (flat := [image for row in images for image in row]) and flat[0].get(FEATURES):
            return dict(feature_columns(flat))
        texts = [number for number, row in enumerate(images) if row or self.family.cross_attention]
        sources = {image["sha256"]: image for image in flat}  # answers to a prompt share its images
        decoded = {digest: opened(image) for digest, image in sources.items()}
        pictures = [[decoded[image["sha256"]] for image in images[number]] for number in texts]
        first, *others = [image["location"] for image in flat]
        names = f"{first} and {len(others)} more" if others else first
        with answered(f"the processor of {self.origin.name} refuses the images of {names}", error=DataError):
            _, encoded = self._processed(pictures, [ids[number] for number in texts])
        return {name: value for name, value in encoded.items() if name not in (INPUT_IDS, self.token_types)}

    @cached_property
    def position_model(self) -> Any:
        """The model's class without weights, whose `get_rope_index` makes positions of M-RoPE; None: it has none."""
        model_class = transformers.MODEL_MAPPING[type(self.model_config)]
        if not hasattr(model_class, "get_rope_index"):
            return None
        model = model_class.__new__(model_class)  # its __init__ would make weights, which positions do not read
        torch.nn.Module.__init__(model)
        model.config = self.model_config
        return model

    def probe_image(self, seed: int) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of a small picture of noise, and the picture as rows store it.

        Args:
            seed: of the noise; all pictures have the same size.
        """
        from PIL import Image

        noise = np.random.default_rng(seed).integers(0, 256, (PROBE_SIDE, PROBE_SIDE, CHANNELS), dtype=np.uint8)
        source = ImageSource(None, allow_urls=False)
        stored = source.stored(Image.fromarray(noise), "", "the picture that probes the isolation of documents")
        expansion = self.expansion((PROBE_SIDE, PROBE_SIDE), several=False, location=stored["location"])
        ids = self.tokenizer(expansion.text, add_special_tokens=False)["input_ids"]
        return ids, {**stored, "tokens": expansion.tokens}


def save_processor_files(source: Path, folder: Path, processor: ImageProcessor) -> None:
    """Copy a model's processor files, with the limits on pixels of a run, so that other tools prepare images alike."""
    limits = processor.size_options(processor.processor.image_processor) if processor.limits else {}
    for file in (source / name for name in PROCESSOR_FILES):
        if not file.is_file():
            continue
        content = read_json(file, ModelError)
        options = content if file.name == PROCESSOR_FILES[0] else content.get("image_processor", {})
        if options:
            options |= limits
        write_json(folder / file.name, content)


class _Recorder:
    """A tokenizer that records the texts it is given: the processor's, with the tokens of images.

    Args:
        ids: tokens that it returns in place of those of the texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ids: list[list[int]] | None):
        self._tokenizer = tokenizer
        self._ids = ids
        self.texts = [""]

    def __call__(self, text: list[str], **options: Any) -> Any:
        self.texts = text
        encoded = self._tokenizer(text, add_special_tokens=False)
        ids = encoded[INPUT_IDS] if self._ids is None else self._ids
        return BatchEncoding({INPUT_IDS: ids}, encoded.encodings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@contextlib.contextmanager
def _packages_named(name: str) -> Iterator[None]:
    """Name the package that transformers' processor of a model needs.

    Raises:
        ModelError: a package is missing.
    """
    try:
        yield
    except (ImportError, ValueError) as error:  # a ValueError if no backend of an image processor is installed
        if isinstance(error, ImportError) or "dependencies" in str(error):
            wrong = f"the image processor of {name} needs a package that is not installed: {text_of(error)}"
            raise ModelError(wrong, "install it") from error
        raise


def _processor_class(config: Any, name: str | None = None) -> Any:
    """Return transformers' class of processors for a config. Its video processor, which needs torchvision, may be None.

    Args:
        name: class in the model's files, which may differ from the config's: Pixtral's checkpoints are LLaVA models.

    Without torchvision, transformers has a placeholder for Pixtral's class, since its module imports a function of the
    other backend if images can be read at all. The class does not need it.
    """
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    processor_class = getattr(transformers, name or "", PROCESSOR_MAPPING[type(config)])
    if hasattr(processor_class, "_backends"):
        with mock.patch.object(transformers.utils, "is_vision_available", return_value=False):
            module = importlib.import_module(processor_class.__module__)
        processor_class = getattr(module, processor_class.__name__)

    def check(self: Any, name: str, value: Any) -> Any:
        return None if value is None else processor_class.check_argument_for_proper_class(self, name, value)

    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check})


def _moved(turn: Turn, placeholders: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> Turn:
    """Return a turn at its positions after images replaced placeholders."""

    def at(position: int) -> int:
        before = [new[1] - old[1] for old, new in zip(placeholders, spans, strict=True) if old[1] <= position]
        return position + (before[-1] if before else 0)

    marked = tuple((at(start), at(end)) for start, end in turn.spans)
    return replace(turn, start=at(turn.start), end=at(turn.end), limit=at(turn.limit), spans=marked)


def image_tokens(offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first and the end token of each image.

    Args:
        offsets: start, stop, start, ... of each token's characters.
        spans: character positions of each image.
    """
    starts, stops = offsets[::2], offsets[1::2]
    return [
        (int(np.searchsorted(stops, start, "right")), int(np.searchsorted(starts, end, "left"))) for start, end in spans
    ]


def check_same_text(
    plain: tuple[str, np.ndarray, np.ndarray],
    expanded: tuple[str, np.ndarray, np.ndarray],
    text: ExpandedText,
    tokenizer: PreTrainedTokenizerBase,
    location: str,
) -> None:
    """Check that the text around images has the tokens that it has without them.

    Tokens next to an image may hold white space that the processor writes around it, so that they are not compared.

    Args:
        plain, expanded: text, ids and offsets with placeholders, and with the tokens of images.

    Raises:
        DataError: it has other tokens.
    """
    pairs = zip(_between(*plain, text.placeholders), _between(*expanded, text.spans), strict=True)  # stretches of ids
    for before, after in pairs:
        if not np.array_equal(before, after):
            shown = [brief(str(tokenizer.decode(ids))) for ids in (before, after)]
            raise DataError(
                f"{location}: next to an image the tokenizer reads {shown[0]} as {before.tolist()[:20]}, and with the"
                f" image's tokens {shown[1]} as {after.tolist()[:20]}",
                "write a space or a line break between the image and the text",
            )


def _between(text: str, ids: np.ndarray, offsets: np.ndarray, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """Return the ids of the stretches of text before, between and after spans, without white space at their borders."""
    starts, stops = offsets[::2], offsets[1::2]
    borders = [0, *(position for span in spans for position in span), len(text)]
    stretches = []
    for begin, end in list(pairwise(borders))[::2]:
        stretch = text[begin:end]
        first = begin + len(stretch) - len(stretch.lstrip()) if begin else begin
        last = begin + len(stretch.rstrip()) if end < len(text) else end
        stretches.append(ids[(starts >= first) & (stops <= last)])
    return stretches
