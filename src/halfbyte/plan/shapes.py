"""The run's model on the meta device: bytes of its weights as stored, and of one step's allocations."""

from __future__ import annotations

import copy
import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..adapter_kinds import LORA, adapter_kind
from ..adapters.expert_adapters import expert_wrappers
from ..adapters.lora import add_adapter
from ..config.methods import PAIRED
from ..config.policy import POLICY
from ..config.schema import RunKeys
from ..data.batch_shapes import Shape
from ..data.collate import PackedCollator
from ..layers import QuantizedLinear, hold_table, quantized_parameter
from ..layers.plain import factor_holders
from ..loading.assignment import quantized_names, skipped_modules, stored_formats
from ..loading.expert_offload import layers_of_experts
from ..loading.expert_stacks import prepare_stacks
from ..modeling import recurrent
from ..modeling.architectures import (
    auto_class,
    conv1d_layers,
    expert_stacks,
    non_text_modules,
    per_layer_tables,
    quantizable,
    refuse_conv1d,
    train_vision,
)
from ..modeling.attention import Implementation, implementation
from ..modeling.cast_cache import cast_replacements
from ..modeling.checkpointing import TILE_ROWS
from ..modeling.config_facts import has_sinks
from ..modeling.experts import names_of
from ..modeling.families import family_of_config
from ..modeling.language_inputs import CONFIRMED, IMAGES_EAGER, unsplit_reason
from ..modeling.layer import causal_lm_of, decoder_layers
from ..modeling.packing import isolate_tiny_model
from ..modeling.patch import EXPERTS, PatchReport, patch, patch_attention, unpatch
from ..modeling.transformers_versions import enable_checkpointing
from ..parallel.tensor import sharded_dims
from ..qat.model import fake_quantize_linears, qat_format, round_sums
from ..tensor import QuantizedTensor
from ..utils.caching import cached_method
from ..utils.errors import ConfigError, ModelError, first_line
from ..utils.hardware import compute_dtype, onednn_beats_mkl
from ..utils.notices import notice, remark, silent
from .rank import Frozen
from .replay import NO_SHAPES, LayerBytes, Step, Target, own_error, replay
from .vision import BatchImages, TowerBytes, vision_bytes

CUDA_RUNTIME = 96 * 2**20  # cuBLAS workspaces of the forward and the backward thread, inside torch's allocator
CPU_RUNTIME = 64 * 2**20  # thread pools and packed operands of oneDNN and MKL, malloc overhead
CPU_PRIMITIVES = 112 * 2**20  # oneDNN GEMMs compiled for many lengths, see hardware.limit_primitive_caches
MASK_COPIES = 4  # of two types of layers, computed and read by a graph, a byte per pair of tokens
SPLIT_METHODS = ("sft", *PAIRED, *POLICY)  # whose micro-batches run one forward, or two of the same tokens
LONG = 8 * TILE_ROWS  # tokens; longer batches are extrapolated from replays of this length and its half


@dataclass(frozen=True)
class Trainable:
    """Trained parameters: number of elements, and bytes in their own dtypes."""

    numel: int
    bytes: int


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """torch dtype for a config name; "auto" is the fast dtype of `device`, which may be absent."""
    if name != "auto":
        return getattr(torch, name)
    absent = device.type == "cuda" and not torch.cuda.is_available()
    return torch.bfloat16 if absent else compute_dtype(device).dtype


