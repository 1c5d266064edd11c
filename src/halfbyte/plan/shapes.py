"""The model of a run without storage: what it is made of, how it is stored, and what one step of it allocates."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from ..architectures import ALL_LINEAR, all_linear, auto_class, beside_text
from ..config import RunConfig, resolve
from ..errors import ModelError
from ..hardware import compute_dtype
from ..memory.batches import Shape
from ..models.choice import stored_formats
from ..notices import notice
from ..qat.model import qat_format
from .replay import (
    FakeQuantizedStandIn,
    QuantizedStandIn,
    Replay,
    bytes_to_round,
    give_shapes_a_device,
    replay_step,
    shapes_only,
)


@dataclass(frozen=True)
class Trainable:
    numel: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def planned_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The dtype of computation on `device`, which need not be in this machine."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    absent = device.type == "cuda" and not torch.cuda.is_available()
    return torch.bfloat16 if absent else compute_dtype(device).dtype


def weights_dtype(config: RunConfig, computed: torch.dtype) -> torch.dtype:
    """The dtype of unquantized weights. Full fine-tuning keeps float32 ones (an update of 1e-4 of a weight is lost in
    bfloat16's 8 bits), unless a dtype is asked for."""
    return torch.float32 if not config.use_peft and config.dtype == "auto" else computed


class ModelShapes:
    """A causal LM with its adapter on the meta device.

    Raises:
        ModelError: transformers cannot build a causal LM from `model_config`, or PEFT finds no module to adapt.
    """

    def __init__(self, config: RunConfig, model_config: Any, device: torch.device):
        self.config, self.device = config, device
        self.dtype = planned_dtype(config, device)
        self.causal_lm = self._build(copy.deepcopy(model_config))
        linears = self._quantizable()
        storage = resolve(config).storage
        if storage.quantized:
            for name, format_ in stored_formats(storage, model_config, self.causal_lm, linears.keys()).items():
                linears[name].__class__ = QuantizedStandIn
                linears[name].format = format_  # type: ignore[assignment]
        elif config.qat_scheme is not None:
            format_ = qat_format(config.qat_scheme)
            bytes_to_round(format_)  # tried while tensors still have data
            for linear in linears.values():
                linear.__class__ = FakeQuantizedStandIn
                linear.format = format_  # type: ignore[assignment]
        self.model = self._adapted() if config.use_peft else self.causal_lm.train()

    def _build(self, model_config: Any) -> Any:
        stored = weights_dtype(self.config, self.dtype)
        options: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code, "dtype": stored}
        attention = self.config.attn_implementation
        if attention is None and getattr(model_config.get_text_config(), "attn_logit_softcapping", None):
            attention = "eager"  # as `models.load` does
        if attention in ("eager", "sdpa"):  # kernels of packages stand behind sdpa's numbers
            options["attn_implementation"] = attention
        if hasattr(model_config, "quantization_config"):
            del model_config.quantization_config
        try:
            with torch.device("meta"):
                return auto_class(model_config).from_config(model_config, **options)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ModelError(f"transformers cannot build this model: {error}", "check config.json") from error

    def _quantizable(self) -> dict[str, nn.Linear]:
        head, beside = self.causal_lm.get_output_embeddings(), tuple(beside_text(self.causal_lm))
        return {
            name: module
            for name, module in self.causal_lm.named_modules()
            if type(module) is nn.Linear and module is not head and not name.startswith(beside)
        }

    def _adapted(self) -> Any:
        config = self.config
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=config.r,
            lora_dropout=config.lora_dropout,
            use_dora=config.use_dora,
            target_modules=all_linear(self.causal_lm) if config.target_modules == ALL_LINEAR else config.target_modules,
            modules_to_save=config.modules_to_save,
            rank_pattern=dict(config.rank_pattern),
        )
        try:
            with torch.device("meta"):
                model = get_peft_model(self.causal_lm, lora, autocast_adapter_dtype=False)
        except ValueError as error:
            raise ModelError(f"target_modules: {error}", "name linear layers, or use all-linear") from error
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, config.adapter_dtype))
        return model.train()

    # --- what stays --------------------------------------------------------------------------------------------------

    def frozen_bytes(self) -> int:
        """Weights that are not trained, as stored: the parts of quantized linears, the rest in 16 (or 32) bits."""
        stored = 0
        formats = {id(m.weight): m.format for m in self.model.modules() if isinstance(m, QuantizedStandIn)}
        for parameter in self.model.parameters():
            if id(parameter) in formats:
                parts = formats[id(parameter)].part_specs(tuple(parameter.shape)).values()
                stored += sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in parts)
            elif not parameter.requires_grad:
                stored += parameter.nbytes
        return stored + sum(buffer.nbytes for buffer in self.model.buffers())

    def trainable(self) -> Trainable:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return Trainable(sum(parameter.numel() for parameter in parameters), parameters[0].dtype)

    # --- what comes and goes -----------------------------------------------------------------------------------------

    def replays(self, checkpointed: bool, batch: Shape) -> tuple[Replay, Replay]:
        """(a step through all layers, a step through one layer), extrapolated from few layers where they are alike."""
        if checkpointed:
            if not getattr(self.causal_lm, "supports_gradient_checkpointing", False):
                raise ModelError(
                    f"{type(self.causal_lm).__name__} does not support activation checkpointing",
                    "set activation_checkpointing: false",
                )
            self.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        layers = self._layers()
        try:
            if layers is None or len(layers) <= 2 or not _alike(layers):
                whole = self._replay(batch)
                return whole, whole
            two, one = self._replay(batch, layers, 2), self._replay(batch, layers, 1)
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
            whole = self._rough(checkpointed, batch.tokens)
            notice(
                "rough_memory", f"activation memory is a rough guess: this model cannot be replayed on shapes ({error})"
            )
            return whole, whole
        per_layer = two.total - one.total
        total = two.total + per_layer * (len(layers) - 2)
        return Replay(total - two.logits, two.logits), one

    def _layers(self) -> nn.ModuleList | None:
        depth = self.causal_lm.config.get_text_config().num_hidden_layers
        lists = [module for module in self.causal_lm.modules() if isinstance(module, nn.ModuleList)]
        return next((layers for layers in lists if len(layers) == depth), None)

    def _replay(self, batch: Shape, layers: nn.ModuleList | None = None, count: int = 0) -> Replay:
        text_config = self.causal_lm.config.get_text_config()
        before = (dict(layers._modules), text_config.num_hidden_layers) if layers is not None else None
        if layers is not None:
            for name in list(layers._modules)[count:]:
                del layers._modules[name]
            text_config.num_hidden_layers = count
        try:
            model = copy.deepcopy(self.model)
            with shapes_only():
                give_shapes_a_device(model)
                return replay_step(
                    model,
                    self._inputs(batch),
                    compute_dtype=self.dtype,
                    device_type=self.device.type,
                    softcap=getattr(text_config, "final_logit_softcapping", None),
                )
        finally:
            if layers is not None and before is not None:
                layers._modules.update(before[0])
                text_config.num_hidden_layers = before[1]

    def _inputs(self, batch: Shape) -> dict[str, Tensor]:
        """A micro-batch as the collator makes it."""
        tokens = torch.zeros(batch.rows, batch.length, dtype=torch.int64)
        if self.config.packing or self.config.padding_free:
            return {"input_ids": tokens, "position_ids": torch.zeros_like(tokens)}
        masked = batch.rows > 1 and not (self.config.use_kernels and self.device.type == "cuda")
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)} if masked else {"input_ids": tokens}

    def _rough(self, checkpointed: bool, tokens: int) -> Replay:
        """Outputs of all linears, twice (before and after what follows them); or a layer's share, and the inputs."""
        text_config = self.causal_lm.config.get_text_config()
        width = sum(m.out_features for m in self.causal_lm.modules() if isinstance(m, QuantizedStandIn | nn.Linear))
        kept = 2 * width * tokens * self.dtype.itemsize
        if checkpointed:
            inputs = text_config.num_hidden_layers * text_config.hidden_size * tokens * self.dtype.itemsize
            kept = inputs + 2 * kept // text_config.num_hidden_layers
        return Replay(kept, 0)


def _alike(layers: nn.ModuleList) -> bool:
    shapes = {tuple((name, tensor.shape) for name, tensor in layer.named_parameters()) for layer in layers}
    return len(shapes) == 1
