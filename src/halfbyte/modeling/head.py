"""The loss of a causal language model through its backbone and head, without full logits.

What a model does after its head (a scale, a softcap) is read from its config, and believed only after it reproduced the
model's own logits on a few tokens. Where the head is something else (an adapter on it, a bias, a trained copy, router
losses beside it), the model's own full logits are used, with a notice.
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
from torch import Tensor, nn

from ..autograd.losses import linear_cross_entropy, linear_log_probs
from ..ops import IGNORE_INDEX
from ..parallel.mesh import Mesh
from ..parallel.tensor.vocabulary import Vocabulary
from ..utils.errors import DataError, ModelError
from ..utils.notices import notice
from .attention import share
from .layer import causal_lm_of
from .shared_prefix import Kept

LABELS = ("labels", "shift_labels")  # in a batch
PROBE_TOKENS = 8
ARGMAX_ROWS = 256  # positions whose logits are made at a time

# The config's key of what logits are multiplied by → the exponent it has in that.
LOGIT_SCALES = {
    "logit_scale": 1,  # Cohere
    "logits_scaling": -1,  # Granite
    "lm_head_multiplier": 1,  # Falcon-H1
    "output_multiplier": 1,  # Muse Glimmer
}


@dataclass(frozen=True)
class Head:
    """How a model turns its last hidden state into logits: softcap · tanh(scale · X Wᵀ / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """The logits of X Wᵀ, in fp32."""
        logits = products.float() if self.scale == 1 else products.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


_heads: WeakKeyDictionary[nn.Module, Head | str] = WeakKeyDictionary()
_divided: WeakKeyDictionary[nn.Module, Vocabulary] = WeakKeyDictionary()


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Summed next-token cross-entropy of a batch, and the number of tokens it is summed over.

    Equals `model(**batch).loss` times the trained tokens. It does not go through `model.forward`: whatever wraps that
    one (accelerate's autocast, say) must be entered by the caller.

    Args:
        model: a Hugging Face causal LM, alone or beside a vision tower, plain or inside a `peft.PeftModel`.
        batch: `input_ids` and `labels` [B, T] (unshifted, -100 where nothing is trained; or `shift_labels`, where
            position i has the label of the token behind it), and any further input of the model: `attention_mask`,
            `position_ids`, `pixel_values` and what comes with them.

    Returns:
        loss_sum: 0-d fp32, differentiable.
        trained_tokens: 0-d int64.

    Raises:
        DataError: an input is missing, empty, or of a dtype or shape that does not fit the others; on a CPU, a label is
            outside the vocabulary (on an accelerator the loss is NaN instead).
    """
    _check_batch(batch)
    inputs = backbone_inputs(model, batch)
    labels = batch.get("shift_labels")
    labels = F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORE_INDEX) if labels is None else labels
    trained_tokens = (labels != IGNORE_INDEX).sum()
    head, causal_lm = _head_of(model, inputs), causal_lm_of(model)
    if isinstance(head, str):
        notice("full_logits", f"the loss is computed from full logits, which takes more memory: {head}")
        return _loss_of_full_logits(model, inputs, labels, trained_tokens), trained_tokens
    hidden = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state
    weight, vocabulary = causal_lm.get_output_embeddings().weight, _divided.get(causal_lm)
    if vocabulary is not None:
        return vocabulary.cross_entropy(hidden, weight, labels, softcap=head.softcap, scale=head.scale), trained_tokens
    loss_sum = linear_cross_entropy(hidden, weight, labels, softcap=head.softcap, scale=head.scale, shift=False)
    return loss_sum, trained_tokens


def _check_batch(batch: Mapping[str, Any]) -> None:
    """Raise a DataError that names the input no step can take; looks at shapes and dtypes alone."""
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
        raise DataError(f"{name} is {list(tokens.shape)}: there is no token", "leave empty batches out")
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
    """`batch` without labels, as the forward of `model` takes it.

    Positions [B, T] become [4, B, T] for M-RoPE: the text's first, without which transformers looks for no documents
    and packed ones would see each other; then time, height and width, which are the same in text.
    """
    inputs = {key: value for key, value in batch.items() if key not in LABELS}
    positions = inputs.get("position_ids")
    rope = getattr(_config(model), "rope_parameters", None) or {}
    if positions is not None and positions.dim() == 2 and "mrope_section" in rope:
        inputs["position_ids"] = positions.expand(4, -1, -1)
    return inputs


def reads_hidden_states(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether the loss is computed from the backbone's hidden states, without full logits."""
    return not isinstance(found_head(model, inputs), str)


def _loss_of_full_logits(model: nn.Module, inputs: dict[str, Any], labels: Tensor, trained_tokens: Tensor) -> Tensor:
    output = model(**inputs, use_cache=False)
    loss = F.cross_entropy(
        output.logits.flatten(0, -2).float(),
        labels.flatten().to(output.logits.device),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    if getattr(output, "aux_loss", None) is not None:  # of a mixture of experts; a mean, as transformers adds it
        loss = loss + _config(model).router_aux_loss_coef * output.aux_loss * trained_tokens
    return loss


def token_log_probs(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that are asked about, and whether each is the likeliest, without full logits.

    Like `causal_lm_loss` it does not go through `model.forward`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`.
        inputs: of the model; `input_ids` [B, T] and more.
        labels: int64 [B, T], the token that may follow position t (no shift); -100 where nothing is asked.

    Returns:
        log-probabilities fp32 [N] and bool [N] of the N positions that are asked about, row by row.
    """
    asked = labels != IGNORE_INDEX
    wanted = labels[asked]
    head, causal_lm = _head_of(model, dict(inputs)), causal_lm_of(model)
    if isinstance(head, str):
        notice("full_logits", f"log-probabilities are computed from full logits, which takes more memory: {head}")
        logits = model(**inputs, use_cache=False).logits[asked].float()
        return -F.cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted
    hidden = causal_lm.base_model(**inputs, use_cache=False).last_hidden_state[asked]
    weight, vocabulary = causal_lm.get_output_embeddings().weight, _divided.get(causal_lm)
    if vocabulary is not None:
        return vocabulary.likeliest(hidden, weight, wanted, softcap=head.softcap, scale=head.scale)
    log_probs, _ = linear_log_probs(hidden, weight, wanted, softcap=head.softcap, scale=head.scale)
    # The largest stays the largest under a scale and a softcap.
    likeliest = [(rows.to(weight.dtype) @ weight.T).argmax(-1) for rows in hidden.split(ARGMAX_ROWS)]
    return log_probs, torch.cat(likeliest) == wanted


def log_probs_at(
    model: nn.Module,
    inputs: Mapping[str, Any],
    at: Tensor,
    wanted: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Differentiable log-probabilities of chosen tokens, without full logits and without waiting for a device.

    The head computes nothing but the positions that are asked about. Like `causal_lm_loss` it does not go through
    `model.forward`.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`.
        inputs: of the model; `input_ids` [B, T] and more.
        at: int64 [N], positions in the flattened [B·T] batch; the token behind each is asked about.
        wanted: int64 [N], those tokens; -100 where nothing is asked, whose log-probability is 0.
        temperature: logits are divided by it.
        entropy, entropy_grad: see `linear_log_probs`.

    Returns:
        log-probabilities fp32 [N]; entropies [N] in nats, or None.

    Raises:
        ModelError: entropies are asked of a head divided among processes.
    """
    rows, head = rows_at(model, inputs, at)
    return _log_probs(model, rows, head, wanted, temperature, entropy or entropy_grad, entropy_grad)


def log_probs_beside(
    model: nn.Module,
    inputs: Mapping[str, Any],
    asked: tuple[Tensor, Tensor],
    beside: Mapping[str, Any],
    asked_beside: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """As `log_probs_at`, and of further answers to the prompts of `inputs`, without a gradient: these go through the
    model in a forward behind the first, which sees the keys and values that the first has made of the prompts.

    Args:
        asked: `at` and `wanted`, of `inputs`.
        beside: the further answers, as `data.shared_prefix.BranchCollator.further_answers` lays them out.
        asked_beside: the same of them; positions are of the tokens of `inputs` with these behind them.

    Returns:
        log-probabilities fp32 [N] and [M].
    """
    kept = Kept()
    found, head = _outputs(model, inputs, kept)
    kept.gives = True
    with torch.no_grad():
        behind, _ = _outputs(model, beside, kept)
        rows = _taken(torch.cat([x.detach().flatten(0, -2) for x in (found, behind)]), asked_beside[0])
        others, _ = _log_probs(model, rows, head, asked_beside[1])
    own, _ = _log_probs(model, _taken(found, asked[0]), head, asked[1])
    return own, others


def _log_probs(
    model: nn.Module,
    hidden: Tensor,
    head: Head | None,
    wanted: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Of what `rows_at` gives."""
    if head is None:
        logits = hidden.float() / temperature
        log_probs = -F.cross_entropy(logits, wanted, reduction="none", ignore_index=IGNORE_INDEX)
        return log_probs, _entropies(logits, entropy_grad) if entropy else None
    how: dict[str, Any] = {"softcap": head.softcap, "scale": head.scale, "temperature": temperature}
    weight, vocabulary = causal_lm_of(model).get_output_embeddings().weight, _divided.get(causal_lm_of(model))
    if vocabulary is None:
        return linear_log_probs(hidden, weight, wanted, entropy=entropy, entropy_grad=entropy_grad, **how)
    if entropy:
        raise ModelError("a head divided among processes gives no entropies", "use parallel: {data: N}")
    return vocabulary.log_probs(hidden, weight, wanted, **how), None


def aligned_log_probs_at(
    model: nn.Module, inputs: Mapping[str, Any], at: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """`log_probs_at`, and how each compares with a token drawn from the model: log p − log Σ p², without a gradient.

    With logits z that is log softmax(2z) − log softmax(z) of the token, so it takes the head twice.
    """
    hidden, head = rows_at(model, inputs, at)
    if head is None:
        found = [
            -F.cross_entropy(hidden.float() * t, wanted, reduction="none", ignore_index=IGNORE_INDEX) for t in (1, 2)
        ]
        return found[0], (found[1] - found[0]).detach()
    weight, vocabulary = causal_lm_of(model).get_output_embeddings().weight, _divided.get(causal_lm_of(model))

    def asked(rows: Tensor, temperature: float) -> Tensor:
        how: dict[str, Any] = {"softcap": head.softcap, "scale": head.scale, "temperature": temperature}
        if vocabulary is not None:
            return vocabulary.log_probs(rows, weight, wanted, **how)
        return linear_log_probs(rows, weight, wanted, **how)[0]

    log_probs = asked(hidden, 1.0)
    with torch.no_grad():
        doubled = asked(hidden.detach(), 0.5)
    return log_probs, doubled - log_probs.detach()


def hidden_at(model: nn.Module, inputs: Mapping[str, Any], at: Tensor) -> Tensor:
    """Last hidden states [N, H], after the final norm, at positions `at` [N] of the flattened batch."""
    causal_lm = causal_lm_of(model)
    output = causal_lm.base_model(**share(model, backbone_inputs(model, inputs)), use_cache=False)
    return _taken(output.last_hidden_state, at)


def rows_at(model: nn.Module, inputs: Mapping[str, Any], at: Tensor) -> tuple[Tensor, Head | None]:
    """Hidden states [N, H] at these positions and the head that turns them into logits; or logits [N, V] and None."""
    found, head = _outputs(model, inputs)
    return _taken(found, at), head


def _outputs(model: nn.Module, inputs: Mapping[str, Any], kept: Kept | None = None) -> tuple[Tensor, Head | None]:
    """The same of all positions [B, T]; `kept` as of `share`."""
    causal_lm = causal_lm_of(model)
    inputs = backbone_inputs(model, inputs)
    head, inputs = _head_of(model, inputs), share(model, inputs, kept)
    if isinstance(head, str):
        notice("full_logits", f"log-probabilities are computed from full logits, which takes more memory: {head}")
        return model(**inputs, use_cache=False).logits, None
    return causal_lm.base_model(**inputs, use_cache=False).last_hidden_state, head


def _taken(x: Tensor, at: Tensor) -> Tensor:
    """Rows `at` of x [B, T, H], flattened. Gradients of a row that is taken often, as of a shared prompt's last token,
    are added in one order: on CPUs `x[at]` would add by atomics, elsewhere `index_select`."""
    x = x.flatten(0, -2)
    return x.index_select(0, at) if x.device.type == "cpu" else x[at]


def _entropies(logits: Tensor, differentiable: bool) -> Tensor:
    """[N] of logits [N, V], in nats."""
    found = torch.distributions.Categorical(logits=logits).entropy()
    return found if differentiable else found.detach()


def divide_vocabulary(model: nn.Module, mesh: Mesh, axes: Sequence[str]) -> None:
    """Leave this process its rows of the head's weight and of the embedding's, which may be one; it loses the others.

    From then on `causal_lm_loss` and `token_log_probs`, forwards and sampling of all processes along `axes` must come
    together: each computes its slice of everybody's logits (`parallel.tensor.vocabulary`).

    Args:
        model: with its adapters.

    Raises:
        ModelError: the head needs full logits, or it or the embedding is trained, quantized or watched.
    """
    causal_lm, obstacle = causal_lm_of(model), undivided(model)
    if obstacle:
        raise ModelError(f"the vocabulary is not divided: {obstacle}", "use parallel: {data: N}")
    head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    vocabulary = Vocabulary.over(mesh, axes, len(head.weight))
    for weight in {id(module.weight): module.weight for module in (embedding, head)}.values():
        device = weight.device
        weight.data = vocabulary.slice_of(weight.data)  # a device that is full has no room for it beside the whole
        weight.data = weight.data.to(device)
    embedding.padding_idx = None  # a row number; of a frozen table it says nothing
    embedding.forward = MethodType(partial(_embedded, vocabulary), embedding)
    head.forward = MethodType(partial(_logits, vocabulary), head)
    _divided[causal_lm] = vocabulary


def undivided(model: nn.Module) -> str | None:
    """Why head and embedding of `model` are not divided by vocabulary; None where they can be."""
    if isinstance(head := described_head(model), str):
        return head
    causal_lm = causal_lm_of(model)
    parts = {"head": causal_lm.get_output_embeddings(), "embedding": causal_lm.get_input_embeddings()}
    for name, module in parts.items():
        if not isinstance(module, nn.Linear if name == "head" else nn.Embedding):
            return f"its {name} is a {type(module).__name__}"
        if type(module.weight.data) is not Tensor:
            return f"its {name} is stored quantized"
        if module.weight.requires_grad:
            return f"its {name} is trained"
        if "forward" in module.__dict__:
            return f"something else has replaced the forward of its {name}"
    sizes = {len(module.weight) for module in parts.values()}
    return f"its head and its embedding have {' and '.join(map(str, sizes))} rows" if len(sizes) > 1 else None


def _embedded(vocabulary: Vocabulary, self: Any, ids: Tensor) -> Tensor:
    """An embedding's forward: that of its class, of the tokens that this process has rows of."""
    return vocabulary.embedded(ids, partial(type(self).forward, self))


def _logits(vocabulary: Vocabulary, self: Any, hidden: Tensor) -> Tensor:
    """A head's forward."""
    return vocabulary.products(hidden, self.weight)


def _config(model: nn.Module) -> Any:
    return causal_lm_of(model).config.get_text_config()


def described_head(model: nn.Module) -> Head | str:
    """The head as structure and config say, or in words why it needs full logits; no numbers are looked at."""
    return _obstacle(model) or configured_head(_config(model))


def _head_of(model: nn.Module, inputs: dict[str, Any]) -> Head | str:
    """The model's head, or in words why it needs full logits. Structure is looked at each time, numbers once."""
    head, causal_lm = described_head(model), causal_lm_of(model)
    if isinstance(head, str):
        return head
    if causal_lm not in _heads:
        _heads[causal_lm] = _probe(causal_lm, head, inputs)
    return _heads[causal_lm]


def take_head(model: nn.Module, head: Head | str) -> None:
    """Believe what `found_head` says of another model of this architecture, where this one cannot compute logits: its
    layers are in several processes."""
    _heads[causal_lm_of(model)] = head


def found_head(model: nn.Module, inputs: Mapping[str, Any]) -> Head | str:
    """The head that the loss of `model` is computed with, or in words why it needs full logits."""
    return _head_of(model, dict(inputs))


def _obstacle(model: nn.Module) -> str | None:
    causal_lm = causal_lm_of(model)
    name = type(causal_lm).__name__
    if not hasattr(causal_lm, "get_output_embeddings") or getattr(causal_lm, "base_model", causal_lm) is causal_lm:
        return f"{name} is not a Hugging Face model with a backbone and a head"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "prompt learning changes the inputs of the model"
    head = causal_lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"the head of {name} is {type(head).__module__}.{type(head).__name__}, not a plain linear"
    if head.bias is not None:
        return f"the head of {name} has a bias"
    if head._forward_hooks or head._forward_pre_hooks:
        return f"the head of {name} has forward hooks"
    if getattr(_config(model), "output_router_logits", False):
        return f"{name} trains its router with a loss of its own"
    return None


def configured_head(config: Any) -> Head:
    """What the (text) config of a model says of its head."""
    scales = ((getattr(config, key, None) or 1.0) ** exponent for key, exponent in LOGIT_SCALES.items())
    return Head(math.prod(scales), getattr(config, "final_logit_softcapping", None))  # Gemma 2, 3n


@torch.no_grad()
def _probe(causal_lm: Any, head: Head, inputs: dict[str, Any]) -> Head | str:
    """`head`, if it gives the model's logits for the first tokens of `inputs`; else what differs."""
    tokens = inputs.get("input_ids")
    if tokens is None:
        return "the inputs are not token ids"
    few = {
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
        with torch.random.fork_rng(devices=cuda):  # dropout must not see that there was a probe: resume is exact
            logits = causal_lm(**few, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    name = type(causal_lm).__name__
    if set(seen) != {"hidden", "into_head", "out_of_head"} or not torch.equal(seen["hidden"], seen["into_head"]):
        return f"{name} does more between its backbone and its head than this version knows"
    expected = head(seen["out_of_head"])
    if (logits.float() - expected).abs().max() > expected.abs().max() / 64:  # bf16 rounds to 1/256
        return f"{name} changes its logits in a way that this version does not know"
    return head
