"""all-linear on families whose layers are more than linears: routers, Mamba layers, linears of their own classes."""

import pytest
import torch
import transformers

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.modeling.compute_dtype import compute_autocast, no_input_casts
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.plan.estimate import estimate
from halfbyte.plan.shapes import ModelShapes
from halfbyte.utils import notices
from halfbyte.utils.errors import ModelError
from tests.helpers.families import FAMILIES, SHAPE
from tests.helpers.patch_models import batch

MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
SIZES = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")}
EXPERTS = {"num_local_experts": 4}
CONFIGS = {  # and what all-linear adapts there
    "Llama4Text": (SHAPE | EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 8},
                   {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    "Phimoe": (SHAPE | EXPERTS, {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "FalconH1": (SHAPE | MAMBA,
                 {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj"}),
    "Mamba": (SIZES | {"state_size": 8}, {"in_proj"}),
    "Falcon": (SIZES | {"num_attention_heads": 4},
               {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
    "Qwen3Next": (
        SHAPE | FAMILIES["Qwen3Next"],
        {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate",
         "gate_proj", "up_proj", "down_proj"},
    ),
}  # fmt: skip


def config(**keys):
    return RunConfig(model_name_or_path="m", dataset="d", **{"r": 4, "load_in_4bit": False, "device": "cpu"} | keys)


def built(family):
    model_config = getattr(transformers, f"{family}Config")(**CONFIGS[family][0])
    return transformers.AutoModelForCausalLM.from_config(model_config).train()


def step(model, every: bool = True) -> None:
    """As `train` takes one; `every` adapter gets a gradient."""
    with no_input_casts(model), compute_autocast(model):
        loss, tokens = causal_lm_loss(model, batch())
    (loss / tokens).backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    without = [name for name, parameter in trained.items() if parameter.grad is None]
    assert not (every and without)
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in trained.values())
    torch.optim.AdamW(trained.values(), lr=1e-3).step()


@pytest.mark.parametrize("family", CONFIGS)
def test_all_linear_trains(family):
    model = add_adapter(built(family), config())
    factors = [name for name, _ in model.named_parameters() if "lora_A" in name]
    adapted = {name.partition(".lora_A")[0].rpartition(".")[2] for name in factors}
    assert adapted - {"experts", "base_layer"} == CONFIGS[family][1]  # PEFT's names of what wraps stacked experts
    step(model)
    assert ("all-linear-mamba" in notices.notices_so_far()) == (family in ("FalconH1", "Mamba"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_memory_plan_adapts_the_same_layers(family):
    model = add_adapter(built(family), config())
    model_config = getattr(transformers, f"{family}Config")(**CONFIGS[family][0])
    plan = ModelShapes(config(), model_config, torch.device("cpu")).trainable()
    assert plan.numel == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for dtype in ("bfloat16", "float32"):  # torch's fake product of experts knows the first alone
        assert estimate(config(max_length=64, dtype=dtype), model_config, device=torch.device("cpu")).total > 0


@pytest.mark.slow
def test_all_linear_trains_or_is_refused_in_every_family():
    """Every causal LM of transformers that builds from a tiny configuration."""
    families = pytest.importorskip("tests.helpers.all_families")
    died, tried = {}, 0
    for name in families.NAMES:
        try:
            model = families.build(name).train()
        except Exception:  # transformers' own
            continue
        tried += 1
        try:
            step(add_adapter(model, config()), every=False)
        except ModelError:
            continue
        except Exception as error:
            died[name] = f"{type(error).__name__}: {error}"
    assert tried > 150
    assert died.keys() <= {"reformer"}, died  # which trains on rows of a multiple of its chunks


@pytest.mark.parametrize("targets", [["router"], r".*feed_forward\.router"])
def test_a_router_that_is_named_is_refused(targets):
    with pytest.raises(ModelError, match=r"layers\.0\.feed_forward\.router.*Llama4Router") as raised:
        add_adapter(built("Llama4Text"), config(target_modules=targets))
    assert raised.value.fix


def test_a_model_without_linears_is_refused():
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ModelError, match=r"nn\.Linear"):
        add_adapter(model, config())


@pytest.fixture(autouse=True)
def _unsaid():
    notices.reset_notices()
