"""Plans of quantization-aware training, compared with the allocations of a real step."""

import pytest
import torch
import transformers

from halfbyte.adapters.lora import add_adapter
from halfbyte.autograd.losses import linear_cross_entropy
from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Batches, Shape
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.modeling.architectures import quantizable
from halfbyte.plan.estimate import GIB, estimate
from halfbyte.plan.ledger import Ledger
from halfbyte.qat.model import fake_quantize_linears, round_sums
from halfbyte.utils.errors import ModelError
from tests.helpers.planned_steps import transient_bytes

WIDE = transformers.LlamaConfig(
    vocab_size=115,
    hidden_size=128,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
TOKENS = torch.zeros(1, 40, dtype=torch.long)


def config(**keys):
    keys = {"dtype": "float32", "device": "cpu", "r": 4, "load_in_4bit": False, "qat_scheme": "nf4"} | keys
    return RunConfig(model_name_or_path="m", dataset="d", **keys)


def real_peak(config):
    model = transformers.LlamaForCausalLM(WIDE).to(getattr(torch, config.dtype))
    if config.merge_aware:
        for name, linear in quantizable(model).items():
            model.set_submodule(name, QuantizedLinear.from_linear(linear, named(config.storage.formats[0][1])))
        round_sums(model)
    else:
        fake_quantize_linears(model, named(config.qat_scheme))
    model = add_adapter(model, config) if config.use_peft else model
    for parameter in model.train().parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    ledger = Ledger()
    ledger.ignore(iter((*model.parameters(), *model.buffers())))
    ledger.ignore(p.grad for p in model.parameters() if p.grad is not None)
    base = model.get_base_model() if config.use_peft else model
    with ledger:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.dtype == "bfloat16"):
            hidden = base.model(input_ids=TOKENS, use_cache=False).last_hidden_state
            loss = linear_cross_entropy(hidden, base.lm_head.weight, TOKENS)
        del hidden
        loss.backward()
    return ledger.peak


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("scheme", "dtype", "use_peft"),
    [
        ("nf4", "float32", True),
        ("int4", "bfloat16", True),
        ("int8", "bfloat16", False),
        ("fp8", "bfloat16", True),
        ("nvfp4", "float32", False),
    ],
)
def test_a_replayed_step_allocates_what_a_real_one_does(scheme, dtype, use_peft):
    keys = config(qat_scheme=scheme, dtype=dtype, use_peft=use_peft)
    predicted, _ = transient_bytes(keys, WIDE, Shape(*TOKENS.shape), "keep")
    assert 0.75 * predicted <= real_peak(keys) <= 1.05 * predicted


def test_a_replayed_merge_aware_step_allocates_what_a_real_one_does():
    keys = config(merge_aware=True, load_in_4bit=True, qat_scheme=None)
    predicted, _ = transient_bytes(keys, WIDE, Shape(*TOKENS.shape), "keep")
    assert 0.75 * predicted <= real_peak(keys) <= 1.05 * predicted


@pytest.mark.slow
def test_fake_quantized_weights_are_workspace():
    """Compared with a run without QAT, six layers need no more than three: one weight is quantized at a time."""
    more = []
    for layers in (3, 6):
        model_config = transformers.LlamaConfig(**WIDE.to_dict() | {"num_hidden_layers": layers})
        plans = [
            estimate(config(qat_scheme=scheme), model_config, capacity_bytes=GIB, batches=Batches.uniform(1, 8))
            for scheme in ("nf4", None)
        ]
        assert plans[0].weights == plans[1].weights
        more.append(plans[0].activations - plans[1].activations)
    largest = 128 * 1024
    assert 8 * largest < more[0] <= 16 * largest
    assert abs(more[1] - more[0]) < largest


def test_qat_disables_fused_forwards():
    assert estimate(config(device="cuda", dtype="bfloat16"), WIDE, device="cuda", capacity_bytes=GIB).levels == ()


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ModelError, match=r"qat_scheme:.*'nf3'"):
        estimate(config(qat_scheme="nf3"), WIDE, capacity_bytes=GIB)
