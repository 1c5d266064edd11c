"""Checks of a finished run: the files it saved, and whether it is reproducible. Results go to checks.json."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from ..adapter_kinds import adapter_kind
from ..adapters.expert_adapters import attach_adapter_forwards, changed_experts
from ..adapters.expert_targets import weights_as_modules
from ..adapters.initial import InitialAdapter
from ..adapters.lora import adapter_weights, load_adapter, load_adapter_weights, saved_adapter_config
from ..autograd.attention import DIFFERS
from ..config.schema import TrainingSection
from ..mesh.sharded_linears import are_unsharded, full_parameters
from ..modeling.architectures import expert_stacks
from ..modeling.compute_dtype import compute_autocast
from ..modeling.patch import PatchReport
from ..modeling.task_models import head_outputs, last_hidden_states
from ..modeling.transformers_versions import quiet_peft
from ..optim import trained_parameters
from ..parallel.shard.model import sharded
from ..qat.model import round_merged
from ..reading.tensors import ADAPTER, read_tensors, safetensors_files
from ..utils.errors import TrainingError, first_line
from ..utils.notices import notices_so_far

TOKENS = 256  # tokens of the row that is checked: its full logits are small even with a vocabulary of 256k
ROUNDING = 1 / 64  # tolerance relative to the loss or the largest logit; bfloat16 has 8 bits
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # torch requires it for deterministic cuBLAS


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 logits [1, T, V] of `ids` [1, T], without dropout."""
    model.eval()
    with compute_autocast(model, dtype):
        return model(input_ids=ids, use_cache=False).logits.float()


