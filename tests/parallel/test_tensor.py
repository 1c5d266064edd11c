"""Tensor parallelism equals the same model on one process."""

from unittest import mock

import pytest
import torch
from torch import nn

from halfbyte.formats import from_spec
from halfbyte.generation import generate
from halfbyte.layers import QuantizedLinear
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.mesh.reduction import clip_gradients, sharded_along, sum_gradients
from halfbyte.mesh.sharded_linears import ShardedStore, full_parameters, shard_of
from halfbyte.modeling.head import causal_lm_loss, shard_vocabulary
from halfbyte.modeling.patch import patch
from halfbyte.parallel.tensor import apply_tensor_parallel, check_tensor_parallel
from halfbyte.utils.errors import ModelError
from tests.helpers.patch_models import batch, tiny

pytestmark = pytest.mark.dist

# Sides whose halves and quarters are multiples of every block.
SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
KINDS = ["blockwise4:nf4:64:nested", "int8", "fp8:row", "nvfp4:2d:plain", "mxfp4", "kbit:3:bnf", "hqq:4:64"]


def stored(model, spec):
    """Return `model` with its frozen linears in a format."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "lora" not in name and name not in ("lm_head", "default"):
                setattr(module, name, QuantizedLinear.from_linear(child, from_spec(spec)))
    return model


def prepared(mesh, family, spec, fused, level=None, **lora):
    torch.manual_seed(3)
    model = tiny(family, shape=SHAPE, **lora)
    model = stored(model, spec) if spec else model.double()
    if mesh.size > 1:
        apply_tensor_parallel(model, mesh)
        if mesh.degree("shard") > 1:  # which `shard_model` would do
            shard_vocabulary(model, mesh, ("shard", "tensor"))
    if fused:
        report = patch(model, level)
        assert report.fused["gated activation"] == 2
    return model


def trained(mesh, family, spec, fused, level=None, **lora):
    """Return losses, gradients, norms, adapters and an answer of three steps on this rank's sequences."""
    model = prepared(mesh, family, spec, fused, level, **lora)
    factors = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, found = torch.optim.SGD(factors.values(), lr=0.1), []
    for step in range(3):
        torch.manual_seed(step)
        inputs = {
            key: value[mesh.coordinate("shard") :: mesh.degree("shard")]
            for key, value in batch(packed=step == 1).items()
        }
        loss, _ = causal_lm_loss(model, inputs)
        (loss / 40).backward()
        sums = sum_gradients(mesh, list(factors.values()), loss.detach().reshape(1))
        norm = clip_gradients(mesh, list(factors.values()), 0.5)
        found.append((sums, norm, {name: _whole(p, p.grad) for name, p in factors.items()}))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    answer = generate(model, batch()["input_ids"][:2, :5].tolist(), max_new_tokens=4, stops=[])
    with full_parameters(factors.values()):
        return found, {name: p.detach().clone() for name, p in factors.items()}, answer


def _whole(parameter, part):
    return part.clone() if shard_of(parameter) is None else shard_of(parameter).gather(part)


def assert_close(name, found, expected, error):
    relative = (found - expected).norm() / expected.norm()
    assert relative <= error, f"{name}: {relative:.2g}"


