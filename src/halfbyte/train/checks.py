"""What a run verifies about itself: the loss it trains with, and the files it leaves. Numbers go to checks.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from halfbyte.layers.expert_adapters import attach_adapter_forwards, changed_experts
from halfbyte.layers.expert_targets import weights_as_modules
from halfbyte.methods.answers import model_inputs
from halfbyte.methods.base import Batch
from halfbyte.modeling.adapters import compute_autocast, load_adapter_weights, quiet_peft, saved_adapter_config
from halfbyte.modeling.architectures import expert_stacks
from halfbyte.modeling.head import causal_lm_loss, hidden_states_at
from halfbyte.ops import IGNORE_INDEX
from halfbyte.optim import trained_parameters
from halfbyte.parallel.context.model import context_shard
from halfbyte.parallel.mesh import Mesh
from halfbyte.parallel.shard.model import sharded
from halfbyte.parallel.tensor.layers import are_unsharded, full_parameters
from halfbyte.qat.model import round_merged
from halfbyte.reading.tensors import read_tensors, safetensors_files
from halfbyte.utils.errors import TrainingError

TOKENS = 256  # of one row: its full logits are small even with a vocabulary of 256k
ROUNDING = 1 / 64  # relative to the largest logit; bfloat16 keeps 8 bits
APART, APART_16 = {torch.float32: 1e-4}, 0.1  # of a token's hidden states; in 16 bits rounding grows through the layers


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[1, T, V] float32 logits of `ids` [1, T], without dropout."""
    model.eval()
    with compute_autocast(model, dtype):
        return model(input_ids=ids, use_cache=False).logits.float()


