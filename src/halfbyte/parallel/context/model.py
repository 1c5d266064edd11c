"""Models whose rows are cut along their tokens (`parallel.context.exchange`): a process's slice of a batch, what attention is
told of whole rows, and which models cannot be cut.

A forward is divided where its batch says so (`slice_of`); every other runs as ever: answers and checks see
whole rows. What a batch says reaches `attention.attend` as a keyword argument, so a layer that is computed again in
backward repeats its all-to-alls, in the same order on every process.

A model in which tokens meet outside of attention (a recurrent state, a convolution) would compute something else on
slices, silently. So the kinds of layers are looked at, a tiny model of the same kind is run whole and divided before
any weight is read, and the run compares its loss with the undivided one (`train.checks`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...batch import ATTENTION_MASK, CONTEXT, POSITION_IDS, UNSPLIT, is_per_token, pad_tokens, padded_bounds
from ...modeling.attention import ATTENTION_NAME, CONTEXT_NAME, CONTEXT_SCORES_NAME, SCORES_NAME, metadata, register
from ...modeling.config_facts import has_sinks, is_capped
from ...modeling.head import backbone_inputs
from ...modeling.layer import causal_lm_of
from ...modeling.packed_forwards import is_wrapped, unwrap, wrap, wrapped_forward
from ...modeling.tiny_model import tiny_model
from ...ops import IGNORE_INDEX
from ...utils.errors import ConfigError
from ..context.exchange import Context
from ..mesh import Mesh
from ..support import WITHOUT_CONTEXT, unsupported_context, unsupported_packing

OF_ATTENTION = (POSITION_IDS, ATTENTION_MASK)  # columns that attention needs for full sequences
PROBE = 12  # tokens a process of the probe's rows, above a tiny model's windows
TOKENS = 200  # of a tiny model's vocabulary
FAR = 1e-3  # relative to its norm, so far from the undivided one no rounding brings a hidden state in float32


@contextlib.contextmanager
def divided(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Inside, `model` takes what `slice_of` gives, and whole batches as before.

    Args:
        model: a causal LM of transformers, plain or inside a `peft.PeftModel`, patched or not.

    Raises:
        ConfigError: it cannot be divided.
    """
    if mesh.ways(CONTEXT) == 1:
        yield
        return
    causal_lm = causal_lm_of(model)
    if reason := unsupported_context(causal_lm.config, mesh.ways(CONTEXT), mesh.ways("tensor")):
        raise ConfigError(reason.problem, reason.fix)
    if is_wrapped(causal_lm.base_model):
        reason = unsupported_packing(mesh.layout, None)
        assert reason is not None
        raise ConfigError(reason.problem, reason.fix)
    with _divided(causal_lm):
        yield


@contextlib.contextmanager
def _divided(causal_lm: Any) -> Iterator[None]:
    config = causal_lm.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _divided_name(causal_lm, config)
    register()
    wrap(causal_lm.base_model, divided_forward)
    try:
        yield
    finally:
        unwrap(causal_lm.base_model)
        config._attn_implementation = before


def _divided_name(causal_lm: Any, config: Any) -> str:
    """Of an attention that knows of slices, and that computes what the model's does."""
    capped, name = is_capped(config), config._attn_implementation
    if name in (ATTENTION_NAME, SCORES_NAME) and not has_sinks(config):  # whose heads' sinks would have to go where the heads go
        return name
    if name != ("eager" if capped else "sdpa"):
        raise ConfigError(*_unknown_attention(name, "eager" if capped else "sdpa" if causal_lm._supports_sdpa else ""))
    return CONTEXT_SCORES_NAME if capped else CONTEXT_NAME


def _unknown_attention(name: str, known: str) -> tuple[str, str]:
    wrong = f"attn_implementation: {name} does not see whole rows where context cuts them"
    return wrong, f"set attn_implementation: {known}, or {WITHOUT_CONTEXT}" if known else WITHOUT_CONTEXT


def divided_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A backbone's forward; of a slice, its attention is told of the whole rows."""
    own, kwargs = wrapped_forward(self, args, kwargs)
    context: Context | None = kwargs.get(CONTEXT)
    if context is None:
        return own(**kwargs)
    whole = {name: kwargs.pop(UNSPLIT + name, None) for name in OF_ATTENTION}
    tokens = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
    return own(**kwargs | _of_attention(self, tokens, context, {**kwargs, **whole}))


def _of_attention(module: Any, tokens: Tensor, context: Context, whole: Mapping[str, Any]) -> dict[str, Any]:
    """What attention reads of whole rows: where documents begin, or transformers' masks."""
    backbone = getattr(module, "language_model", module)
    rows, length = tokens.shape[0], tokens.shape[1] * context.ways
    if backbone.config._attn_implementation in (ATTENTION_NAME, SCORES_NAME):
        found = metadata(backbone, rows, length, tokens.device, whole)
        if found:
            return found
    return {"attention_mask": _masks(backbone, rows, length, tokens.device, whole)}


