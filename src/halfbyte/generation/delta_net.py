"""A Gated DeltaNet for inference; each row has a recurrent state of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..modeling.families import family_of
from ..modeling.layer import TokenMixer, epsilon
from ..ops.causal_conv import causal_conv
from ..ops.delta_net import conv_step_, delta_rows, delta_step_, gates
from ..ops.glu import glu
from ..ops.norms import rms_norm
from .adapters import module_of
from .linears import Linears


class Rows(NamedTuple):
    """Documents of a prefill of N tokens, right-padded to a common length L.

    Attributes:
        padded: int64 [D, L], indices of each document's tokens among the N; arbitrary in the padding.
        real: bool [D, L], False in the padding; each document has at least one token.
        seats: int64 [D], where the states are stored.
        tokens, places: int64 [n], the real tokens' indices among the N and among the D·L.
    """

    padded: Tensor
    real: Tensor
    seats: Tensor
    tokens: Tensor
    slots: Tensor

    @classmethod
    def of(cls, padded: Tensor, real: Tensor, seats: Tensor) -> Rows:
        slots = real.flatten().nonzero().squeeze(1)
        return cls(padded, real, seats, padded.flatten()[slots], slots)


class States(NamedTuple):
    """Recurrent states of S seats: convolution inputs [S, C, K − 1] in the model's dtype, and fp32 [S, Hv, Dk, Dv]."""

    conv: Tensor
    recurrent: Tensor


def is_delta_net(module: nn.Module) -> bool:
    """Return whether a module is a Gated DeltaNet of a supported family."""
    family, block_type = family_of(type(module)) or (None, "")
    return family is not None and family.mixer is not None and block_type == family.mixer.kind == "GatedDeltaNet"


def new_states(module: Any, seats: int, dtype: torch.dtype, device: torch.device) -> States:
    """Return zero states for `seats` rows of a transformers layer."""
    channels, history = module.conv1d.weight.shape[0], module.conv_kernel_size - 1
    shape = seats, module.num_v_heads, module.head_k_dim, module.head_v_dim
    conv = torch.zeros(seats, channels, history, dtype=dtype, device=device)
    return States(conv, torch.zeros(shape, dtype=torch.float32, device=device))


def state_bytes(module: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one seat."""
    return sum(state.nbytes for state in new_states(module, 1, dtype, torch.device("meta")))


class DeltaNet:
    """Input projections, convolution and recurrence of a layer, up to the output projection.

    Raises:
        Unsupported: a part of it needs transformers' own forward.
    """

    def __init__(
        self, view: TokenMixer, module: Any, adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool
    ):
        self.module, self.dtype = module, dtype
        self.norm, self.conv = module_of(view.norm, adapters), module_of(module.conv1d, adapters)
        self.inputs = Linears(view.inputs, adapters, dtype, unpacked)
        self.group = module.num_v_heads // module.num_k_heads

    def renew(self) -> bool:
        """Refresh the weights as `Linears.renew` does."""
        return self.inputs.renew()

    def states(self, seats: int, device: torch.device) -> States:
        return new_states(self.module, seats, self.dtype, device)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return concatenated q, k, v [N, C], the gate [N, Hv, Dv], and a, b [N, Hv], for x [B, T, K]."""
        outputs, module = [output.flatten(0, 1) for output in self.inputs(x)], self.module
        if len(outputs) == 4:
            mixed, gate, b, a = outputs
            return mixed, gate.unflatten(-1, (module.num_v_heads, -1)), a, b
        qkvz, ba = outputs  # grouped by key head
        values = self.group * module.head_v_dim
        widths = [module.head_k_dim, module.head_k_dim, values, values]
        sections = qkvz.unflatten(-1, (module.num_k_heads, -1)).split(widths, -1)
        query, key, value, gate = (section.flatten(1) for section in sections)
        b, a = (section.flatten(1) for section in ba.unflatten(-1, (module.num_k_heads, -1)).split(self.group, -1))
        return torch.cat([query, key, value], -1), gate.unflatten(-1, (module.num_v_heads, -1)), a, b

    @property
    def _conv(self) -> tuple[Tensor, Tensor | None]:
        return self.conv.weight.detach().squeeze(1), None if self.conv.bias is None else self.conv.bias.detach()

    def step(self, x: Tensor, states: States, seats: Tensor) -> Tensor:
        """Return [R, 1, Hv·Dv] for one more token of each row, x [R, 1, K]; seats int64 [R]."""
        mixed, gate, a, b = self._projected(x)
        module = self.module
        mixed = conv_step_(mixed.contiguous(), *self._conv, states.conv, seats)
        numbers = a.contiguous(), b.contiguous(), module.A_log.detach(), module.dt_bias.detach()
        out = delta_step_(mixed, *numbers, states.recurrent, seats, module.num_k_heads)
        return self._normed(out, gate).unsqueeze(1)

    def prompts(self, x: Tensor, rows: Sequence[Rows], states: States) -> Tensor:
        """Return [B, T, Hv·Dv] for x [B, T, K]; tokens that are in none of `rows` get zeros."""
        mixed, gate, a, b = self._projected(x)
        decay, beta = gates(a, b, self.module.A_log.detach(), self.module.dt_bias.detach())
        out, history = torch.zeros_like(gate), states.conv.shape[-1]
        for padded, real, seats, tokens, slots in rows:
            its = mixed[padded]
            last = real.sum(-1, keepdim=True) - history + torch.arange(history, device=x.device)  # < 0: no token
            inputs = its.gather(1, last.clamp(min=0).unsqueeze(-1).expand(-1, -1, its.shape[-1]))
            states.conv[seats] = inputs.where((last >= 0).unsqueeze(-1), 0).mT
            begins = torch.arange(len(its), dtype=torch.int32, device=x.device).repeat_interleave(its.shape[1])
            y = causal_conv(its.flatten(0, 1), *self._conv, begins * its.shape[1], True).view_as(its)
            scan = y, decay[padded], beta[padded], real, states.recurrent
            y, states.recurrent[seats] = delta_rows(*scan, self.module.num_k_heads)
            out[tokens] = y.flatten(0, 1)[slots]
        return self._normed(out, gate).unflatten(0, x.shape[:2])

    def _normed(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return the gated norm [N, Hv·Dv] of out and gate [N, Hv, Dv]."""
        y, _, _ = rms_norm(out, None, self.norm.weight, epsilon(self.norm), False)
        return glu(gate.flatten(1), y.to(self.dtype).flatten(1), "silu")
