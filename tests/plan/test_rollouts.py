"""The rollout phase of a plan, compared with an engine, and its choices under memory pressure."""

import functools
from dataclasses import replace

import pytest
import torch
import transformers

from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Batches, Shape
from halfbyte.formats import Blockwise4
from halfbyte.generation import Rollouts, Sampling
from halfbyte.layers import Linear4bit
from halfbyte.plan.estimate import GIB, estimate
from halfbyte.plan.shapes import ModelShapes

LLAMA_8B = transformers.LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072, tie_word_embeddings=False,
)  # fmt: skip


def config_of(**keys):
    given = {"model_name_or_path": "m", "dataset": "d", "method": "grpo", "reward_funcs": ["exact"], "r": 16}
    given |= {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 16}
    return RunConfig(**given | {"max_completion_length": 256, "max_length": 384} | keys)


@functools.cache
def shapes_8b(**keys):
    return ModelShapes(config_of(**keys), LLAMA_8B, torch.device("cuda"))


def plan_8b(capacity, prompts=(128,) * 32, **keys):
    batches = Batches(Shape(16, 384), Shape(16, 384), prompts=prompts)
    answered = keys.pop("answered", None)
    how = {"device": "cuda", "batches": batches, "capacity_bytes": int(capacity * GIB), "answered": answered}
    shapes = shapes_8b(**keys)
    return estimate(config_of(**keys), LLAMA_8B, shapes=shapes, **how)


def test_plan_matches_an_engines_bytes():
    """Pages and dequantized weights of an engine on the CPU equal its tensors' bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    model_config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048
    )
    prompts, new = [90, 40, 33, 20], 30
    keys = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "dtype": "float32",
    }
    batches = Batches(Shape(8, 120), Shape(8, 120), prompts=tuple(prompts))
    config = config_of(**keys, max_completion_length=new, max_length=120, r=4)
    plan = estimate(config, model_config, device="cpu", batches=batches, capacity_bytes=GIB).answering
    model = transformers.LlamaForCausalLM(model_config)
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            model.set_submodule(name, Linear4bit.from_linear(module, Blockwise4("nf4", 64, True)))
    engine = Rollouts(model, rows=16, weights=plan.weights, memory_gib=plan.pages / GIB)
    ids = [torch.randint(3, 128, (length,)).tolist() for length in prompts]
    engine.generate(ids, 4, max_new_tokens=new, sampling=Sampling(1.0, seed=1), stops=[])
    decoder = engine._decoder
    assert decoder.unpacked == (plan.weights == "unpacked") is True
    assert plan.pages == sum(cache.nbytes for pair in decoder.caches for cache in pair)
    linears = [
        each for layer in decoder.layers for each in (layer.inputs, layer.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    weights = [each.fused.weight.nbytes for each in linears]
    assert sum(weights) <= plan.decoded == pytest.approx(sum(weights), rel=0.25)  # this one has no adapter


def test_recurrent_states_are_planned_in_addition_to_pages():
    """Of a hybrid, byte for byte of its engine's tensors; a CPU's batch is never filled up."""
    from tests.helpers.patch_models import tiny

    model, new = tiny("Qwen3_5Text", adapter=False, shape={"linear_key_head_dim": 32}).eval(), 30
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 4}
    config = config_of(**keys, dtype="float32", max_completion_length=new, max_length=120, r=4)
    prompts = [90, 40, 33, 20]
    batches = Batches(Shape(8, 120), Shape(8, 120), prompts=tuple(prompts))
    plan = estimate(config, model.config, device="cpu", batches=batches, capacity_bytes=GIB).answering
    engine = Rollouts(model, rows=16, weights=plan.weights, memory_gib=plan.pages / GIB)
    ids = [torch.randint(3, 101, (length,)).tolist() for length in prompts]
    engine.generate(ids, 4, max_new_tokens=new, sampling=Sampling(1.0, seed=1), stops=[])
    assert plan.pages == sum(cache.nbytes for pair in engine._decoder.caches for cache in pair)


@pytest.mark.slow
def test_the_8b_within_40_gib():
    plan = plan_8b(40)
    assert plan.answering.weights == "unpacked"
    assert plan.answering.decoded == pytest.approx(6.98e9 * 2, rel=0.03)
    assert plan.answering.pages == pytest.approx(131072 * (64 * 32 * 2 + 256 * 64 * 4 + 64 * 33), rel=0.06)
    assert plan.rollouts > 0  # the higher phase
    assert plan.fits
    stays = plan.weights + plan.adapters + plan.gradients + plan.optimizer + plan.runtime
    assert plan.total == stays + max(plan.answering.total, plan.activations + plan.logits)
    assert not plan.use_graphs  # their pool would stay allocated


@pytest.mark.slow
def test_graphs_are_used_if_rollouts_keep_all_their_memory():
    roomy, tight = plan_8b(130), plan_8b(40)
    assert roomy.use_graphs
    assert replace(roomy.answering, stays=False) == tight.answering
    stays = roomy.weights + roomy.adapters + roomy.gradients + roomy.optimizer + roomy.runtime
    pool = roomy.activations + roomy.logits
    beside = stays + pool + roomy.graphs + roomy.answering.total
    assert roomy.answering.stays == (beside <= 0.9 * 130 * GIB)
    assert roomy.total == (beside if roomy.answering.stays else stays + pool + max(roomy.answering.total, roomy.graphs))
    least = stays + pool + roomy.answering.total
    assert plan_8b(1.2 * least / GIB, activation_checkpointing=False).use_graphs
    assert not plan_8b(1.05 * least / GIB, activation_checkpointing=False).use_graphs  # no tenth to spare
    assert not plan_8b(130, use_kernels=False).use_graphs


@pytest.mark.slow
def test_rollout_memory_stays_allocated_if_both_fit():
    """With the CUDA graphs of decoding. Runs without graphs, or that would fill the device, free it. With many batch
    shapes, some run outside of the pool."""

    def plan(capacity, **more):
        shapes = {"second": Shape(16, 300), "many": True, "prompts": (128,) * 32}
        batches = Batches(Shape(16, 384), Shape(16, 384), **shapes)
        how = {"device": "cuda", "batches": batches, "capacity_bytes": int(capacity)}
        return estimate(config_of(activation_checkpointing=False, **more), LLAMA_8B, **how)

    most = plan(1000 * GIB)
    assert most.answering.stays
    assert most.rollouts == most.answering.total
    assert most.graphs > GIB
    assert plan(1.001 * most.total / 0.9).answering.stays
    full = plan(0.999 * most.total / 0.9)
    assert full.use_graphs
    assert not full.answering.stays
    assert full.total == most.total - min(full.graphs, full.answering.total)
    assert not plan(1000 * GIB, use_kernels=False).answering.stays


@pytest.mark.slow
def test_a_resumed_run_keeps_its_rollout_choices():
    """Whatever memory is free now, because another GEMM path would round differently."""
    began = plan_8b(22).answering
    assert replace(plan_8b(80, answered=(began.weights, began.pages)).answering, stays=False) == began
    assert not plan_8b(22, answered=("unpacked", 9 * GIB)).fits
