"""Initialisations of LoRA from the base's weights: computed while a model loads, saved with the run, undone for PEFT.

PiSSA, OLoRA and LoftQ start from factors A₀, B₀ with a product that is not zero, and train on a base without it. PEFT
computes the factors from a weight in 16 bits. Here a `ResidualBase` gets each 16-bit weight W when the loader is about
to quantize it, and the loader stores what `residual` returns, so a model in any format never exists in 16 bits.

A run keeps A₀ and B₀ in a folder (`InitialAdapter`). Loading subtracts them again, so merging, serving and resuming get
the base of the training. A trained adapter A, B fits only that base. Converted, with rank 2r, it fits the original one:
s·[B, −B₀]·[A; A₀] = s·(B·A − B₀·A₀), as PEFT's `path_initial_model_for_weight_conversion` writes it.

Initialisations that read inputs, too, are computed before, by `loading.streamed`, which has both.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from ..adapter_kinds import LORA, PREFIX
from ..config import Adapter
from ..config.initialisations import (
    EVA_RHO,
    LOFTQ_BITS,
    LOFTQ_ITERATIONS,
    all_options,
    initialisation,
    option,
    read_by,
)
from ..formats import Format
from ..mesh.mesh import Mesh
from ..modeling.layer import decoder_layers
from ..reading.tensors import ADAPTER, ADAPTER_CONFIG, read_adapter_config, read_tensors
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, ConfigError, ModelError
from .initial_data import LabelledBatch, initialise_by_eva
from .initial_factors import LayerScale, LowRank, by_peft, loftq, seeded

RESIDUAL = "residual:"  # before `init_lora_weights` in the config of an adapter that only fits the residual base
OFFSETS = "base_offsets.safetensors"  # what a base is stored without, if that is not the product of the factors


class ResidualBase(ABC):
    """A base whose weights are stored without the product of an adapter's initial factors."""

    def __init__(self) -> None:
        self.loaded: set[str] = set()  # modules whose weight `residual` has returned

    @property
    @abstractmethod
    def modules(self) -> set[str]:
        """Names of the modules whose 16-bit weights it needs."""

    @abstractmethod
    def change(self, module: str, weight: Tensor, format: Format | None) -> Tensor:
        """Return what to store instead of `weight`; `module` is one of `modules`."""

    @torch.no_grad()
    def residual(self, module: str, weight: Tensor, format: Format | None) -> Tensor:
        """Return what to store instead of a weight, in its dtype.

        Args:
            weight: [N, K], as the checkpoint has it, in the model's dtype.
            format: the format that it will be stored in; None: 16 bits.
        """
        if module not in self.modules or weight.is_meta:  # another rank reads it
            return weight
        self.loaded.add(module)
        return self.change(module, weight, format)

    def gather(self, mesh: Mesh) -> None:
        """Give all ranks what each has computed from the weights that it has read."""
        for loaded in mesh.gather(self.loaded):
            self.loaded |= loaded

    def finish(self, model: nn.Module) -> None:
        """Change the weights that are not quantized, one at a time.

        Raises:
            ModelError: the checkpoint stores a weight quantized.
        """
        for name in sorted(self.modules - self.loaded):
            module: Any = model.get_submodule(name)
            if type(module.weight.data) is not Tensor or not module.weight.is_floating_point():
                raise ModelError(
                    f"init_lora_weights: the checkpoint stores {name} quantized, and its 16-bit weight is not known",
                    "name the 16-bit model, or set init_lora_weights: true",
                )
            module.weight.data = self.residual(name, module.weight.data, None)

    def __deepcopy__(self, memo: Any) -> Self:
        """Return self: transformers copies its quantization config, but one object sees all weights."""
        return self


