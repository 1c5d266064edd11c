"""A head and an embedding divided by rows of the vocabulary: each process holds a slice, and no slice ever moves.

What moves is hidden states, and a few numbers for each token. Process i of n holds rows W_i [V_i, H] of the weight. For
hidden states X [N, H] of *all* processes it makes the logits of its slice, a chunk of tokens at a time, and of those
L_i = logsumexp [N]. With L = logsumexp over i of L_i, and y the label, which one process holds,

    ℓ = L − z_y = (L − L_i) + ℓ_i     there: ℓ_i is the loss over its slice alone
    ∂ℓ/∂X = Σ_i (exp(z_i − L) − onehot_i(y))·∂z_i/∂a·W_i

so that between the logits and their gradient, which takes their place, only L_i and ℓ_i are exchanged. That is the
arithmetic of one process (`ops.losses`): as many products, divided; sums of H values in the hidden states' dtype.

Where processes have different rows (or tokens), hidden states are gathered, and their gradients come back summed: 33 MB
for 2,048 tokens of a 70B model, whose head is 2.1 GB. Where they have the same ones, there is nothing to gather. All
processes of a vocabulary call its verbs together, with as many tokens as each has.

The embedding is the transpose of this: each process looks up the tokens that it has rows of. One of the summed rows is
not zero, so the sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...autograd.function import OnceFunction
from ...autograd.losses import flat_rows, scaled
from ...ops import ELSEWHERE, IGNORE_INDEX
from ...ops.cross_entropy import Objective, cross_entropy_, log_probs_backward_
from ...ops.losses import check_labels, chunk_rows
from ...utils.errors import ModelError
from ..collectives import gathered, longest, members, scattered_sum, summed
from ..mesh import TOKENS, Mesh

OUTSIDE = -1  # what cross-entropies call a label that no slice holds


class Answers(NamedTuple):
    """Of a process's own tokens."""

    losses: Tensor  # fp32 [N]
    gradient: Tensor | None  # [N, H] of the losses' sum
    likeliest: Tensor | None  # int64 [N], the tokens with the largest logits


