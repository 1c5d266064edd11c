"""Another base of a run's model: the weights that a server will add the adapter to, one at a time.

It is named as `merge --quantize` and `export --gguf` name formats, or by the folder or GGUF file that will be served.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import torch
from torch import Tensor

from ..config import SIXTEEN, Origin, RunConfig
from ..gguf.graph import checked_family, experts_of
from ..gguf.mixes import MIXES, choose
from ..gguf.quants import FLOATS, Type, quantize
from ..gguf.tensors import Layout, Weight, plan
from ..loading.checkpoint import BaseCheckpoint
from ..loading.find import read_model_config
from ..runs.saved import SavedPaths, saved_config
from ..utils.errors import CheckpointError, ConfigError
from .adapter import AdapterLayers
from .gguf_model import text_config
from .layouts import LAYOUTS
from .packing import Packing, packing
from .weights import MergedWeights, Output

OTHER_MODEL = 1.0  # relative difference of two weights from which they are not of one model, however few bits


class TargetBase:
    """The weights of a base that an adapter is fitted to.

    Args:
        to: a format of `quantization:`, a layout of `merge --quantize`, a type of `export --gguf`, "16bit", or the path
            of a checkpoint's folder or of a GGUF file.
        run: keys of the run whose base it replaces.
        trained: layers of the run's adapter.

    Attributes:
        name: short name, for file names.
        description: of the base, for a reader who wants to make or find it.
        origin: the model that it is stored in or made from.
        config: keys that load it, or the 16-bit base where halfbyte does not load it.
        is_path: whether it is a folder or a file.
        is_gguf: whether it is read by llama.cpp.

    Raises:
        ConfigError: no such format, a base that is stored quantized already, or the base of another model.
    """

    def __init__(self, to: str, run: RunConfig, trained: AdapterLayers):
        path, mix = Path(to), to.lower() if to.lower() in MIXES else ""
        is_file = path.suffix == ".gguf"
        self.is_path, self.is_gguf = is_file or path.is_dir(), is_file or bool(mix)
        self._types: dict[str, Type] = {}
        self._layout: Layout | None = None
        if is_file and not path.is_file():
            raise ConfigError(f"--to {to}: there is no such file", "name a GGUF file of the run's base model")
        self.origin = Origin(to, trust_remote_code=run.origin.trust_remote_code) if self.is_path else run.origin
        base = BaseCheckpoint(self.origin)
        if base.quantized and not self.is_path:
            raise ConfigError(
                f"--to {to}: {base.folder} is stored quantized, so its 16-bit weights are not known",
                "name the folder or GGUF file that will be served",
            )
        packed, storage = packing(None, self.origin), f"load_in_4bit={str(base.quantized).lower()}"
        if self.is_path:
            self.name, self.description = path.stem if is_file else path.resolve().name, to
            _check_same_model(run.origin, self.origin)
        elif mix:
            self.name, self.description = mix, f"the file that `halfbyte export {run.origin.name} --gguf {mix}` writes"
        elif to == SIXTEEN:
            self.name, self.description = to, f"{run.origin.name} in 16 bits"
        else:
            packed = _packing(to, self.origin)
            self.name, self.description = to.replace(":", "_"), f"{run.origin.name} stored as {to}"
            storage = storage if to in LAYOUTS else f"quantization={to}"
        trusted = f"trust_remote_code={self.origin.trust_remote_code}"
        config = saved_config(SavedPaths(self.origin.name, None, None), [trusted, storage])
        self.config = config.model_copy(update={"rope_scaling": run.rope_scaling, "max_length": run.max_length})
        layers = AdapterLayers(self.config, None, trained.device)
        self._weights = MergedWeights(self.config, base, layers, packed)
        self._outputs = {output.parameter: output for output in self._weights.outputs}
        self._entries = {output.entry.name: output for output in self._weights.outputs}
        self._tied = layers.tied
        for name, shape in trained.shapes.items():
            if layers.shapes.get(name) != shape:
                wrong = f"--to {to}: {name} has the shape {layers.shapes.get(name)}, and {shape} in the run's model"
                raise ConfigError(wrong, f"name a base of {run.origin.name}")
        if mix and not self.is_path:
            self._choose_types(mix)

    def _choose_types(self, mix: str) -> None:
        config = text_config(self.origin)
        family = checked_family(config)
        weights = {
            output.entry.name: Weight(output.entry.shape, partial(self._stored, output.parameter))
            for output in self._outputs.values()
        }
        heads_per_kv = config.num_attention_heads // config.num_key_value_heads
        layers, experts = config.num_hidden_layers, experts_of(config, family)
        self._types = choose(
            plan(weights, config, family),
            mix,
            layers=layers,
            heads_per_kv=heads_per_kv,
            experts=experts,
            important=False,
        )
        self._layout = Layout(config, family)

    def _stored(self, parameter: str) -> Tensor:
        output = self._outputs[parameter]
        if output.packed:
            return self._weights.quantized(output, "original").dequantize(torch.float32)
        return self._weights.values(output, "original")

    @torch.no_grad()
    def values(self, parameter: str) -> Tensor:
        """Return a weight as the base stores it, fp32.

        Raises:
            CheckpointError: it has no such weight.
        """
        parameter = parameter if parameter in self._outputs else self._tied.get(parameter, parameter)
        if parameter not in self._outputs:
            raise CheckpointError(f"{self.origin.name} lacks {parameter}", "name a complete base of the run's model")
        weight = self._stored(parameter)
        if self._layout is None:
            return weight
        name = self._layout.name(self._outputs[parameter].entry.name)
        type_ = self._types.get(name, Type.F32)
        if type_ in FLOATS:
            return weight.to(FLOATS[type_]).float()
        in_file = self._layout.in_file(name, weight)
        stored = quantize(in_file, type_).reshape(len(in_file), -1)
        decoded = torch.from_numpy(gguf.quants.dequantize(stored.cpu().numpy(), type_)).reshape(in_file.shape)
        return self._layout.in_model(name, decoded.to(weight.device)).float()

    @torch.no_grad()
    def stored(self, output: Output) -> Tensor | None:
        """Return a tensor of the run's merged model as this base stores it, fp32; None if it has none.

        A folder has it under its name, a GGUF file as a parameter, and a packed stack holds an expert's rows.
        """
        if output.entry.name in self._entries:
            return self._weights.values(self._entries[output.entry.name], "original")
        if output.parameter not in self._outputs:
            return None
        values = self._weights.values(self._outputs[output.parameter], "original")
        if output.piece is None:
            return values
        return values[output.piece.expert][output.piece.rows(values.shape[1])]

    def check_weight(self, parameter: str, weight: Tensor, trained: Tensor) -> None:
        """Check that a weight of this base and one of the run's base are two forms of the same weight.

        Raises:
            ConfigError: they are not.
        """
        if float(torch.dist(weight, trained)) > OTHER_MODEL * float(trained.norm()):
            wrong = f"--to {self.description}: {parameter} is not the weight that the run was trained on"
            raise ConfigError(wrong, "name a base of the run's model")


def _packing(to: str, origin: Origin) -> Packing:
    try:
        return packing(to, origin)
    except ConfigError as error:
        if to == "awq":
            wrong = "--to awq: its scales depend on the text that another tool has read"
            raise ConfigError(wrong, "name the folder of the AWQ checkpoint") from error
        fix = f"{error.fix}; for GGUF: {', '.join(MIXES)}; or the path of a checkpoint"
        raise ConfigError(error.message.replace("quantize:", "--to:"), fix) from error


def _check_same_model(run: Origin, target: Origin) -> None:
    trained_type, target_type = (read_model_config(origin).get_text_config().model_type for origin in (run, target))
    if trained_type != target_type:
        wrong = f"--to {target.name}: it is a {target_type} model, and the run trained a {trained_type} model"
        raise ConfigError(wrong, f"name a base of {run.name}")
