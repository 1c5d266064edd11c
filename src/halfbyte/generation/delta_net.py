"""A Gated DeltaNet as generation runs it: what its rows carry on is in states of one size, whatever their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.plain import has_hooks, hooked
from ..modeling.families import family_of
from ..modeling.layer import TokenMixer, epsilon
from ..modeling.patch_record import is_bound
from ..ops.causal_conv import causal_conv
from ..ops.delta_net import conv_step_, delta_rows, delta_step_, gates
from ..ops.glu import glu
from ..ops.norms import rms_norm
from .linears import Linears, Unknown


class Rows(NamedTuple):
    """Documents of a prefill of N tokens as rows, filled up behind to one length.

    Attributes:
        padded: int64 [D, L]: a row's tokens among the N; of what fills it up, any.
        real: bool [D, L]: the tokens that are its own; each has at least one.
        seats: int64 [D]: where its state goes.
        tokens, places: int64 [n], of all that are real: where they are among the N, and among the D·L.
    """

    padded: Tensor
    real: Tensor
    seats: Tensor
    tokens: Tensor
    places: Tensor

    @classmethod
    def of(cls, padded: Tensor, real: Tensor, seats: Tensor) -> Rows:
        places = real.flatten().nonzero().squeeze(1)
        return cls(padded, real, seats, padded.flatten()[places], places)


class States(NamedTuple):
    """Of S seats: inputs of the convolution [S, C, K − 1] in the model's dtype, and fp32 [S, Hv, Dk, Dv]."""

    conv: Tensor
    recurrent: Tensor


def is_delta_net(module: nn.Module) -> bool:
    family, kind = family_of(type(module)) or (None, "")
    return family is not None and family.mixer is not None and kind == family.mixer.kind == "GatedDeltaNet"


def new_states(module: Any, seats: int, dtype: torch.dtype, device: torch.device) -> States:
    """Of a layer of transformers', for rows that have not begun."""
    channels, before = module.conv1d.weight.shape[0], module.conv_kernel_size - 1
    shape = seats, module.num_v_heads, module.head_k_dim, module.head_v_dim
    conv = torch.zeros(seats, channels, before, dtype=dtype, device=device)
    return States(conv, torch.zeros(shape, dtype=torch.float32, device=device))


def state_bytes(module: Any, dtype: torch.dtype) -> int:
    """Of a seat."""
    return sum(each.nbytes for each in new_states(module, 1, dtype, torch.device("meta")))


class DeltaNet:
    """A layer's inputs, convolution and recurrence, up to what its output's linear reads.

    Raises:
        Unknown: a part of it must run its own forward.
    """

    def __init__(
        self, view: TokenMixer, module: Any, adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool
    ):
        if any(has_hooks(each) if is_bound(each) else hooked(each) for each in (module, module.conv1d, view.norm)):
            raise Unknown("it has hooks")
        self.module, self.norm, self.dtype = module, view.norm, dtype
        self.inputs = Linears(view.inputs, adapters, dtype, unpacked)
        self.group = module.num_v_heads // module.num_k_heads

    def renew(self) -> bool:
        """As `Linears.renew`."""
        return self.inputs.renew()

    def states(self, seats: int, device: torch.device) -> States:
        return new_states(self.module, seats, self.dtype, device)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side [N, C], a gate [N, Hv, Dv], and a and b [N, Hv], of x [B, T, K]."""
        outputs, own = [each.flatten(0, 1) for each in self.inputs(x)], self.module
        if len(outputs) == 4:
            mixed, gate, b, a = outputs
            return mixed, gate.unflatten(-1, (own.num_v_heads, -1)), a, b
        each, wide = outputs  # by key head
        values = self.group * own.head_v_dim
        parts = each.unflatten(-1, (own.num_k_heads, -1)).split([own.head_k_dim, own.head_k_dim, values, values], -1)
        query, key, value, gate = (part.flatten(1) for part in parts)
        b, a = (part.flatten(1) for part in wide.unflatten(-1, (own.num_k_heads, -1)).split(self.group, -1))
        return torch.cat([query, key, value], -1), gate.unflatten(-1, (own.num_v_heads, -1)), a, b

    @property
    def _conv(self) -> tuple[Tensor, Tensor | None]:
        own = self.module.conv1d
        return own.weight.detach().squeeze(1), None if own.bias is None else own.bias.detach()

    def step(self, x: Tensor, states: States, seats: Tensor) -> Tensor:
        """[R, 1, Hv·Dv] of one more token of each row, x [R, 1, K]; seats int64 [R]."""
        mixed, gate, a, b = self._projected(x)
        own = self.module
        mixed = conv_step_(mixed.contiguous(), *self._conv, states.conv, seats)
        numbers = a.contiguous(), b.contiguous(), own.A_log.detach(), own.dt_bias.detach()
        out = delta_step_(mixed, *numbers, states.recurrent, seats, own.num_k_heads)
        return self._normed(out, gate).unsqueeze(1)

    def prompts(self, x: Tensor, rows: Sequence[Rows], states: States) -> Tensor:
        """[B, T, Hv·Dv] of x [B, T, K], all of whose tokens that count are in `rows`; the others' are zeros."""
        mixed, gate, a, b = self._projected(x)
        decay, beta = gates(a, b, self.module.A_log.detach(), self.module.dt_bias.detach())
        out, before = torch.zeros_like(gate), states.conv.shape[-1]
        for padded, real, seats, tokens, places in rows:
            its = mixed[padded]
            last = real.sum(-1, keepdim=True) - before + torch.arange(before, device=x.device)  # below 0: before all
            inputs = its.gather(1, last.clamp(min=0).unsqueeze(-1).expand(-1, -1, its.shape[-1]))
            states.conv[seats] = inputs.where((last >= 0).unsqueeze(-1), 0).mT
            begins = torch.arange(len(its), dtype=torch.int32, device=x.device).repeat_interleave(its.shape[1])
            y = causal_conv(its.flatten(0, 1), *self._conv, begins * its.shape[1], True).view_as(its)
            scan = y, decay[padded], beta[padded], real, states.recurrent
            y, states.recurrent[seats] = delta_rows(*scan, self.module.num_k_heads)
            out[tokens] = y.flatten(0, 1)[places]
        return self._normed(out, gate).unflatten(0, x.shape[:2])

    def _normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """[N, Hv·Dv] of out and gate [N, Hv, Dv]."""
        y, _, _ = rms_norm(out, None, self.norm.weight, epsilon(self.norm), False)
        return glu(gate.flatten(1), y.to(self.dtype).flatten(1), "silu")