@dataclass(frozen=True)
class Vocabulary:
    """How a vocabulary is divided, and which slice this process holds.

    Attributes:
        size: tokens in it.
        ways: slices.
        place: of this process's slice.
        turn: which of `others` this process is.
        every: the processes that hold the slices.
        others: of these, those with other tokens than this one.
        same: of these, those with the same tokens.
    """

    size: int
    ways: int
    place: int
    turn: int
    every: Any
    others: Any
    same: Any

    @classmethod
    def over(cls, mesh: Mesh, axes: Sequence[str], size: int) -> Vocabulary:
        """The vocabulary divided over the processes along `axes`.

        Raises:
            ModelError: there are more processes than tokens.
        """
        if mesh.ways(*axes) > size:
            raise ModelError(f"a vocabulary of {size} is not divided {mesh.ways(*axes)} ways", "take fewer processes")
        differing = [axis for axis in axes if axis in TOKENS]
        alike = [axis for axis in axes if axis not in TOKENS]
        groups = (mesh.group(*which) if which else None for which in (axes, differing, alike))
        return cls(size, mesh.ways(*axes), mesh.place(*axes), mesh.place(*differing), *groups)

    def bounds(self, place: int | None = None) -> tuple[int, int]:
        """First token of a slice, and the first after it; slices differ by one token at most."""
        place = self.place if place is None else place
        return self.size * place // self.ways, self.size * (place + 1) // self.ways

    @property
    def widest(self) -> int:
        """Tokens of the largest slice."""
        return -(-self.size // self.ways)

    def slice_of(self, weight: Tensor) -> Tensor:
        """This process's rows of `weight` [V, ...], in the host's memory."""
        begin, end = self.bounds()
        return weight[begin:end].to("meta" if weight.is_meta else "cpu", copy=True)

    def embedded(self, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """[*ids.shape, H] of token ids, which each process has its own or the same of.

        Args:
            look_up: ids within this process's slice, int64 [n], → [n, H].
        """
        (begin, end), own = self.bounds(), ids.reshape(-1)
        most = longest(len(own), self.others)
        every = gathered(F.pad(own, (0, most - len(own))), self.others)
        held = (every >= begin) & (every < end)
        rows = look_up((every - begin).masked_fill(~held, 0)).masked_fill(~held.unsqueeze(1), 0.0)
        found = scattered_sum(summed(rows, self.same), self.others)[: len(own)]
        return found.view(*ids.shape, rows.shape[1])

    def cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None, scale: float = 1.0
    ) -> Tensor:
        """`autograd.losses.linear_cross_entropy` of this process's tokens: their summed loss, labels not shifted.

        Args:
            hidden: [..., T, H].
            weight: this process's slice [V_i, H], frozen.
            labels: [..., T] int64, `IGNORE_INDEX` where nothing is trained.

        Returns:
            0-d fp32, differentiable.

        Raises:
            DataError: on a CPU, a label is outside the vocabulary; on an accelerator the loss is NaN instead.
            ModelError: the head is trained.
        """
        _check_frozen(weight)
        hidden, weight, labels = flat_rows(hidden, weight, labels)
        return _Losses.apply(hidden, weight, labels, Objective(scale, softcap), self).sum()

    def log_probs(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probabilities fp32 [N] of `labels` [N] of this process's tokens, differentiable; 0 of ignored ones.

        Arguments as in `cross_entropy`; `temperature` divides the logits.

        Raises:
            ModelError: the head is trained.
        """
        _check_frozen(weight)
        return -_Losses.apply(*flat_rows(hidden, weight, labels), Objective(scale, softcap, temperature), self)

    def likeliest(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities fp32 [N] of `labels` [N] of this process's tokens, and whether each is the likeliest; not
        differentiable. Arguments as in `cross_entropy`."""
        flat = flat_rows(hidden, weight, labels)
        found = self._answers(*flat, Objective(scale, softcap), likeliest=True)
        return -found.losses, torch.eq(found.likeliest, flat[2])  # type: ignore[arg-type]

    @torch.no_grad()
    def products(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden·Wᵀ [..., V] of this process's tokens [..., H], whole: for the few tokens that are sampled from."""
        own = hidden.reshape(-1, hidden.shape[-1])
        most = longest(len(own), self.others)
        part = F.linear(gathered(_lengthened(own, most), self.others), weight)
        parts = gathered(F.pad(part, (0, self.widest - part.shape[1])), self.every).unflatten(0, (self.ways, -1))
        widths = [end - begin for begin, end in map(self.bounds, range(self.ways))]
        whole = torch.cat([each[:, :width] for each, width in zip(parts, widths, strict=True)], dim=1)
        first = self.turn * most
        return whole[first : first + len(own)].view(*hidden.shape[:-1], self.size)

    @torch.no_grad()
    def _answers(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        objective: Objective,
        gradient: bool = False,
        likeliest: bool = False,
    ) -> Answers:
        """Of tokens [N, H] and their labels [N]; on a CPU, where counting is free, untrained ones cost no product."""
        if hidden.device.type != "cpu":
            return self._answers_of_all(hidden, weight, labels, objective, gradient, likeliest)
        trained = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        own = hidden[trained], weight, labels[trained]
        found = self._answers_of_all(*own, objective, gradient, likeliest)

        def spread(values: Tensor | None, like: Tensor) -> Tensor | None:
            return None if values is None else values.new_zeros(like.shape).index_copy_(0, trained, values)

        return Answers(*map(spread, found, (labels, hidden, labels)))  # type: ignore[arg-type]

    def _answers_of_all(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, gradient: bool, likeliest: bool
    ) -> Answers:
        own = len(hidden)
        most = longest(own, self.others)
        labels = F.pad(labels, (0, most - own), value=IGNORE_INDEX)
        hidden = _lengthened(hidden, most)
        found: list[list[Tensor]] = [[], [], []]
        for rows, every in self._chunks(labels, weight):
            logits = _products(gathered(hidden[rows], self.others), weight)
            if likeliest:
                found[2].append(self._own(self._likeliest(logits)))
            losses, logsumexp = self._losses(logits, every, objective)
            found[0].append(self._own(losses))
            if gradient:
                local = self._local(every)
                log_probs_backward_(
                    logits, local, logsumexp, None, losses.new_full(losses.shape, -1.0), None, objective
                )
                found[1].append(scattered_sum(summed(logits @ weight, self.same), self.others))
        exact = torch.promote_types(hidden.dtype, torch.float32)
        none = hidden.new_empty(0, dtype=exact), hidden[:0], labels[:0]
        losses, grads, tokens = (torch.cat([first, *parts])[:own] for first, parts in zip(none, found, strict=True))
        return Answers(losses, grads if gradient else None, tokens if likeliest else None)

    def _chunks(self, labels: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(which of a process's tokens, the labels [ways·n] of those of all processes), chunk by chunk."""
        every = gathered(labels, self.others).view(members(self.others), -1)  # of no tokens, too
        if labels.device.type == "cpu":
            check_labels(every[every != IGNORE_INDEX], self.size)
        step = max(chunk_rows(self.widest, weight.device.type, weight.element_size()) // len(every), 1)
        for start in range(0, len(labels), step):
            rows = slice(start, start + step)
            yield rows, every[:, rows].reshape(-1)

    def _own(self, values: Tensor) -> Tensor:
        """Those of this process's tokens, of values [ways·n]."""
        return values.view(members(self.others), -1)[self.turn]

    def _local(self, labels: Tensor) -> Tensor:
        """Labels as this process's slice counts them, from 0; those of other slices are `ELSEWHERE`, of none `OUTSIDE`,
        ignored ones stay."""
        begin, end = self.bounds()
        known = torch.where((labels >= 0) & (labels < self.size), ELSEWHERE, OUTSIDE)
        local = torch.where((labels >= begin) & (labels < end), labels - begin, known)
        return local.masked_fill_(labels == IGNORE_INDEX, IGNORE_INDEX)

    def _losses(self, logits: Tensor, labels: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """ℓ and L [n] of a chunk, from the logits [n, V_i] of this slice; ℓ is 0 in ignored rows."""
        local = self._local(labels)
        held = local >= 0
        anywhere = local.masked_fill(local == ELSEWHERE, 0)  # some label: the loss of such a row is not looked at
        own = cross_entropy_(logits, anywhere, objective, False, False)
        parts = gathered(torch.stack([own.logsumexp, own.loss, held.to(own.loss)]).unsqueeze(0), self.every)
        logsumexp = parts[:, 0].logsumexp(0)
        losses = torch.where(parts[:, 2] > 0, logsumexp - parts[:, 0] + parts[:, 1], 0.0).sum(0)
        return losses.masked_fill_(local == OUTSIDE, torch.nan), logsumexp

    def _likeliest(self, logits: Tensor) -> Tensor:
        """The token [n] with the largest logit, from those [n, V_i] of this slice; a scale or softcap changes nothing.

        Of equal ones, the first.
        """
        largest, token = logits.max(-1)
        found = torch.stack([largest.double(), token + self.bounds()[0]]).unsqueeze(0)
        values, tokens = gathered(found, self.every).unbind(1)
        return tokens.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long()


class _Losses(OnceFunction):
    """The loss [N] of each token. Forward makes the gradients, as on one process, and backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, objective, vocabulary):
        found = vocabulary._answers(hidden, weight, labels, objective, gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(found.gradient)
        return found.losses

    @staticmethod
    def backward(ctx, grad):
        return scaled(ctx.saved_tensors[0], grad.unsqueeze(1)), None, None, None, None


def _check_frozen(weight: Tensor) -> None:
    if weight.requires_grad:
        raise ModelError("a head that is trained is not divided by vocabulary", "leave it out of modules_to_save")


def _lengthened(rows: Tensor, length: int) -> Tensor:
    """[n, H] with zeros after them: [length, H]."""
    return rows if len(rows) == length else F.pad(rows, (0, 0, 0, length - len(rows)))


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ [n, V_i]; rows begin at multiples of 16, which vector loads and matrix products want."""
    width = len(weight)
    return torch.mm(x, weight.T, out=x.new_empty(len(x), -(-width // 16) * 16)[:, :width])
