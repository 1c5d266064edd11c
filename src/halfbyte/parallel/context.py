"""Context parallelism of a model (`mesh.head_exchange`): shards of a batch, metadata of full sequences for
attention, and the models that are refused.

A forward is context parallel only if its batch has a `context` entry (`context_shard`); sampling and checks pass full
sequences. The entry reaches `attention.attend` as a keyword argument, so that recomputation in backward repeats the
all-to-alls, in the same order on every rank.

A model that mixes tokens outside of attention (a recurrent state, a convolution) would silently compute something else
on slices. So its kinds of layers are checked, a tiny model of the same kind is run unsharded and sharded before any
weight is read, and the run compares its loss with the unsharded one (`train.checks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import BrokenBarrierError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import (
    ATTENTION_MASK,
    CONTEXT,
    POSITION_IDS,
    SHIFT_LABELS,
    UNSPLIT,
    is_per_token,
    pad_tokens,
    padded_bounds,
)
from ..config import Parallel
from ..config.layouts import WITHOUT_CONTEXT, unsupported_context, unsupported_packing
from ..mesh.head_exchange import ContextGroup, ThreadGroup
from ..mesh.mesh import Mesh
from ..modeling.attention import ATTENTION_NAME, CONTEXT_NAME, CONTEXT_SCORES_NAME, SCORES_NAME, metadata, register
from ..modeling.config_facts import has_sinks, is_capped
from ..modeling.head import backbone_inputs
from ..modeling.layer import causal_lm_of
from ..modeling.packed_forwards import is_wrapped, unwrap, wrap, wrapped_forward
from ..modeling.tiny_model import tiny_model
from ..ops import IGNORE_INDEX
from ..utils.errors import ConfigError, first_line
from ..utils.notices import notice

ATTENTION_COLUMNS = (POSITION_IDS, ATTENTION_MASK)  # columns that attention needs of full sequences
PROBE_TOKENS = 12  # tokens per rank in the probe's sequences, above a tiny model's windows
PROBE_VOCABULARY = 200  # tokens in a tiny model's vocabulary
TOLERANCE = 1e-3  # relative error of hidden states, far above float32 rounding


@contextlib.contextmanager
def context_parallel(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Within the context, `model` also accepts the shards of `context_shard`, in addition to full batches.

    Args:
        model: a causal LM of transformers, plain or inside a `peft.PeftModel`, patched or not.

    Raises:
        ConfigError: the model does not support it.
    """
    if mesh.degree(CONTEXT) == 1:
        yield
        return
    causal_lm = causal_lm_of(model)
    if reason := unsupported_context(causal_lm.config, mesh.degree(CONTEXT), mesh.degree("tensor")):
        raise ConfigError(reason.problem, reason.fix)
    if is_wrapped(causal_lm.base_model):
        reason = unsupported_packing(mesh.layout, None)
        assert reason is not None
        raise ConfigError(reason.problem, reason.fix)
    with _context_parallel(causal_lm):
        yield


@contextlib.contextmanager
def _context_parallel(causal_lm: Any) -> Iterator[None]:
    config = causal_lm.config.get_text_config()
    previous = config._attn_implementation
    config._attn_implementation = _attention_name(causal_lm, config)
    register()
    wrap(causal_lm.base_model, context_parallel_forward)
    try:
        yield
    finally:
        unwrap(causal_lm.base_model)
        config._attn_implementation = previous


def _attention_name(causal_lm: Any, config: Any) -> str:
    """Return the context-parallel attention that computes what the model's attention does."""
    capped, name = is_capped(config), config._attn_implementation
    if name in (ATTENTION_NAME, SCORES_NAME) and not has_sinks(
        config
    ):  # whose heads' sinks would have to go where the heads go
        return name
    if name != ("eager" if capped else "sdpa"):
        raise ConfigError(*_unknown_attention(name, "eager" if capped else "sdpa" if causal_lm._supports_sdpa else ""))
    return CONTEXT_SCORES_NAME if capped else CONTEXT_NAME


def _unknown_attention(name: str, supported: str) -> tuple[str, str]:
    problem = f"attn_implementation: {name} does not support context parallelism"
    return problem, f"set attn_implementation: {supported}, or {WITHOUT_CONTEXT}" if supported else WITHOUT_CONTEXT


def context_parallel_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of a backbone; for a shard, it passes metadata of the full sequences to attention."""
    forward, kwargs = wrapped_forward(self, args, kwargs)
    context: ContextGroup | None = kwargs.get(CONTEXT)
    if context is None:
        return forward(**kwargs)
    full = {name: kwargs.pop(UNSPLIT + name, None) for name in ATTENTION_COLUMNS}
    tokens = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    backbone = getattr(self, "language_model", self)
    sizes = tokens.shape[0], tokens.shape[1] * context.degree, tokens.device
    attention = None
    if backbone.config._attn_implementation in (ATTENTION_NAME, SCORES_NAME):
        attention = metadata(backbone, *sizes, {**kwargs, **full})  # document bounds
    if not attention:
        attention = {"attention_mask": _masks(backbone, *sizes, {**kwargs, **full})}
    return forward(**kwargs | attention)


def _masks(backbone: Any, rows: int, length: int, device: torch.device, full: Mapping[str, Any]) -> Any:
    """Return transformers' mask of full sequences, or one per type of layer."""
    from transformers.masking_utils import create_masks_for_generate

    dtype = backbone.get_input_embeddings().weight.dtype
    masks = create_masks_for_generate(
        backbone.config,
        torch.empty(rows, length, 0, dtype=dtype, device=device),  # the embeddings, read for their shape and dtype
        full["attention_mask"],
        None,  # no cache, whose name differs between versions of transformers
        position_ids=full["position_ids"],
    )
    # models with layers of one type may know no others, and all take one mask for all layers
    return next(iter(masks.values())) if isinstance(masks, dict) and len(masks) == 1 else masks


