"""DPO's step and reference pass on one CUDA device, compared with supervised fine-tuning on as many tokens.

    python -m benchmarks.preference_step [--model llama-3.1-8b] [--pairs 8] [--prompt 1024] [--answer 512]
        [--reference once|each] [--json FILE]

Random weights in NF4, r = 16 on seven linears, padded rows: first one document per row, with every prompt twice, then
rows whose answers share their prompt. Reports ms and computed tokens per second of the steps and of the reference's
forward, and peak memory. Before that it compares the log-probabilities of the fused model with transformers' forwards,
and the sums and gradients of CUDA graphs with eager steps, which must be bit-equal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import free_memory, parser_of, write_result
from benchmarks.step_model import build, levels, model_config, run_config, timed

ERROR = 0.02  # mean difference of bf16 log-probabilities, relative to their mean size


def batch_of(name: str, pairs: int, prompt: int, answer: int, *, shared: bool = False) -> dict[str, Any]:
    """Return random pairs, collated like `halfbyte train` does for a GPU, with reference log-probabilities of 0."""
    from datasets import Dataset

    from halfbyte.data.collate import PaddedCollator
    from halfbyte.data.collate_answers import AnswerCollator, as_documents
    from halfbyte.methods.preference import ANSWERS

    generator = torch.Generator().manual_seed(1)
    sizes = {"prompt_ids": prompt, "chosen_ids": answer, "rejected_ids": answer}
    words = {key: torch.randint(3, model_config(name).vocab_size, (pairs, size), generator=generator).tolist()
             for key, size in sizes.items()}  # fmt: skip
    masks = {f"{side}_mask": [[1] * answer] * pairs for side in ("chosen", "rejected")}
    rows = as_documents(Dataset.from_dict(words | masks), ANSWERS, shared=shared)
    collate = AnswerCollator(PaddedCollator(2, True, prompt + answer, True), rounded=True)
    batch = collate([{**row, "reference": [0.0] * (2 * answer)} for row in rows])
    return {key: value.cuda() if isinstance(value, Tensor) else value for key, value in batch.items()}


def method_for(name: str, each: bool) -> Any:
    from halfbyte.methods import method_of

    asked = {"method": "dpo", "packing": False, "precompute_ref_log_probs": not each}
    return method_of(run_config(name).model_copy(update={**asked, "beta": 0.1, "loss_type": "sigmoid"}))


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def checked(name: str) -> None:
    """Exit unless fused log-probabilities equal transformers' and graphs equal eager steps."""
    import halfbyte
    from halfbyte.methods.answers import log_probs
    from halfbyte.modeling.adapters import compute_autocast

    model = build(name, "cuda")
    with torch.no_grad():
        for parameter in trained_of(model):
            parameter += 0.02 * torch.randn_like(parameter)
    batches = [batch_of(name, 2, 96, 100, shared=shared) for shared in (False, True)]
    with torch.no_grad(), compute_autocast(model, torch.bfloat16):
        plain = log_probs(model, batches[0])[:400]
        halfbyte.patch(model)
        for kind, batch in zip(("apart", "shared"), batches, strict=True):
            fused = log_probs(model, batch)[:400]
            apart = float((fused - plain).abs().mean() / plain.abs().mean())
            print(f"log-probabilities fused, prompts {kind}, and not fused: {apart:.2e} apart", flush=True)
            if not apart < ERROR:
                raise SystemExit("the fused model's log-probabilities are not the model's")
    for kind, batch in zip(("apart", "shared"), batches, strict=True):
        print(f"prompts {kind}:")
        _check_graphs(name, model, batch)


def _check_graphs(name: str, model: Any, batch: dict[str, Any]) -> None:
    from halfbyte.train.stepper import GraphedStepper, Stepper

    found = {}
    for reference in ("once", "each"):
        asked = method_for(name, reference == "each")
        inputs = {key: value for key, value in batch.items() if reference == "once" or key != "reference"}
        for kind in ("eager", "graph"):
            found[kind] = steps_of(model, asked, inputs, kind == "graph", Stepper, GraphedStepper)
        worst = max(float((a - b).abs().max()) for a, b in zip(found["eager"], found["graph"], strict=True))
        print(f"reference {reference}: sums and gradients of graphs and eager steps at most {worst:.2e} apart")
        if worst:
            raise SystemExit("a graph computes something else")


