"""Head and embedding sharded by rows of the vocabulary; weights are never gathered.

Ranks exchange hidden states and a few numbers per token. Rank i of n holds rows W_i [V_i, H] of the weight. For the
hidden states X [N, H] of *all* ranks it computes its shard of the logits, in chunks of tokens, and their logsumexp
L_i [N]. With L = logsumexp over i of L_i, and label y, whose row is on one rank,

    ℓ = L − z_y = (L − L_i) + ℓ_i     on the rank with y; ℓ_i is the loss over its shard alone
    ∂ℓ/∂X = Σ_i (exp(z_i − L) − onehot_i(y))·∂z_i/∂a·W_i

so that only L_i and ℓ_i are exchanged between the logits and their gradient, which overwrites them. The arithmetic is
that of one process (`ops.losses`): the same GEMMs, sharded, and sums of H values in the hidden states' dtype.

If ranks have different tokens, hidden states are all-gathered and their gradients reduce-scattered: 33 MB for 2,048
tokens of a 70B model, whose head has 2.1 GB. Otherwise there is nothing to gather. All ranks must call the methods
together; each may have another number of tokens.

The embedding is the transpose: each rank looks up the tokens whose rows it has. One term of each sum is not zero, so
the sum is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.function import OnceFunction
from ..autograd.losses import flat_rows, scaled
from ..ops import ELSEWHERE, IGNORE_INDEX
from ..ops.cross_entropy import Objective, cross_entropy_, log_probs_backward_
from ..ops.linear_head import chunk_rows
from ..ops.losses import check_labels
from ..utils.errors import ModelError
from .collectives import all_gather, all_reduce_, group_size, max_int, reduce_scatter
from .mesh import TOKEN_AXES, Mesh

OUTSIDE = -1  # label outside the vocabulary


class TokenOutputs(NamedTuple):
    """Results for this rank's tokens."""

    losses: Tensor  # fp32 [N]
    gradient: Tensor | None  # of the losses' sum with respect to hidden states [N, H]
    argmax: Tensor | None  # int64 [N], tokens with the largest logits


