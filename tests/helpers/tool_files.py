"""Entries of one weight as other tools store it, with the values that the tool dequantizes them to.

`TOOL_FILES` are made by the tool's own code, `PACKED_HERE` by packers of the documented layouts. A tool that is not
installed skips its tests: `pip install --no-deps --target FOLDER hqq` (gptqmodel, aqlm, torchao), and FOLDER on
PYTHONPATH.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn


class Made(NamedTuple):
    """A weight as a tool stores it.

    Attributes:
        entries: suffix → entry.
        values: as the tool computes them; halfbyte's are equal, or within `rtol`.
        config: the file's quantization_config.
    """

    entries: dict[str, Tensor]
    values: Tensor
    config: dict[str, Any]
    rtol: float = 0

    def check(self, tensor: Any) -> None:
        values = tensor.dequantize(self.values.dtype)
        if self.rtol:
            torch.testing.assert_close(values, self.values, rtol=self.rtol, atol=0)
        else:
            assert torch.equal(values, self.values)


Make = Callable[[Tensor], Made]


def needs(tool: str) -> Any:
    """Import a tool, or skip with what installs it."""
    return pytest.importorskip(tool, reason=f"pip install --no-deps --target FOLDER {tool}", exc_type=ImportError)


# ---- compressed-tensors


def arguments(**keys: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | keys


def scheme(form: str, activations: Any = None, **keys: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "weights": arguments(**keys), "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def compressed(entry: dict[str, Any]) -> Make:
    """Compress by the compressor of the scheme's format."""

    def make(weight: Tensor) -> Made:
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme

        (group,) = entry["config_groups"].values()
        stated = QuantizationScheme.model_validate(group)
        compressor = BaseCompressor.get_value_from_registry(stated.format)
        state = {"weight": weight, **parameters(weight, stated.weights)}
        stored = compressor.compress(state, stated)
        values = compressor.decompress(dict(stored), stated)["weight"]
        entries = {f"../{key}" if key != "weight" else "": value for key, value in stored.items()}
        return Made(entries, values, entry, rtol=2**-7 if "nvfp4" in stated.format else 0)  # see `formats.nvfp4`

    return make


