"""Initialisations of LoRA from rows of the data on the loaded base: EVA's input directions, LoRA-GA's gradients.

Sources: EVA (Paischer et al. 2024), LoRA-GA (Wang et al. 2024, arXiv:2407.05000, §3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from peft import EvaConfig, PeftModel
from peft.tuners.lora.eva import initialize_lora_eva_weights
from torch import Tensor, nn

from ..modeling.head import causal_lm_loss
from ..modeling.layer import causal_lm_of
from ..ops import IGNORE_INDEX
from ..utils.errors import ModelError
from ..utils.waiting import waiting

SIMILAR = 0.999  # cosine of the mean gradients before and after a batch from which no more rows are read

LabelledBatch = Mapping[str, Tensor]  # input_ids, attention_mask and labels, int64 [rows, T]


@waiting("finding the directions of the layers' inputs")
def initialise_by_eva(model: PeftModel, batches: Sequence[LabelledBatch], options: Mapping[str, Any]) -> None:
    """Let PEFT fill the factors A with the first principal components of the layers' inputs, and redistribute ranks.

    PEFT reads batches, again from the first if necessary, until the components of every layer have converged.

    Args:
        options: of PEFT's EvaConfig.

    Raises:
        ModelError: no batch has enough tokens.
    """
    config: Any = model.peft_config["default"]
    needed = round(2 * options["rho"] * max([config.r, *config.rank_pattern.values()]))  # of an incremental SVD
    usable = [batch for batch in batches if _observed(batch, bool(options["use_label_mask"])) >= needed]
    if not usable:
        wrong = f"init_lora_weights: eva needs batches of {needed} trained tokens for this rank, and the data has fewer"
        raise ModelError(wrong, "give more rows, a smaller r, or eva_config: {use_label_mask: false}")
    backbone = causal_lm_of(model).base_model

    def forward(_: nn.Module, batch: LabelledBatch) -> None:
        backbone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)

    config.init_lora_weights = "eva"
    config.eva_config = EvaConfig(**options, label_mask_value=IGNORE_INDEX)
    initialize_lora_eva_weights(
        model,
        [dict(batch) for batch in usable],
        forward_fn=forward,
        gather_distributed_inputs=False,  # every rank has the same rows
        show_progress_bar=False,
    )
    config.init_lora_weights, config.eva_config = True, None


def _observed(batch: LabelledBatch, trained_only: bool) -> int:
    """Return the number of tokens of a batch that EVA reads."""
    read = batch["attention_mask"].bool()
    return int((read & (batch["labels"] != IGNORE_INDEX) if trained_only else read).sum())


@waiting("measuring the gradients of the base's weights")
def weight_gradients(model: nn.Module, modules: Collection[str], batches: Sequence[LabelledBatch]) -> dict[str, Tensor]:
    """Return the mean gradients of the loss with respect to weights, which may be quantized: fp32 [N, K] on the CPU.

    A gradient is the product of a layer's output gradients and inputs, computed in the backward and moved to the host,
    so the device holds one at a time. Reading stops when another batch changes their direction no more.

    Raises:
        ModelError: a weight has no gradient.
    """
    sums: dict[str, Tensor] = {}

    def observe(name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not output.requires_grad:  # the head is probed without gradients
            return
        x = inputs[0].detach()

        def add(gradient: Tensor) -> None:
            product = gradient.reshape(-1, gradient.shape[-1]).float().T @ x.reshape(-1, x.shape[-1]).float()
            sums[name] = sums[name] + product.cpu() if name in sums else product.cpu()

        output.register_hook(add)

    handles: list[Any] = [model.get_submodule(name).register_forward_hook(partial(observe, name)) for name in modules]
    embedding: Any = causal_lm_of(model).get_input_embeddings()
    handles.append(embedding.register_forward_hook(lambda _module, _inputs, output: output.requires_grad_(True)))
    read = 0
    try:
        for batch in batches:
            earlier_sums = dict(sums)
            loss, count = causal_lm_loss(model, batch)
            (loss / count.clamp(min=1)).backward()
            read += 1
            if earlier_sums and _cosine(earlier_sums, sums) > SIMILAR:
                break
    finally:
        for handle in handles:
            handle.remove()
    for name in modules:
        if name not in sums or not bool(sums[name].any()):
            wrong = f"init_lora_weights: lora_ga: the loss of the rows has no gradient at {name}"
            raise ModelError(wrong, "give rows with trained tokens, or leave the module out of target_modules")
    return {name: total / read for name, total in sums.items()}


def _cosine(earlier_sums: Mapping[str, Tensor], later_sums: Mapping[str, Tensor]) -> float:
    product = sum(float((earlier_sums[name] * later_sums[name]).sum()) for name in earlier_sums)
    squares = [sum(float(tensor.square().sum()) for tensor in sums.values()) for sums in (earlier_sums, later_sums)]
    return product / max((squares[0] * squares[1]) ** 0.5, 1e-30)