def _masks(backbone: Any, rows: int, length: int, device: torch.device, whole: Mapping[str, Any]) -> Any:
    """transformers' mask of whole rows, or one for each type of layer."""
    from transformers.masking_utils import create_masks_for_generate

    dtype = backbone.get_input_embeddings().weight.dtype
    masks = create_masks_for_generate(
        backbone.config,
        torch.empty(rows, length, 0, dtype=dtype, device=device),  # the embeddings, read for their shape and dtype
        whole["attention_mask"],
        None,  # no cache, whose name differs between versions of transformers
        position_ids=whole["position_ids"],
    )
    # models with layers of one type may know no others, and all take one mask for all layers
    return next(iter(masks.values())) if isinstance(masks, dict) and len(masks) == 1 else masks


def check_divided_like(
    model_config: Any, mesh: Mesh, *, attention: str | None = None, trust_remote_code: bool = False
) -> None:
    """Whether the rows of a model of `model_config` can be cut: a few small layers of the kinds that it has are run
    whole and divided, by every process of `mesh`.

    Args:
        attention: `attn_implementation`; None: as models are loaded.

    Raises:
        ConfigError: they cannot be.
    """
    ways = mesh.ways(CONTEXT)
    if reason := unsupported_context(model_config, ways, mesh.ways("tensor")):
        raise ConfigError(reason.problem, reason.fix)
    known = "eager" if is_capped(model_config.get_text_config()) else "sdpa"
    if attention not in (None, known):
        raise ConfigError(*_unknown_attention(attention, known))
    rows = torch.arange(10, 10 + 2 * ways * PROBE).view(2, -1)
    documents = torch.cat([torch.arange(n) for n in (PROBE + 5, ways * PROBE - PROBE - 5)])
    plain = {"input_ids": rows % TOKENS, "labels": rows}
    batches = [plain, {**plain, "position_ids": documents.repeat(2, 1)}]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = tiny_model(model_config, trust_remote_code=trust_remote_code)
        if attention or known == "eager":  # as it is loaded; transformers 5.17 would leave out the cap
            model.set_attn_implementation(known)
        whole = [_hidden_states(model, batch) for batch in batches]
    except Exception:  # whatever the model's own code says to sizes that were not made for it; the run asks again
        return
    refused = f"parallel: context: {ways}: rows of {model_config.model_type} cannot be cut: "
    try:
        with _divided(model):  # which may have fewer heads than there are processes
            slices = [_hidden_states(model, slice_of(batch, mesh)) for batch in batches]
    except (TypeError, AttributeError) as error:  # a forward that hands its layers no keyword arguments
        raise ConfigError(f"{refused}{error}", WITHOUT_CONTEXT) from error
    own = slice(mesh.place(CONTEXT) * PROBE, (mesh.place(CONTEXT) + 1) * PROBE)
    far = max(_distance(found, expected[:, own]) for found, expected in zip(slices, whole, strict=True))
    if not mesh.max(far) <= FAR:
        raise ConfigError(f"{refused}its layers see other tokens otherwise than by attention", WITHOUT_CONTEXT)


@torch.no_grad()
def _hidden_states(model: Any, batch: Mapping[str, Any]) -> Tensor:
    return model.base_model(**backbone_inputs(model, batch), use_cache=False).last_hidden_state


def _distance(found: Tensor, expected: Tensor) -> float:
    """Of hidden states [B, T, H], the largest of a token, relative to its norm."""
    far = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(far.nan_to_num(torch.inf).max())


def slice_of(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """This process's slice of the rows of a batch; the batch itself where rows are not cut.

    Rows are padded on the right, with untrained tokens, to a multiple of the slices. Nothing waits for the device.

    Args:
        batch: `input_ids` and `labels` [B, T], and perhaps `attention_mask` and `position_ids` [B, T]; where documents
            begin, as transformers' flash attention is told; and more. Tensors [B, T, …] are cut, others left.

    Returns:
        The slice: its `position_ids` [B, t] are those within the row, or the document; `shift_labels` [B, t] take the
        place of `labels`: position i has the label of the token behind it, which may be in the next slice. Beside it
        `context`, and of whole rows what attention must know, named with `UNSPLIT`.
    """
    ways = mesh.ways(CONTEXT)
    if ways == 1:
        return dict(batch)
    rows, length = batch["input_ids"].shape
    lacking = -length % ways
    size = (length + lacking) // ways
    own = slice(mesh.place(CONTEXT) * size, (mesh.place(CONTEXT) + 1) * size)
    row = {
        name: pad_tokens(value, lacking) if is_per_token(value, rows, length) else value
        for name, value in batch.items()
    }
    row["shift_labels"] = F.pad(row.pop("labels")[:, 1:length], (0, 1 + lacking), value=IGNORE_INDEX)
    positions = torch.arange(length + lacking, device=row["input_ids"].device).expand(rows, -1)
    if "position_ids" in batch:  # the padding is a document
        row["position_ids"] = torch.cat([batch["position_ids"], positions[:, :lacking]], 1)
    whole = {UNSPLIT + name: row[name] for name in OF_ATTENTION if name in row} | padded_bounds(row, length, lacking)
    row = {"position_ids": positions} | row
    row.pop("attention_mask", None)
    cut = {name: value[:, own].contiguous() if is_per_token(value, rows, length + lacking) else value
           for name, value in row.items()}  # fmt: skip
    return cut | whole | {CONTEXT: Context(ways, mesh.group(CONTEXT))}
