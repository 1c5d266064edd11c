"""Isolation of packed documents: probe whether a model mixes the documents of a row, and bind forwards that do not.

transformers isolates the documents of a row by restarting `position_ids`, in models that pass them to their masks. Many
models do not, and a convolution or recurrent state ignores positions: documents then see each other, silently. So every
packed run begins with a probe: rows of short documents, some of which are then replaced. Hidden states of the others
must be bit-equal. If sums depend on the rest of the batch (experts, GPUs), they may change by no more than in separate
rows. Also, each document's hidden states must match those of the document alone, up to rounding. The probe takes five
forwards: two in training mode, two in evaluation mode, and one of the documents alone. If the rows of a run have
images, so have some documents of the probe, and replacing a document replaces its image. The documents alone then have
no positions, so that an M-RoPE model makes its own.

A model that leaks is tried with FlashAttention's document bounds, and with `recurrent` for its convolutions and scans;
then with masks made from positions, if it takes masks. If it still leaks, its documents are unpacked
(`packed_forwards`). This is correct for every causal model; it costs up to a third of padding, and a forward for each
group of lengths.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..batch import IMAGES
from ..config.schema import DataSection
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from ..utils.errors import ConfigError, first_line
from ..utils.notices import notice
from . import recurrent
from .compute_dtype import compute_autocast, no_input_casts
from .head import backbone_inputs, uses_hidden_states
from .layer import causal_lm_of
from .packed_forwards import forward_with_bounds, forward_with_masks, unpacked_forward, unwrap, wrap
from .tiny_model import tiny_model

Collate = Callable[[list[dict[str, Any]]], Mapping[str, Any]]

LENGTHS = (70, 1, 29, 37)  # the probe's documents: a single token, two similar lengths, no multiple of a chunk size
REPLACED = (0, len(LENGTHS) + 1)  # documents to replace, counted over both rows: a first one and an inner one
WITH_IMAGE = (0, 2, len(LENGTHS), len(LENGTHS) + 1)  # documents with an image, if the rows of the run have some
SMALL_ROW = 256  # tokens of a tiny model's row
PROBE_ROWS = 16  # rows of the data that provide the probe's tokens
NOISE_MARGIN = 8.0  # a change above this multiple of the noise is a leak
MAX_NOISE = 0.02  # more noise, relative to the hidden states, would hide a leak
MAX_DEVIATION = 0.1  # rounding cannot move hidden states this far from those of the document alone
NOTICES = {
    "bounds": "halfbyte passes document bounds to its layers, without CUDA graphs",
    "masks": "halfbyte makes its masks from positions, without CUDA graphs",
    "unpacked": "halfbyte unpacks documents into rows in each step, which takes more time, up to a third more tokens, "
    "and no CUDA graphs; packing: false and padding_free: false avoid it",
}
FORWARDS = {"bounds": forward_with_bounds, "masks": forward_with_masks, "unpacked": unpacked_forward}


class ProbeImages(Protocol):
    """Makes the images of the probe, and the model's inputs for them: `data.image_processor.ImageProcessor`."""

    @property
    def image_token_id(self) -> int: ...

    def probe_image(self, seed: int) -> tuple[list[int], dict[str, Any]]: ...

    def columns(self, images: Sequence[Sequence[Mapping[str, Any]]], input_ids: Tensor) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ProbeResult:
    """The probe's measurements for one isolation method.

    Attributes:
        change: maximum change of a token in an untouched document, relative to the maximum of its hidden state.
        typical: the median token's change, in the document that changed most.
        order_of_sums: noise: the median change in separate rows; measured if `change` is not 0.
        alone: the median token's distance from the same document alone, relative to its norm.
        error: error that the model raised, if any.
    """

    change: float = 0.0
    typical: float = 0.0
    order_of_sums: float = 0.0
    alone: float = 0.0
    error: str | None = None

    @property
    def isolated(self) -> bool:
        if self.error is not None or not self.alone < MAX_DEVIATION:
            return False
        return self.change == 0.0 or (
            self.typical <= NOISE_MARGIN * self.order_of_sums and self.order_of_sums < MAX_NOISE
        )

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        off = f" and differ from those of the document alone by {self.alone:.1e}" if self.alone else ""
        return f"hidden states change by {self.change:.1e}{off}"


