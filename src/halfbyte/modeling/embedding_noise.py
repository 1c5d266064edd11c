"""NEFTune: noise on the embeddings while a model trains (Jain et al. 2023, arXiv:2310.05914, algorithm 1).

Uniform noise of ±α/√(L·d) for a document of L tokens and embeddings of width d. In packed rows each document has its
own L, and padding does not count. Lengths are computed on the device without a synchronisation, so a CUDA graph of a
step draws new noise for the lengths of each batch. Image features replace embeddings after the noise, and have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..batch import ATTENTION_MASK, CONTEXT, POSITION_IDS, UNSPLIT
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from .attention import ATTENTION_NAME, SCORES_NAME
from .layer import causal_lm_of


@contextlib.contextmanager
def noisy_embeddings(model: Any, alpha: float | None, mesh: Mesh = SINGLE_PROCESS) -> Iterator[None]:
    """Within the context, add NEFTune's noise to the embeddings in forwards in training mode.

    Args:
        model: a causal LM of transformers, plain or inside a `peft.PeftModel`.
        alpha: α; None: no noise.
    """
    if alpha is None:
        yield
        return
    backbone = causal_lm_of(model).base_model
    lengths: list[Tensor] = []  # of the forward that runs

    def read_lengths(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is not None and module.training:
            lengths[:] = [document_lengths(tokens, kwargs, mesh)]
        text = getattr(module, "language_model", module)
        # Batches are padded on the right, so causal attention needs no mask. Prompts of a decoding loop, which has a
        # cache, are padded on the left.
        if kwargs.get("use_cache") is False and text.config._attn_implementation in (ATTENTION_NAME, SCORES_NAME):
            kwargs.pop(ATTENTION_MASK, None)
        return args, kwargs

    def add_noise(module: Any, args: Any, output: Tensor) -> Tensor:
        if not module.training:
            return output
        tokens = lengths.pop() if lengths else torch.full((1, 1), float(output.shape[1]), device=output.device)
        scale = alpha / (tokens * output.shape[-1]).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * scale.unsqueeze(-1).to(output.dtype)

    hooks = [
        backbone.register_forward_pre_hook(read_lengths, with_kwargs=True, prepend=True),
        model.get_input_embeddings().register_forward_hook(add_noise),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def document_lengths(tokens: Tensor, inputs: Mapping[str, Any], mesh: Mesh = SINGLE_PROCESS) -> Tensor:
    """Return the number of tokens in each token's document, fp32, to broadcast with `tokens`.

    Args:
        tokens: [B, T]; with context parallelism this rank's slice of each row.
        inputs: the other inputs: `position_ids`, restarting with each document, or `attention_mask`, of full rows
            under the prefix `UNSPLIT`; with neither, a row is one document.
    """
    rows, length = tokens.shape
    degree = mesh.degree(CONTEXT) if CONTEXT in inputs else 1
    positions, mask = (inputs.get((UNSPLIT if degree > 1 else "") + name) for name in (POSITION_IDS, ATTENTION_MASK))
    if mask is not None and mask.dim() == 2:
        return mask.sum(1, keepdim=True).float()
    if positions is not None and positions.dim() == 3:  # M-RoPE: (text,) time, height, width
        positions = positions[0] if positions.shape[0] == 4 else None
    if positions is None:
        return torch.full((1, 1), float(length * degree), device=tokens.device)
    positions = positions.expand(rows, -1)
    begins = torch.ones_like(positions)
    begins[:, 1:] = positions.diff(dim=1) != 1
    document = begins.flatten().cumsum(0) - 1
    counts = torch.zeros_like(document).scatter_add_(0, document, torch.ones_like(document))
    lengths = counts[document].view_as(positions).float()
    local = mesh.coordinate(CONTEXT) if degree > 1 else 0
    return lengths[:, local * length : (local + 1) * length]
