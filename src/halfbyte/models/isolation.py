"""Whether packed documents see each other in a model, asked of the model itself, and what is done where they do.

transformers keeps the documents of a row apart by `position_ids` that restart, in models that hand them to their masks.
Many do not, and a convolution or a recurrent state knows no positions: documents then see each other, silently. So
every packed run begins with a probe: a row of short documents, one of them replaced; no hidden state of the others may
change by a bit, or, where sums depend on what else is in a batch (experts, GPUs), by more than in separate rows. And
each must have the hidden states that it has alone, up to rounding.

A model that leaks is tried with the bounds that kernels for packed rows read (FlashAttention, flash-linear-attention,
mamba-ssm, causal-conv1d). If it still leaks, its documents are unpacked (`unpacking`): right for every causal model, at
the cost of padding of up to a third and a forward for each class of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import compute, no_input_casts
from ..config import RunConfig
from ..errors import ConfigError
from ..notices import notice
from .head import backbone_inputs, reads_hidden_states
from .layer import causal_lm_of
from .tiny import tiny_model
from .unpacking import unpacked, unwrap, with_bounds, wrap

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]

LENGTHS = (70, 1, 29, 37)  # of the probe's documents: one of a token, two of like length, none a multiple of a chunk
REPLACED = (0, 2)  # which are replaced in turn: others are behind, and before
SMALL_ROW = 256  # tokens that a row of a small model may hold
ROWS = 16  # of the data, that give the probe its tokens
MARGIN = 8.0  # how much more than in separate rows is more than another order of sums
BLIND = 0.02  # a change in separate rows of this size, relative to the hidden states, would hide a leak
WRONG = 0.1  # so far from its hidden states alone no rounding brings a document; masks or positions are others
WORDS = {
    "bounds": "its kernels are told where each begins, without CUDA graphs",
    "unpacked": "they are unpacked into rows in each step, which takes more time, up to a third more tokens, and no "
    "CUDA graphs; packing: false and padding_free: false avoid it",
}
FORWARDS = {"bounds": with_bounds, "unpacked": unpacked}


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
        way: "positions": as the batch is; "bounds" and "unpacked": by the forwards of `unpacking`.
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
    model: nn.Module, collate: Collate, *, key: str, length: int, tokens: Sequence[int], dtype: Any = None
) -> Isolation:
    """Probe `model` and, where packed documents see each other, bind forwards that keep them apart; see `release`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`, patched or not, as it will be run.
        collate: makes a batch of rows with `input_ids`, `labels` and `seq_lengths`, as the run does.
        key: what to set to false where nothing helps, "packing" or "padding_free".
        length: tokens that a row may hold.
        tokens: ids that the probe's documents are made of.
        dtype: of matrix products, a torch.dtype; None: the weights'.

    Raises:
        ConfigError: nothing keeps the documents apart.
    """
    release(model)
    probe = _Probe(model, collate, length, tokens, dtype)
    causal_lm = causal_lm_of(model)
    backbone = getattr(causal_lm, "base_model", causal_lm)
    tried: dict[str, Found] = {}
    leak = None
    for way, modules in (
        ("positions", []),
        ("bounds", [backbone]),
        ("unpacked", [backbone]),
        ("unpacked", [backbone, causal_lm]),  # that hands its backbone no positions, or uses a part of it
    ):
        for module in dict.fromkeys(modules):
            wrap(module, FORWARDS[way])
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
    model: nn.Module, config: RunConfig, collate: Collate, rows: Sequence[Mapping[str, Any]], dtype: Any = None
) -> Isolation | None:
    """`isolate` as `config` asks for it, with tokens of the first of `rows`; None where rows are documents.

    Raises:
        ConfigError: see `isolate`.
    """
    if not config.packing and not config.padding_free:
        return None
    tokens = [token for index in range(min(len(rows), ROWS)) for token in rows[index]["input_ids"]]
    key = "packing" if config.packing else "padding_free"
    return isolate(model, collate, key=key, length=config.max_length, tokens=tokens, dtype=dtype)


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
    causal_lm = causal_lm_of(model)
    for module in (causal_lm, getattr(causal_lm, "base_model", causal_lm)):
        unwrap(module)


def _said(model: nn.Module, isolation: Isolation) -> Isolation:
    if isolation.way != "positions":
        name = type(causal_lm_of(model)).__name__
        reason = isolation.leak or isolation.tried["positions"]
        said = f"packed documents would see each other in {name} ({reason}): {WORDS[isolation.way]}"
        notice(f"isolation-{name}", said)
    return isolation


class _Probe:
    """Two rows of documents, of which one is replaced; and what the others see of it, in training and evaluation."""

    def __init__(self, model: nn.Module, collate: Collate, length: int, tokens: Sequence[int], dtype: Any):
        self.model, self.collate, self.dtype = model, collate, dtype
        self.tokens = torch.tensor(sorted({*tokens} if len({*tokens}) > 1 else {0, 1}))
        scale = min(1.0, length / sum(LENGTHS))
        self.lengths = [max(1, int(scale * each)) for each in LENGTHS]

    @torch.no_grad()
    def __call__(self) -> Found:
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            found = self._in_mode(training=True)
            return found if not found.isolated else max(found, self._in_mode(training=False), key=_severity)
        except (ArithmeticError, AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError,
                AttributeError, ImportError, ValueError) as error:  # fmt: skip
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return Found(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
        finally:
            for module, training in modes:
                module.training = training

    def _in_mode(self, *, training: bool) -> Found:
        self.model.train(training)
        before, documents = self._outputs(None)
        change = typical = 0.0
        for replaced in REPLACED:
            after, _ = self._outputs(replaced)
            for one, other in zip(before, after, strict=True):
                changes = _changes(one, other)
                untouched = [changes[documents == each] for each in documents.unique() if each != replaced]
                change = max(change, *(float(each.max()) for each in untouched))
                typical = max(typical, *(float(each.median()) for each in untouched))
        order_of_sums = self._order_of_sums() if change else 0.0
        return Found(change, typical, order_of_sums, 0.0 if training else self._alone(before))

    def _rows(self, replaced: int | None) -> list[dict[str, Any]]:
        """Two rows; document `replaced` of the first is another one."""
        generator = torch.Generator().manual_seed(0)
        rows = []
        for row, lengths in enumerate((self.lengths, self.lengths[::-1])):
            ids: list[int] = []
            for document, length in enumerate(lengths):
                picked = torch.randint(len(self.tokens), (length,), generator=generator)
                if row == 0 and document == replaced:
                    picked = (picked + 1) % len(self.tokens)
                ids += self.tokens[picked].tolist()
            rows.append({"input_ids": ids, "labels": ids, "seq_lengths": list(lengths)})
        return rows

    def _outputs(self, replaced: int | None) -> tuple[list[Tensor], Tensor]:
        """Hidden states (where the loss is computed from them) and logits, and each token's document, [B, T]."""
        batch = dict(self.collate(self._rows(replaced)))
        positions = batch["position_ids"]
        documents = ((positions == 0).flatten().cumsum(0) - 1).view(positions.shape)
        return self._run(batch), documents

    def _run(self, batch: dict[str, Any]) -> list[Tensor]:
        device = next(self.model.parameters()).device
        inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        inputs = backbone_inputs(self.model, inputs) | {"use_cache": False}
        outputs = []
        cuda = [device] if device.type == "cuda" else []
        hidden = reads_hidden_states(self.model, {"input_ids": inputs["input_ids"]})
        for run in (causal_lm_of(self.model).base_model, self.model) if hidden else (self.model,):
            # The same dropout each time; and the run's own random numbers must not see that there was a probe.
            with torch.random.fork_rng(devices=cuda), no_input_casts(self.model), compute(self.model, self.dtype):
                torch.manual_seed(0)
                result = run(**inputs)
            outputs.append((result.logits if run is self.model else result.last_hidden_state).float().cpu())
        return outputs

    def _alone(self, packed: list[Tensor]) -> float:
        """How far the documents of the first row, but its first, are from what they are alone."""
        worst, begin = 0.0, self.lengths[0]
        ids = self._rows(None)[0]["input_ids"]
        for length in self.lengths[1:]:
            alone = self._run({"input_ids": torch.tensor([ids[begin : begin + length]])})
            for one, other in zip(packed, alone, strict=True):
                found, own = (x.nan_to_num(0.0, 0.0, 0.0) for x in (one[0, begin : begin + length], other[0]))
                worst = max(worst, float(((found - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-30)).median()))
            begin += length
        return worst

    def _order_of_sums(self) -> float:
        """The median change of a row's tokens when another row is replaced, or when nothing is."""
        generator = torch.Generator().manual_seed(1)
        picked = torch.randint(len(self.tokens), (4, max(self.lengths)), generator=generator)
        other = picked.clone()
        other[0] += 1
        runs = [self._run({"input_ids": self.tokens[each % len(self.tokens)]}) for each in (picked, picked, other)]
        medians = [_changes(x[1:], y[1:]).median() for run in runs[1:] for x, y in zip(runs[0], run, strict=True)]
        return float(max(medians))

    @torch.no_grad()
    def first_leak(self) -> str | None:
        """The first module of which an untouched token's output changes while all its inputs stay."""
        sums: list[dict[str, tuple[float, float]]] = []
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        for replaced in (None, REPLACED[0]):
            batch = dict(self.collate(self._rows(replaced)))
            documents = ((batch["position_ids"] == 0).flatten().cumsum(0) - 1).view(batch["position_ids"].shape)
            seen: dict[str, tuple[float, float]] = {}
            handles = [
                module.register_forward_hook(_summing(name, documents != REPLACED[0], seen), with_kwargs=True)
                for name, module in self.model.named_modules()
            ]
            try:
                self._run(batch)
            finally:
                for handle in handles:
                    handle.remove()
            sums.append(seen)
        for module, training in modes:
            module.training = training
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