@dataclass(frozen=True)
class Isolation:
    """Method that isolates the documents of a packed row.

    Attributes:
        method: "positions": the batch as it is; "bounds", "masks" and "unpacked": the forwards of `packed_forwards`.
        tried: method → result of the probe, up to the selected method.
        leak: the first module that mixes documents of an unmodified batch, or None.
    """

    method: str
    tried: dict[str, ProbeResult]
    leak: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the entry of checks.json: the selected method's measurements, and why earlier methods failed."""
        numbers = {key: value for key, value in asdict(self.tried[self.method]).items() if key != "error"}
        without = {f"not_by_{name}": str(measured) for name, measured in self.tried.items() if name != self.method}
        return {"way": self.method, "leak": self.leak, **numbers, **without}


def isolate_documents(
    model: nn.Module,
    collate: Collate,
    *,
    key: str,
    length: int,
    tokens: Sequence[int],
    dtype: Any = None,
    mesh: Mesh = SINGLE_PROCESS,
    images: ProbeImages | None = None,
) -> Isolation:
    """Probe `model` and, if packed documents see each other, bind forwards that isolate them; see `remove_isolation`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`, patched or not, as the run uses it.
        collate: makes a batch of rows with `input_ids`, `labels` and `seq_lengths`, as the run does.
        key: config key named in the error, "packing" or "padding_free".
        length: maximum tokens of a row.
        tokens: token ids for the probe's documents.
        dtype: torch.dtype of matmuls; None: the weights' dtype.
        mesh: ranks that probe their (parts of) models together; all get the same result.
        images: makes images for some documents; None: the rows of the run have none.

    Raises:
        ConfigError: no method isolates the documents.
    """
    remove_isolation(model)
    probe = _Probe(model, collate, length, tokens, dtype, mesh, images)
    causal_lm = causal_lm_of(model)
    backbone = getattr(causal_lm, "base_model", causal_lm)
    text = getattr(backbone, "language_model", backbone)  # a vision tower would take bounds for those of its images
    tried: dict[str, ProbeResult] = {}
    leak = None
    for method, modules in (
        ("positions", []),
        ("bounds", [text]),
        ("masks", [backbone]),
        ("unpacked", [backbone]),
        ("unpacked", [backbone, causal_lm]),  # a causal LM may pass its backbone no positions, or use a part of it
    ):
        for module in dict.fromkeys(modules):
            wrap(module, FORWARDS[method])
        for module in list(recurrent.recurrent_layers(model)) if method in ("bounds", "masks") else ():
            wrap(module, recurrent.isolated_forward)
        tried[method] = probe()
        if tried[method].isolated:
            if method != "positions":
                name, reason = type(causal_lm).__name__, leak or tried["positions"]
                message = f"packed documents would see each other in {name} ({reason}): {NOTICES[method]}"
                notice(f"isolation-{name}", message)
            return Isolation(method, tried, leak)
        if method == "positions" and tried[method].error is None:
            leak = probe.first_leak()
        remove_isolation(model)
    location = f" (they see each other in {leak})" if leak else ""
    names = "; ".join(f"{method}: {measured}" for method, measured in tried.items())
    raise ConfigError(
        f"{key}: documents of a row cannot be isolated in {type(causal_lm).__name__}{location}. Tried: {names}",
        f"set {key}: false",
    )


def isolate_for_run(
    model: nn.Module,
    config: DataSection,
    collate: Collate,
    rows: Sequence[Mapping[str, Any]],
    dtype: Any = None,
    mesh: Mesh = SINGLE_PROCESS,
) -> Isolation | None:
    """Call `isolate_documents` for a run with packing, with tokens of the first `rows`; otherwise return None.

    Raises:
        ConfigError: no method isolates the documents.
    """
    if not config.packing and not config.padding_free:
        return None
    first_rows = [rows[index] for index in range(min(len(rows), PROBE_ROWS))]
    images = getattr(collate, "images", None) if first_rows and IMAGES in first_rows[0] else None
    tokens = [token for row in first_rows for token in row["input_ids"]]
    if images is not None:
        tokens = [token for token in tokens if token != images.image_token_id]
    key = "packing" if config.packing else "padding_free"
    return isolate_documents(
        model, collate, key=key, length=config.max_length, tokens=tokens, dtype=dtype, mesh=mesh, images=images
    )


def isolate_tiny_model(
    model_config: Any, collate: Collate, *, key: str = "packing", trust_remote_code: bool = False
) -> Isolation:
    """Return the isolation of a tiny model with the layer types of `model_config`, before its weights are read.

    Raises:
        ConfigError: no method isolates the documents.
        Exception: the model's own code rejects the tiny sizes.
    """
    model = tiny_model(model_config, trust_remote_code=trust_remote_code)
    tokens = range(10, model.get_input_embeddings().weight.shape[0])
    return isolate_documents(model, collate, key=key, length=SMALL_ROW, tokens=tokens)


