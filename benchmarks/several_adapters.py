"""A step of several adapters on one base, by rows of one batch, and steps of one of them after another.

    python -m benchmarks.several_adapters --model qwen3-0.6b --batch 2 --length 512 [--adapters 4]

NF4 with nested scales, rank 16 on the seven linears, random weights and tokens, fused AdamW for each adapter. A step of
one adapter is one CUDA graph with its optimizer; the joint one is a graph with all optimizers. Losses are compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import halfbyte
from benchmarks.harness import free_memory, parser_of, require_gpu, write_result
from benchmarks.step_model import MODELS, STEPS, frozen_model, random_batch, run_config, timed
from halfbyte.adapters.lora import add_adapter
from halfbyte.batch import joined
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.row_adapters import RowAdapters
from halfbyte.train.graph import ShapeGraphs
from halfbyte.train.several import with_same_tensors


class Adapters:
    """Models of a base with an adapter each, and the steps to compare."""

    def __init__(self, given: argparse.Namespace):
        base = frozen_model(given.model, "cuda")
        self.models = []
        for number in range(given.adapters):
            torch.manual_seed(number)
            model = add_adapter(with_same_tensors(base), run_config(given.model)).train()
            halfbyte.patch(model, given.policy)
            self.models.append(model)
        joint: Any = with_same_tensors(base).train()
        halfbyte.patch(joint, given.policy)
        self.rows = RowAdapters(joint, self.models)
        batch = random_batch(given.model, given.batch * given.adapters, given.length, "cuda")
        self.batches = [
            {key: value[number * given.batch :][: given.batch] for key, value in batch.items()}
            for number in range(given.adapters)
        ]
        self.trained = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.initial = [[p.detach().clone() for p in trained] for trained in self.trained]
        self.tokens = given.batch * given.length
        self.restart()

    def restart(self) -> None:
        """Reset the adapters and their optimizers."""
        with torch.no_grad():
            for trained, initial in zip(self.trained, self.initial, strict=True):
                torch._foreach_copy_(trained, initial)
        self.optimizers = [torch.optim.AdamW(trained, lr=2e-4, fused=True, capturable=True) for trained in self.trained]

    def one(self, batch: Any) -> Tensor:
        """Run a step of the first adapter; return its loss."""
        loss = causal_lm_loss(self.models[0], batch)[0] / (self.tokens - self.tokens // batch["labels"].shape[1])
        loss.backward()
        self.optimizers[0].step()
        self.optimizers[0].zero_grad(set_to_none=True)
        return loss.detach()

    def together(self, batch: Any) -> Tensor:
        """Run a step of all adapters; return the loss of the first."""
        adapters = range(len(self.models))
        with self.rows.active(adapters):
            divisor = self.tokens - self.tokens // batch["labels"].shape[1]
            losses = torch.stack(self.rows.losses(batch)) / divisor
            losses.sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses[0].detach()

    def drop_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    made.add_argument("--adapters", type=int, default=4)
    made.add_argument("--batch", type=int, default=2, help="rows of each adapter")
    made.add_argument("--length", type=int, default=512)
    made.add_argument("--policy", default="keep", help="activation level")
    made.add_argument("--steps", type=int, default=STEPS)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    require_gpu()
    adapters = Adapters(given)

    def graphed(step: Callable[[Any], Tensor], batch: Any, tokens: int) -> dict[str, Any]:
        adapters.restart()
        free_memory()
        graphs = ShapeGraphs(step, adapters.drop_gradients)
        return timed(lambda: graphs(batch), tokens, given.steps)

    one = graphed(adapters.one, adapters.batches[0], adapters.tokens)
    all_adapters = graphed(adapters.together, joined(adapters.batches), adapters.tokens * given.adapters)
    ratio = all_adapters["tokens_per_second"] / one["tokens_per_second"]
    first, *later = [abs(a / b - 1) for a, b in zip(one["losses"], all_adapters["losses"], strict=True)]
    shape = f"{given.adapters} adapters, {given.model}, {given.batch}×{given.length} each"
    print(f"{shape}: one {one['ms']:.2f} ms, {one['peak_gib']:.2f} GiB; together {all_adapters['ms']:.2f} ms,")
    print(f"{all_adapters['peak_gib']:.2f} GiB: {ratio:.2f} times the tokens/s")
    print(f"the first loss is {first:.1e} apart, later ones at most {max(later):.1e}")
    write_result(given.json, {"one": one, "together": all_adapters, "ratio": ratio})
    if first > 5e-3:
        raise SystemExit("the adapters have other losses together")


if __name__ == "__main__":
    main()
