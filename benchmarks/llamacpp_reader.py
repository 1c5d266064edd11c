"""llama.cpp's answers to prompts with images, by the package cyllama; needs numpy in addition.

    python benchmarks/llamacpp_reader.py MODEL.gguf MMPROJ.gguf PROMPTS.npz ANSWERS.npz

PROMPTS.npz has `prompts` [N], texts with `MARKER` in place of an image, and `image0`, `image1` … (uint8
[height, width, 3]), one for each. ANSWERS.npz gets `logits` [N, vocabulary] after each prompt and `tokens` [N], the
positions' number of embeddings of each image. llama.cpp ends its process on errors, so `benchmarks.mmproj_answers`
runs this file as a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

MARKER = "<__media__>"
CONTEXT = 2048  # tokens


def logits_after(gguf: str, mmproj: str, prompts: Sequence[str], images: Sequence[Any]) -> tuple[Any, list[int]]:
    """Return logits [N, vocabulary] after N prompts, and the number of embeddings of each prompt's image.

    Args:
        prompts: with `MARKER` in place of the image.
        images: uint8 [height, width, 3], one for each prompt.
    """
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):
        """cyllama 0.2.18's get_logits_ith asks a model for what only its vocabulary has."""

        @property
        def n_vocab(self) -> Any:
            return self.get_vocab().n_vocab

    llama_cpp.llama_backend_init()
    model = Model(gguf, llama_cpp.LlamaModelParams(), verbose=False)
    keys = llama_cpp.LlamaContextParams()
    keys.n_ctx = keys.n_batch = keys.n_ubatch = CONTEXT
    keys.n_threads = keys.n_threads_batch = 1
    context = llama_cpp.LlamaContext(model, keys, verbose=False)
    options = llama_cpp.MtmdContextParams()
    options.use_gpu = options.warmup = False
    options.n_threads = 1
    reader = llama_cpp.MtmdContext(mmproj, model, options)
    logits, tokens = [], []
    for prompt, image in zip(prompts, images, strict=True):
        height, width, _ = image.shape
        bitmap = llama_cpp.MtmdBitmap.create_image(width, height, image.tobytes())
        context.kv_cache_clear()
        chunks = reader.tokenize(str(prompt), [bitmap], False, True)
        kinds = [chunks[number] for number in range(len(chunks))]
        tokens.append(sum(chunk.n_tokens for chunk in kinds if chunk.type == llama_cpp.MtmdInputChunkType.IMAGE))
        reader.eval_chunks(context, chunks, 0, 0, keys.n_batch, True)
        logits.append(np.array(context.get_logits_ith(-1), dtype=np.float32))
    return np.stack(logits), tokens


def main() -> None:
    gguf, mmproj, prompts, answers = sys.argv[1:]
    given = np.load(prompts)
    images = [given[f"image{number}"] for number in range(len(given["prompts"]))]
    logits, tokens = logits_after(gguf, mmproj, given["prompts"], images)
    np.savez(answers, logits=logits, tokens=tokens)


if __name__ == "__main__":
    main()