class AdapterInitialiser(ResidualBase):
    """Compute the initial factors of an adapter from the base's weights, one at a time, while they load.

        initial = AdapterInitialiser(config.adapter, config.seed)
        model = load_model(path, config.storage, initial=initial)
        model = add_adapter(model, config, initial=initial)

    Args:
        adapter: the adapter section of a run's keys.
        seed: of randomized decompositions. Each weight has its own random numbers, so their order does not matter.
    """

    def __init__(self, adapter: Adapter, seed: int = 0):
        super().__init__()
        self.adapter, self.seed = adapter, seed
        self.row, self.reads = initialisation(adapter), read_by(adapter)
        self.layers: dict[str, LayerScale] = {}
        self.factors: dict[str, LowRank] = {}
        self.offsets: dict[str, LowRank] = {}
        self.mean_squares: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}  # module → gradient of its weight, fp32 [N, K] (lora_ga)
        self.batches: Sequence[LabelledBatch] = ()  # of the run's data, on the base's device (eva)

    @property
    def modules(self) -> set[str]:
        return set() if self.reads == "stored" else set(self.layers)

    def prepare(self, model: PeftModel) -> None:
        """Read which modules are adapted, and with which rank, from a model with the adapter on the meta device.

        Raises:
            ModelError: the initialisation does not fit a module.
        """
        self.layers = adapted_layers(model, self.adapter)

    @property
    def by_row(self) -> bool:
        """Whether moments are averaged over rows that are divided by their largest value, as in PEFT's CorDA."""
        return self.row.name == "corda"

    @torch.no_grad()
    def compute(self, module: str, weight: Tensor, format: Format | None, moment: Tensor | None = None) -> None:
        """Compute the factors of a module.

        Args:
            weight: [N, K], in the dtype that it is loaded in.
            format: the format that it will be stored in; None: 16 bits.
            moment: second moment of its inputs, fp32 [K, K], if the initialisation reads them.
        """
        layer, row = self.layers[module], self.row
        if moment is not None and not self.by_row:
            self.mean_squares[module] = moment.diagonal().cpu().contiguous()
        if row.quantized_only and format is None:
            return  # nothing to compensate for: PEFT's default factors remain
        offset = None
        with seeded(self.seed, module, weight.device):
            if not row.quantized_only:
                factors = by_peft(self.adapter, weight, layer, moment, self.gradients.get(module))
            else:
                assert format is not None
                iterations = 1
                if row.name == "loftq":
                    check_bits(self.adapter, module, format)
                    iterations = option(self.adapter, LOFTQ_ITERATIONS)
                factors, offset = loftq(weight, format, layer, iterations, moment)
        dtype = getattr(torch, self.adapter.adapter_dtype)
        self.factors[module] = LowRank(*(factor.to("cpu", dtype).contiguous() for factor in factors))
        if offset is not None:
            self.offsets[module] = LowRank(*(factor.cpu().contiguous() for factor in offset))

    def change(self, module: str, weight: Tensor, format: Format | None) -> Tensor:
        if module not in self.factors:
            plain = self.row.quantized_only and format is None
            if (self.reads == "inputs" and not plain) or (self.reads == "gradients" and module not in self.gradients):
                wrong = f"init_lora_weights: {self.adapter.init_lora_weights} needs the {self.reads} of {module}"
                raise ModelError(wrong, f"call observe_{self.reads} before load_model")
            self.compute(module, weight, format)
        offset = self.offsets.get(module)
        if self.row.changes_base:
            a, b = self.factors[module]
            offset = LowRank(a, self.layers[module].scaling * b.float())
        return weight if offset is None else offset.subtracted_from(weight)

    def gather(self, mesh: Mesh) -> None:
        super().gather(mesh)
        for factors, offsets in mesh.gather((self.factors, self.offsets)):
            self.factors |= factors
            self.offsets |= offsets

    def fill(self, model: PeftModel) -> None:
        """Put the computed factors into the adapter of the loaded model."""
        if self.row.name == "eva":
            initialise_by_eva(model, self.batches, all_options(self.adapter))
        for name, layer in lora_layers(model):
            if name in self.factors:
                a, b = self.factors[name]
                layer.lora_A["default"].weight.data = a.to(layer.lora_A["default"].weight.device)
                layer.lora_B["default"].weight.data = b.to(layer.lora_B["default"].weight.device)
        self.factors.clear()
        self.gradients.clear()

    def save_mean_squares(self, file: Path) -> None:
        """Write the mean squares of the inputs of each module that were observed, fp32 [K]."""
        save_file(self.mean_squares, file)

    def save_offsets(self, folder: Path) -> None:
        """Write what the base is stored without, if the factors do not say it."""
        if self.offsets:
            sides = {f"{name}.a": offset.a for name, offset in self.offsets.items()}
            save_file(sides | {f"{name}.b": offset.b for name, offset in self.offsets.items()}, folder / OFFSETS)


