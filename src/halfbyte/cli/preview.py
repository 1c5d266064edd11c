"""`halfbyte preview`: rows as the model sees them, with trained tokens in colour, and sampled answers with rewards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..config import RunConfig
from ..ops import IGNORE_INDEX
from ..runs.inputs import check_inputs
from ..utils.console import Console, has_colours
from ..utils.errors import UsageError
from ..utils.text import brief, visible
from .startup import quick_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED = "green"
MASKED = "dim"
EOS = "reverse"
REJECTED = "red"  # trained tokens of a rejected answer
INITIAL_STATE = {"global_step": 0, "max_steps": 0, "num_train_epochs": 0, "epoch": 0.0}  # at the beginning of a run


def preview_rows(config: RunConfig, count: int) -> None:
    """Print the first `count` rows, prepared and collated exactly as in training."""
    check_inputs(config)
    with quick_imports():
        from ..data.image_processor import ImageProcessor
        from ..data.images import IMAGES
        from ..loading.tokenizers import load_run_tokenizer
        from ..methods import method_of

    tokenizer = load_run_tokenizer(config)
    method = method_of(config)
    row_type = method.rows
    prepared = method.prepare(config, tokenizer)
    collate = method.collator(config, tokenizer) if row_type == "text" else None
    stops = [tokenizer.convert_tokens_to_ids(token) for token in prepared.report["stop_tokens"]]
    ends = {tokenizer.eos_token_id, *stops}
    console = Console(soft_wrap=True)
    marks = not has_colours(console)
    console.print(legend(marks, answers=collate is None))
    for number in range(min(count, len(prepared.train))):
        row = prepared.train[number]
        image_id = ImageProcessor(config, tokenizer).image_token_id if row.get(IMAGES) else None
        if collate is not None:
            shown = render(collate([row]), tokenizer, ends, number, marks, image_id)
        elif row_type == "labelled":
            shown = render_task(row, tokenizer, number, marks)
        else:
            shown = render_answers(row, tokenizer, ends, number, marks, image_id)
        for document in shown:
            console.print(document)


def legend(marks: bool, *, answers: bool = False) -> Text:
    """Explain the colours, or the brackets of output without colours.

    Args:
        answers: whether rows may have rejected answers.
    """
    if marks:
        return Text("⟦trained⟧ masked ⏎=EOS")
    rejected = [(" rejected", REJECTED)] if answers else []
    return Text.assemble(("trained", TRAINED), *rejected, "  ", ("masked", MASKED), "  ", ("EOS", EOS))


def render(
    batch: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    row: int,
    marks: bool = False,
    image_id: int | None = None,
) -> Iterator[Text]:
    """One heading and one text per document of a collated batch of one row.

    Args:
        batch: `input_ids`, `labels` and `attention_mask` or `position_ids`, each (1, length).
        ends: ids that end a text or a turn; they are marked as EOS.
        row: index of the row, from 0.
        marks: put trained text into ⟦⟧ and mark EOS, for output without colours.
        image_id: token of an image's features, which are counted; None: the row has no image.
    """
    tokens, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    spans = documents(batch)
    for index, (start, end) in enumerate(spans):
        trained = sum(label != IGNORE_INDEX for label in labels[start:end])
        yield _heading(f"row {row + 1}, document {index + 1} of {len(spans)}: {end - start} tokens, {trained} trained")
        yield _coloured(tokens[start:end], labels[start:end], tokenizer, ends, marks, image_id=image_id)


def render_answers(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    number: int,
    marks: bool = False,
    image_id: int | None = None,
) -> Iterator[Text]:
    """Yield a heading and a text for a prompt and for each of its answers, and then the remaining columns.

    Args:
        row: a row of `data.prepare_answers`.
        ends, marks, image_id: see `render`.
        number: index of the row, from 0.
    """
    prompt = row["prompt_ids"]
    yield _heading(f"row {number + 1}, prompt: {len(prompt)} tokens")
    yield _coloured(prompt, [IGNORE_INDEX] * len(prompt), tokenizer, ends, marks, image_id=image_id)
    for name in (name.removesuffix("_mask") for name in row if name.endswith("_mask")):
        ids, mask = row[f"{name}_ids"], row[f"{name}_mask"]
        is_desirable = row.get("label", name != "rejected")
        title = f"{name} ({'desirable' if is_desirable else 'undesirable'})" if "label" in row else name
        yield _heading(f"row {number + 1}, {title}: {len(ids)} tokens, {sum(mask)} trained")
        labels = [token if trained else IGNORE_INDEX for token, trained in zip(ids, mask, strict=True)]
        yield _coloured(ids, labels, tokenizer, ends, marks, TRAINED if is_desirable else REJECTED)
    further = {name: row[name] for name in ("margin", "right") if name in row} | row.get("columns", {})
    if further:
        yield Text("\n".join(f"{name}: {brief(value)}" for name, value in further.items()), style="cyan")


def render_task(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, number: int, marks: bool = False
) -> Iterator[Text]:
    """Yield a heading and a text for each text of a row, with the tokens whose hidden states are read in colour, and
    the row's target.

    Args:
        row: a row of `data.prepare_tasks`.
        number, marks: as of `render_answers`.
    """
    begin, sizes = 0, row["seq_lengths"]
    for index, size in enumerate(sizes):
        ids, labels = (row[name][begin : begin + size] for name in ("input_ids", "labels"))
        begin += size
        read = sum(label != IGNORE_INDEX for label in labels)
        yield _heading(f"row {number + 1}, text {index + 1} of {len(sizes)}: {size} tokens, {read} read")
        yield _coloured(ids, labels, tokenizer, set(), marks)
    if row["target"]:
        yield Text(f"target: {brief(row['target'])}", style="cyan")


def _heading(title: str) -> Text:
    return Text(f"\n{f'── {title} ':─<100}", style="cyan")


def documents(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """Return start and end of each document: positions restart there; without positions, all but padding."""
    if "position_ids" in batch:
        positions = batch["position_ids"][0].tolist()
        starts = [index for index, position in enumerate(positions) if position == 0]
        return list(zip(starts, [*starts[1:], len(positions)], strict=True))
    real = batch["attention_mask"][0].nonzero().flatten().tolist()
    return [(real[0], real[-1] + 1)] if real else []


def _coloured(
    tokens: list[int],
    labels: list[int],
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    marks: bool,
    colour: str = TRAINED,
    image_id: int | None = None,
) -> Text:
    """Colour tokens; decode runs of one kind together, since a character may consist of several tokens."""
    text = Text()
    token_marks = [
        (label != IGNORE_INDEX, token in ends, token == image_id) for token, label in zip(tokens, labels, strict=True)
    ]
    at = 0
    for (trained, is_eos, is_image), run in groupby(token_marks):
        size = len(list(run))
        piece = str(tokenizer.decode(tokens[at : at + size], skip_special_tokens=False))
        piece = f"[image: {size} tokens]" if is_image else piece
        at += size
        if marks:
            piece += "⏎" if is_eos else ""
            piece = f"⟦{piece}⟧" if trained else piece
        style = colour if trained else MASKED
        text.append(piece, f"{style} {EOS}" if is_eos else style)
    return text


def preview_rollouts(config: RunConfig, count: int, answers: int) -> None:
    """Print `answers` answers to each of the first `count` prompts, sampled as in training, with their rewards.

    Raises:
        UsageError: the method of the run does not sample answers.
    """
    check_inputs(config)
    with quick_imports():
        from ..adapters.lora import add_adapter
        from ..loading.find import find_model
        from ..loading.load import load_model
        from ..loading.tokenizers import load_run_tokenizer, with_token_rows
        from ..methods import method_of
        from ..methods.grpo import PolicyOptimization
        from ..modeling.compute_dtype import compute_dtype_of
        from ..rewards.model_scores import check_reward_model_compatibility, loaded_reward_models
        from ..rl.preflight import rewards_of
        from ..rl.served import check_server
        from ..train.rollouts import make_rollouts
        from ..utils.hardware import chosen_device

    method = method_of(config)
    if not isinstance(method, PolicyOptimization):
        raise UsageError(
            f"--rollouts: method: {config.method} does not sample answers", "remove --rollouts, or set method: grpo"
        )
    files = find_model(config.origin)
    tokenizer = load_run_tokenizer(config, files.origin)
    config = with_token_rows(config, tokenizer, files.config)
    data = method.ready(config, tokenizer)
    rewards = rewards_of(config, data)
    check_server(config, data, tokenizer, Console(quiet=True))
    try:
        rewards.check()
        check_reward_model_compatibility(config, rewards, files.config, tokenizer, Console(quiet=True))
        model = load_model(
            files,
            config.storage,
            dtype=config.precision.compute,
            device=config.device,
            attn_implementation=config.attn_implementation,
        )
        if config.adapter:
            plain = config.adapter.model_copy(update={"init_lora_weights": True})
            model = add_adapter(model, plain)  # a new adapter does not change the model
        device = chosen_device(config.device)
        dtype = compute_dtype_of(model)
        rollouts = make_rollouts(config, method, model, tokenizer, data, rewards, device=device, compute_dtype=dtype)
        shown = list(range(min(count, len(data.train))))
        with closing(rollouts), loaded_reward_models(config, rewards, model, tokenizer, device, dtype):
            batch = rollouts.answer(shown, [data.train[at] for at in shown], answers, 0, INITIAL_STATE)
        console = Console(soft_wrap=True)
        images = rollouts.sampler.images
        for line in _rollout_lines(batch, answers, tokenizer, None if images is None else images.image_token_id):
            console.print(line)
    finally:
        rewards.close()


def _rollout_lines(batch: Any, answers: int, tokenizer: Any, image_id: int | None) -> Iterator[Text]:
    """Yield each prompt, its answers with their rewards, and the mean and spread of each reward.

    Args:
        image_id: as in `render`.
    """
    for at, text in enumerate(batch.texts):
        if at % answers == 0:
            ids = batch.prompts[at]["prompt_ids"]
            untrained = [IGNORE_INDEX] * len(ids)
            prompt = _coloured(ids, untrained, tokenizer, set(), marks=False, image_id=image_id).plain
            yield Text(f"\n{f'── prompt {at // answers + 1} ':─<100}", style="cyan")
            yield Text(visible(prompt), style="dim")
        completion = batch.completions[at]
        values = [f"{name} {_shown(rewards[at])}" for name, rewards in batch.scored.rewards.items()]
        ended = "" if completion.ended else ", cut off"
        title = " · ".join([f"answer {at % answers + 1}: {len(completion.ids)} tokens{ended}", *values])
        yield Text(f"{f'── {title} ':─<100}", style="cyan")
        yield Text(visible(text), style="green")
    if not batch.scored.rewards:
        return
    yield Text("")
    for name in batch.scored.rewards:
        mean, spread = (batch.numbers.get(f"rewards/{name}/{statistic}") for statistic in ("mean", "std"))
        yield Text(f"{name}: mean {_shown(mean)}, spread {_shown(spread)}")
    yield Text(f"groups with equal rewards, which have no gradient: {batch.numbers.get('frac_reward_zero_std', 0):.0%}")


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