def steps_of(model: Any, asked: Any, batch: Any, graphed: bool, plain: Any, with_graphs: Any) -> list[Tensor]:
    """Return the sums and gradients of the last of six micro-batches; the sixth is a graph's third replay."""
    from halfbyte.modeling.adapters import compute_autocast

    def sums(given: Any) -> dict[str, Tensor]:
        with compute_autocast(model, torch.bfloat16):
            return asked.sums(model, given)

    trained = trained_of(model)
    stepper = with_graphs(sums, trained) if graphed else plain(sums)
    count = torch.ones((), device="cuda")
    for _ in range(6):
        for parameter in trained:
            parameter.grad = None
        last = stepper([batch], count)
    if graphed and not stepper.holds_graphs:
        raise SystemExit("no graph was captured")
    found = [last.clone(), *(parameter.grad.clone() for parameter in trained)]
    stepper.close()
    for parameter in trained:
        parameter.grad = None
    return found


def steps_for(given: argparse.Namespace) -> dict[str, tuple[Callable[[], Tensor], int]]:
    """Return the steps to time, by name, each with its tokens."""
    import halfbyte
    from halfbyte.methods.answers import as_reference, log_probs
    from halfbyte.modeling.adapters import compute_autocast
    from halfbyte.modeling.head import causal_lm_loss

    length = given.prompt + given.answer
    rows, model = 2 * given.pairs, build(given.model, "cuda")
    halfbyte.patch(model, levels(given.model, rows, length, "auto", None))
    trained = trained_of(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    shape, asked = (given.model, given.pairs, given.prompt, given.answer), method_for(given.model, True)
    batch = batch_of(*shape)
    left = {"reference"} if given.reference == "each" else set()
    inputs, shared = (
        {key: value for key, value in each.items() if key not in left}
        for each in (batch, batch_of(*shape, shared=True))
    )
    text = {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}

    def finish(loss: Tensor) -> Tensor:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def preference(pairs: dict[str, Any]) -> Tensor:
        with compute_autocast(model.train(), torch.bfloat16):
            return finish(asked.sums(model, pairs)["loss"] / given.pairs)

    def imitation() -> Tensor:
        with compute_autocast(model.train(), torch.bfloat16):
            loss, tokens = causal_lm_loss(model, text)
        return finish(loss / tokens)

    @torch.no_grad()
    def reference() -> Tensor:
        with compute_autocast(model.eval(), torch.bfloat16), as_reference(model):
            return log_probs(model, batch).sum()

    apart, once = (each["input_ids"].numel() for each in (inputs, shared))
    return {"sft": (imitation, apart), "dpo": (partial(preference, inputs), apart),
            "dpo, shared": (partial(preference, shared), once), "reference": (reference, apart)}  # fmt: skip


def measured(given: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, (step, tokens) in steps_for(given).items():
        free_memory()
        found[name] = timed(step, tokens, given.steps)
        print(json.dumps({name: found[name]}), flush=True)
    found["shared_speed"] = found["dpo"]["ms"] / found["dpo, shared"]["ms"]
    found["reference_speed"] = found["reference"]["tokens_per_second"] / found["dpo"]["tokens_per_second"]
    found["peak"] = found["dpo"]["peak_gib"] / found["sft"]["peak_gib"]
    return found


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", default="llama-3.1-8b")
    made.add_argument("--pairs", type=int, default=8)
    made.add_argument("--prompt", type=int, default=1024)
    made.add_argument("--answer", type=int, default=512)
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--reference", choices=["once", "each"], default="once")
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    checked("tiny")
    result = {"settings": vars(given), **measured(given)}
    print(json.dumps({name: result[name] for name in ("shared_speed", "reference_speed", "peak")}))
    write_result(given.json, result)


if __name__ == "__main__":
    main()
