"""`cuda/decode.cu`: all decoder layers of a decoding step in one launch."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Unavailable
from ...ops.decode import DecoderLayer, PackedLinear, Projections, Run, Stack, one_launch
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Image, Kernel, cubin, remembered
from .few_rows import TILE, UNIT, Operand, enlarged, operand_obstacle, operand_of

BATCH = 8  # most sequences; for more, separate GEMMs are faster
LONG_CACHE = 1024  # slots from which attention uses all blocks
HEADS = (64, 128, 256)  # head sizes that `attend.cuh` supports


def _struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    """A struct of `cuda/copies.cuh`."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_P = ctypes.c_void_p
_I = ctypes.c_uint32
_F = ctypes.c_float
TILES = 2  # tiles of 16 rows of W that a warp has at a time
Step = _struct(
    "Step", layers=_P, norm=_P, hidden=_P, normed=_P * 2, qkv=_P, attended=_P, gated=_P, squares=_P, shares=_P,
    low=_P, counters=_P, cos=_P, sin=_P, padding=_P, slot=_P, count=_I, batch=_I, width=_I, heads=_I, key_heads=_I,
    slots=_I, eps=_F, scale=_F, slab=_I, columns=_I,
)  # fmt: skip


class Tables(NamedTuple):
    """Structs of `cuda/copies.cuh` for a format's `Weight`."""

    linear: Any
    product: Any
    layer: Any


@functools.cache
def tables_of(weight: type[ctypes.Structure]) -> Tables:
    linear = _struct("Linear", w=weight, bias=_P, up=_P, begin=_I, rank=_I)
    product = _struct("Product", parts=linear * 3, down=_P, mask=_P, order=_P, columns=_I, tiles=_I, ranks=_I, pad=_I)
    layer = _struct(
        "Layer", products=product * 4, norms=_P * 2, q_norm=_P, k_norm=_P, keys=_P, values=_P, window=_I, pad=_I * 3
    )
    return Tables(linear, product, layer)


class Blocks(NamedTuple):
    """Constants of `cuda/decode.cu`: warps that multiply, stages of their rings."""

    warps: int
    stages: int


def blocks_for(batch: int) -> Blocks:
    """The fastest blocks of a sweep on an H200: twelve warps including the `epilogue_warps_of` the batch."""
    return Blocks(11 if batch == 1 else 8, 2)


def epilogue_warps_of(batch: int) -> int:
    """Warps that finish tiles; with 9 to 12 warps per block each warp has the same number of registers."""
    return 1 if batch == 1 else 4


def queries_of(batch: int, size: int, group: int) -> int:
    """Query heads per block of attention at a time, chosen so that most batches need one round."""
    queries = 1 if batch <= 4 or size > 128 else 2
    return math.gcd(queries, group)


def buffer_floats(blocks: Blocks, batch: int, size: int, queries: int) -> int:
    """Floats of a buffer of partial sums (a tile's, or those that attention's warps exchange), a multiple of 4."""
    attention = (queries + 1) * size + blocks.warps * queries * (size + 2)
    return 4 * ceil_div(max(blocks.warps * batch * TILE * TILES, attention), 4)


def splits_of(units: int, blocks: int, tiles: int, slots: int) -> int:
    """Blocks that share the slots of a unit of attention, if there are enough blocks.

    For a short cache at most two, and only blocks with the fewest tiles of q, k and v, since the others finish later.
    """
    long = slots >= LONG_CACHE
    free = blocks if long or tiles <= blocks else blocks - tiles % blocks
    return next(splits for splits in (4, 2, 1) if splits == 1 or (units * splits <= free and (long or splits == 2)))


@remembered
def _image(device: int, weight: type[ctypes.Structure], constants: tuple[tuple[str, int], ...]) -> Image:
    defines = dict(constants) | {"ORIGIN": origin_of(device)}
    return cubin("decode", device_at(device).capability, defines, [*tables_of(weight), Step])


