"""The balancing loss of a mixture's routers against transformers' own, and how often experts are chosen."""

import pytest
import torch
import transformers

from halfbyte.adapters.lora import add_adapter
from halfbyte.batch import REAL_TOKENS
from halfbyte.config import Parallel, RunConfig, load_config
from halfbyte.config.layouts import unsupported_reason
from halfbyte.methods import method_of
from halfbyte.modeling.compute_dtype import no_input_casts
from halfbyte.modeling.patch import patch, unpatch
from halfbyte.modeling.routers import check_balancing, track_routers
from halfbyte.modeling.transformers_versions import enable_checkpointing
from halfbyte.utils.errors import ConfigError
from tests.helpers.expert_models import MIXTURES, TOKENS, mixture

OTHERS = {
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "Phimoe": {"num_local_experts": 4, "intermediate_size": 32},
    "Jamba": {"num_experts": 4, "intermediate_size": 32, "use_mamba_kernels": False, "attn_layer_period": 2,
              "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0, "mamba_d_state": 8},
}  # fmt: skip
BALANCED = [*(name for name in MIXTURES if name != "DeepseekV3"), *OTHERS]
COEFFICIENT = 0.5
MASK = torch.ones(2, 13, dtype=torch.long)
MASK[1, 9:] = 0
KEYS = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o", "r": 4}


def trainable(name):
    """A mixture with adapters on everything, and its routers trained."""
    model = mixture(name, **OTHERS.get(name, {}))
    gates = {name.rpartition(".")[2] for name, _ in model.named_modules() if name.endswith((".gate", ".router"))}
    adapted = add_adapter(model, RunConfig(**KEYS, modules_to_save=sorted(gates) or None))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.05)
    return adapted.train()


def gradients(model):
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def ours(model, batch):
    """Loss, balancing loss and gradients of a step of one micro-batch."""
    method = method_of(RunConfig(**KEYS, router_aux_loss_coef=COEFFICIENT))
    model.zero_grad()
    with track_routers(model, balanced=True) as routers, no_input_casts(model, torch.float32):
        sums = routers.counted(lambda micro_batch: method.sums(model, micro_batch))(batch)
        count = (batch["labels"][:, 1:] != -100).sum()
        (sums["loss"] / count).backward()
    return sums["loss"].detach() / count, sums["aux_loss"] / count, gradients(model)


def theirs(model, batch):
    config = model.get_base_model().config
    config.output_router_logits, model.get_base_model().router_aux_loss_coef = True, COEFFICIENT
    config.router_aux_loss_coef = COEFFICIENT
    model.zero_grad()
    output = model(**{key: value for key, value in batch.items() if key != REAL_TOKENS}, use_cache=False)
    output.loss.backward()
    config.output_router_logits = False
    return output.loss.detach(), output.aux_loss.detach(), gradients(model)


def assert_same(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)
    assert actual[2].keys() == expected[2].keys()
    for key, gradient in actual[2].items():
        assert (gradient - expected[2][key]).norm() <= 2e-5 * expected[2][key].norm() + 1e-7, key


PADDED = {"input_ids": TOKENS, "attention_mask": MASK, "labels": TOKENS.where(MASK == 1, -100)}
PACKED = {"input_ids": TOKENS, "position_ids": torch.arange(13).expand(2, -1) % 7, "labels": TOKENS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("batch", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("name", BALANCED)
def test_as_transformers(name, batch):
    model = trainable(name)
    if name == "GraniteMoe" and transformers.__version__ < "5.18":  # it fails in transformers, which records no logits
        with pytest.raises(ConfigError):
            check_balancing(model, COEFFICIENT)
        return
    expected = theirs(model, batch)
    assert_same(ours(model, batch), expected)
    assert any(".modules_to_save." in key for key in expected[2])


@pytest.mark.parametrize("level", ["keep", "recompute", "recompute_mlp", "checkpoint", "tiled", "transformers"])
def test_recomputed_routers_count_once(level):
    """Recomputed routers count once, with the same gradient."""
    model = trainable("Qwen3Moe")
    expected = theirs(model, PADDED)
    if level == "transformers":
        enable_checkpointing(model)
        recomputed = ours(model, PADDED)
    else:
        patch(model, level)
        recomputed = ours(model, PADDED)
        unpatch(model)
    assert_same(recomputed, expected)


def test_use():
    model = trainable("Qwen3Moe")
    with track_routers(model, balanced=False) as routers, torch.no_grad():
        routers.counted(lambda batch: model(**batch))(PADDED)
        routers.counted(lambda batch: model(**batch))(method_of(RunConfig(**KEYS)).blank(PADDED))
        model(**PACKED)  # a forward that nobody counts
        use = routers.usage()
    assert list(use["layers"]) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    for layer in use["layers"].values():
        assert sum(layer["used"]) == 2 * int(MASK.sum())  # two of four experts a token
        assert layer["dead"] == [at for at, count in enumerate(layer["used"]) if not count]
        shares = torch.tensor([count for count in layer["used"] if count]) / sum(layer["used"])
        assert layer["entropy"] == pytest.approx(float(-(shares * shares.log()).sum() / torch.tensor(4.0).log()))
    assert not any(module._forward_hooks for module in model.modules())


def test_models_without_balancing_loss():
    model = mixture("DeepseekV3")
    with pytest.raises(ConfigError, match="deepseek_v3"):
        check_balancing(model, 0.01)
    check_balancing(model, None)


def test_balancing_with_context_parallelism_is_refused():
    keys = {"model_name_or_path": "m", "dataset": "d", "router_aux_loss_coef": 0.01}
    with pytest.raises(ConfigError, match=r"parallel:.*2"):
        load_config(None, {**keys, "parallel": {"pipeline": 2}})
    assert unsupported_reason(Parallel(shard=2), load_config(None, keys)) is None
