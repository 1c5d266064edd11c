"""Base checkpoint: which tensors it holds, in which file and dtype, and reading them one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..config import Origin
from ..formats import Format, Stack, named, of_checkpoint, recognize
from ..formats.base import parameter_of_entry
from ..formats.stack import STACK_META
from ..gguf.cache import checkpoint_folder
from ..reading.model_config import read_config
from ..reading.tensors import INDEX, SINGLE, read_header, read_tensor, safetensors_files
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError, first_line

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}
DESCRIBING = 64  # bytes up to which an entry may hold a shape, a width or a name
HUB_FILES = ["*.safetensors", INDEX, "*.json", "*.model", "*.txt", "*.jinja", "*.py"]


@dataclass(frozen=True)
class Stored:
    """A weight of the checkpoint.

    Attributes:
        name: name in the checkpoint.
        file: shard that holds it.
        dtype: dtype of its values in safetensors' spelling; for a quantized weight, of the dequantized values.
        shape: shape of its values.
        entries: for a quantized weight: suffix → entry name; empty for others.
        spec: for a quantized weight: its format, as far as headers tell; "" for others.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    entries: Mapping[str, str] = field(default_factory=dict)
    spec: str = ""


class BaseCheckpoint:
    """Files of a base model. Tensors are mapped from disk on access.

    Raises:
        CheckpointError: the folder does not exist or holds no safetensors, or a file is damaged.
    """

    def __init__(self, origin: Origin):
        self.folder = base_folder(origin)
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
        """Whether weights are stored quantized."""
        return "quantization_config" in self.config

    @property
    def in_part(self) -> bool:
        """Whether some linear layers are stored in 16 bits and quantized while loading."""
        return bool(self.config.get("quantization_config", {}).get("others"))

    @cached_property
    def weights(self) -> list[Stored]:
        """All weights in the order of the shards, from headers only."""
        quantized_entries = self._quantized_entries() if self.quantized else {}
        packed_entries = {entry for entries in quantized_entries.values() for entry in entries.values()}
        packed: dict[str, list[Stored]] = {file: [] for file in self.headers}
        for name, entries_of_weight in quantized_entries.items():
            file = self._file_of[entries_of_weight.get("", next(iter(entries_of_weight.values())))]
            packed[file].append(self._packed(name, file, entries_of_weight))
        weights = []
        for file, header in self.headers.items():
            for name, entry in header.items():
                if name not in packed_entries:
                    weights.append(Stored(name, file, entry["dtype"], tuple(entry["shape"])))
            weights += packed[file]
        return weights

    @cached_property
    def _format_classes(self) -> list[type[Format]]:
        """Formats of the weights, according to config.json.

        Raises:
            CheckpointError: halfbyte does not read this format.
        """
        entry = self.config["quantization_config"]
        if "formats" in entry:
            stacks = [Stack] if any(name.endswith(STACK_META) for name in self._file_of) else []
            return list(dict.fromkeys([*(type(named(spec)) for spec in entry["formats"]), *stacks]))
        format_ = of_checkpoint(entry)
        if format_ is None:
            raise CheckpointError(
                f"{self.folder} is stored as {entry.get('quant_method')}, which halfbyte does not read",
                "merge onto the 16-bit model: name it as model_name_or_path in the run's config.resolved.yaml",
            )
        return [type(format_)]

    @cached_property
    def _stored_as(self) -> dict[str, type[Format]]:
        """Quantized weight → its format, if config.json lists weights: GPTQ and AWQ have the same entries."""
        listed = self.config["quantization_config"].get("formats", {})
        return {f"{name}.weight": type(named(spec)) for spec, names in listed.items() for name in names}

    def _quantized_entries(self) -> dict[str, dict[str, str]]:
        """Return quantized weight → suffix → entry; codes are stored under the weight's own name or a suffix of it."""
        suffixes = {suffix for cls in self._format_classes for suffix in cls.state_suffixes()} - {""}
        entries: dict[str, dict[str, str]] = {}
        for entry in self._file_of:
            for suffix in suffixes:
                name = parameter_of_entry(entry, suffix)
                if name and suffix.startswith("../") and name.removesuffix(".weight") in self._file_of:
                    continue  # the entry belongs to a stack of that name
                # "scales" is below the weight in one format, a sibling of it in another
                stack = name in self._file_of or suffix.startswith("_")  # [E, N, K], a parameter of its module
                if name and (stack or (name.endswith(".weight") and not name.endswith(".weight.weight"))):
                    entries.setdefault(name, {"": name} if name in self._file_of else {})[suffix] = entry
        return entries

    def _packed(self, name: str, file: str, entries: Mapping[str, str]) -> Stored:
        state = {suffix: self._described(suffix, entry) for suffix, entry in entries.items()}
        format_, _, shape, dtype = self._class_of(name, state).from_state(state, name)
        if "kept" in self.config["quantization_config"]:  # an unpacked GGUF file, which stores no dtype of values
            dtype = getattr(torch, self.config["dtype"])
        return Stored(name, file, NAMES[dtype], shape, entries, format_.spec)

    def check_scales(self) -> None:
        """Check scales and zeros of all quantized weights, without reading their codes: the largest entry of integers.

        Raises:
            CheckpointError: an entry holds a value that no quantizer writes, e.g. NaN.
        """
        for stored in self.weights:
            if not stored.entries:
                continue
            sizes = {suffix: self._size(entry) for suffix, entry in stored.entries.items() if not self._is_float(entry)}
            codes = max(sizes, key=sizes.__getitem__, default=None)
            state = {
                suffix: self._described(suffix, entry) if suffix == codes else self._tensor(entry)
                for suffix, entry in stored.entries.items()
            }
            self._class_of(stored.name, state).from_state(state, stored.name)

    def _is_float(self, entry: str) -> bool:
        """Whether an entry has 16 bits or more, of a float."""
        return self.headers[self._file_of[entry]][entry]["dtype"] in DTYPES

    def _size(self, entry: str) -> int:
        """Bytes of an entry."""
        first, last = self.headers[self._file_of[entry]][entry]["data_offsets"]
        return int(last - first)

    def _described(self, suffix: str, entry: str) -> Tensor:
        """Return an entry on the meta device, or the entry itself if it describes others (quant_state, a shape)."""
        header = self.headers[self._file_of[entry]][entry]
        if "quant_state" in suffix or self._size(entry) <= DESCRIBING:
            return self._tensor(entry)
        return torch.empty(header["shape"], dtype=TYPES[header["dtype"]], device="meta")

    def _class_of(self, name: str, state: Mapping[str, Tensor]) -> type[Format]:
        if name in self._stored_as:
            return self._stored_as[name]
        classes = self._format_classes
        return classes[0] if len(classes) == 1 else recognize(state, prefer=classes[0])

    def _quantized(self, name: str, entries: Mapping[str, str]) -> QuantizedTensor:
        state = {suffix: self._tensor(entry) for suffix, entry in entries.items()}
        return QuantizedTensor(*self._class_of(name, state).from_state(state, name))

    def read(self, stored: Stored) -> Tensor:
        """Read the values on the CPU: as stored, or dequantized to fp32."""
        if not stored.entries:
            return self._tensor(stored.name)
        return self._quantized(stored.name, stored.entries).dequantize(torch.float32)

    def _tensor(self, name: str) -> Tensor:
        return read_tensor(self.folder / self._file_of[name], name)

    @cached_property
    def dtype(self) -> str:
        """Storage dtype of most weights."""
        sizes: Counter[str] = Counter()
        for stored in self.weights:
            sizes[stored.dtype] += torch.Size(stored.shape).numel()
        return sizes.most_common(1)[0][0]

    def written_dtype(self, stored: Stored) -> str:
        """Return the stored dtype, or bf16 for 32-bit weights, except single fp32 tensors of a 16-bit model."""
        wide = stored.dtype in ("F32", "F64")
        return "BF16" if wide and (self.dtype == stored.dtype or stored.entries) else stored.dtype

    def written_bytes(self, stored: Stored) -> int:
        """Return the size of the values in `written_dtype`."""
        dtype = self.written_dtype(stored)
        if dtype in DTYPES:
            return torch.Size(stored.shape).numel() * DTYPES[dtype].itemsize
        first, last = self.headers[stored.file][stored.name]["data_offsets"]  # other dtypes (integers) are copied
        return last - first


def base_folder(origin: Origin) -> Path:
    """Return the base model's folder; for a hub id the local cache, downloading missing files."""
    from huggingface_hub import snapshot_download

    folder = Path(checkpoint_folder(origin.name, origin.keep))
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(str(folder), revision=origin.revision, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the base model {origin.name} is missing: neither a folder nor a reachable hub model"
            f" ({first_line(error)})",
            "restore it, or correct model_name_or_path in the run's config.resolved.yaml",
        ) from error