@torch.no_grad()
def outputs(model: PeftModel, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the outputs that a run trains, float32 [1, T, n], without dropout.

    They are the hidden states of an embedding model, the outputs of a trained head, or logits.
    """
    model.eval()
    embeds = model.peft_config["default"].task_type == "FEATURE_EXTRACTION"
    with compute_autocast(model, dtype):
        return (last_hidden_states if embeds else head_outputs)(model, ids).float()


def adapter_reload(
    model: PeftModel, folder: Path, ids: torch.Tensor, dtype: torch.dtype, initial: InitialAdapter | None = None
) -> dict[str, Any]:
    """Unload the adapter and let plain PEFT load the saved one on the same base: `outputs` must not change.

    An embedding model's adapter is loaded on the backbone, as AutoModel does.

    An adapter that was converted for the original base is loaded by halfbyte, without its initial factors.

    In a mixture, and with DoRA, the logits of most tokens must not change. PEFT cannot load an adapter onto sharded
    weights; there the saved weights replace the trained ones. `model` must not be used afterwards.

    Raises:
        TrainingError: the saved adapter computes other outputs.
    """
    trained, unsharded = outputs(model, ids, dtype), sharded(model) is None and are_unsharded(model.parameters())
    changed = changed_experts(model) if unsharded else None
    # Reloaded norms of the base's weights (DoRA) round differently, and rounding may route a token to another expert.
    scattered = bool(expert_stacks(model, [])) or adapter_kind(saved_adapter_config(folder)).reads_base
    if unsharded:
        lora = saved_adapter_config(folder)
        lora.inference_mode = True
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.requires_grad}
        base: Any = model.unload()
        if isinstance(getattr(base, "score", None), nn.Module):
            for parameter in base.score.parameters():  # it is the trained head, and the saved one is compared
                parameter.detach().zero_()
        base = base.base_model if lora.task_type == "FEATURE_EXTRACTION" else base
        if initial is not None:
            model = load_adapter(base, folder, str(lora.base_model_name_or_path), initial=initial)
        else:
            with quiet_peft(), weights_as_modules(lora, base):
                model = PeftModel.from_pretrained(base, str(folder), config=lora)
        for name, parameter in model.named_parameters():  # PEFT loads adapters as float32
            if name in dtypes:
                parameter.data = parameter.data.to(dtypes[name])
        round_merged(model)
        attach_adapter_forwards(model)
    else:
        parameters = trained_parameters(model).values()
        with full_parameters(parameters):
            for parameter in parameters:
                parameter.detach().zero_()
            load_adapter_weights(model, folder, convert=None if initial is None else initial.trained_part)
    reloaded = outputs(model, ids, dtype)
    differences, largest = (reloaded - trained).abs().amax(-1), float(trained.abs().max())
    result = {"largest_difference": float(differences.max()), "largest_logit": largest}
    result |= {"median_difference": float(differences.median()), "equal": bool(torch.equal(reloaded, trained))}
    difference = result["median_difference" if scattered else "largest_difference"]
    reloaded_changes = changed_experts(model) if unsharded else None
    if reloaded_changes is not None:
        result |= {"experts_changed": reloaded_changes[0], "experts": reloaded_changes[1]}
    if not difference <= ROUNDING * largest or reloaded_changes != changed:
        raise TrainingError(
            f"the adapter saved in {folder} gives logits that differ by up to {difference:.3g} from the trained one's",
            "the last checkpoint holds the trained weights; please report this",
        )
    return result


def model_reload(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Compare the saved tensors of full fine-tuning with the trained ones, bit by bit.

    Raises:
        TrainingError: a tensor differs.
    """
    trained = model.state_dict()
    compared = set()
    for name, tensor in saved_weights(model, folder):
        if not torch.equal(tensor, trained[name].cpu()):
            raise TrainingError(f"{folder}: {name} differs from the trained weight", "please report this")
        compared.add(name)
    return {"tensors": len(compared), "equal": True}


def saved_weights(model: PreTrainedModel, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each weight that `model.save_pretrained(folder)` saved, under the names of `model`."""
    names = model.state_dict().keys()
    renamed = False
    for path in safetensors_files(folder):
        for name, tensor in read_tensors(path).items():
            if name in names:
                yield name, tensor
            else:
                renamed = True
    if renamed:  # transformers saves some families under older names, and translates them when loading
        yield from type(model).from_pretrained(folder, dtype="auto").state_dict().items()


def adapter_file(model: PeftModel, folder: Path, initial: InitialAdapter | None = None) -> dict[str, Any]:
    """Compare the saved tensors of this pipeline rank's adapters with the trained ones, bit by bit.

    Raises:
        TrainingError: a tensor differs or is missing.
    """
    saved = read_tensors(folder / ADAPTER)
    saved = saved if initial is None else initial.trained_part(saved)
    trained = adapter_weights(model)
    for name, tensor in trained.items():
        if name not in saved or not torch.equal(saved[name], tensor):
            raise TrainingError(f"{folder}: {name} differs from the trained weight", "please report this")
    return {"tensors": len(trained), "equal": True}


# --- reproducibility -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def deterministic_algorithms(config: TrainingSection, device: torch.device) -> Iterator[None]:
    """Use torch's deterministic algorithms inside, if the run sets `deterministic: true` on a GPU.

    torch would also fill new tensors, so that reading uninitialized memory repeats; that costs a quarter of a small
    step's time, and is disabled.

    Raises:
        TrainingError: an operation has no deterministic algorithm.
    """
    if not config.deterministic or device.type == "cpu":
        yield
        return
    os.environ.setdefault(WORKSPACE, ":4096:8")
    memory: Any = torch.utils.deterministic
    debug_mode = torch.get_deterministic_debug_mode()
    fills_memory = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        reason = first_line(error)
        if WORKSPACE in str(error):
            fix = f"start a new process, or set {WORKSPACE}=:4096:8 before this one uses the GPU"
            raise TrainingError(f"deterministic: {reason}", fix) from error
        if "deterministic" in reason:
            raise TrainingError(f"deterministic: {reason}", "set deterministic: false") from error
        raise
    finally:
        torch.set_deterministic_debug_mode(debug_mode)
        memory.fill_uninitialized_memory = fills_memory


def reproducibility(config: TrainingSection, device: torch.device, report: PatchReport | None) -> dict[str, Any]:
    """Return whether another run with this seed on this machine has equal bytes, and the reason, for checks.json.

    Args:
        report: report of `patch`; None if the model ran transformers' own forwards.
    """
    if device.type == "cpu":
        return {"equal": True, "why": "on a CPU, sums are added in the same order each time"}
    if config.deterministic:
        return {"equal": True, "why": "deterministic: true"}
    if DIFFERS in notices_so_far():
        return {"equal": False, "why": f"{notices_so_far()[DIFFERS]}; deterministic: true repeats them"}
    if report is None or not report.fused:
        return {"equal": False, "why": "transformers' own forwards ran; deterministic: true repeats them"}
    if any(operation == "experts" for operation, _ in report.unfused):
        why = "transformers' function adds experts' results in any order"
        return {"equal": False, "why": f"{why}; deterministic: true repeats them"}
    return {"equal": True, "why": "all kernels of this run add their sums in the same order each time"}