@torch.no_grad()
def loss_check(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """The loss that is trained (no full logits) against cross-entropy on the model's own logits.

    Raises:
        TrainingError: they differ by more than rounding, or are NaN or Inf.
    """
    full = logits(model, ids, dtype)
    reference = float(F.cross_entropy(full[0, :-1], ids[0, 1:]))
    with compute_autocast(model, dtype):
        loss_sum, count = causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    return first_step(float(loss_sum / count), reference, int(count))


def first_step(loss: float, reference: float, tokens: int) -> dict[str, Any]:
    """What `loss_check` says of the two losses."""
    if not abs(loss - reference) <= ROUNDING * abs(reference):  # also when either is NaN
        raise TrainingError(
            f"before training, the loss is {loss:.6g} but the model's own logits give {reference:.6g}",
            "check the checkpoint for NaN; if it is sound, this is a bug: please report the model",
        )
    return {"loss": loss, "reference_loss": reference, "difference": abs(loss - reference), "tokens": tokens}


@torch.no_grad()
def fused_check(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype, reference: float) -> dict[str, Any]:
    """The loss through the fused kernels against `reference`, that of transformers' own forwards.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    with compute_autocast(model, dtype):
        loss_sum, count = causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    return fused(float(loss_sum / count), reference)


def fused(loss: float, reference: float) -> dict[str, Any]:
    """What `fused_check` says of the two losses."""
    if not abs(loss - reference) <= ROUNDING * abs(reference):
        raise TrainingError(
            f"with fused kernels the loss is {loss:.6g}, with transformers' forwards {reference:.6g}",
            "set use_kernels: false, and please report the model",
        )
    return {"loss": loss, "reference_loss": reference, "difference": abs(loss - reference)}


@torch.no_grad()
def shared_check(model: nn.Module, shared: Batch, apart: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """Hidden states of answers that share prompts against those of each answer with a prompt of its own.

    Args:
        shared, apart: batches of the same answers, of `data.collate_answers`.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    with compute_autocast(model, dtype):
        found, expected = (hidden_states_at(model, model_inputs(batch), batch["at"]).float() for batch in (shared, apart))
    real = shared["wanted"] != IGNORE_INDEX
    found, expected = found[real], expected[apart["wanted"] != IGNORE_INDEX]
    off = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    difference = float(off.median())
    if not difference <= APART.get(dtype, APART_16):
        raise TrainingError(
            f"with the prompts shared by their answers, hidden states differ by {difference:.3g} from those apart",
            "set use_kernels: false, and please report the model",
        )
    return {"median_difference": difference, "largest_difference": float(off.max()), "tokens": len(off)}


@torch.no_grad()
def divided_check(
    model: nn.Module, ids: torch.Tensor, dtype: torch.dtype, reference: float, mesh: Mesh
) -> dict[str, Any]:
    """The loss of a row cut along its tokens, inside `divided`, against `reference`, that of the whole row.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    with compute_autocast(model, dtype):
        loss_sum, _ = causal_lm_loss(model, context_shard({"input_ids": ids, "labels": ids}, mesh))
    loss = mesh.sum(float(loss_sum), ("context",)) / (ids.shape[1] - 1)
    if not abs(loss - reference) <= ROUNDING * abs(reference):
        raise TrainingError(
            f"with its row cut {mesh.degree('context')} ways the loss is {loss:.6g}, of the whole row {reference:.6g}",
            "leave context out of `parallel`, and please report the model",
        )
    return {"loss": loss, "reference_loss": reference, "difference": abs(loss - reference)}


def adapter_reload(model: PeftModel, folder: Path, ids: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Take the adapter off and let plain PEFT put the saved one on the same base: logits must not change; of a mixture,
    those of most tokens.

    PEFT cannot make an adapter beside slices of weights: there the saved one is loaded in the place of the trained one.
    `model` must not be used afterwards.

    Raises:
        TrainingError: the saved adapter computes something else.
    """
    trained, whole = logits(model, ids, dtype), sharded(model) is None and are_unsharded(model.parameters())
    changed = changed_experts(model) if whole else None
    # DoRA's reloaded weights round otherwise, and where rounding sends a token to another expert its logits are others.
    scattered = bool(expert_stacks(model, [])) or bool(saved_adapter_config(folder).use_dora)
    if whole:
        lora = saved_adapter_config(folder)
        lora.inference_mode = True
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
        base: Any = model.unload()
        with quiet_peft(), weights_as_modules(lora, base):
            model = PeftModel.from_pretrained(base, str(folder), config=lora)
        for name, parameter in model.named_parameters():  # PEFT makes adapters float32, which bf16 ones are not
            if name in dtypes:
                parameter.data = parameter.data.to(dtypes[name])
        round_merged(model)
        attach_adapter_forwards(model)
    else:
        parameters = trained_parameters(model).values()
        with full_parameters(parameters):
            for parameter in parameters:
                parameter.detach().zero_()
            load_adapter_weights(model, folder)
    again = logits(model, ids, dtype)
    apart, largest = (again - trained).abs().amax(-1), float(trained.abs().max())
    result = {"largest_difference": float(apart.max()), "largest_logit": largest}
    result |= {"median_difference": float(apart.median()), "equal": bool(torch.equal(again, trained))}
    difference = result["median_difference" if scattered else "largest_difference"]
    again_changed = changed_experts(model) if whole else None
    if again_changed is not None:
        result |= {"experts_changed": again_changed[0], "experts": again_changed[1]}
    if not difference <= ROUNDING * largest or again_changed != changed:
        raise TrainingError(
            f"the adapter saved in {folder} gives other logits than the trained one (by up to {difference:.3g})",
            "the last checkpoint holds the trained weights; please report this",
        )
    return result


def model_reload(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Compare the saved tensors of full fine-tuning with those in memory, bit by bit.

    Raises:
        TrainingError: a tensor differs.
    """
    own, compared = model.state_dict(), set()
    for name, tensor in saved_weights(model, folder):
        _same(folder, name, tensor, own[name])
        compared.add(name)
    return {"tensors": len(compared), "equal": True}


def saved_weights(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each weight that `model.save_pretrained(folder)` wrote, under the names of `model`."""
    own, renamed = model.state_dict().keys(), False
    for path in safetensors_files(folder):
        for name, tensor in read_tensors(path).items():
            if name in own:
                yield name, tensor
            else:
                renamed = True
    if renamed:  # transformers saves some families under the names of older versions, and restores them
        yield from type(model).from_pretrained(folder, dtype="auto").state_dict().items()


def _same(folder: Path, name: str, saved: torch.Tensor, trained: torch.Tensor) -> None:
    if not torch.equal(saved, trained.cpu()):
        raise TrainingError(f"{folder}: {name} differs from the trained weight", "please report this")
