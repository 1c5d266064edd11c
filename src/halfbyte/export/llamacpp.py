"""Logits of a GGUF file by llama.cpp itself, through the package cyllama."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..utils.errors import CheckpointError


def llamacpp_logits(path: Path, ids: Sequence[int]) -> Tensor:
    """Return fp32 logits [T, vocabulary] of token ids, with the key-value cache in fp32, on the CPU.

    Raises:
        CheckpointError: llama.cpp does not load the file.
    """
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):
        """cyllama 0.2.18's get_logits_ith asks a model for what only its vocabulary has."""

        @property
        def n_vocab(self) -> Any:
            return self.get_vocab().n_vocab

    llama_cpp.llama_backend_init()
    try:
        model = Model(str(path), llama_cpp.LlamaModelParams(), verbose=False)
    except ValueError as error:
        reason = str(error).partition(". ")[0]
        raise CheckpointError(f"llama.cpp does not load {path}: {reason}", "export it again") from error
    keys = llama_cpp.LlamaContextParams()
    keys.n_ctx = keys.n_batch = keys.n_ubatch = len(ids)
    keys.n_threads = keys.n_threads_batch = max(1, torch.get_num_threads())
    keys.type_k = keys.type_v = 0
    context = llama_cpp.LlamaContext(model, keys, verbose=False)
    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
    batch.set_batch(list(ids), 0, True)
    context.decode(batch)
    return torch.from_numpy(np.array([context.get_logits_ith(index) for index in range(len(ids))], np.float32))
