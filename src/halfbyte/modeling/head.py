"""Losses and log-probabilities of a causal LM through its backbone and head, without full logits.

A scale or softcap after the head is read from the config, and used only after it has reproduced the model's own logits
on a few tokens. LoRA and DoRA on the head, a bias, a copy that is trained in full and rows that are trained one by one
are terms of the logits (`ops.linear_head`). With any other head or loss (another kind of adapter, DoRA with dropout,
router losses), the model's own full logits are used, with a notice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from ..autograd.gemms import dense
from ..autograd.lora import dropped
from ..autograd.losses import linear_cross_entropy, linear_log_probs
from ..batch import HEAD_ROWS, LANGUAGE_INPUTS, ROPE_POSITIONS, language_arguments
from ..dispatch import autocast_dtype, on_compiler
from ..formats.base import is_quantized
from ..layers.plain import Adapter, PlainLinear, has_hooks, read_linear
from ..mesh.mesh import Mesh
from ..mesh.sharded_vocabulary import Vocabulary
from ..ops import IGNORE_INDEX
from ..ops.linear_head import HeadAdapter, head_logits
from ..utils.errors import DataError, ModelError
from ..utils.notices import notice
from .architectures import text_model
from .attention import with_shared_prefixes
from .layer import causal_lm_of
from .projections import dora_adapter
from .shared_prefix import PrefixCache
from .token_rows import active_rows, trained_rows

LABELS = ("labels", "shift_labels")  # keys of a batch
PROBE_TOKENS = 8
ARGMAX_ROWS = 256  # positions whose logits are computed at a time
ALIGNED_RANK = 8  # GEMMs in 16 bits need rows of 16 bytes

# The config's key for a factor of the logits → the factor's exponent.
LOGIT_SCALES = {
    "logit_scale": 1,  # Cohere
    "logits_scaling": -1,  # Granite
    "lm_head_multiplier": 1,  # Falcon-H1
    "output_multiplier": 1,  # Muse Glimmer
}


@dataclass(frozen=True)
class Head:
    """Map from the last hidden state to logits: softcap · tanh(scale · X Wᵀ / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """Return fp32 logits from X Wᵀ."""
        logits = products.float() if self.scale == 1 else products.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


_heads: WeakKeyDictionary[nn.Module, Head | str] = WeakKeyDictionary()
_sharded_vocabularies: WeakKeyDictionary[nn.Module, Vocabulary] = WeakKeyDictionary()


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the summed next-token cross-entropy of a batch, and the number of tokens it is summed over.

    The sum equals `model(**batch).loss` times the trained tokens. `model.forward` does not run: the caller must enter
    any context that wraps it (accelerate's autocast, for example).

    Args:
        model: a Hugging Face causal LM, with or without a vision tower, plain or inside a `peft.PeftModel`.
        batch: `input_ids` and `labels` [B, T] (unshifted, -100 at untrained tokens; or `shift_labels`, whose position i
            has the label of the next token), and any further input of the model: `attention_mask`, `position_ids`,
            `pixel_values`, ... With `batch.HEAD_ROWS`, the head computes these positions, which must include all
            that are followed by a trained token.

    Returns:
        loss_sum: 0-d fp32, differentiable.
        trained_tokens: 0-d int64.

    Raises:
        DataError: an input is missing, empty, or of a dtype or shape that does not match the others; on a CPU, a label
            is outside the vocabulary (on an accelerator the loss is NaN instead).
    """
    _check_batch(batch)
    inputs = backbone_inputs(model, batch)
    labels = batch.get("shift_labels")
    labels = F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORE_INDEX) if labels is None else labels
    trained_tokens = (labels != IGNORE_INDEX).sum()
    head, causal_lm = verified_head(model, inputs), causal_lm_of(model)
    if isinstance(head, str):
        notice("full_logits", f"the loss is computed from full logits, which takes more memory: {head}")
        output = model(**inputs, use_cache=False)
        logits = output.logits.flatten(0, -2).float()
        targets = labels.flatten().to(logits.device)
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        if getattr(output, "aux_loss", None) is not None:  # a mixture's, a mean: weighted as in transformers
            loss = loss + _text_config(model).router_aux_loss_coef * output.aux_loss * trained_tokens
        return loss, trained_tokens
    hidden = last_hidden_state(causal_lm, inputs)
    if HEAD_ROWS in batch:
        rows = batch[HEAD_ROWS]
        hidden, labels = (x.flatten(0, 1).index_select(0, rows) for x in (hidden, labels))
    return hidden_loss(causal_lm, head, hidden, labels), trained_tokens


def hidden_loss(causal_lm: Any, head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy of the logits of hidden states [B, T, H], 0-d fp32.

    Args:
        causal_lm: the transformers model, whose head's weight is used.
        labels: int64 [B, T], already shifted; -100 at untrained positions.

    Both may also be of some positions, [M, H] and [M].
    """
    (weight, adapter), vocabulary = head_terms(causal_lm, hidden), _sharded_vocabularies.get(causal_lm)
    if vocabulary is not None:
        return vocabulary.cross_entropy(hidden, weight, labels, softcap=head.softcap, scale=head.scale)
    return linear_cross_entropy(
        hidden, weight, labels, adapter=adapter, softcap=head.softcap, scale=head.scale, shift=False
    )


def head_terms(causal_lm: Any, hidden: Tensor) -> tuple[Tensor, HeadAdapter]:
    """Return a head's weight [V, H], and what its adapters add to the logits of hidden states [..., H].

    Gradients reach the adapters' parameters. Dropout is drawn in each call.

    Raises:
        ModelError: the head needs full logits, so `expected_head` returns a reason.
    """
    read = _read_head(causal_lm.get_output_embeddings())
    if isinstance(read, str):
        raise ModelError(f"the head has no terms: {read}", "run the model's own forward, which computes full logits")
    weight: Any = read.weight
    dtype = autocast_dtype(hidden.device.type) or (hidden.dtype if is_quantized(weight) else weight.dtype)
    weight = dense(weight, dtype) if is_quantized(weight) else weight
    x, columns = hidden.to(dtype), None
    inputs, factors = [], []
    for adapter in read.adapters:
        inputs.append(F.linear(_dropped(x, adapter), adapter.a.to(dtype)))
        factors.append(adapter.b * adapter.scaling)
        if adapter.dora is not None:
            lora = dora_adapter(adapter.a, adapter.b, adapter.scaling, adapter.dora, read.weight)
            columns = adapter.dora.weight / lora.norms(read.weight, dtype)
    if read.bias is not None:
        inputs.append(x.new_ones(*x.shape[:-1], 1))
        factors.append(read.bias.unsqueeze(1))
    tokens = trained_rows(causal_lm.get_output_embeddings())
    token_rows, indices = (None, None) if tokens is None else active_rows(tokens)
    if not inputs:
        return weight, HeadAdapter(None, None, columns, token_rows, indices)
    padding = -sum(factor.shape[1] for factor in factors) % ALIGNED_RANK
    stacked, factor = (F.pad(torch.cat(tensors, dim=-1), (0, padding)) for tensors in (inputs, factors))
    return weight, HeadAdapter(stacked, factor, columns, token_rows, indices)


def _dropped(x: Tensor, adapter: Adapter) -> Tensor:
    """x after dropout of an adapter's inputs."""
    if not adapter.dropout:
        return x
    return F.dropout(x, adapter.dropout) if on_compiler() else dropped(x, adapter.dropout, adapter.first_column)


def _read_head(head: Any) -> PlainLinear | str:
    """Return the linear of a model's head with its adapters, or the reason why it needs full logits.

    Disabled adapters give the base's. Trained rows are read by `active_rows`.
    """
    if has_hooks(head):
        return "it has hooks"
    if trained_rows(head) is not None:
        head = head.original_module
    elif isinstance(head, ModulesToSaveWrapper):
        is_base = head.disable_adapters or not head.active_adapters
        head = head.original_module if is_base else head.modules_to_save[head.active_adapters[0]]
    if type(head) is nn.Linear:  # its forward may be replaced: `shard_vocabulary`
        return "it has hooks" if has_hooks(head) else PlainLinear(head, head.weight, [])
    # The norms of a linear whose weight several processes share are not computed here.
    read = read_linear(head, with_dora=not torch.distributed.is_initialized())
    if not isinstance(read, str) and any(adapter.dora is not None for adapter in read.adapters):
        if len(read.adapters) > 1:
            return "several adapters are active on it, with DoRA"
        if read.bias is not None:
            return "it has DoRA and a bias"
        if read.adapters[0].dropout:  # PEFT multiplies the dropped inputs by W as well
            return "its DoRA has dropout"
    return read


def _check_batch(batch: Mapping[str, Any]) -> None:
    """Raise a DataError that names the invalid input; checks shapes and dtypes only."""
    labels = batch.get("labels", batch.get("shift_labels"))
    if labels is None:
        raise DataError("the batch has no labels", "give labels [B, T], -100 where nothing is trained")
    name = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    tokens = batch.get(name)
    if tokens is None:
        raise DataError("the batch has neither input_ids nor inputs_embeds", "give one of them")
    if name == "input_ids" and (tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32)):
        raise DataError(f"input_ids are {tokens.dtype} {list(tokens.shape)}", "give int64 [B, T]")
    shape = tokens.shape[:2]
    if 0 in shape:
        raise DataError(f"{name} is {list(tokens.shape)}: there are no tokens", "remove empty batches")
    positions = batch.get("position_ids")
    if labels.dtype is not torch.int64 or labels.shape != shape:
        raise DataError(f"labels are {labels.dtype} {list(labels.shape)}, and {name} {list(tokens.shape)}",
                        f"give int64 {list(shape)}")  # fmt: skip
    if positions is None:
        return
    if positions.dtype not in (torch.int64, torch.int32) or positions.shape[-2:] not in (shape, (1, shape[1])):
        raise DataError(f"position_ids are {positions.dtype} {list(positions.shape)}, and {name} {list(tokens.shape)}",
                        f"give int64 {list(shape)}")  # fmt: skip


def backbone_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `batch` without labels, as the forward of `model` takes it.

    For M-RoPE, positions [B, T] become [4, B, T]: text, time, height and width, all equal for text. Without the text
    positions, transformers does not detect packed documents, which would then see each other. A batch with images has
    the other three as `batch.ROPE_POSITIONS`.
    """
    inputs = {key: value for key, value in batch.items() if key not in (*LABELS, HEAD_ROWS)}
    positions, axes = inputs.get("position_ids"), inputs.pop(ROPE_POSITIONS, None)
    rope = getattr(_text_config(model), "rope_parameters", None) or {}
    if positions is not None and axes is not None:
        inputs["position_ids"] = torch.cat([positions.unsqueeze(0), axes.permute(2, 0, 1)])
    elif positions is not None and positions.dim() == 2 and "mrope_section" in rope:
        inputs["position_ids"] = positions.expand(4, -1, -1)
    return inputs


def last_hidden_state(causal_lm: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the last hidden states [B, T, H], after the final norm, of inputs as `backbone_inputs` returns them.

    If they hold the arguments of the language model (`batch.language_columns`), only this runs.
    """
    if LANGUAGE_INPUTS in inputs:
        output = text_model(causal_lm)(**language_arguments(inputs))
    else:
        output = causal_lm.base_model(**inputs, use_cache=False)
    hidden: Tensor = output.last_hidden_state
    return hidden


def uses_hidden_states(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the loss is computed from the backbone's hidden states, without full logits."""
    return not isinstance(verified_head(model, inputs), str)


def token_log_probs(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the labelled tokens, and whether each is the argmax, without full logits.

    Like `causal_lm_loss`, it does not run `model.forward`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`.
        inputs: inputs of the model: `input_ids` [B, T] and more.
        labels: int64 [B, T], the next token of each position (already shifted); -100 at positions to skip.

    Returns:
        fp32 log-probabilities [N] and bool [N], for the N labelled positions in row order.
    """
    selected = labels != IGNORE_INDEX
    targets = labels[selected]
    head, causal_lm = verified_head(model, inputs), causal_lm_of(model)
    if isinstance(head, str):
        notice("full_logits", f"log-probabilities are computed from full logits, which takes more memory: {head}")
        logits = model(**inputs, use_cache=False).logits[selected].float()
        return -F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets
    hidden = last_hidden_state(causal_lm, inputs)[selected]
    (weight, adapter), vocabulary = head_terms(causal_lm, hidden), _sharded_vocabularies.get(causal_lm)
    if vocabulary is not None:
        return vocabulary.log_probs_and_argmax(hidden, weight, targets, softcap=head.softcap, scale=head.scale)
    log_probs, _ = linear_log_probs(hidden, weight, targets, adapter=adapter, softcap=head.softcap, scale=head.scale)
    hidden, likeliest = hidden.to(weight.dtype), []
    for start in range(0, len(hidden), ARGMAX_ROWS):  # a scale and a softcap do not change the argmax
        rows = slice(start, start + ARGMAX_ROWS)
        likeliest.append(head_logits(hidden[rows], weight, adapter.at(rows)).argmax(-1))
    return log_probs, torch.cat(likeliest) == targets


def log_probs_at(
    model: nn.Module,
    inputs: Mapping[str, Any],
    at: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return differentiable log-probabilities of chosen tokens, without full logits or device synchronisation.

    The head computes only the chosen positions. Like `causal_lm_loss`, it does not run `model.forward`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`.
        inputs: inputs of the model: `input_ids` [B, T] and more.
        at: int64 [N], positions in the flattened [B·T] batch, each before its chosen token.
        targets: int64 [N], the chosen tokens; -100 gives a log-probability of 0.
        temperature: divisor of the logits.
        entropy, entropy_grad: see `linear_log_probs`.

    Returns:
        fp32 log-probabilities [N]; entropies [N] in nats, or None.

    Raises:
        ModelError: entropies are requested from a head sharded over ranks.
    """
    rows, head = outputs_at(model, inputs, at)
    return _log_probs(model, rows, head, targets, temperature, entropy or entropy_grad, entropy_grad)


def log_probs_with_extra(
    model: nn.Module,
    inputs: Mapping[str, Any],
    selection: tuple[Tensor, Tensor],
    extra: Mapping[str, Any],
    extra_selection: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return `log_probs_at` of a batch, and log-probabilities of extra answers to its prompts without a gradient.

    The extra answers run in a second forward, which attends to the keys and values that the first computed for the
    prompts.

    Args:
        selection: `at` and `targets` for `inputs`.
        extra: the extra answers, in the layout of `data.shared_prefix.BranchCollator.further_answers`.
        extra_selection: `at` and `targets` for the extra answers; positions count `inputs`, then `extra`.

    Returns:
        fp32 log-probabilities [N] and [M].
    """
    cache = PrefixCache()
    outputs, head = _outputs(model, inputs, cache)
    cache.is_filled = True
    with torch.no_grad():
        extra_outputs, _ = _outputs(model, extra, cache)
        joined = torch.cat([x.detach().flatten(0, -2) for x in (outputs, extra_outputs)])
        extra_log_probs, _ = _log_probs(model, _select_rows(joined, extra_selection[0]), head, extra_selection[1])
    log_probs, _ = _log_probs(model, _select_rows(outputs, selection[0]), head, selection[1])
    return log_probs, extra_log_probs


def _log_probs(
    model: nn.Module,
    hidden: Tensor,
    head: Head | None,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
    terms: tuple[Tensor, HeadAdapter] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies from a result of `outputs_at`; `terms` are its `head_terms`."""
    if head is None:
        logits = hidden.float() / temperature
        log_probs = -F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_INDEX)
        entropies = torch.distributions.Categorical(logits=logits).entropy() if entropy else None
        return log_probs, entropies if entropies is None or entropy_grad else entropies.detach()
    options: dict[str, Any] = {"softcap": head.softcap, "scale": head.scale, "temperature": temperature}
    causal_lm = causal_lm_of(model)
    weight, adapter = terms or head_terms(causal_lm, hidden)
    vocabulary = _sharded_vocabularies.get(causal_lm)
    if vocabulary is None:
        options |= {"adapter": adapter, "entropy": entropy, "entropy_grad": entropy_grad}
        return linear_log_probs(hidden, weight, targets, **options)
    if entropy:
        raise ModelError("a head sharded over ranks computes no entropies", "use parallel: {data: N}")
    return vocabulary.log_probs(hidden, weight, targets, **options), None


def aligned_log_probs_at(
    model: nn.Module, inputs: Mapping[str, Any], at: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `log_probs_at`, and each relative to the model's expected token probability: log p − log Σ p².

    The second result has no gradient. With logits z it is log softmax(2z) − log softmax(z) of the token, so the head
    runs twice.
    """
    hidden, head = outputs_at(model, inputs, at)
    terms = None if head is None else head_terms(causal_lm_of(model), hidden)  # once: dropout is drawn
    log_probs, _ = _log_probs(model, hidden, head, targets, terms=terms)
    with torch.no_grad():
        doubled, _ = _log_probs(model, hidden, head, targets, temperature=0.5, terms=terms)
    return log_probs, doubled - log_probs.detach()


def hidden_states_at(model: nn.Module, inputs: Mapping[str, Any], at: Tensor) -> Tensor:
    """Return the last hidden states [N, H], after the final norm, at positions `at` [N] of the flattened batch."""
    causal_lm = causal_lm_of(model)
    inputs = with_shared_prefixes(model, backbone_inputs(model, inputs))
    return _select_rows(last_hidden_state(causal_lm, inputs), at)


def outputs_at(model: nn.Module, inputs: Mapping[str, Any], at: Tensor) -> tuple[Tensor, Head | None]:
    """Return hidden states [N, H] at these positions and the head for them; or logits [N, V] and None."""
    outputs, head = _outputs(model, inputs)
    return _select_rows(outputs, at), head


def _outputs(
    model: nn.Module, inputs: Mapping[str, Any], cache: PrefixCache | None = None
) -> tuple[Tensor, Head | None]:
    """Return the result of `outputs_at` for all positions [B, T]; `cache` as in `with_shared_prefixes`."""
    causal_lm = causal_lm_of(model)
    inputs = backbone_inputs(model, inputs)
    head, inputs = verified_head(model, inputs), with_shared_prefixes(model, inputs, cache)
    if isinstance(head, str):
        notice("full_logits", f"log-probabilities are computed from full logits, which takes more memory: {head}")
        return model(**inputs, use_cache=False).logits, None
    return last_hidden_state(causal_lm, inputs), head


def _select_rows(x: Tensor, at: Tensor) -> Tensor:
    """Return rows `at` of x [B, T, H], flattened.

    Gradients of a row that is selected repeatedly (a shared prompt's last token) are summed in a fixed order: on CPUs
    `x[at]` would use atomics, on other devices `index_select` would.
    """
    x = x.flatten(0, -2)
    return x.index_select(0, at) if x.device.type == "cpu" else x[at]


def shard_vocabulary(model: nn.Module, mesh: Mesh, axes: Sequence[str]) -> None:
    """Shard the rows of the head's and the embedding's weight (possibly tied) over ranks; this rank keeps its shard.

    From then on, `causal_lm_loss`, `token_log_probs`, forwards and sampling are collective along `axes`: each rank
    computes its shard of every rank's logits (`mesh.sharded_vocabulary`).

    Args:
        model: the model with its adapters.

    Raises:
        ModelError: the head needs full logits, or the head or embedding is trained, quantized or has another forward.
    """
    causal_lm, reason = causal_lm_of(model), vocabulary_unsupported_reason(model)
    if reason:
        raise ModelError(f"the vocabulary cannot be sharded: {reason}", "use parallel: {data: N}")
    head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    vocabulary = Vocabulary.over(mesh, axes, len(head.weight))
    for weight in {id(module.weight): module.weight for module in (embedding, head)}.values():
        device = weight.device
        weight.data = vocabulary.local_rows(weight.data)  # on the host: a full device may lack room for the copy
        weight.data = weight.data.to(device)
    embedding.padding_idx = None  # would be a row number; unused in a frozen embedding
    embedding.forward = MethodType(partial(_embedding_forward, vocabulary), embedding)
    head.forward = MethodType(partial(_head_forward, vocabulary), head)
    _sharded_vocabularies[causal_lm] = vocabulary


def vocabulary_unsupported_reason(model: nn.Module) -> str | None:
    """Return why head and embedding of `model` cannot be sharded by vocabulary, or None."""
    if isinstance(head := expected_head(model), str):
        return head
    causal_lm = causal_lm_of(model)
    ends = {"head": causal_lm.get_output_embeddings(), "embedding": causal_lm.get_input_embeddings()}
    for name, module in ends.items():
        if isinstance(module, BaseTunerLayer):
            return f"its {name} has an adapter"
        if not isinstance(module, nn.Linear if name == "head" else nn.Embedding):
            return f"its {name} is a {type(module).__name__}"
        if type(module.weight.data) is not Tensor:
            return f"its {name} is stored quantized"
        if module.weight.requires_grad:
            return f"its {name} is trained"
        if getattr(module, "bias", None) is not None:
            return f"its {name} has a bias"
        if "forward" in module.__dict__:
            return f"something else has replaced the forward of its {name}"
    sizes = {len(module.weight) for module in ends.values()}
    return f"its head and its embedding have {' and '.join(map(str, sizes))} rows" if len(sizes) > 1 else None


def _embedding_forward(vocabulary: Vocabulary, self: Any, ids: Tensor) -> Tensor:
    """Run the embedding class's forward on the tokens whose rows this rank holds."""
    return vocabulary.embed(ids, partial(type(self).forward, self))


def _head_forward(vocabulary: Vocabulary, self: Any, hidden: Tensor) -> Tensor:
    """Compute the sharded head's logits."""
    return vocabulary.logits(hidden, self.weight)


def _text_config(model: nn.Module) -> Any:
    return causal_lm_of(model).config.get_text_config()


def expected_head(model: nn.Module) -> Head | str:
    """Return the head according to structure and config, unverified, or the reason why it needs full logits."""
    return _full_logits_reason(model) or head_from_config(_text_config(model))


def verified_head(model: nn.Module, inputs: Mapping[str, Any]) -> Head | str:
    """Return the head that the loss of `model` uses, or the reason why it needs full logits.

    The structure is checked each time, the numbers once, with the first tokens of `inputs`.
    """
    head, causal_lm = expected_head(model), causal_lm_of(model)
    if isinstance(head, str):
        return head
    if causal_lm not in _heads:
        _heads[causal_lm] = _probe(causal_lm, head, inputs)
    return _heads[causal_lm]


def set_verified_head(model: nn.Module, head: Head | str) -> None:
    """Set the head that `verified_head` found for another model of this architecture.

    For pipeline stages, which cannot compute logits themselves.
    """
    _heads[causal_lm_of(model)] = head


def _full_logits_reason(model: nn.Module) -> str | None:
    causal_lm = causal_lm_of(model)
    name = type(causal_lm).__name__
    if not hasattr(causal_lm, "get_output_embeddings") or getattr(causal_lm, "base_model", causal_lm) is causal_lm:
        return f"{name} is not a Hugging Face model with a backbone and a head"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt learning changes the inputs of the model"
    head = causal_lm.get_output_embeddings()
    if head is None:
        return f"{name} has no head"
    if isinstance(reason := _read_head(head), str):
        return f"the head of {name}: {reason}"
    if getattr(_text_config(model), "output_router_logits", False):
        return f"{name} trains its router with a loss of its own"
    return None


def head_from_config(config: Any) -> Head:
    """Return the head that a model's (text) config describes."""
    scales = ((getattr(config, key, None) or 1.0) ** exponent for key, exponent in LOGIT_SCALES.items())
    return Head(math.prod(scales), getattr(config, "final_logit_softcapping", None))  # Gemma 2, 3n


@torch.no_grad()
def _probe(causal_lm: Any, head: Head, inputs: Mapping[str, Any]) -> Head | str:
    """Return `head` if it reproduces the model's logits for the first tokens of `inputs`, otherwise the difference."""
    tokens = inputs.get("input_ids")
    if tokens is None:
        return "the inputs are not token ids"
    first_tokens = {
        key: value[:1, :PROBE_TOKENS]
        for key, value in inputs.items()
        if isinstance(value, Tensor) and value.shape == tokens.shape and key != "attention_mask"
    }
    seen: dict[str, Tensor] = {}
    hooks = [
        causal_lm.base_model.register_forward_hook(lambda _m, _i, out: seen.update(hidden=out.last_hidden_state)),
        causal_lm.get_output_embeddings().register_forward_hook(
            lambda _m, args, out: seen.update(into_head=args[0], out_of_head=out)
        ),
    ]
    cuda = [tokens.device] if tokens.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda):  # the probe must not advance the RNG: resume is exact
            logits = causal_lm(**first_tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    name = type(causal_lm).__name__
    if set(seen) != {"hidden", "into_head", "out_of_head"} or not torch.equal(seen["hidden"], seen["into_head"]):
        return f"{name} computes something between its backbone and its head that this version does not know"
    expected = head(seen["out_of_head"])
    if (logits.float() - expected).abs().max() > expected.abs().max() / 64:  # bf16 rounds to 1/256
        return f"{name} changes its logits in a way that this version does not know"
    return head