def assert_same_training(results, expected, loss_error=1e-6, error=1e-5):
    for steps, adapters, answer in results:
        for (loss, norm, grads), (true_loss, true_norm, true_grads) in zip(steps, expected[0], strict=True):
            torch.testing.assert_close(loss, true_loss, rtol=loss_error, atol=0)
            torch.testing.assert_close(norm.float(), true_norm.float(), rtol=1e-5, atol=0)
            assert grads.keys() == true_grads.keys()
            for name, grad in grads.items():
                error = (grad - true_grads[name]).norm() / true_grads[name].norm()
                assert error <= 1e-5, f"{name}: {error:.2g}"
        for name, adapter in adapters.items():
            assert_close(name, adapter, expected[1][name], error)
        assert answer == expected[2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_families_equal_one_process(two, family, fused):
    """Biases of all linears, q and k norms, norms after blocks, and softcaps; float64 excludes rounding."""
    results = two.run(trained, family, None, fused, layout={"tensor": 2})
    assert_same_training(results, trained(SINGLE_PROCESS, family, None, fused), 1e-8, 1e-6)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("spec", KINDS)
def test_formats_equal_one_process(two, spec):
    assert_same_training(
        two.run(trained, "Llama", spec, True, layout={"tensor": 2}), trained(SINGLE_PROCESS, "Llama", spec, True)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", ["recompute", "recompute_mlp", "checkpoint", "tiled"])
def test_activation_levels_equal_one_process(two, level):
    results = two.run(trained, "Mistral", KINDS[0], True, level, layout={"tensor": 2})
    assert_same_training(results, trained(SINGLE_PROCESS, "Mistral", KINDS[0], True, level))


def trained_with_dropout(mesh, fused, level=None):
    return trained(mesh, "Llama", None, fused, level, lora_dropout=0.3)


def test_ranks_drop_their_columns_of_one_mask(two):
    """Also in `down_proj`, whose inputs are divided."""
    results = two.run(trained_with_dropout, True, "recompute_mlp", layout={"tensor": 2})
    assert_same_training(results, trained_with_dropout(SINGLE_PROCESS, True, "recompute_mlp"), 1e-8, 1e-6)
    unfused = two.run(trained_with_dropout, False, layout={"tensor": 2})
    assert_same_training(unfused[:1], unfused[1])


def kept(mesh, level):
    """Return the elements of the stream saved in a forward: on this rank, and of the full stream."""
    model, sizes, pack = prepared(mesh, "Llama", KINDS[0], True, level), [], ShardedStore.pack

    def seen(self, tensor):
        packed = pack(self, tensor)
        sizes.append((packed[0].tensor.numel(), tensor.numel()))
        return packed

    with mock.patch.object(ShardedStore, "pack", seen):
        causal_lm_loss(model, batch())
    return sizes


@pytest.mark.parametrize("level", ["checkpoint", "tiled", "recompute"])
def test_saved_stream_is_sharded(two, level):
    """Levels that save only each layer's input shard it; other levels shard nothing."""
    stream = batch()["input_ids"].numel() * SHAPE["hidden_size"]
    expected = [] if level == "recompute" else [(stream // 2, stream)] * 2
    assert two.run(kept, level, layout={"tensor": 2}) == [expected] * 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 4}, {"shard": 2, "tensor": 2}], ids=str)
def test_four_processes_equal_one(four, layout):
    results = four.run(trained, "Llama", KINDS[0], True, layout=layout)
    assert_same_training(results, trained(SINGLE_PROCESS, "Llama", KINDS[0], True))


def held(mesh):
    """Return the bytes of this rank's linears, and which factors are sharded."""
    model = prepared(mesh, "Llama", KINDS[0], True)
    layers = model.get_base_model().model.layers
    bytes_ = sum(p.nbytes for name, p in layers.named_parameters() if "base_layer.weight" in name)
    cut = {name.split("layers.")[1].removesuffix(".default.weight") for name, p in model.named_parameters()
           if p.requires_grad and sharded_along(p)}  # fmt: skip
    return bytes_, {name for name in cut if name.startswith("0.")}


def test_each_rank_holds_its_shard(two):
    (one, cut), (other, _) = two.run(held, layout={"tensor": 2})
    whole_bytes, _ = held(SINGLE_PROCESS)
    assert one == other
    assert one <= whole_bytes / 2 * 1.12  # columns have scales that are not nested
    rows, columns = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    assert {name.split(".", 2)[2] for name in cut} == {
        *(f"{name}.lora_B" for name in rows), *(f"{name}.lora_A" for name in columns)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("family", "shape", "ways", "named"),
    [
        ("Llama", {}, 4, "2 key heads"),
        ("Llama", {"intermediate_size": 50, "num_key_value_heads": 4}, 4, "50 channels"),
        ("Phi3", {}, 2, "Phi3"),
        ("Mixtral", {}, 2, "Mixtral"),
        ("Llama", {"attention_dropout": 0.1}, 2, "attention_dropout"),
    ],
)
def test_unsupported_sizes_are_refused(family, shape, ways, named):
    with pytest.raises(ModelError, match=f"parallel: {{tensor: {ways}}}: .*{named}"):
        check_tensor_parallel(tiny(family, adapter=False, shape=shape), ways)


def test_unsplittable_format_is_refused():
    model = stored(tiny("Llama", shape=SHAPE | {"intermediate_size": 160}), "kbit:4:bnf")
    with pytest.raises(ModelError, match=r"parallel: {tensor: 2}: down_proj: kbit:4:bnf:.*\(64, 160\).*by"):
        check_tensor_parallel(model, 2)
    check_tensor_parallel(stored(tiny("Llama", shape=SHAPE), "kbit:4:bnf"), 2)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"use_dora": True}, "q_proj:.*LoRA"),
        ({"lora_bias": True}, "q_proj: .*bias"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_unsupported_adapters_are_refused(lora, said):
    model = tiny("Llama", **lora)
    with pytest.raises(ModelError, match=said):
        check_tensor_parallel(model, 2)
