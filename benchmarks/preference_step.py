"""DPO's step and reference pass on one CUDA device, beside our own step of as many tokens of supervised fine-tuning.

    python -m benchmarks.preference_step [--model llama-3.1-8b] [--pairs 8] [--prompt 1024] [--answer 512] [--steps 5]
                                         [--reference once|each] [--prompts once|twice|both] [--json FILE]

Random weights in NF4, r=16 on seven linears, as padded rows. Each pair's prompt stands once before both answers, as a run
has it, or before each. Reported are ms and tokens a
second of both steps and of the reference's forward, and each one's peak. Asked: the reference's tokens a second at
least 1.9 times the step's, DPO's peak within 5% of the other's. Before that both answers' log-probabilities of the
fused model are compared with transformers' own forwards, and the losses of steps as CUDA graphs with eager ones.
"""

from __future__ import annotations

import argparse
import gc
import json
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import write_result
from benchmarks.step_model import build, levels, model_config, run_config, timed

ERROR = 0.02  # of a log-probability, relative to their mean size, in bf16


def batch_of(name: str, pairs: int, prompt: int, answer: int, once: bool = True) -> dict[str, Any]:
    """Random pairs as `halfbyte train` collates them for a GPU, with the reference's log-probabilities set to 0."""
    from halfbyte.data.collate import PaddedCollator
    from halfbyte.data.paired import AnswerCollator

    length, generator = prompt + answer, torch.Generator().manual_seed(1)
    ids = torch.randint(3, model_config(name).vocab_size, (pairs, 2, length), generator=generator)
    ids[:, 1, :prompt] = ids[:, 0, :prompt]
    rows = []
    for each in ids:
        labels = each.clone()
        labels[:, :prompt] = -100
        kept = torch.cat([torch.arange(length), length + torch.arange(prompt if once else 0, length)])
        parts = {"seq_lengths": [prompt, answer, answer], "answers": [2]} if once else {"seq_lengths": [length, length]}
        rows.append({"input_ids": each.flatten()[kept].tolist(), "labels": labels.flatten()[kept].tolist(),
                     "reference": [0.0] * (2 * answer), **parts})  # fmt: skip
    batch = AnswerCollator(PaddedCollator(2, True, length, True), rounded=True)(rows)
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in batch.items()}


def method_for(name: str, each: bool) -> Any:
    from halfbyte.methods import method_of

    asked = {"method": "dpo", "packing": False, "precompute_ref_log_probs": not each}
    return method_of(run_config(name).model_copy(update={**asked, "beta": 0.1, "loss_type": "sigmoid"}))


def trained_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def checked(name: str) -> None:
    """Log-probabilities fused and not; losses and gradients of a few pairs in graphs and eager.

    Raises:
        SystemExit: they differ.
    """
    import halfbyte
    from halfbyte.adapters import compute
    from halfbyte.methods.answers import log_probs
    from halfbyte.train.stepper import GraphedStepper, Stepper

    model = build(name, "cuda")
    with torch.no_grad():
        for parameter in trained_of(model):
            parameter += 0.02 * torch.randn_like(parameter)
    batch, twice = batch_of(name, 2, 96, 100), batch_of(name, 2, 96, 100, once=False)
    with torch.no_grad(), compute(model, torch.bfloat16):
        plain = log_probs(model, twice)
        halfbyte.patch(model)
        for said, given in (("prompts twice", twice), ("prompts once", batch)):
            fused = log_probs(model, given)[: len(plain)]
            apart = float((fused - plain[: len(fused)]).abs().mean() / plain.abs().mean())
            print(f"log-probabilities fused, {said}, and not: {apart:.2e} apart", flush=True)
            if not apart < ERROR:
                raise SystemExit("the fused model's log-probabilities are not the model's")
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
    """The sums of the last of six micro-batches, and its gradients; the sixth is a graph's third replay."""
    from halfbyte.adapters import compute

    def sums(given: Any) -> dict[str, Tensor]:
        with compute(model, torch.bfloat16):
            return asked.sums(model, given)

    trained = trained_of(model)
    stepper = with_graphs(sums, trained, lambda: True) if graphed else plain(sums)
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


def built(given: argparse.Namespace) -> Any:
    import halfbyte

    model = build(given.model, "cuda")
    halfbyte.patch(model, levels(given.model, 2 * given.pairs, given.prompt + given.answer, "auto", None))
    return model


def measured(given: argparse.Namespace, model: Any, once: bool) -> dict[str, Any]:
    from halfbyte.adapters import compute
    from halfbyte.methods.answers import as_reference, log_probs
    from halfbyte.models.head import causal_lm_loss

    trained = trained_of(model)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    batch = batch_of(given.model, given.pairs, given.prompt, given.answer, once)
    asked, tokens = method_for(given.model, True), batch["input_ids"].numel()
    inputs = dict(batch) if given.reference == "once" else {k: v for k, v in batch.items() if k != "reference"}
    text = {"input_ids": batch["input_ids"], "labels": batch["input_ids"].clone()}

    def finish(loss: Tensor) -> Tensor:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def preference() -> Tensor:
        with compute(model, torch.bfloat16):
            return finish(asked.sums(model, inputs)["loss"] / given.pairs)

    def imitation() -> Tensor:
        with compute(model, torch.bfloat16):
            loss, count = causal_lm_loss(model, text)
        return finish(loss / count)

    @torch.no_grad()
    def reference() -> Tensor:
        with compute(model, torch.bfloat16), as_reference(model):
            return log_probs(model, batch).sum()

    found = {}
    for name, step in (("sft", imitation), ("dpo", preference), ("reference", reference)):
        model.train(name != "reference")
        gc.collect()
        torch.cuda.empty_cache()
        found[name] = timed(step, tokens, given.steps)
        print(json.dumps({name: found[name]}), flush=True)
    found["reference_speed"] = found["reference"]["tokens_per_second"] / found["dpo"]["tokens_per_second"]
    found["peak"] = found["dpo"]["peak_gib"] / found["sft"]["peak_gib"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--reference", choices=["once", "each"], default="once")
    parser.add_argument("--prompts", choices=["once", "twice", "both"], default="once")
    parser.add_argument("--json")
    given = parser.parse_args()
    checked("tiny")
    model, result = built(given), {"settings": vars(given)}
    for prompts in ("twice", "once") if given.prompts == "both" else (given.prompts,):
        print(f"prompts {prompts}", flush=True)
        result[prompts] = measured(given, model, prompts == "once")
        print(json.dumps({name: result[prompts][name] for name in ("reference_speed", "peak")}))
    write_result(given.json, result)


if __name__ == "__main__":
    main()
