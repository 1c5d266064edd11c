"""The checkpoint under an adapter, one tensor at a time: what it holds, where, and in which dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.config import Origin
from halfbyte.formats import FORMATS, Format, Stack, named, recognize
from halfbyte.formats.base import parameter_of_entry
from halfbyte.formats.stack import META as STACK_META
from halfbyte.gguf.cache import checkpoint_folder
from halfbyte.reading.model_config import read_config
from halfbyte.reading.tensors import INDEX, SINGLE, read_header, read_tensor, safetensors_files
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}
HUB_FILES = ["*.safetensors", INDEX, "*.json", "*.model", "*.txt", "*.jinja", "*.py"]


@dataclass(frozen=True)
class Stored:
    """One weight of the checkpoint.

    Attributes:
        name: its name in the checkpoint.
        file: the shard it lies in.
        dtype: dtype of its values, in safetensors' spelling; of a quantized weight, that of the dequantized values.
        shape: of its values.
        parts: of a quantized weight: suffix → name of the entry; empty for others.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    parts: Mapping[str, str] = field(default_factory=dict)


class BaseCheckpoint:
    """The files of a base model. Tensors are mapped from disk as they are asked for.

    Raises:
        CheckpointError: no such folder, no safetensors in it, or a damaged file.
    """

    def __init__(self, origin: Origin):
        self.folder = folder_of(origin)
        self.config = read_config(self.folder)
        files = safetensors_files(self.folder)
        if not files:
            raise CheckpointError(
                f"{self.folder} holds no {SINGLE}", "save the base model with save_pretrained, which writes safetensors"
            )
        self.headers = {file.name: read_header(file) for file in files}
        self._file_of = {name: file for file, header in self.headers.items() for name in header}

    @property
    def quantized(self) -> bool:
        """Whether the weights are stored quantized."""
        return "quantization_config" in self.config

    @property
    def in_part(self) -> bool:
        """Whether linear layers that are not stored quantized are quantized while loading."""
        return bool(self.config.get("quantization_config", {}).get("others"))

    @cached_property
    def weights(self) -> list[Stored]:
        """Every weight, in the order of the shards; headers say their shapes, and no values are read."""
        parts = self._quantized_parts() if self.quantized else {}
        of_parts = {entry for entries in parts.values() for entry in entries.values()}
        packed: dict[str, list[Stored]] = {file: [] for file in self.headers}
        for name, own in parts.items():
            file = self._file_of[own.get("", next(iter(own.values())))]
            packed[file].append(self._packed(name, file, own))
        found = []
        for file, header in self.headers.items():
            for name, entry in header.items():
                if name not in of_parts:
                    found.append(Stored(name, file, entry["dtype"], tuple(entry["shape"])))
            found += packed[file]
        return found

    @cached_property
    def _format_classes(self) -> list[type[Format]]:
        """The formats that config.json says the weights are in.

        Raises:
            CheckpointError: one that halfbyte does not read.
        """
        entry = self.config["quantization_config"]
        if "formats" in entry:
            stacks = [Stack] if any(name.endswith(STACK_META) for name in self._file_of) else []
            return list(dict.fromkeys([*(type(named(spec)) for spec in entry["formats"]), *stacks]))
        found = [type(format_) for cls in FORMATS.values() if (format_ := cls.from_quantization_config(entry))]
        if not found:
            raise CheckpointError(
                f"{self.folder} is stored as {entry.get('quant_method')}, which halfbyte does not read",
                "merge onto the 16-bit model: name it as model_name_or_path in the run's config.resolved.yaml",
            )
        return found

    @cached_property
    def _stored_as(self) -> dict[str, type[Format]]:
        """Quantized weight → its format, where config.json says it of each: GPTQ's and AWQ's look alike."""
        named_so = self.config["quantization_config"].get("formats", {})
        return {f"{name}.weight": type(named(spec)) for spec, names in named_so.items() for name in names}

    def _quantized_parts(self) -> dict[str, dict[str, str]]:
        """Quantized weight → suffix → entry. The codes are the entry of the weight's own name, or beside it."""
        suffixes = {suffix for cls in self._format_classes for suffix in cls.state_suffixes()} - {""}
        found: dict[str, dict[str, str]] = {}
        for entry in self._file_of:
            for suffix in suffixes:
                name = parameter_of_entry(entry, suffix)
                if name and suffix.startswith("../") and name.removesuffix(".weight") in self._file_of:
                    continue  # it is of a stack of that name
                # "scales" lies below the weight in one format, beside it in another
                stack = name in self._file_of or suffix.startswith("_")  # [E, N, K], a parameter of its module
                if name and (stack or (name.endswith(".weight") and not name.endswith(".weight.weight"))):
                    found.setdefault(name, {"": name} if name in self._file_of else {})[suffix] = entry
        return found

    def _packed(self, name: str, file: str, parts: Mapping[str, str]) -> Stored:
        state = {suffix: self._described(suffix, entry) for suffix, entry in parts.items()}
        _, _, shape, dtype = self._class_of(name, state).from_state(state, name)
        if "kept" in self.config["quantization_config"]:  # from a GGUF file, which has no dtype of values
            dtype = getattr(torch, self.config["dtype"])
        return Stored(name, file, NAMES[dtype], shape, parts)

    def _described(self, suffix: str, entry: str) -> Tensor:
        """An entry on the meta device; one that describes the others, as it is."""
        if "quant_state" in suffix:
            return self._tensor(entry)
        header = self.headers[self._file_of[entry]][entry]
        return torch.empty(header["shape"], dtype=TYPES[header["dtype"]], device="meta")

    def _class_of(self, name: str, state: Mapping[str, Tensor]) -> type[Format]:
        if name in self._stored_as:
            return self._stored_as[name]
        classes = self._format_classes
        return classes[0] if len(classes) == 1 else recognize(state, prefer=classes[0])

    def _quantized(self, name: str, parts: Mapping[str, str]) -> QuantizedTensor:
        state = {suffix: self._tensor(entry) for suffix, entry in parts.items()}
        return QuantizedTensor(*self._class_of(name, state).from_state(state, name))

    def read(self, stored: Stored) -> Tensor:
        """The values on the CPU: as they are stored, or, of a quantized weight, dequantized in fp32."""
        if not stored.parts:
            return self._tensor(stored.name)
        return self._quantized(stored.name, stored.parts).dequantize(torch.float32)

    def _tensor(self, name: str) -> Tensor:
        return read_tensor(self.folder / self._file_of[name], name)

    @cached_property
    def dtype(self) -> str:
        """What most weights are stored in."""
        sizes: Counter[str] = Counter()
        for stored in self.weights:
            sizes[stored.dtype] += torch.Size(stored.shape).numel()
        return sizes.most_common(1)[0][0]

    def written_dtype(self, stored: Stored) -> str:
        """The stored dtype; bf16 for what is stored in 32 bits, unless a 16-bit model keeps a few tensors so."""
        wide = stored.dtype in ("F32", "F64")
        return "BF16" if wide and (self.dtype == stored.dtype or stored.parts) else stored.dtype

    def written_bytes(self, stored: Stored) -> int:
        """Size of the values in `written_dtype`."""
        dtype = self.written_dtype(stored)
        if dtype in DTYPES:
            return torch.Size(stored.shape).numel() * DTYPES[dtype].itemsize
        first, last = self.headers[stored.file][stored.name]["data_offsets"]  # integers, say: copied as they are
        return last - first


def folder_of(origin: Origin) -> Path:
    """The base's folder; that of a hub id in the local cache, downloaded where it is not there yet."""
    from huggingface_hub import snapshot_download

    folder = Path(checkpoint_folder(origin.name, origin.keep))
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(folder), revision=origin.revision, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the base model {origin.name} is missing: neither a folder nor a hub model within reach"
            f" ({str(error).splitlines()[0]})",
            "put it back, or correct model_name_or_path in the run's config.resolved.yaml",
        ) from error
