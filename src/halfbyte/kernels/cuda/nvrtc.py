"""Compilation of this folder's CUDA sources with NVRTC, which comes with torch, and reading of what they export.

Compiled kernels are cached under a hash of everything they depend on: the source with its headers, NVRTC's version, and
the options, which include constants and architecture.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...dispatch import Unavailable
from ...utils.errors import TrainingError
from ...utils.files import new_file
from ..native import cache_folder

FOLDER = Path(__file__).parent
SYMBOL_TABLES = (2, 11)  # SHT_SYMTAB, SHT_DYNSYM


class Image(NamedTuple):
    """A compiled source.

    Args:
        code: the cubin.
        shared: bytes of shared memory per block of its main kernel.
        shared_each: additional bytes per row of x, or per other unit that the launcher counts.
    """

    code: Any
    shared: int
    shared_each: int

    def shared_for(self, count: int) -> int:
        return self.shared + count * self.shared_each


def cubin(
    name: str, capability: tuple[int, int], constants: dict[str, int], structs: Sequence[type[ctypes.Structure]] = ()
) -> Image:
    """Compile `<name>.cu` for a device of this compute capability, or load it from the cache.

    Args:
        structs: parameters that Python fills in, in the order of the source's LAYOUT.

    Raises:
        Unavailable: with NVRTC's first error, which names file and line.
    """
    suffix = "a" if capability >= (9, 0) else ""  # include instructions of only this architecture, such as wgmma
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}{suffix}", "--std=c++17"]
    options += [f"-D{key}={value}" for key, value in constants.items()]
    files = sources(name)
    key = hashlib.sha256(repr((files, options, _version())).encode()).hexdigest()[:16]
    built = cache_folder() / "cuda" / f"{name}-{key}.cubin"
    if not built.exists():
        code = compiled(files, options)
        try:
            with new_file(built) as aside:
                aside.write_bytes(code)
        except TrainingError as error:
            raise Unavailable(error.message) from error
    code = built.read_bytes()
    return Image(code, *checked(exported(code), name, structs))


def sources(name: str) -> dict[str, str]:
    """Read `<name>.cu` and all headers that it includes, by name."""
    texts, missing = {}, [f"{name}.cu"]
    while missing:
        file = missing.pop()
        texts[file] = (FOLDER / file).read_text()
        missing += [header for header in re.findall(r'#include "(.+)"', texts[file]) if header not in texts]
    return texts


def compiled(files: dict[str, str], options: Sequence[str]) -> bytes:
    """Compile the first file, which may include the others, to a cubin.

    Raises:
        Unavailable: there is no NVRTC, or it rejects the source.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    (name, source), *headers = [(file.encode(), text.encode()) for file, text in files.items()]
    strings = ctypes.c_char_p * len(headers)
    names, texts = strings(*[file for file, _ in headers]), strings(*[text for _, text in headers])
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, len(headers), texts, names)
    try:
        encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
            log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            raise Unavailable(f"NVRTC failed: {first_error(log.decode(errors='replace'))}")
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def first_error(log: str) -> str:
    """First error in NVRTC's log, with the lines that show its place."""
    messages = log.strip("\0\n ").split("\n\n")
    return next((message for message in messages if " error" in message), messages[0]).strip()


def exported(image: bytes) -> list[int]:
    """Read the numbers of `layout` (warp.cuh) in a 64-bit ELF file: a cubin, or a library for a CPU."""
    offset, size, count = *struct.unpack_from("<Q", image, 0x28), *struct.unpack_from("<HH", image, 0x3A)
    # Fields of a section: type, address, offset, size, section of its names.
    sections = [struct.unpack_from("<4xI8xQQQI", image, offset + i * size) for i in range(count)]
    for section_type, _, begin, length, names in sections:
        for at in range(begin, begin + length, 24) if section_type in SYMBOL_TABLES else ():
            name, section, value, bytes_ = struct.unpack_from("<I2xHQQ", image, at)
            name_start = sections[names][2] + name
            if image[name_start : name_start + 7] == b"layout\0" and section:
                _, address, start, _, _ = sections[section]
                return list(struct.unpack_from(f"<{bytes_ // 4}I", image, start + value - address))
    raise RuntimeError("a CUDA source without LAYOUT")


def checked(layout: Sequence[int], name: str, structs: Sequence[type[ctypes.Structure]]) -> tuple[int, int]:
    """Bytes of shared memory, and additional bytes per counted unit, from a layout with the same structs as Python's.

    Raises:
        RuntimeError: a struct's size differs.
    """
    shared, origin, *sizes = layout
    python_sizes = [ctypes.sizeof(struct) for struct in structs]
    if sizes != python_sizes:
        names = ", ".join(struct.__name__ for struct in structs)
        raise RuntimeError(f"{name}.cu: the structs ({names}) have {sizes} bytes in CUDA and {python_sizes} in Python")
    return shared, origin


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise Unavailable("this torch has no CUDA")
    try:
        return ctypes.CDLL(f"libnvrtc.so.{torch.version.cuda.split('.')[0]}")
    except OSError as error:
        raise Unavailable(f"NVRTC does not load: {error}") from error


@functools.cache
def _version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _read(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    read(program, data)
    return data.raw
