"""A conversation with a saved run or model: prompts from its chat template, streamed answers."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..utils.notices import notice

if TYPE_CHECKING:
    from ..generation import Penalties, Sampling
    from ..runs.saved import Saved

Message = dict[str, str]
Style = Literal["template", "instruction", "text"]
STYLES = {"instruction": "sent as a separate instruction", "text": "continued as plain text"}


class Conversation:
    """The messages so far, and the prompt format that the model was trained with."""

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

    def prompt(self, text: str) -> str:
        """Return the text that the model continues after the user message `text`."""
        from ..data.encode import INSTRUCTION

        if self.style == "text":
            return text
        if self.style == "instruction":
            return INSTRUCTION.format(prompt=text)
        return self.render([*self.messages, {"role": "user", "content": text}])

    def render(self, turns: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Render messages with the chat template, and with values of its variables, up to the start of an answer.

        Raises:
            DataError: the template raises.
        """
        from ..data.chat import prompt_text

        return prompt_text(self.saved.tokenizer, turns, variables=variables)

    def remember(self, text: str, answer: str) -> None:
        """Append a user message and its answer."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of `prompt`; chat templates contain their special tokens."""
        special = self.style != "template"
        return self.saved.tokenizer(self.prompt(text), add_special_tokens=special, verbose=False)["input_ids"]

    def answer(self, text: str, adapter: bool = True) -> Generator[str]:
        """Yield the answer to `text` in pieces; closing the generator stops the generation."""
        from ..generation.run import ACTIVE
        from ..generation.text import continue_texts

        pieces = continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            [self.prompt_ids(text)],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            ends=self.stops,
            adapter=ACTIVE if adapter else None,
            penalties=self.penalties,
        )
        with contextlib.closing(pieces):
            yield from (piece.text for piece in pieces if piece.text)