class InitialAdapter(ResidualBase):
    """The adapter of a run before its first step, as saved.

    Args:
        folder: with adapter_config.json and the factors.
        keys: the run's keys, or their adapter section.

    Attributes:
        config: PEFT's config.

    Raises:
        CheckpointError: the folder is missing or damaged.
    """

    def __init__(self, folder: Path, keys: Any):
        super().__init__()
        self.folder, self.row = folder, initialisation(keys)
        self.chosen = f"init_lora_weights: {keys.init_lora_weights}"
        fix = f"copy {folder.name} of the run there again"
        if not (folder / ADAPTER_CONFIG).is_file():
            wrong = f"{folder} is missing, with the factors of {self.chosen} that the base was stored without"
            raise CheckpointError(wrong, fix)
        read_adapter_config(folder)
        self.config: Any = PeftConfig.from_pretrained(str(folder))
        self._tensors = read_tensors(folder / ADAPTER, fix)
        stored = read_tensors(folder / OFFSETS, fix) if (folder / OFFSETS).is_file() else {}
        names = {name.rpartition(".")[0] for name in stored}
        self._offsets = {name: LowRank(stored[f"{name}.a"], stored[f"{name}.b"]) for name in names}

    @property
    def modules(self) -> set[str]:
        return set(self._offsets) if not self.row.changes_base else {name for name, _ in self._adapted()}

    def _adapted(self) -> Iterator[tuple[str, str]]:
        """Yield the name of each adapted module and of its factor A."""
        for key in self._tensors:
            match = LORA.tensors.fullmatch(key)
            if match and match["factor"] == "A":
                yield match["module"].removeprefix(PREFIX), key

    def product(self, module: str) -> LowRank | None:
        """Return the initial update of a module, with the scaling in b; None for a module without an adapter."""
        key = f"{PREFIX}{module}.lora_A.weight"
        if key not in self._tensors:
            return None
        a, b = self._tensors[key], self._tensors[_partner(key)]
        return LowRank(a, self._scaling(module, len(a)) * b.float())

    def _scaling(self, module: str, rank: int) -> float:
        from peft.utils.other import get_pattern_key

        patterns = self.config.alpha_pattern
        alpha = patterns.get(get_pattern_key(patterns.keys(), module), self.config.lora_alpha)
        return float(alpha / math.sqrt(rank) if self.config.use_rslora else alpha / rank)

    def change(self, module: str, weight: Tensor, format: Format | None) -> Tensor:
        offset = self.product(module) if self.row.changes_base else self._offsets[module]
        assert offset is not None, "only adapted modules are changed"
        return offset.subtracted_from(weight)

    # --- the two forms of a trained adapter --------------------------------------------------------------------------

    def residual_config(self) -> PeftConfig:
        """Return PEFT's config of an adapter for the residual base, which PEFT can add to a model."""
        config = copy.deepcopy(self.config)
        config.init_lora_weights = True
        return config

    def trained_part(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of an adapter for the residual base, from either form."""
        plain = dict(tensors)
        for _, key in self._adapted():
            rank = len(self._tensors[key])
            if key in plain and len(plain[key]) == 2 * rank:
                plain[key] = plain[key][:rank].contiguous()
                plain[_partner(key)] = plain[_partner(key)][:, :rank].contiguous()
        return plain

    def converted(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of an adapter for the original base, from either form."""
        plain = dict(tensors)
        if self.row.starts_at_zero:
            return plain
        for _, key in self._adapted():
            partner = _partner(key)
            if key not in plain or len(plain[key]) == 2 * len(self._tensors[key]):
                continue
            a, b = plain[key], plain[partner]
            plain[key] = torch.cat([a, self._tensors[key].to(a)], 0)
            plain[partner] = torch.cat([b, -self._tensors[partner].to(b)], 1)
        return plain

    def converted_config(self) -> PeftConfig:
        """Return PEFT's config of a converted adapter: the doubled rank has the same scaling."""
        config: Any = self.residual_config()
        if self.row.starts_at_zero:
            return config
        factor = 2**0.5 if config.use_rslora else 2
        config.r *= 2
        config.lora_alpha *= factor
        config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
        config.alpha_pattern = {name: factor * alpha for name, alpha in config.alpha_pattern.items()}
        return config

    def convert(self, folder: Path) -> None:
        """Rewrite the adapter that was saved in `folder` for the original base."""
        tensors = self.converted(read_tensors(folder / ADAPTER))
        save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
        config = self.converted_config()
        config.inference_mode = True
        config.save_pretrained(str(folder))


def _partner(key: str) -> str:
    """Return the name of factor B from the name of factor A."""
    return key.replace(".lora_A.", ".lora_B.")


# --- layers ----------------------------------------------------------------------------------------------------------


def lora_layers(model: PeftModel) -> Iterator[tuple[str, Any]]:
    """Yield the name in the base, and the layer, of each module with LoRA."""
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def adapted_layers(model: PeftModel, adapter: Adapter) -> dict[str, LayerScale]:
    """Return module → rank and scale of its adapter.

    Raises:
        ModelError: the initialisation does not fit a module.
    """
    row = initialisation(adapter)
    chosen = f"init_lora_weights: {adapter.init_lora_weights}"
    observed = f"{decoder_layers(model)[0]}." if read_by(adapter) in ("inputs", "stored") else ""
    layers = {}
    for name, layer in lora_layers(model):
        if not isinstance(layer, LoraLinear):
            wrong = f"{chosen} cannot initialise the adapter of {name}, which is not a linear layer"
            raise ModelError(wrong, "set target_parameters: [], and name only linear layers in target_modules")
        if not name.startswith(observed):
            wrong = f"{chosen}: {name} is not in a decoder layer, and its inputs are not measured"
            raise ModelError(wrong, "leave it out of target_modules")
        rank = layer.r["default"]
        shape: Any = (layer.out_features, layer.in_features)
        directions = 2 * option(adapter, EVA_RHO) if row.name == "eva" else row.directions
        if directions * rank > min(shape):
            wrong = f"{chosen} with rank {rank}: the weight of {name} has the shape {shape}"
            raise ModelError(wrong, f"set r, or its rank_pattern, to {int(min(shape) / directions)} or less")
        if isinstance(weight := layer.get_base_layer().weight.data, QuantizedTensor):
            check_bits(adapter, name, weight.format)
        layers[name] = LayerScale(rank, layer.lora_alpha["default"], layer.scaling["default"])
    return layers


def check_bits(adapter: Adapter, module: str, format: Format) -> None:
    """Check that the bits of `loftq_config` are those of a module's format.

    Raises:
        ConfigError: they are not.
    """
    bits = option(adapter, LOFTQ_BITS) if initialisation(adapter).name == "loftq" else None
    if bits is not None and bits != format.code_bits:
        wrong = f"loftq_config: loftq_bits: {bits}, but {module} is stored as {format.spec}, in {format.code_bits} bits"
        raise ConfigError(wrong, "remove loftq_bits: LoftQ uses the format of the run")


def mark_initialisation(model: PeftModel, adapter: Adapter) -> None:
    """Freeze the factor that the initialisation does not train, and name the initialisation in PEFT's config.

    PEFT's own names there would let PEFT change the base again when it loads the adapter.
    """
    row = initialisation(adapter)
    config: Any = model.peft_config["default"]
    if not row.starts_at_zero:
        config.init_lora_weights = f"{RESIDUAL}{adapter.init_lora_weights}"
    if row.frozen == "B":
        for _, layer in lora_layers(model):
            if isinstance(layer, LoraLinear):  # `adapted_layers` refuses others
                layer.lora_B["default"].weight.requires_grad_(False)
