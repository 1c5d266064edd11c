"""Whether packed documents see each other in a model, asked of the model itself, and what is done where they do.

transformers keeps the documents of a row apart by `position_ids` that restart, in models that hand them to their masks.
Many do not, and a convolution or a recurrent state knows no positions: documents then see each other, silently. So
every packed run begins with a probe: rows of short documents, one of each replaced; no hidden state of the others may
change by a bit, or, where sums depend on what else is in a batch (experts, GPUs), by more than in separate rows. And
each must have the hidden states that it has alone, up to rounding. That takes five forwards: two as the model trains,
two as it evaluates, and one of documents alone.

A model that leaks is tried with the bounds that FlashAttention reads, its convolutions and scans as `scans` has them.
Then with masks made of positions, where it takes masks and makes its own without. If it still leaks, its documents are
unpacked (`unpacking`): right for every causal model, at the cost of padding of up to a third and a forward for each
class of lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..parallel.mesh import ALONE, Mesh
from ..utils.errors import ConfigError
from ..utils.notices import notice
from . import recurrent
from .adapters import compute, no_input_casts
from .head import backbone_inputs, reads_hidden_states
from .layer import causal_lm_of
from .packed_forwards import unpacked, unwrap, with_bounds, with_masks, wrap
from .tiny import tiny_model

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]

LENGTHS = (70, 1, 29, 37)  # of the probe's documents: one of a token, two of like length, none a multiple of a chunk
REPLACED = (0, len(LENGTHS) + 1)  # of both rows together: of the first, and with others before it and behind
SMALL_ROW = 256  # tokens that a row of a small model may hold
ROWS = 16  # of the data, that give the probe its tokens
MARGIN = 8.0  # how much more than in separate rows is more than another order of sums
BLIND = 0.02  # a change in separate rows of this size, relative to the hidden states, would hide a leak
WRONG = 0.1  # so far from its hidden states alone no rounding brings a document; masks or positions are others
WORDS = {
    "bounds": "its layers are told where each begins, without CUDA graphs",
    "masks": "its masks are made of their positions, without CUDA graphs",
    "unpacked": "they are unpacked into rows in each step, which takes more time, up to a third more tokens, and no "
    "CUDA graphs; packing: false and padding_free: false avoid it",
}
FORWARDS = {"bounds": with_bounds, "masks": with_masks, "unpacked": unpacked}


@dataclass(frozen=True)
class Found:
    """What the probe saw of one way to run packed rows.

    Attributes:
        change: the largest change of a token of an untouched document, relative to its hidden state's largest number.
        typical: the same of the document that changed most, its median token.
        order_of_sums: the median change in separate rows, which is nobody's leak; measured where `change` is not 0.
        alone: the difference of a document's median token from the same document alone, relative to its norm.
        error: what the model raised instead.
    """

    change: float = 0.0
    typical: float = 0.0
    order_of_sums: float = 0.0
    alone: float = 0.0
    error: str | None = None

    @property
    def isolated(self) -> bool:
        if self.error is not None or not self.alone < WRONG:
            return False
        return self.change == 0.0 or (self.typical <= MARGIN * self.order_of_sums and self.order_of_sums < BLIND)

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        off = f" and are off those alone by {self.alone:.1e}" if self.alone else ""
        return f"hidden states change by {self.change:.1e}{off}"


@dataclass(frozen=True)
class Isolation:
    """How the documents of a packed row are kept apart.

    Attributes:
        way: "positions": as the batch is; "bounds", "masks" and "unpacked": by the forwards of `unpacking`.
        tried: way → what the probe found, up to the one that is taken.
        leak: the first module that lets documents see each other in a batch as it is; None where there is none.
    """

    way: str
    tried: dict[str, Found]
    leak: str | None = None

    def document(self) -> dict[str, Any]:
        """For checks.json: what was found of the way that is taken, and in words why not the ways before it."""
        numbers = {key: value for key, value in asdict(self.tried[self.way]).items() if key != "error"}
        without = {f"not_by_{way}": str(found) for way, found in self.tried.items() if way != self.way}
        return {"way": self.way, "leak": self.leak, **numbers, **without}


def isolate(
    model: nn.Module,
    collate: Collate,
    *,
    key: str,
    length: int,
    tokens: Sequence[int],
    dtype: Any = None,
    mesh: Mesh = ALONE,
) -> Isolation:
    """Probe `model` and, where packed documents see each other, bind forwards that keep them apart; see `release`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`, patched or not, as it will be run.
        collate: makes a batch of rows with `input_ids`, `labels` and `seq_lengths`, as the run does.
        key: what to set to false where nothing helps, "packing" or "padding_free".
        length: tokens that a row may hold.
        tokens: ids that the probe's documents are made of.
        dtype: of matrix products, a torch.dtype; None: the weights'.
        mesh: processes that probe their models, or their parts of one, together, and find the same.

    Raises:
        ConfigError: nothing keeps the documents apart.
    """
    release(model)
    probe = _Probe(model, collate, length, tokens, dtype, mesh)
    causal_lm = causal_lm_of(model)
    backbone = getattr(causal_lm, "base_model", causal_lm)
    tried: dict[str, Found] = {}
    leak = None
    for way, modules in (
        ("positions", []),
        ("bounds", [backbone]),
        ("masks", [backbone]),
        ("unpacked", [backbone]),
        ("unpacked", [backbone, causal_lm]),  # that hands its backbone no positions, or uses a part of it
    ):
        for module in dict.fromkeys(modules):
            wrap(module, FORWARDS[way])
        for module in list(recurrent.layers(model)) if way in ("bounds", "masks") else ():
            wrap(module, recurrent.apart)
        tried[way] = probe()
        if tried[way].isolated:
            return _said(model, Isolation(way, tried, leak))
        if way == "positions" and tried[way].error is None:
            leak = probe.first_leak()
        release(model)
    where = f" (they see each other in {leak})" if leak else ""
    names = "; ".join(f"{way}: {found}" for way, found in tried.items())
    raise ConfigError(
        f"{key}: documents of a row cannot be kept apart in {type(causal_lm).__name__}{where}. Tried: {names}",
        f"set {key}: false",
    )


def isolate_run(
    model: nn.Module,
    config: RunConfig,
    collate: Collate,
    rows: Sequence[Mapping[str, Any]],
    dtype: Any = None,
    mesh: Mesh = ALONE,
) -> Isolation | None:
    """`isolate` as `config` asks for it, with tokens of the first of `rows`; None where rows are documents.

    Raises:
        ConfigError: see `isolate`.
    """
    if not config.packing and not config.padding_free:
        return None
    tokens = [token for index in range(min(len(rows), ROWS)) for token in rows[index]["input_ids"]]
    key = "packing" if config.packing else "padding_free"
    return isolate(model, collate, key=key, length=config.max_length, tokens=tokens, dtype=dtype, mesh=mesh)


def isolate_like(
    model_config: Any, collate: Collate, *, key: str = "packing", trust_remote_code: bool = False
) -> Isolation:
    """What `isolate` finds for a few small layers of the kinds that a model of `model_config` has, before its weights
    are read.

    Raises:
        ConfigError: see `isolate`.
        Exception: whatever the model's own code says to sizes that were not made for it.
    """
    model = tiny_model(model_config, trust_remote_code=trust_remote_code)
    tokens = range(10, model.get_input_embeddings().weight.shape[0])
    return isolate(model, collate, key=key, length=SMALL_ROW, tokens=tokens)


def release(model: nn.Module) -> None:
    """Undo `isolate`."""
    for module in model.modules():
        unwrap(module)


def _said(model: nn.Module, isolation: Isolation) -> Isolation:
    if isolation.way != "positions":
        name = type(causal_lm_of(model)).__name__
        reason = isolation.leak or isolation.tried["positions"]
        said = f"packed documents would see each other in {name} ({reason}): {WORDS[isolation.way]}"
        notice(f"isolation-{name}", said)
    return isolation


class _Probe:
    """Two rows of documents, one of each replaced; and what the others see of it, in training and evaluation."""

    def __init__(
        self,
        model: nn.Module,
        collate: Collate,
        length: int,
        tokens: Sequence[int],
        dtype: Any,
        mesh: Mesh = ALONE,
    ):
        self.model, self.collate, self.dtype, self.mesh = model, collate, dtype, mesh
        self.tokens = torch.tensor(sorted({*tokens} if len({*tokens}) > 1 else {0, 1}))
        scale = min(1.0, length / sum(LENGTHS))
        self.lengths = [max(1, int(scale * each)) for each in LENGTHS]

    @torch.no_grad()
    def __call__(self) -> Found:
        try:
            with self._modes_restored():
                found = self._in_mode(training=True)
                return found if not found.isolated else max(found, self._in_mode(training=False), key=_severity)
        except (ArithmeticError, AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError,
                AttributeError, ImportError, ValueError) as error:  # fmt: skip
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return Found(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")

    @contextlib.contextmanager
    def _modes_restored(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _in_mode(self, *, training: bool) -> Found:
        self.model.train(training)
        batch, other, documents, untouched = self._batches()
        before = self._run(batch)
        changes = _changes(before, self._run(other))
        of_each = [changes[documents == document] for document in documents[untouched].unique()]
        # rounding may differ from one process to another: what is run next, all decide alike
        change = self.mesh.max(max(float(each.max()) for each in of_each))
        typical = self.mesh.max(max(float(each.median()) for each in of_each))
        order_of_sums = self.mesh.max(self._order_of_sums()) if change else 0.0
        return Found(change, typical, order_of_sums, 0.0 if training else self.mesh.max(self._alone(before)))

    def _batches(self) -> tuple[dict[str, Any], dict[str, Any], Tensor, Tensor]:
        """Two batches as the run collates them, the second with other documents in the place of some; each token's
        document, and whether that is in both, [B, T]."""
        batch, other = (dict(self.collate(self._rows(replaced))) for replaced in ((), REPLACED))
        positions = batch["position_ids"]
        documents = ((positions == 0).flatten().cumsum(0) - 1).view(positions.shape)
        return batch, other, documents, ~torch.isin(documents, documents[batch["input_ids"] != other["input_ids"]])

    def _rows(self, replaced: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Two rows; the documents `replaced`, counted through both, are others."""
        generator = torch.Generator().manual_seed(0)
        rows, document = [], 0
        for lengths in (self.lengths, self.lengths[::-1]):
            ids: list[int] = []
            for length in lengths:
                picked = torch.randint(len(self.tokens), (length,), generator=generator)
                if document in replaced:
                    picked = (picked + 1) % len(self.tokens)
                ids += self.tokens[picked].tolist()
                document += 1
            rows.append({"input_ids": ids, "labels": ids, "seq_lengths": list(lengths)})
        return rows

    def _run(self, batch: dict[str, Any]) -> Tensor:
        """What the loss is computed from in training, hidden states or logits; in evaluation, logits."""
        device = next(self.model.parameters()).device
        inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        inputs = backbone_inputs(self.model, inputs) | {"use_cache": False}
        cuda = [device] if device.type == "cuda" else []
        hidden = self.model.training and reads_hidden_states(self.model, {"input_ids": inputs["input_ids"]})
        run = causal_lm_of(self.model).base_model if hidden else self.model
        # The same dropout each time; and the run's own random numbers must not see that there was a probe.
        with torch.random.fork_rng(devices=cuda), no_input_casts(self.model), compute(self.model, self.dtype):
            torch.manual_seed(0)
            result = run(**inputs)
        return (result.last_hidden_state if hidden else result.logits).float().cpu()

    def _alone(self, packed: Tensor) -> float:
        """How far the documents of the first row, but its first, are from what they are alone: in rows padded on the
        right, which causal layers never look at."""
        ids = self._rows()[0]["input_ids"]
        pieces = torch.tensor(ids).split(self.lengths)[1:]
        rows = self._run({"input_ids": nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=ids[0])})
        worst = 0.0
        first_row = packed.flatten(0, 1)[: len(ids)]
        for found, row in zip(first_row.split(self.lengths)[1:], rows, strict=True):
            found, own = (x.nan_to_num(0.0, 0.0, 0.0) for x in (found, row[: len(found)]))
            worst = max(worst, float(((found - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-30)).median()))
        return worst

    def _order_of_sums(self) -> float:
        """The median change of a row's tokens when another row is replaced, or when nothing is."""
        generator = torch.Generator().manual_seed(1)
        picked = torch.randint(len(self.tokens), (4, max(self.lengths)), generator=generator)
        other = picked.clone()
        other[0] += 1
        runs = [self._run({"input_ids": self.tokens[each % len(self.tokens)]}) for each in (picked, picked, other)]
        return max(float(_changes(runs[0][1:], run[1:]).median()) for run in runs[1:])

    @torch.no_grad()
    def first_leak(self) -> str | None:
        """The first module of which an untouched token's output changes while all its inputs stay."""
        sums: list[dict[str, tuple[float, float]]] = []
        with self._modes_restored():
            self.model.eval()
            *batches, _, untouched = self._batches()
            for batch in batches:
                seen: dict[str, tuple[float, float]] = {}
                handles = [
                    module.register_forward_hook(_summing(name, untouched, seen), with_kwargs=True)
                    for name, module in self.model.named_modules()
                ]
                try:
                    self._run(batch)
                finally:
                    for handle in handles:
                        handle.remove()
                sums.append(seen)
        for name, (inputs, output) in sums[0].items():
            other = sums[1].get(name)
            if other is not None and other[0] == inputs and other[1] != output:
                return f"{name}, a {type(self.model.get_submodule(name)).__name__}"
        return None


def _severity(found: Found) -> tuple[bool, float]:
    return not found.isolated, found.change


def _summing(name: str, untouched: Tensor, seen: dict[str, tuple[float, float]]) -> Callable[..., None]:
    """A hook that notes the sums of a module's inputs and output over the untouched tokens, the first time it runs."""

    def total(values: Any) -> float:
        if isinstance(values, Tensor):
            if values.shape[:2] != untouched.shape or not values.is_floating_point():
                return 0.0
            kept = values[untouched.to(values.device)].double()
            return float(kept.abs().sum() + (kept * torch.arange(kept.shape[-1], device=kept.device)).sum())
        values = values.values() if isinstance(values, Mapping) else values
        return sum(map(total, values)) if isinstance(values, list | tuple | type({}.values())) else 0.0

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.setdefault(name, (total(args) + total(kwargs), total(output)))

    return hook


def _changes(before: Tensor, after: Tensor) -> Tensor:
    """[B, T]: how far each token's numbers moved, relative to its largest."""
    moved = torch.where(before != after, (before - after).abs(), 0.0).amax(-1)
    if not moved.isfinite().all():
        raise ArithmeticError("hidden states or logits are NaN")
    return moved / before.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1).clamp(min=1e-30)