@dataclass(frozen=True)
class Vocabulary:
    """Sharding of a vocabulary and this rank's shard.

    Attributes:
        size: tokens in the vocabulary.
        degree: number of shards.
        coordinate: index of this rank's shard.
        token_coordinate: this rank's index in `token_group`.
        group: the ranks that hold the shards.
        token_group: the ranks of `group` with different tokens; None if there are none.
        replica_group: the ranks of `group` with the same tokens; None if there are none.
    """

    size: int
    degree: int
    coordinate: int
    token_coordinate: int
    group: Any
    token_group: Any
    replica_group: Any

    @classmethod
    def over(cls, mesh: Mesh, axes: Sequence[str], size: int) -> Vocabulary:
        """Shard a vocabulary over the ranks along `axes`.

        Raises:
            ModelError: there are more ranks than tokens.
        """
        if mesh.degree(*axes) > size:
            raise ModelError(
                f"a vocabulary of {size} has fewer rows than the {mesh.degree(*axes)} processes", "use fewer processes"
            )
        token_axes = [axis for axis in axes if axis in TOKEN_AXES]
        replica_axes = [axis for axis in axes if axis not in TOKEN_AXES]
        groups = (mesh.group(*group_axes) if group_axes else None for group_axes in (axes, token_axes, replica_axes))
        return cls(size, mesh.degree(*axes), mesh.coordinate(*axes), mesh.coordinate(*token_axes), *groups)

    def bounds(self, coordinate: int | None = None) -> tuple[int, int]:
        """Return the first token of a shard and the first after it; sizes of shards differ by at most one."""
        coordinate = self.coordinate if coordinate is None else coordinate
        return self.size * coordinate // self.degree, self.size * (coordinate + 1) // self.degree

    @property
    def largest_shard(self) -> int:
        """Number of tokens in the largest shard."""
        return -(-self.size // self.degree)

    def local_rows(self, weight: Tensor) -> Tensor:
        """Copy this rank's rows of `weight` [V, ...] to host memory."""
        begin, end = self.bounds()
        return weight[begin:end].to("meta" if weight.is_meta else "cpu", copy=True)

    def embed(self, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Return embeddings [*ids.shape, H] of this rank's token ids.

        Args:
            look_up: maps ids within this rank's shard, int64 [n], to [n, H].
        """
        (begin, end), local_ids = self.bounds(), ids.reshape(-1)
        longest = max_int(len(local_ids), self.token_group)
        gathered = all_gather(F.pad(local_ids, (0, longest - len(local_ids))), self.token_group)
        held = (gathered >= begin) & (gathered < end)
        rows = look_up((gathered - begin).masked_fill(~held, 0)).masked_fill(~held.unsqueeze(1), 0.0)
        embeddings = reduce_scatter(all_reduce_(rows, self.replica_group), self.token_group)[: len(local_ids)]
        return embeddings.view(*ids.shape, rows.shape[1])

    def cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return the summed loss of this rank's tokens; `autograd.losses.linear_cross_entropy` with unshifted labels.

        Args:
            hidden: [..., T, H].
            weight: this rank's shard [V_i, H], frozen.
            labels: [..., T] int64, `IGNORE_INDEX` for untrained tokens.

        Returns:
            0-d fp32, differentiable.

        Raises:
            DataError: on a CPU, a label is outside the vocabulary; on an accelerator the loss is NaN instead.
            ModelError: the head is trained.
        """
        _check_frozen(weight)
        hidden, labels = flat_rows(hidden, weight.dtype, labels)
        weight = weight.to(hidden.dtype)
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
        """Return log-probabilities fp32 [N] of this rank's `labels` [N], differentiable; 0 for ignored labels.

        Arguments as in `cross_entropy`; `temperature` divides the logits.

        Raises:
            ModelError: the head is trained.
        """
        _check_frozen(weight)
        hidden, labels = flat_rows(hidden, weight.dtype, labels)
        objective = Objective(scale, softcap, temperature)
        return -_Losses.apply(hidden, weight.to(hidden.dtype), labels, objective, self)

    def log_probs_and_argmax(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *, softcap: float | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities fp32 [N] of this rank's `labels` [N], and whether each label has the largest logit.

        Not differentiable. Arguments as in `cross_entropy`.
        """
        hidden, labels = flat_rows(hidden, weight.dtype, labels)
        outputs = self._token_outputs(hidden, weight.to(hidden.dtype), labels, Objective(scale, softcap), argmax=True)
        return -outputs.losses, torch.eq(outputs.argmax, labels)  # type: ignore[arg-type]

    @torch.no_grad()
    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return full logits [..., V] of this rank's hidden states [..., H], for the few tokens that are sampled."""
        local = hidden.reshape(-1, hidden.shape[-1])
        longest = max_int(len(local), self.token_group)
        local_logits = F.linear(all_gather(_pad_rows(local, longest), self.token_group), weight)
        padded = F.pad(local_logits, (0, self.largest_shard - local_logits.shape[1]))
        shards = all_gather(padded, self.group).unflatten(0, (self.degree, -1))
        widths = [end - begin for begin, end in map(self.bounds, range(self.degree))]
        full = torch.cat([shard[:, :width] for shard, width in zip(shards, widths, strict=True)], dim=1)
        first = self.token_coordinate * longest
        return full[first : first + len(local)].view(*hidden.shape[:-1], self.size)

    @torch.no_grad()
    def _token_outputs(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        objective: Objective,
        gradient: bool = False,
        argmax: bool = False,
    ) -> TokenOutputs:
        """Compute the results of tokens [N, H] with labels [N]; on a CPU, skip untrained tokens."""
        if hidden.device.type != "cpu":
            return self._all_token_outputs(hidden, weight, labels, objective, gradient, argmax)
        trained = (labels != IGNORE_INDEX).nonzero().squeeze(1)
        trained_inputs = hidden[trained], weight, labels[trained]
        outputs = self._all_token_outputs(*trained_inputs, objective, gradient, argmax)

        def spread(values: Tensor | None, like: Tensor) -> Tensor | None:
            return None if values is None else values.new_zeros(like.shape).index_copy_(0, trained, values)

        return TokenOutputs(*map(spread, outputs, (labels, hidden, labels)))  # type: ignore[arg-type]

    def _all_token_outputs(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, objective: Objective, gradient: bool, argmax: bool
    ) -> TokenOutputs:
        count = len(hidden)
        longest = max_int(count, self.token_group)
        labels = F.pad(labels, (0, longest - count), value=IGNORE_INDEX)
        hidden = _pad_rows(hidden, longest)
        chunks: list[list[Tensor]] = [[], [], []]
        for rows, every in self._chunks(labels, weight):
            # rows of logits are aligned to 16 elements for vector loads and tensor cores
            gathered = all_gather(hidden[rows], self.token_group)
            logits = gathered.new_empty(len(gathered), -(-len(weight) // 16) * 16)[:, : len(weight)]
            torch.mm(gathered, weight.T, out=logits)
            if argmax:
                chunks[2].append(self._local_part(self._argmax(logits)))
            losses, logsumexp = self._losses(logits, every, objective)
            chunks[0].append(self._local_part(losses))
            if gradient:
                local = self._local(every)
                log_probs_backward_(
                    logits, local, logsumexp, None, losses.new_full(losses.shape, -1.0), None, objective
                )
                chunks[1].append(reduce_scatter(all_reduce_(logits @ weight, self.replica_group), self.token_group))
        exact = torch.promote_types(hidden.dtype, torch.float32)
        empty = hidden.new_empty(0, dtype=exact), hidden[:0], labels[:0]
        losses, grads, tokens = (torch.cat([e, *results])[:count] for e, results in zip(empty, chunks, strict=True))
        return TokenOutputs(losses, grads if gradient else None, tokens if argmax else None)

    def _chunks(self, labels: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks: this rank's tokens as a slice, and the labels [degree·n] of all ranks' tokens."""
        every = all_gather(labels, self.token_group).view(group_size(self.token_group), -1)
        if labels.device.type == "cpu":
            check_labels(every[every != IGNORE_INDEX], self.size)
        step = max(chunk_rows(self.largest_shard, weight.device.type, weight.element_size()) // len(every), 1)
        for start in range(0, len(labels), step):
            rows = slice(start, start + step)
            yield rows, every[:, rows].reshape(-1)

    def _local_part(self, values: Tensor) -> Tensor:
        """Return this rank's part of `values` [degree·n]."""
        return values.view(group_size(self.token_group), -1)[self.token_coordinate]

    def _local(self, labels: Tensor) -> Tensor:
        """Map labels to rows of this shard, `ELSEWHERE` (another shard), `OUTSIDE` (no shard) or `IGNORE_INDEX`."""
        begin, end = self.bounds()
        elsewhere = torch.where((labels >= 0) & (labels < self.size), ELSEWHERE, OUTSIDE)
        local = torch.where((labels >= begin) & (labels < end), labels - begin, elsewhere)
        return local.masked_fill_(labels == IGNORE_INDEX, IGNORE_INDEX)

    def _losses(self, logits: Tensor, labels: Tensor, objective: Objective) -> tuple[Tensor, Tensor]:
        """Return ℓ and L [n] of a chunk from this shard's logits [n, V_i]; ℓ is 0 for ignored labels."""
        local = self._local(labels)
        held = local >= 0
        anywhere = local.masked_fill(local == ELSEWHERE, 0)  # any valid label: the losses of these rows are ignored
        local_rows = cross_entropy_(logits, anywhere, objective, False, False)
        numbers = torch.stack([local_rows.logsumexp, local_rows.loss, held.to(local_rows.loss)])
        shards = all_gather(numbers.unsqueeze(0), self.group)
        logsumexp = shards[:, 0].logsumexp(0)
        losses = torch.where(shards[:, 2] > 0, logsumexp - shards[:, 0] + shards[:, 1], 0.0).sum(0)
        return losses.masked_fill_(local == OUTSIDE, torch.nan), logsumexp

    def _argmax(self, logits: Tensor) -> Tensor:
        """Return the token [n] with the largest logit, the first of equal ones, from this shard's logits [n, V_i].

        A scale or softcap does not change it.
        """
        largest, token = logits.max(-1)
        local_largest = torch.stack([largest.double(), token + self.bounds()[0]]).unsqueeze(0)
        values, tokens = all_gather(local_largest, self.group).unbind(1)
        return tokens.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long()


class _Losses(OnceFunction):
    """Loss [N] of each token. As on one process, forward computes the gradients and backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, objective, vocabulary):
        outputs = vocabulary._token_outputs(hidden, weight, labels, objective, gradient=ctx.needs_input_grad[0])
        ctx.save_for_backward(outputs.gradient)
        return outputs.losses

    @staticmethod
    def backward(ctx, grad):
        return scaled(ctx.saved_tensors[0], grad.unsqueeze(1)), None, None, None, None


def _check_frozen(weight: Tensor) -> None:
    if weight.requires_grad:
        raise ModelError("a trained head cannot be sharded by vocabulary", "leave it out of modules_to_save")


def _pad_rows(rows: Tensor, length: int) -> Tensor:
    """Pad [n, H] with zeros to [length, H]."""
    return rows if len(rows) == length else F.pad(rows, (0, 0, 0, length - len(rows)))
