"""A conversation with a saved run or model: prompts from its chat template, streamed answers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..utils.errors import DataError, HalfbyteError
from ..utils.notices import notice

if TYPE_CHECKING:
    from ..data.image_processor import ImageProcessor
    from ..generation import Penalties, Sampling
    from ..generation.images import Columns
    from ..runs.saved import Saved

Message = dict[str, Any]
StoredImage = Mapping[str, Any]  # as `data.images.ImageSource.stored` returns it
Style = Literal["template", "instruction", "text"]
STYLES = {"instruction": "sent as a separate instruction", "text": "continued as plain text"}


class Prompt(NamedTuple):
    """Token ids of a prompt, and the model's inputs for its images (None: it has none)."""

    ids: list[int]
    images: Columns | None = None


class Conversation:
    """The messages so far, and the prompt format that the model was trained with.

    Attributes:
        messages: turns; an image is a part `{"type": "image"}` of a turn's content.
        images: the images of these turns, in their order.
        attached: images of the next user message.
    """

    def __init__(
        self,
        saved: Saved,
        sampling: Sampling,
        max_new_tokens: int | None = None,
        penalties: Penalties | None = None,
    ):
        from ..generation.sampling import stop_tokens
        from ..runs.stop_tokens import data_report, trained_stop_tokens

        self.saved = saved
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.penalties = penalties
        self.messages: list[Message] = []
        self.images: list[StoredImage] = []
        self.attached: list[StoredImage] = []
        report = data_report(saved.paths.run_dir)
        # The prompt format of the run's training data, or of the model's template without a run.
        formats = {source["format"] for source in report.get("sources", ())}
        if formats == {"text"} or not (formats or saved.tokenizer.chat_template):
            self.style = "text"
        else:
            self.style = "template" if saved.tokenizer.chat_template else "instruction"
        learned = trained_stop_tokens(report, saved.tokenizer)
        self.stops = sorted({*stop_tokens(saved.tokenizer, saved.model, ()), *learned})
        if self.style != "template":
            notice("chat", f"no chat template in use: each line is {STYLES[self.style]}, without the previous ones")

    @cached_property
    def processor(self) -> ImageProcessor:
        """The processor of the model's images."""
        from ..data.image_processor import ImageProcessor

        return ImageProcessor(self.saved.config, self.saved.tokenizer)

    @cached_property
    def reads_images(self) -> bool:
        """Whether the model answers about images."""
        try:
            self.check_reads_images()
        except HalfbyteError:
            return False
        return True

    def check_reads_images(self) -> None:
        """Raise a DataError if the model reads text only, or has no chat template."""
        processor = self.processor
        if not processor.takes_images:
            wrong = f"{self.saved.config.model_name_or_path} ({processor.model_config.model_type}) reads no images"
            raise DataError(wrong, "use a model that reads images")
        if self.style != "template":
            wrong = "prompts with images need a chat template, which says where images are, and this model has none"
            raise DataError(wrong, "set chat_template_path in training, or add chat_template.jinja to the model")

    def attach(self, file: str) -> None:
        """Add an image file to the next user message.

        Raises:
            DataError: it is no image, or the model reads text only.
        """
        from ..data.images import ImageSource, opened

        self.check_reads_images()
        image = ImageSource(None, allow_urls=False).stored(file, "", file)
        self.processor.expansion(opened(image).size, several=False, location=file)  # a bad image is an error at once
        self.attached.append(image)

    def reset(self) -> None:
        """Start a new conversation."""
        self.messages = []
        self.images = []
        self.attached = []

    def prompt(self, text: str) -> str:
        """Return the text that the model continues after the user message `text`."""
        from ..data.encode import INSTRUCTION

        if self.style == "text":
            return text
        if self.style == "instruction":
            return INSTRUCTION.format(prompt=text)
        return self.render([*self.messages, self._user(text)])

    def _user(self, text: str) -> Message:
        """Return a user message: the attached images, then the text."""
        if not self.attached:
            return {"role": "user", "content": text}
        return {
            "role": "user",
            "content": [*({"type": "image"} for _ in self.attached), {"type": "text", "text": text}],
        }

    def render(self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Render messages with the chat template, and with values of its variables, up to the start of an answer.

        Raises:
            DataError: the template raises.
        """
        from ..data.chat import prompt_text

        return prompt_text(self.saved.tokenizer, turns, variables=variables)

    def remember(self, text: str, answer: str) -> None:
        """Append a user message with the attached images, and its answer."""
        self.messages += [self._user(text), {"role": "assistant", "content": answer}]
        self.images, self.attached = [*self.images, *self.attached], []

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of `prompt`, which has no images; chat templates contain their special tokens."""
        special = self.style != "template"
        return self.saved.tokenizer(self.prompt(text), add_special_tokens=special, verbose=False)["input_ids"]

    def with_images(self, text: str, images: Sequence[StoredImage], location: str = "the conversation") -> Prompt:
        """Tokenize a rendered conversation, with the tokens of images in place of their placeholders.

        Args:
            images: of the conversation, in their order.
            location: names the conversation in errors.

        Raises:
            DataError: an image cannot be read, or placeholders and images differ in number.
            ModelError: the model's processor is missing, or halfbyte does not use it.
        """
        import torch

        tokenizer: Any = self.saved.tokenizer
        if not images:
            return Prompt(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        expanded = self.processor.expanded(text, None, images, location, sys.maxsize)
        ids = tokenizer(expanded.text, add_special_tokens=False, verbose=False)["input_ids"]
        pairs = zip(images, expanded.images, strict=True)
        counted = [{**image, "tokens": expansion.tokens} for image, expansion in pairs]
        return Prompt(ids, self.processor.columns([counted], torch.tensor([ids])))

    def encoded(self, text: str) -> Prompt:
        """Return the prompt after the user message `text` and the attached images."""
        images = [*self.images, *self.attached]
        return self.with_images(self.prompt(text), images) if images else Prompt(self.prompt_ids(text))

    def answer(self, text: str, adapter: bool = True) -> Generator[str]:
        """Yield the answer to `text` in pieces; closing the generator stops the generation."""
        from ..generation.run import ACTIVE
        from ..generation.text import continue_texts

        prompt = self.encoded(text)
        pieces = continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            [prompt.ids],
            images=[prompt.images],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            ends=self.stops,
            adapter=ACTIVE if adapter else None,
            penalties=self.penalties,
        )
        with contextlib.closing(pieces):
            yield from (piece.text for piece in pieces if piece.text)