def parameters(weight: Tensor, args: Any) -> dict[str, Tensor]:
    """Scales and zeros from the ranges, in the shapes of the strategy."""
    from compressed_tensors.quantization.utils import calculate_qparams

    outputs = len(weight)
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if args.num_bits == 4 and args.type == "float":
        amax = weight.float().view(outputs, -1, args.group_size).abs().amax(2)
        if strategy == "group":  # MXFP4
            return {"weight_scale": torch.exp2(torch.floor(torch.log2(amax)) - 2)}
        of_all = (6 * 448 / weight.float().abs().max()).reshape(1)
        return {"weight_scale": (amax / 6 * of_all).to(torch.float8_e4m3fn).float(), "weight_global_scale": of_all}
    if strategy == "block":
        tiles = [piece.abs().max() for rows in weight.split(128) for piece in rows.split(128, 1)]
        amax = torch.stack(tiles).view(-(-outputs // 128), -1)
        return {"weight_scale": (amax.float() / 448).to(weight.dtype)}
    runs = weight.view(
        {"tensor": (1, 1, -1), "channel": (outputs, 1, -1)}.get(strategy, (outputs, -1, args.group_size))
    )
    scale, zero = calculate_qparams(runs.amin(2), runs.amax(2), args)
    scale = scale.to(weight.dtype).view(-1) if strategy == "tensor" else scale.to(weight.dtype)
    return {"weight_scale": scale} | ({} if args.symmetric else {"weight_zero_point": zero.to(torch.int8)})


FP8_ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "group_size": None, "activations": FP8_ACTIVATIONS}
NVFP4 = {"type": "float", "strategy": "tensor_group", "group_size": 16}
COMPRESSED: dict[str, Make] = {
    **{f"pack-quantized {bits}": compressed(scheme("pack-quantized", num_bits=bits)) for bits in (2, 3, 4, 5, 6, 8)},
    "pack-quantized 8, channels": compressed(scheme("pack-quantized", num_bits=8, strategy="channel", group_size=None)),
    "pack-quantized 8, zeros": compressed(scheme("pack-quantized", num_bits=8, symmetric=False, group_size=64)),
    "fp8, tensor": compressed(scheme("float-quantized", strategy="tensor", **FP8)),
    "fp8, channels": compressed(scheme("float-quantized", strategy="channel", **FP8)),
    "fp8, blocks": compressed(scheme("float-quantized", strategy="block", block_structure=[128, 128], **FP8)),
    "nvfp4": compressed(scheme("nvfp4-pack-quantized", **NVFP4)),
    "mxfp4": compressed(scheme("mxfp4-pack-quantized", type="float", group_size=32)),
}  # fmt: skip


# ---- GPTQ


def gptq(bits: int, version: int = 1, act_order: bool = False, symmetric: bool = False, group: int = 32) -> Make:
    """Pack by gptqmodel's own module."""

    def make(weight: Tensor) -> Made:
        needs("gptqmodel")
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

        outputs, inputs = weight.shape
        linear = nn.Linear(inputs, outputs, bias=False)
        order = torch.randperm(inputs) if act_order else torch.arange(inputs)
        index = torch.empty(inputs, dtype=torch.int32)
        size = inputs if group == -1 else group
        index[order] = torch.arange(inputs, dtype=torch.int32) // size
        runs = weight.float()[:, order].view(outputs, -1, size)
        top = 2**bits - 1
        low, high = runs.amin(2), runs.amax(2)
        if symmetric:
            scales = (2 * torch.maximum(-low, high) / top).half()
            zeros = torch.full_like(scales, 2 ** (bits - 1))
        else:
            scales = ((high - low) / top).half()
            zeros = (-low / scales.float()).round().clamp(1, top)
        codes = ((runs / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
        values = ((codes - zeros[..., None]) * scales.float()[..., None]).view(outputs, inputs)
        linear.weight.data = torch.empty_like(values).index_copy_(1, order, values)
        keys = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
        module = TorchLinear(**keys, in_features=inputs, out_features=outputs, bias=False, pack_dtype=torch.int32)
        module.pack_original(linear, scales.float(), zeros.float(), index)
        module.optimize = lambda: None  # it compiles
        module.post_init()
        values = module.dequantize_weight().t()
        if version == 1:
            stated = type("Config", (), {"pack_dtype": torch.int32, "bits": bits})()
            convert_gptq_v2_to_v1_format_module(module, stated)
        entries = {f"../{key}": getattr(module, key).data for key in ("qweight", "qzeros", "scales", "g_idx")}
        config = {"quant_method": "gptq", "checkpoint_format": "gptq" if version == 1 else "gptq_v2", **keys}
        return Made(entries, values, config)

    return make


GPTQ: dict[str, Make] = {
    **{f"gptq {bits}": gptq(bits) for bits in (2, 3, 4, 8)},
    **{f"gptq_v2 {bits}, act-order": gptq(bits, 2, act_order=True) for bits in (2, 3, 4, 8)},
    "gptq 3, act-order": gptq(3, act_order=True),
    "gptq 8, symmetric": gptq(8, symmetric=True, group=64),
    "gptq 3, one group": gptq(3, group=-1),
}


# ---- hqq, aqlm and torchao


def hqq(bits: int, dtype: torch.dtype = torch.float16, group: int | None = 64, axis: int = 1) -> Make:
    """Quantize by the hqq package; its values computed in fp32."""

    def make(weight: Tensor) -> Made:
        needs("hqq")
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.float()
        stated = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        module = HQQLinear(linear, stated, compute_dtype=dtype, device="cpu")
        values = Quantizer.dequantize(module.W_q, module.meta | {"compute_dtype": torch.float32})
        config = {"quant_method": "hqq", "quant_config": stated, "skip_modules": ["lm_head"]}
        return Made({f"../{key}": value.data for key, value in module.state_dict().items()}, values, config)

    return make


def aqlm(codebooks: int, bits: int) -> Make:
    """Random codes with the values of the aqlm package's reference."""

    def make(weight: Tensor) -> Made:
        needs("aqlm")
        from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data

        (outputs, inputs), vector = weight.shape, 8
        codes = pack_int_data(torch.randint(2**bits, (outputs, inputs // vector, codebooks)), bits)
        tables = (torch.randn(codebooks, 2**bits, 1, vector) * 0.05).half()
        scales = (0.5 + torch.rand(outputs, 1, 1, 1)).half()
        values = _dequantize_weight(unpack_int_data(codes, bits), tables.float(), scales.float())
        config = {
            "quant_method": "aqlm",
            "num_codebooks": codebooks,
            "nbits_per_codebook": bits,
            "in_group_size": vector,
        }
        return Made({"../codes": codes, "../codebooks": tables, "../scales": scales}, values, config)

    return make


def torchao(name: str, **keys: Any) -> Make:
    """Quantize and flatten by torchao; its values computed in fp32."""

    def make(weight: Tensor) -> Made:
        needs("torchao")
        from torchao import quantization
        from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False).bfloat16()
        linear.weight.data = weight.bfloat16()
        arguments = {key: value for key, value in keys.items() if key != "group"}
        if "group" in keys:
            arguments["granularity"] = quantization.PerGroup(keys["group"])
        quantization.quantize_(linear, getattr(quantization, name)(**arguments))
        entries, _ = flatten_tensor_state_dict({"layer.weight": linear.weight})
        entries = {f"../{key.removeprefix('layer.')}": value for key, value in entries.items()}
        config = {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": {}}}}
        weight = linear.weight
        wide = hasattr(weight, "target_dtype")  # intx: its values have its own dtype
        values = weight.to(torch.float32).dequantize() if wide else weight.dequantize(output_dtype=torch.float32)
        return Made(entries, values, config)

    return make


OTHERS: dict[str, Make] = {
    **{f"hqq {bits}": hqq(bits) for bits in (8, 6, 5, 4, 3, 2)},
    "hqq 4, bf16": hqq(4, torch.bfloat16),
    "hqq 3, fp32": hqq(3, torch.float32, 128),
    "hqq 8, rows": hqq(8, group=None),
    "aqlm 1x16": aqlm(1, 16),
    "aqlm 2x8": aqlm(2, 8),
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig"),
    "torchao intx 4": torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, group=32),
}
TOOL_FILES = COMPRESSED | GPTQ | OTHERS


# ---- the documented layouts, packed bit by bit


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Each row of codes as one number, code i from bit i · `bits` on, cut into int32 words."""
    rows = []
    for row in codes.tolist():
        number = sum(code << bits * i for i, code in enumerate(row))
        rows.append([number >> 32 * i & 0xFFFFFFFF for i in range(len(row) * bits // 32)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def packed_gptq(bits: int, version: int = 1, act_order: bool = False, group: int = 32) -> Make:
    def make(weight: Tensor) -> Made:
        (outputs, inputs), top = weight.shape, 2**bits - 1
        groups = inputs // group
        index = torch.arange(inputs)[torch.randperm(inputs) if act_order else slice(None)] // group
        codes = torch.randint(top + 1, (outputs, inputs))
        zeros = torch.randint(1, top + 1, (groups, outputs))
        scales = (torch.rand(groups, outputs) * 0.02).half()
        values = ((codes - zeros.t()[:, index]) * scales.float().t()[:, index]).half()
        entries = {
            "../qweight": words_of(codes, bits).t().contiguous(),
            "../qzeros": words_of(zeros - int(version == 1), bits),
            "../scales": scales,
            "../g_idx": index.int(),
        }
        form = {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
        return Made(entries, values, {"quant_method": "gptq", "bits": bits, "desc_act": act_order} | form)

    return make


def packed_hqq(bits: int, dtype: torch.dtype = torch.float16, group: int = 32) -> Make:
    def make(weight: Tensor) -> Made:
        groups = weight.numel() // group
        codes = torch.randint(2**bits, (groups, group), dtype=torch.int32)
        scale, zero = (torch.rand(groups, 1) * 0.02).to(dtype), (torch.rand(groups, 1) * 2**bits).to(dtype)
        values = ((codes - zero.float()) * scale.float()).view(weight.shape)
        fields = {3: 10, 4: 2, 2: 4}.get(bits, 1)
        step = -(-groups // fields)
        padded = torch.cat([codes, codes.new_zeros(fields * step - groups, group)]).view(fields, step, group)
        shift = torch.arange(fields - 1, -1, -1).view(-1, 1, 1) * (8 if fields == 1 else bits)
        stored = (padded.long() << shift).sum(0).to(torch.int32 if bits == 3 else torch.uint8)
        entries = {"../W_q": stored, "../scale": scale, "../zero": zero, "../shape": torch.tensor(weight.shape)}
        entries |= {"../nbits": torch.tensor(bits), "../axis": torch.tensor(1), "../packing": torch.tensor([52])}
        stated = {"weight_quant_params": {"nbits": bits, "group_size": group, "axis": 1}}
        return Made(entries, values, {"quant_method": "hqq", "quant_config": stated, "skip_modules": ["lm_head"]})

    return make


def packed_aqlm(codebooks: int, bits: int) -> Make:
    def make(weight: Tensor) -> Made:
        outputs, inputs = weight.shape
        indices = torch.randint(2**bits, (outputs, inputs // 8, codebooks))
        tables = (torch.randn(codebooks, 2**bits, 1, 8) * 0.05).half()
        scales = (0.5 + torch.rand(outputs, 1, 1, 1)).half()
        vectors = sum(tables[i, indices[..., i], 0].float() for i in range(codebooks))
        values = vectors.reshape(weight.shape) * scales.float().view(-1, 1)
        codes = indices.to(torch.int8 if bits == 8 else torch.int16)
        config = {"quant_method": "aqlm", "num_codebooks": codebooks, "nbits_per_codebook": bits, "in_group_size": 8}
        return Made({"../codes": codes, "../codebooks": tables, "../scales": scales}, values, config)

    return make


def packed_torchao(low: int, high: int, group: int | None = None) -> Make:
    def make(weight: Tensor) -> Made:
        outputs, inputs = weight.shape
        size = group or inputs
        codes = torch.randint(low, high + 1, weight.shape, dtype=torch.int8)
        codes[0, :2] = torch.tensor([low, high])
        scale = torch.rand(outputs, inputs // size) * 0.01
        zeros = torch.randint(-3, 4, scale.shape, dtype=torch.int8)
        runs = codes.view(outputs, -1, size).float() - zeros.unsqueeze(2)
        entries = {"qdata": codes, "scale": scale, "zero_point": zeros}
        values = (runs * scale.unsqueeze(2)).view(weight.shape)
        return Made({f"../_weight_{key}": value for key, value in entries.items()}, values, {"quant_method": "torchao"})

    return make


PACKED_HERE: dict[str, Make] = {
    **{f"gptq {bits}": packed_gptq(bits) for bits in (2, 3, 8)},
    "gptq_v2 3, act-order": packed_gptq(3, 2, act_order=True),
    "gptq 8, act-order": packed_gptq(8, act_order=True),
    "gptq 4, act-order": packed_gptq(4, act_order=True),
    **{f"hqq {bits}": packed_hqq(bits) for bits in (2, 3, 4, 5, 6, 8)},
    "hqq 4, bf16": packed_hqq(4, torch.bfloat16),
    "aqlm 1x16": packed_aqlm(1, 16),
    "aqlm 2x8": packed_aqlm(2, 8),
    "torchao int8": packed_torchao(-128, 127),
    "torchao int4 in bytes": packed_torchao(-8, 7, 32),
}