def remove_isolation(model: nn.Module) -> None:
    """Undo `isolate_documents`."""
    for module in model.modules():
        unwrap(module)


class _Probe:
    """Probe of two packed rows: replaces some documents and measures changes of the others, in both modes."""

    def __init__(
        self,
        model: nn.Module,
        collate: Collate,
        length: int,
        tokens: Sequence[int],
        dtype: Any,
        mesh: Mesh = SINGLE_PROCESS,
        images: ProbeImages | None = None,
    ):
        self.model = model
        self.images = images
        self.collate = collate
        self.dtype = dtype
        self.mesh = mesh
        self.tokens = torch.tensor(sorted({*tokens} if len({*tokens}) > 1 else {0, 1}))
        scale = min(1.0, length / sum(LENGTHS))
        self.lengths = [max(1, int(scale * n)) for n in LENGTHS]

    @torch.no_grad()
    def __call__(self) -> ProbeResult:
        try:
            with self._modes_restored():
                training = self._in_mode(training=True)
                if not training.isolated:
                    return training
                return max(training, self._in_mode(training=False), key=lambda run: (not run.isolated, run.change))
        except (ArithmeticError, AssertionError, LookupError, NotImplementedError, RuntimeError, TypeError,
                AttributeError, ImportError, ValueError) as error:  # fmt: skip
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return ProbeResult(error=f"{type(error).__name__}: {first_line(error)}")

    @contextlib.contextmanager
    def _modes_restored(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    def _in_mode(self, *, training: bool) -> ProbeResult:
        self.model.train(training)
        batch, replaced_batch, documents, untouched = self._batches()
        hidden = self._run(batch)
        changes = _relative_changes(hidden, self._run(replaced_batch))
        document_changes = [changes[documents == document] for document in documents[untouched].unique()]
        # ranks may round differently: they must agree on the forwards that run next
        change = self.mesh.max(max(float(moved.max()) for moved in document_changes))
        typical = self.mesh.max(max(float(moved.median()) for moved in document_changes))
        order_of_sums = self.mesh.max(self._order_of_sums()) if change else 0.0
        return ProbeResult(change, typical, order_of_sums, 0.0 if training else self.mesh.max(self._alone(hidden)))

    def _batches(self) -> tuple[dict[str, Any], dict[str, Any], Tensor, Tensor]:
        """Return two collated batches, the second with some documents replaced, and per token [B, T]: its document, and
        whether that document is untouched."""
        batch, replaced_batch = (dict(self.collate(self._rows(replaced))) for replaced in ((), REPLACED))
        positions = batch["position_ids"]
        documents = ((positions == 0).flatten().cumsum(0) - 1).view(positions.shape)
        changed = documents[batch["input_ids"] != replaced_batch["input_ids"]]
        return batch, replaced_batch, documents, ~torch.isin(documents, changed)

    def _rows(self, replaced: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return two rows; documents whose index over both rows is in `replaced` get other tokens, and another image at
        another place, since the mask of one document may depend on where another has its image."""
        generator = torch.Generator().manual_seed(0)
        rows, document = [], 0
        for lengths in (self.lengths, self.lengths[::-1]):
            documents: list[list[int]] = []
            images: list[dict[str, Any]] = []
            for length in lengths:
                picked = torch.randint(len(self.tokens), (length,), generator=generator)
                if document in replaced:
                    picked = (picked + 1) % len(self.tokens)
                ids = self.tokens[picked].tolist()
                if self.images is not None and document in WITH_IMAGE:
                    image_ids, image = self.images.probe_image(
                        document + len(self.lengths) * 2 * (document in replaced)
                    )
                    position = (length + 1) // (4 if document in replaced else 2) or 1
                    ids[position:position] = image_ids
                    images.append(image)
                documents.append(ids)
                document += 1
            ids = [token for tokens in documents for token in tokens]
            row = {"input_ids": ids, "labels": ids, "seq_lengths": [len(tokens) for tokens in documents]}
            rows.append(row if self.images is None else {**row, IMAGES: images})
        return rows

    def _run(self, batch: dict[str, Any]) -> Tensor:
        """Return the tensor that the loss reads in training (hidden states or logits), or logits in evaluation."""
        device = next(self.model.parameters()).device
        inputs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        inputs = backbone_inputs(self.model, inputs) | {"use_cache": False}
        cuda = [device] if device.type == "cuda" else []
        hidden = self.model.training and uses_hidden_states(self.model, {"input_ids": inputs["input_ids"]})
        run = causal_lm_of(self.model).base_model if hidden else self.model
        # The same dropout in each run; and the probe must not advance the run's RNG.
        with torch.random.fork_rng(devices=cuda), no_input_casts(self.model), compute_autocast(self.model, self.dtype):
            torch.manual_seed(0)
            result = run(**inputs)
        return (result.last_hidden_state if hidden else result.logits).float().cpu()

    def _alone(self, packed: Tensor) -> float:
        """Return the distance of the first row's documents (except its first) from each document run alone.

        Documents alone are padded on the right, which causal layers never attend to.
        """
        packed_row = self._rows()[0]
        ids, lengths = packed_row["input_ids"], packed_row["seq_lengths"]
        pieces = torch.tensor(ids).split(lengths)[1:]
        inputs = {"input_ids": nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=ids[0])}
        if self.images is not None:
            images, token = iter(packed_row[IMAGES][1:]), self.images.image_token_id  # the first document has one, too
            images_of = [[next(images)] if (ids == token).any() else [] for ids in pieces]
            inputs |= self.images.columns(images_of, inputs["input_ids"])
        rows = self._run(inputs)
        worst = 0.0
        first_row = packed.flatten(0, 1)[: len(ids)]
        for in_row, row in zip(first_row.split(lengths)[1:], rows, strict=True):
            in_row, alone = (x.nan_to_num(0.0, 0.0, 0.0) for x in (in_row, row[: len(in_row)]))
            worst = max(worst, float(((in_row - alone).norm(dim=-1) / alone.norm(dim=-1).clamp(min=1e-30)).median()))
        return worst

    def _order_of_sums(self) -> float:
        """Return the noise: the median change of a row's tokens if another row is replaced, or nothing is."""
        generator = torch.Generator().manual_seed(1)
        picked = torch.randint(len(self.tokens), (4, max(self.lengths)), generator=generator)
        replaced_row = picked.clone()
        replaced_row[0] += 1
        batches = (picked, picked, replaced_row)
        runs = [self._run({"input_ids": self.tokens[indices % len(self.tokens)]}) for indices in batches]
        return max(float(_relative_changes(runs[0][1:], run[1:]).median()) for run in runs[1:])

    @torch.no_grad()
    def first_leak(self) -> str | None:
        """Return the first module whose output changes for an untouched token although its inputs do not."""
        sums: list[dict[str, tuple[float, float]]] = []
        with self._modes_restored():
            self.model.eval()
            *batches, _, untouched = self._batches()
            for batch in batches:
                batch_sums: dict[str, tuple[float, float]] = {}
                handles = [
                    module.register_forward_hook(_record_sums(name, untouched, batch_sums), with_kwargs=True)
                    for name, module in self.model.named_modules()
                ]
                try:
                    self._run(batch)
                finally:
                    for handle in handles:
                        handle.remove()
                sums.append(batch_sums)
        for name, (inputs, output) in sums[0].items():
            replaced_sums = sums[1].get(name)
            if replaced_sums is not None and replaced_sums[0] == inputs and replaced_sums[1] != output:
                return f"{name}, a {type(self.model.get_submodule(name)).__name__}"
        return None


def _record_sums(name: str, untouched: Tensor, seen: dict[str, tuple[float, float]]) -> Callable[..., None]:
    """Return a hook that records sums of a module's inputs and output over untouched tokens, for its first call."""

    def total(values: Any) -> float:
        if isinstance(values, Tensor):
            if values.shape[:2] != untouched.shape or not values.is_floating_point():
                return 0.0
            x = values[untouched.to(values.device)].double()
            return float(x.abs().sum() + (x * torch.arange(x.shape[-1], device=x.device)).sum())
        values = values.values() if isinstance(values, Mapping) else values
        return sum(map(total, values)) if isinstance(values, list | tuple | type({}.values())) else 0.0

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.setdefault(name, (total(args) + total(kwargs), total(output)))

    return hook


def _relative_changes(first: Tensor, second: Tensor) -> Tensor:
    """Return [B, T]: the change of each token's values, relative to its maximum."""
    moved = torch.where(first != second, (first - second).abs(), 0.0).amax(-1)
    if not moved.isfinite().all():
        raise ArithmeticError("hidden states or logits are NaN")
    return moved / first.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1).clamp(min=1e-30)