class ModelShapes:
    """A causal LM with its adapter on the meta device, built as it will be loaded.

    Args:
        tensor: degree of tensor parallelism; `model_config` is then one rank's (`rank_config`).

    Raises:
        ModelError: transformers cannot build a causal LM from `model_config`, or PEFT finds no module to adapt.
    """

    def __init__(self, config: RunKeys, model_config: Any, device: torch.device, tensor: int = 1):
        self.config, self.device = config, device
        self.rough = False  # whether activations were only estimated
        self.images: BatchImages | None = None  # those of the data, once it is read
        self.dtype = dtype_named(self.config.precision.compute, device)
        self.causal_lm = self._build(copy.deepcopy(model_config))
        with torch.device("meta"):
            self._store(model_config)
            if tensor > 1:
                # The format that splitting the full weights gives: column shards have scales that are not nested.
                for name, dim in sharded_dims(self.causal_lm).items():
                    linear = self.causal_lm.get_submodule(name.rpartition(".")[0])
                    if isinstance(linear, QuantizedLinear) and name.endswith(".weight"):
                        shard = linear.weight.data
                        sides = [size * tensor if at == dim else size for at, size in enumerate(shard.shape)]
                        full = QuantizedTensor.quantize(torch.empty(sides, dtype=shard.dtype), shard.format)
                        linear.weight = nn.Parameter(full.split_for(dim, tensor)[0], requires_grad=False)
        # PEFT draws some adapters on the default device, reads what it drew, and moves them to the base's device.
        on_meta = self.config.adapter is None or adapter_kind(self.config.adapter).peft_type == LORA.peft_type
        with torch.device("meta" if on_meta else "cpu"):
            self.model = add_adapter(self.causal_lm, self.config.adapter) if self.config.adapter else self.causal_lm
        if self.config.adapter is None:
            train_vision(self.causal_lm, self.config.trained_vision)
        self.model.train()

    def _build(self, model_config: Any) -> Any:
        stored = dtype_named(self.config.precision.weights, self.device)
        options: dict[str, Any] = {"trust_remote_code": self.config.origin.trust_remote_code, "dtype": stored}
        attention = self.config.attn_implementation
        if attention is None and getattr(model_config.get_text_config(), "attn_logit_softcapping", None):
            attention = "eager"  # as `loading.load` does
        if attention in ("eager", "sdpa"):  # other kernels allocate as sdpa does
            options["attn_implementation"] = attention
        if hasattr(model_config, "quantization_config"):
            del model_config.quantization_config
        try:
            with torch.device("meta"):
                return auto_class(model_config).from_config(model_config, **options)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ModelError(f"transformers cannot build this model: {error}", "check config.json") from error

    def _store(self, model_config: Any) -> None:
        """Quantize linear layers and freeze the vision tower, as `load_model` does."""
        model, storage = self.causal_lm, self.config.storage
        for name in non_text_modules(model):
            model.get_submodule(name).requires_grad_(False)
        if storage.quantized:
            stored: Any = getattr(model_config, "quantization_config", None) or {}
            skip = skipped_modules(stored)
            linears = quantizable(model, skip, storage.vision is not None)
            refuse_conv1d(model, conv1d_layers(model, skip))
            tables = per_layer_tables(model, skip, quantized_names(stored) if stored else None)
            names = [*linears, *expert_stacks(model, skip), *tables]
            formats = stored_formats(storage, model_config, model, names)
            for name in formats.keys() & linears.keys():
                model.set_submodule(name, QuantizedLinear.from_linear(linears[name], formats[name]))
            for name in formats.keys() & tables.keys():
                hold_table(tables[name])
                tables[name].weight = quantized_parameter(tables[name].weight, formats[name])
            for name, module in prepare_stacks(model, formats, skip, bool(stored)).items():
                leaf = name.rpartition(".")[2]
                stack = QuantizedTensor.quantize(getattr(module, leaf), formats[name].stacked())
                setattr(module, leaf, nn.Parameter(stack, requires_grad=False))
        elif storage.qat_scheme is not None:
            fake_quantize_linears(model, qat_format(storage.qat_scheme))
        if storage.merge_aware:
            round_sums(model)

    def runtime(self, varied: bool) -> int:
        """Bytes of libraries outside of the run's tensors; `varied`: whether batch shapes differ."""
        if self.device.type != "cpu":
            return CUDA_RUNTIME
        return CPU_RUNTIME + CPU_PRIMITIVES * (varied and (self.dtype.itemsize == 2 or onednn_beats_mkl()))

    # --- resident bytes ----------------------------------------------------------------------------------------------

    def frozen_bytes(self) -> int:
        """Bytes of frozen weights, as stored, and of buffers."""
        frozen = sum(parameter.nbytes for parameter in self.model.parameters() if not parameter.requires_grad)
        return frozen + sum(buffer.nbytes for buffer in self.model.buffers())

    def frozen(self) -> Frozen:
        """Bytes of frozen weights by component."""
        return Frozen.of(self.causal_lm, self.layers.values(), self.frozen_bytes())

    def trainable(self) -> Trainable:
        """Elements and bytes of the trained parameters."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return Trainable(sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters))

    @functools.cached_property
    def _patched(self) -> PatchReport:
        """Report of `patch` for this model on the training device."""
        if not self.config.use_kernels or self.device.type == "cpu":
            return PatchReport(None)
        with silent():
            report = patch(self.model)
            unpatch(self.model)
        return report

    @functools.cached_property
    def _attends(self) -> bool:
        """Return whether only attention is patched: on a CPU with packed or padding-free batches."""
        if not self.config.use_kernels or self.device.type != "cpu" or not self._packed:
            return False
        with silent():
            attention_layers = patch_attention(self.model)
            unpatch(self.model)
        return bool(attention_layers)

    @functools.cached_property
    def fused(self) -> bool:
        """Return whether every decoder layer runs the fused forward and so supports every activation level.

        Experts may run their own function inside it. All layers need equal shapes, because one is replayed for all.
        """
        unfused = {component for component, _ in self._patched.unfused} - {EXPERTS}
        return bool(self._patched.fused) and not unfused and self._uniform

    @functools.cached_property
    def _uniform(self) -> bool:
        """Return whether all layers have the same shapes, so that one can be replayed for all."""
        layers = (layer.named_parameters() for layer in self.layers.values())
        shapes = {tuple((name, parameter.shape) for name, parameter in layer) for layer in layers}
        return not self._per_layer and len(shapes) == 1

    @property
    def _per_layer(self) -> bool:
        """Return whether the model has per-layer embeddings, so that it cannot be built with fewer layers."""
        return bool(getattr(self.text_config, "hidden_size_per_layer_input", None))

    @functools.cached_property
    def document_separation(self) -> str:
        """The run's way of separating packed documents, see `modeling.packing`.

        "positions" for families with attention in all layers, and for models that cannot be tested before loading.

        Raises:
            ConfigError: the model cannot separate packed documents.
        """
        family = family_of_config(self.text_config)
        separates_by_positions = family is not None and family.patched and not (family.mixer or family.own_layer)
        # Without kernels, transformers masks models with sinks without positions.
        separates_by_positions = separates_by_positions and (self.config.use_kernels or not has_sinks(self.text_config))
        if not self._packed or separates_by_positions:
            return "positions"
        key, trust = "packing" if self.config.packing else "padding_free", self.config.trust_remote_code
        try:
            with silent():
                return isolate_tiny_model(
                    self.causal_lm.config, PackedCollator(0), key=key, trust_remote_code=trust
                ).method
        except ConfigError:
            raise
        except Exception as error:  # the model's own code may fail on the test's sizes; the run tests again
            remark(
                "planned-packing", f"planned as if positions separate documents: no tiny model ran: {first_line(error)}"
            )
            return "positions"

    @functools.cached_property
    def packed_in_graphs(self) -> bool:
        """Return whether packed documents are separated without device synchronization, as CUDA graphs need."""
        family = family_of_config(self.text_config)
        fused = self.config.use_kernels and self.device.type != "cpu"
        if family is not None and family.mixer is not None and fused and self.document_separation == "bounds":
            return recurrent.avoids_device_sync()  # on a GPU the patched layers get the bounds
        return self.document_separation == "positions"

    # --- transient bytes ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def layers(self) -> dict[str, nn.Module]:
        """Decoder layers by name; empty if the model has no list of them."""
        try:
            name, layers = decoder_layers(self.causal_lm)
        except ModelError:
            return {}
        return {f"{name}.{index}": layer for index, layer in enumerate(layers)}

    @property
    def text_config(self) -> Any:
        """transformers config of the text model."""
        return self.causal_lm.config.get_text_config()

    def expert_bytes(self) -> list[int]:
        """Bytes of each decoder layer's packed expert stacks, which can be offloaded."""
        layers = list(self.layers.values())
        layer_bytes = [0] * len(layers)
        for at, module in layers_of_experts(layers):
            layer_bytes[at] += sum(getattr(module, name).nbytes for name in names_of(module))
        return layer_bytes

    def layer_gradients(self) -> list[int]:
        """Gradient bytes of each decoder layer."""
        return [sum(p.nbytes for p in layer.parameters() if p.requires_grad) for layer in self.layers.values()]

    @cached_method
    def step(self, batch: Shape, levels: tuple[str, ...]) -> Step:
        """Measure the allocations of a step of one micro-batch.

        Args:
            levels: replays one layer at each level if all layers have equal shapes, else all layers at the only level.
                Models that are not `fused` support `keep`; any other level is transformers' checkpointing.

        Raises:
            ModelError: the sizes in config.json contradict each other, so that transformers' own forward fails.
        """
        try:
            attention = self.attention(batch)
            linear = attention is not None and not attention.scores and not attention.mask  # in the number of tokens
            if batch.tokens <= LONG or not linear:
                return self._step(batch, levels)
            half, full = (self._step(Shape(1, tokens), levels) for tokens in (LONG // 2, LONG))
            return half.line(full, 2 * batch.tokens / LONG - 1)
        except NO_SHAPES as error:
            notice(
                "rough_memory",
                f"activation memory is estimated from layer widths: this model cannot run on fake tensors ({error})",
            )
            if not self.fused:
                return Step(self._rough(levels[-1] != "keep", batch.tokens), (), 0, 0)
            saved = [self._rough(level != "keep", batch.tokens) // len(self.layers) for level in levels]
            return Step(0, tuple(LayerBytes(layer, 0, 0) for layer in saved), 0, 0)
        except RuntimeError as error:
            model_error = own_error(self._build(copy.deepcopy(self.causal_lm.config)))
            if model_error is None:
                raise
            raise ModelError(
                f"transformers' {type(self.causal_lm).__name__} fails in its forward with this config.json:"
                f" {model_error}",
                "correct the sizes in config.json, such as head_dim, hidden_size and num_attention_heads",
            ) from error

    def _step(self, batch: Shape, levels: tuple[str, ...]) -> Step:
        depth = len(self.layers)
        if not depth or not self._uniform:
            return self._replay(batch, levels * depth)
        if depth == 1:
            steps = [self._replay(batch, (level,)) for level in levels]
        elif len(levels) < depth:
            steps = [self._replay(batch, (levels[0], *levels))]  # the first differs if embeddings are frozen
        else:
            steps = [self._replay(batch, (level, level)) for level in levels]
        layers = tuple(layer for step in steps for layer in step.layers[min(1, depth - 1) :])
        left_out = sum(self.layer_gradients()[len(steps[0].layers) :]) * self._copy_ratio()
        return replace(steps[-1], initial=steps[-1].initial + int(left_out), layers=layers)

    @property
    def images_before_graphs(self) -> bool:
        """Return whether the images of a batch, if it has some, can be computed before its CUDA graph."""
        if self.images is None:
            return True
        model_type = self.causal_lm.config.model_type
        reason: str | None
        if self.config.method not in SPLIT_METHODS:
            reason = f"with method: {self.config.method}"
        elif model_type not in CONFIRMED:
            reason = f"those of {model_type} have not been shown to equal eager ones on a GPU"
        else:
            reason = unsplit_reason(self.model)
        if reason is not None:
            notice("image-graphs", f"{IMAGES_EAGER}: {reason}")
        return reason is None

    def vision_bytes(self, batch: Shape, transient: int, checkpointed: bool, graphs: int | None = None) -> int:
        """Bytes of vision tower, projector and features of `images`, beyond those of the language model, `transient`.

        A frozen tower frees what it allocates before the language model runs; a trained one keeps what its backward
        reads, which runs when the language model has freed its own.

        Args:
            graphs: bytes outside of the CUDA graphs' pool that are free while the tower runs; None: no graphs, so the
                bytes of the language model are. Graphs also read a copy of the embeddings, of deepstack features, and
                of the masks of images that see themselves.
        """
        if self.images is None:
            return 0
        width = self.text_config.hidden_size * self.dtype.itemsize
        features = self.images.tokens * width
        parts = map(self.causal_lm.get_submodule, non_text_modules(self.causal_lm))
        trained = any(parameter.requires_grad for part in parts for parameter in part.parameters())
        tower = self._tower(trained and checkpointed)
        if graphs is not None:
            tower_config = getattr(self.causal_lm.config, "vision_config", None)
            deepstack = len(getattr(tower_config, "deepstack_visual_indexes", None) or ())
            inputs = (1 + 2 * deepstack) * batch.tokens * width
            family = family_of_config(self.text_config)
            if family is not None and family.bidirectional_images:
                inputs += MASK_COPIES * batch.rows * batch.length**2
            return features + inputs + max(0, tower.peak - graphs)
        return features + max(tower.saved if trained else 0, tower.peak - transient)

    @cached_method
    def _tower(self, checkpointed: bool) -> TowerBytes:
        assert self.images is not None
        try:
            return vision_bytes(self.model, self.images, self.dtype, checkpointed)
        except Exception as error:  # the model's own code may raise anything
            notice("image-memory", f"the memory plan does not count the vision tower's activations: {error}")
            return TowerBytes(0, 0)

    def attention(self, batch: Shape) -> Implementation | None:
        """Implementation that needs a stand-in in the replay; None if the model's own code allocates the same.

        None for eager attention, and on CPUs, where SDPA materializes scores that GPU kernels do not.
        """
        packed, padded = self._packed, self._padded(batch)
        if not self._patched.fused and not self._attends:
            # Layers of files without transformers' table of functions, such as Falcon's, call SDPA themselves.
            calls_it = not hasattr(sys.modules[type(self.causal_lm).__module__], "ALL_ATTENTION_FUNCTIONS")
            if self.device.type == "cpu" or calls_it or self.text_config._attn_implementation != "sdpa":
                return None
            window = getattr(self.text_config, "sliding_window", None) is not None
            masked = padded or window or (packed and self.document_separation == "positions")
            return Implementation("transformers' sdpa", scores=False, mask=masked)
        return implementation(self.text_config, self.device, self.dtype, packed=packed, padded=padded)

    @property
    def _packed(self) -> bool:
        """Return whether rows hold several documents."""
        return self.config.packing or self.config.padding_free

    def _padded(self, batch: Shape) -> bool:
        """Return whether the collator gives a padding mask with a batch."""
        fused = self.config.use_kernels and self.device.type == "cuda"
        return batch.rows > 1 and not fused and not self._packed

    def factors(self) -> tuple[int, int]:
        """Bytes of trained parameters that only GEMMs read, in their own dtype and in the compute dtype."""
        pairs = cast_replacements(self.model, self.dtype)
        return sum(factor.nbytes for factor, _ in pairs), sum(held.nbytes for _, held in pairs)

    def copied(self, trained: int) -> int:
        """Bytes of the compute-dtype copies of `trained` bytes of parameters."""
        return int(trained * self._copy_ratio())

    @cached_method
    def _copy_ratio(self) -> float:
        """Bytes of compute-dtype copies (`modeling.cast_cache`) per trained byte of the layers.

        Factors that a fused forward reads are copied; experts' factors are cast at use.
        """
        adapter = self.config.adapter
        fused = self._patched.fused and adapter is not None and adapter_kind(adapter).fused
        if not fused or self.config.adapter_dtype != "float32":
            return 0.0
        holders = [holder for _, wrapper in expert_wrappers(self.model) for holder in factor_holders(wrapper)]
        of_experts = sum(factor.nbytes for holder in holders for factor in holder.parameters())
        copied = 1 - of_experts / max(sum(self.layer_gradients()), 1)
        return copied * self.dtype.itemsize / 4 if self.dtype.itemsize < 4 else 0.0

    @cached_method
    def evaluation(self, batch: Shape) -> int:
        """Peak bytes of an evaluation forward."""
        if not batch.tokens:
            return 0
        try:
            levels = ("keep",) * (len(self.layers) if self._per_layer else min(len(self.layers), 1))
            return self._replay(batch, levels, training=False).head
        except NO_SHAPES:
            return self._rough(True, batch.tokens)

    def _replay(self, batch: Shape, levels: tuple[str, ...], training: bool = True) -> Step:
        """Replay a model with one layer per level."""
        names, fused = list(self.layers)[: len(levels)], self.fused
        model = self._with_layers(len(levels))
        causal_lm = causal_lm_of(model)
        if not fused and {*levels} - {"keep"}:
            if not getattr(causal_lm, "supports_gradient_checkpointing", False):
                raise ModelError(
                    f"{type(causal_lm).__name__} does not support activation checkpointing",
                    "set activation_checkpointing: false",
                )
            enable_checkpointing(causal_lm)
        target = Target(self.device.type, self.dtype, self.attention(batch), bool(self._patched.fused))
        prefix = "base_model.model." if self.config.adapter else ""
        counted = [prefix + name for name in names]
        return replay(model.train(training), counted, self._inputs(batch), target, levels if fused else None)

    def _with_layers(self, count: int) -> Any:
        """A copy of the model with its first `count` decoder layers."""
        names = list(self.layers)
        if not names:
            return copy.deepcopy(self.model)
        holder = self.causal_lm.get_submodule(names[0].rpartition(".")[0])
        modules, config = dict(holder._modules), self.text_config
        for name in list(holder._modules)[count:]:
            del holder._modules[name]
        config.num_hidden_layers = count
        try:
            return copy.deepcopy(self.model)
        finally:
            holder._modules.update(modules)
            config.num_hidden_layers = len(modules)

    def _inputs(self, batch: Shape) -> dict[str, Tensor]:
        """A micro-batch with the collator's tensors."""
        tokens = torch.empty(batch.rows, batch.length, dtype=torch.int64, device="meta")
        if self._packed:
            return {"input_ids": tokens, "position_ids": tokens}
        return {"input_ids": tokens} | ({"attention_mask": tokens} if self._padded(batch) else {})

    def _rough(self, checkpointed: bool, tokens: int) -> int:
        """Estimate the bytes of activations from layer widths.

        Saved: twice the outputs of all linears. Checkpointed: one layer's share of that, and all layers' inputs.
        """
        self.rough = True
        width = sum(m.out_features for m in self.causal_lm.modules() if isinstance(m, nn.Linear))
        saved, depth = 2 * width * tokens * self.dtype.itemsize, self.text_config.num_hidden_layers
        if checkpointed:
            inputs = depth * self.text_config.hidden_size * tokens * self.dtype.itemsize
            saved = inputs + 2 * saved // depth
        return saved