@remembered
def _kernel(device: int, weight: type[ctypes.Structure], shared: int, constants: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(_image(device, weight, constants), "decode", shared)


class Stacked:
    """A stack in the kernel's representation: tables of pointers, their tensors, and exchange buffers.

    Raises:
        Unavailable: the kernel does not compile on this device.
    """

    def __init__(self, hidden: Tensor, stack: Stack, blocks: Blocks):
        self.stack = stack
        self.blocks = blocks
        self.held_tensors = [hidden]
        self.hidden = torch.empty_like(hidden)
        layers = stack.layers
        first = layers[0]
        self.operand = _operand(hidden, first.out.weights[0])
        self.tables = tables_of(self.operand.type)
        self.ranks = self.shares = 0
        following = [layer.norm for layer in layers[1:]] + [layers[0].norm]
        table = (self.tables.layer * len(layers))(*[self._layer(*pair) for pair in zip(layers, following, strict=True)])
        batch, width = hidden.shape
        self.batch = batch
        self.fp8 = first.keys.dtype is torch.float8_e4m3fn
        self.group = stack.heads // first.keys.shape[1]
        self.head, key_heads = first.keys.shape[3], first.keys.shape[1]

        def buffer(*shape: int, dtype: torch.dtype) -> int:
            return self._hold(torch.zeros(shape, dtype=dtype, device=hidden.device))

        at_once = queries_of(batch, self.head, self.group)
        units = batch * stack.heads // at_once
        tiles = sum(qkv.rows for qkv in first.qkv.weights) // (TILE * TILES)
        self.splits = splits_of(units, multiprocessors_of(hidden.get_device()), tiles, first.keys.shape[2])
        queries, inner = stack.heads * self.head, first.gate_up.weights[0].rows
        sizes = [batch * size for size in (width, width, queries + 2 * key_heads * self.head, queries, inner)]
        columns = [max(linears.columns for linears in linears_of(stack)[i::2]) for i in range(2)]
        self.held = sum(columns) if batch == 1 and self.fits_in(sum(columns)) else 0
        if not self.held and any(order_of(projections) is not None for projections in linears_of(stack)):
            raise Unavailable("inputs in the order of groups need shared memory for a layer's inputs")
        records = 2 * len(layers) if self.held else 1
        exchange = self._hold(torch.full((records, sum(sizes)), -1, dtype=torch.int16, device=hidden.device))
        addresses = [exchange + 2 * sum(sizes[:i]) for i in range(len(sizes))]

        self.step = Step(
            layers=self._hold(torch.frombuffer(bytearray(table), dtype=torch.uint8).to(hidden.device)),
            norm=first.norm.data_ptr(), hidden=self.hidden.data_ptr(), normed=(_P * 2)(*addresses[:2]),
            qkv=addresses[2], attended=addresses[3], gated=addresses[4],
            squares=buffer(batch, width // (TILE * TILES), dtype=torch.int64),
            shares=buffer(units * at_once, self.splits - 1, self.head + 2, dtype=torch.int64),
            low=buffer(self.shares, batch, self.ranks, dtype=torch.int64), counters=buffer(2, dtype=torch.int32),
            cos=self._hold(stack.cos), sin=self._hold(stack.sin), padding=stack.padding.data_ptr(),
            slot=stack.slot.data_ptr(), count=len(layers), batch=batch, width=width, heads=stack.heads,
            key_heads=key_heads, slots=first.keys.shape[2], eps=stack.eps, scale=stack.scale,
            slab=sum(sizes) if self.held else 0, columns=columns[0],
        )  # fmt: skip

    def constants(self, held: int | None = None) -> dict[str, int]:
        """Constants of `cuda/decode.cu`, optionally for `held` input values in shared memory."""
        batch, held = self.batch, self.held if held is None else held
        queries = queries_of(batch, self.head, self.group)
        return self.operand.constants | {
            f"FORMAT_{self.operand.source}": 1,
            "RT": TILES,
            "WR": 1,
            "WK": self.blocks.warps,
            "STAGES": self.blocks.stages,
            "NT": 1,
            "ONE": int(batch == 1),
            "FLAG_SYNC": int(held > 0),
            "HELD": held,
            "EPILOGUE_WARPS": epilogue_warps_of(batch),
            "VALUES": ceil_div(batch, epilogue_warps_of(batch)),
            "BF16": int(self.hidden.dtype is torch.bfloat16),
            "KV8": int(self.fp8),
            "HEAD": self.head,
            "QUERIES": queries,
            "SPLITS": self.splits,
            "BUFFER": buffer_floats(self.blocks, batch, self.head, queries),
        }

    def shared_bytes(self, held: int | None = None) -> int:
        """Shared memory of a block: the image's, and u."""
        image = _image(self.hidden.get_device(), self.operand.type, tuple(self.constants(held).items()))
        return image.shared_for(self.batch) + 4 * self.batch * self.ranks

    def fits_in(self, numbers: int) -> bool:
        """Return whether `numbers` input values of one sequence fit in shared memory."""
        return self.shared_bytes(numbers) <= device_of(self.hidden).shared_bytes

    def _hold(self, tensor: Tensor) -> int:
        """Keep a tensor alive and return its address."""
        self.held_tensors.append(tensor)
        return tensor.data_ptr()

    def kernel(self) -> Kernel:
        constants = tuple(self.constants().items())
        return _kernel(self.hidden.get_device(), self.operand.type, self.shared_bytes(), constants)

    def _layer(self, layer: DecoderLayer, following: Tensor) -> Any:
        products = [self._product(linears) for linears in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        norms = (_P * 2)(layer.post_norm.data_ptr(), following.data_ptr())
        q_norm, k_norm = (None if norm is None else norm.data_ptr() for norm in (layer.q_norm, layer.k_norm))
        caches = layer.keys.data_ptr(), layer.values.data_ptr()
        four = (self.tables.product * 4)(*products)
        return self.tables.layer(four, norms, q_norm, k_norm, *caches, layer.window or 0)

    def _product(self, linears: Projections) -> Any:
        parts = []
        columns = linears.columns
        for linear, up in zip(linears.weights, linears.ups, strict=True):
            operand = _operand(self.hidden, linear)
            bias = None if linear.bias is None else self._hold(linear.bias)
            begin, b = up or (0, None)
            up_address, rank = (None, 0) if b is None else (self._hold(b), b.shape[1])
            parts.append(self.tables.linear(operand.struct, bias, up_address, begin, rank))
        tiles = sum(linear.rows for linear in linears.weights) // (TILE * TILES)
        ranks = 0 if linears.down is None else linears.down.shape[0]
        self.ranks = max(self.ranks, ranks)
        self.shares = max(self.shares, ceil_div(columns // UNIT, self.blocks.warps))
        mask = None if linears.mask is None else linears.mask.contiguous()
        order = order_of(linears)
        below = [None if tensor is None else self._hold(tensor) for tensor in (linears.down, mask, order)]
        return self.tables.product((self.tables.linear * 3)(*parts), *below, columns, tiles, ranks, 0)

    def threads(self) -> int:
        return 32 * (self.blocks.warps + epilogue_warps_of(self.batch))

    def __call__(self, kernel: Kernel, hidden: Tensor) -> Tensor:
        self.hidden.copy_(hidden)
        with torch.cuda.device(hidden.get_device()):
            kernel(multiprocessors_of(hidden.get_device()), self.threads(), [self.step], together=True)
        return self.hidden


def _operand(hidden: Tensor, linear: PackedLinear) -> Operand:
    """The weight, with the number that its decoder would read from memory."""
    operand = operand_of(hidden.new_empty(len(hidden), linear.columns), linear.product)
    if operand.number is not None:
        name, value = operand.number
        number = 1 / enlarged(hidden.dtype) if value is None else float(value)
        setattr(operand.struct, name, (number, number) if name == "shift" else number)
    return operand


def order_of(linears: Projections) -> Tensor | None:
    """int32 [K]: the column of each input, or None if columns are in the order of inputs."""
    order = linears.weights[0].product.order
    return None if order is None else order[1]


def linears_of(stack: Stack) -> list[Projections]:
    return [projections for layer in stack.layers for projections in (layer.qkv, layer.out, layer.gate_up, layer.down)]


def obstacle(hidden: Tensor, stack: Stack) -> str | None:
    if not device_of(hidden).at_least(HOPPER):
        return NEEDS_HOPPER
    if hidden.dtype not in (torch.bfloat16, torch.float16) or not 1 <= len(hidden) <= BATCH:
        return "takes 1 to 8 rows of 16 bits"
    return misfit(hidden, stack)


def misfit(hidden: Tensor, stack: Stack) -> str | None:
    """Return why the kernel does not support these layers, or None."""
    return _formats(hidden, stack) or _shapes(hidden, stack) or _tensors(hidden, stack)


def _formats(hidden: Tensor, stack: Stack) -> str | None:
    """Return a reason unless one decoder takes all weights."""
    decoders: list[Operand] = []
    for linears in linears_of(stack):
        x = hidden.new_empty(len(hidden), linears.columns)
        for linear in linears.weights:
            if reason := operand_obstacle(x, linear.product):
                return reason
            decoders.append(operand_of(x, linear.product))
        orders = [linear.product.order for linear in linears.weights]
        if len(hidden) > 1 and orders[0] is not None:
            return "takes inputs in the order of groups for one row"
        if any(order is not orders[0] for order in orders):
            return "needs one order of inputs for weights with the same input"
    first = decoders[0]
    alike = all((other.source, other.constants) == (first.source, first.constants) for other in decoders)
    tables = (pair for other in decoders for pair in zip(other.tables, first.tables, strict=False))
    if not alike or any(table is not other and not torch.equal(table, other) for table, other in tables):
        return "needs weights of one format with one codebook"
    group = first.constants.get("GROUP", 0)
    if first.source == "few_rows_int4" and group not in (32, 64, 128) and group % UNIT:
        return "needs groups of 32, 64, 128 or a multiple of 256"
    return None


def _shapes(hidden: Tensor, stack: Stack) -> str | None:
    """Return a reason unless tiles divide every GEMM and other sizes fit."""
    all_linears, size = linears_of(stack), stack.layers[0].keys.shape[3]
    rows = [linear.rows for linears in all_linears for linear in linears.weights]
    if hidden.shape[1] % UNIT or any(count % (TILE * TILES) for count in rows):
        return f"needs N in multiples of {TILE * TILES}"
    if any(linear.rows * linears.columns >= 2**36 for linears in all_linears for linear in linears.weights):
        return "needs weights of less than 2^36 values"
    downs = [linears.down.shape[0] for linears in all_linears if linears.down is not None]
    ups = [(begin, up.shape[1]) for linears in all_linears for begin, up in filter(None, linears.ups)]
    if any(rank % 16 for rank in downs) or any(begin % 8 or rank % 8 for begin, rank in ups):
        return "needs adapters' ranks in multiples of 16 in all and of 8 each"
    return None if size in HEADS and stack.cos.shape[1] == size else "takes heads of 64, 128 and 256, fully rotated"


def _tensors(hidden: Tensor, stack: Stack) -> str | None:
    """Return a reason unless layouts, dtypes and devices of all tensors fit."""
    plain = [stack.cos, stack.sin]
    for projections in linears_of(stack):
        plain += [
            tensor for tensor in (projections.down, *[up[1] for up in projections.ups if up]) if tensor is not None
        ]
    for layer in stack.layers:
        norms = layer.norm, layer.post_norm, layer.q_norm, layer.k_norm
        plain += [norm for norm in norms if norm is not None]
    caches = [cache for layer in stack.layers for cache in (layer.keys, layer.values)]
    cached = caches[0].dtype
    if any(tensor.dtype is not hidden.dtype or not tensor.is_contiguous() for tensor in plain):
        return "needs contiguous norms and adapters in the dtype of the rows"
    if cached not in (hidden.dtype, torch.float8_e4m3fn) or any(
        c.dtype is not cached or not c.is_contiguous() for c in caches
    ):
        return "needs contiguous caches in the dtype of the rows or in E4M3"
    products = [linear.product for linears in linears_of(stack) for linear in linears.weights]
    packed = [part for product in products for part in product.arguments if isinstance(part, Tensor)]
    return None if all(tensor.device == hidden.device for tensor in (*plain, *packed)) else "needs one device"


@one_launch.kernel("cuda", unless=obstacle)
def compile_layers(hidden: Tensor, stack: Stack) -> Run | None:
    stacked, device = Stacked(hidden, stack, blocks_for(hidden.shape[0])), hidden.get_device()
    with torch.cuda.device(device):
        kernel = stacked.kernel()
        kernel.check_together(multiprocessors_of(device), stacked.threads())
    return functools.partial(stacked, kernel)