def check_context_parallel(
    model_config: Any, layout: Parallel, *, attention: str | None = None, trust_remote_code: bool = False
) -> None:
    """Check that models of `model_config` support a layout's context parallelism, on a few small layers of their kinds.

    The ranks of the check are threads, so that it also runs for a layout that has not been started.

    Args:
        attention: `attn_implementation`; default: as models are loaded.

    Raises:
        ConfigError: they do not.
    """
    degree = layout.context
    if degree == 1:
        return
    if reason := unsupported_context(model_config, degree, layout.tensor):
        raise ConfigError(reason.problem, reason.fix)
    default = "eager" if is_capped(model_config.get_text_config()) else "sdpa"
    if attention not in (None, default):
        raise ConfigError(*_unknown_attention(attention, default))
    rows = torch.arange(10, 10 + 2 * degree * PROBE_TOKENS).view(2, -1)
    documents = torch.cat([torch.arange(n) for n in (PROBE_TOKENS + 5, degree * PROBE_TOKENS - PROBE_TOKENS - 5)])
    plain = {"input_ids": rows % PROBE_VOCABULARY, "labels": rows}
    batches = [plain, {**plain, "position_ids": documents.repeat(2, 1)}]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = tiny_model(model_config, trust_remote_code=trust_remote_code)
        if attention or default == "eager":  # as loading does; transformers 5.17 would ignore the softcap
            model.set_attn_implementation(default)
        full = [_hidden_states(model, batch) for batch in batches]
    except Exception as error:  # the model's code may not support tiny sizes; the run checks its loss later
        notice("context-untried", f"parallel: context was not tried on a tiny model, which fails: {first_line(error)}")
        return
    prefix = f"parallel: context: {degree}: {model_config.model_type} cannot be split along tokens: "
    try:
        with _context_parallel(model):
            slices = [_joined_slices(model, batch, degree) for batch in batches]
    except (TypeError, AttributeError) as error:  # a forward that does not pass keyword arguments to its layers
        raise ConfigError(f"{prefix}{error}", WITHOUT_CONTEXT) from error
    for hidden, expected in zip(slices, full, strict=True):
        errors = (hidden - expected).norm(dim=-1) / expected.norm(dim=-1)  # of a token's hidden state
        if not float(errors.nan_to_num(torch.inf).max()) <= TOLERANCE:
            raise ConfigError(f"{prefix}its layers mix tokens outside attention", WITHOUT_CONTEXT)


def _joined_slices(model: Any, batch: Mapping[str, Any], degree: int) -> Tensor:
    """Return the hidden states of a batch [B, T, D] that `degree` threads compute a slice each of."""

    def computed(group: ThreadGroup) -> Tensor:
        mesh = Mesh(group.rank, Parallel(context=degree), groups={(CONTEXT,): group})
        try:
            return _hidden_states(model, context_shard(batch, mesh))
        except BaseException:
            group.barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(computed, group) for group in ThreadGroup.create(degree)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return torch.cat([future.result() for future in futures], 1)


@torch.no_grad()
def _hidden_states(model: Any, batch: Mapping[str, Any]) -> Tensor:
    return model.base_model(**backbone_inputs(model, batch), use_cache=False).last_hidden_state


def context_shard(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return this rank's slice of a batch's sequences; the batch itself without context parallelism.

    Sequences are padded on the right with untrained tokens to a multiple of the degree, without a device
    synchronization.

    Args:
        batch: `input_ids` and `labels` [B, T], optionally `attention_mask` and `position_ids` [B, T], document bounds
            as for transformers' flash attention, and other entries. Tensors [B, T, …] are sliced, others unchanged.

    Returns:
        The slice. Its `position_ids` [B, t] count within the full sequence or document. `shift_labels` [B, t] replace
        `labels`: position i has the label of the next token, which may be in the next slice. `context` is the
        `ContextGroup`; what attention needs of full sequences is named with the prefix `UNSPLIT`.
    """
    degree = mesh.degree(CONTEXT)
    if degree == 1:
        return dict(batch)
    rows, length = batch["input_ids"].shape
    padding = -length % degree
    size = (length + padding) // degree
    local = slice(mesh.coordinate(CONTEXT) * size, (mesh.coordinate(CONTEXT) + 1) * size)
    row = {
        name: pad_tokens(value, padding) if is_per_token(name, value, rows, length) else value
        for name, value in batch.items()
    }
    row[SHIFT_LABELS] = F.pad(row.pop("labels")[:, 1:length], (0, 1 + padding), value=IGNORE_INDEX)
    positions = torch.arange(length + padding, device=row["input_ids"].device).expand(rows, -1)
    if "position_ids" in batch:  # the padding is a document of its own
        row["position_ids"] = torch.cat([batch["position_ids"], positions[:, :padding]], 1)
    full = {UNSPLIT + name: row[name] for name in ATTENTION_COLUMNS if name in row} | padded_bounds(
        row, length, padding
    )
    row = {"position_ids": positions} | row
    row.pop("attention_mask", None)
    cut = {name: value[:, local].contiguous() if is_per_token(name, value, rows, length + padding) else value
           for name, value in row.items()}  # fmt: skip
    return cut | full | {CONTEXT: ContextGroup(degree, mesh.group(CONTEXT))}
