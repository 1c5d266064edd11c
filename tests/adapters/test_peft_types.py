"""Every type of PEFT's on NF4: trained as on the dequantized weights, saved, and reloaded there and here."""

import copy

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.formats import from_spec
from halfbyte.layers import QuantizedLinear

LINEARS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ONE = {"target_modules": ["q_proj"]}
VIRTUAL = {"num_virtual_tokens": 4}
TYPES = {
    "ADALORA": LINEARS | {"init_r": 6, "target_r": 4, "total_step": 100, "tinit": 5, "tfinal": 10},
    "ADAMSS": ONE | {"r": 8, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BEFT": ONE,
    "BOFT": LINEARS | {"boft_block_size": 4},
    "C3A": ONE | {"block_size": 16},
    "CARTRIDGE": VIRTUAL,
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "DEFT": ONE | {"r": 4},
    "DELORA": LINEARS | {"r": 4},
    "FOURIERFT": ONE | {"n_frequency": 50},
    "FROD": ONE | {"progressbar": False},
    "GRALORA": LINEARS | {"r": 4, "gralora_k": 2},
    "HIRA": LINEARS | {"r": 4},
    "HRA": LINEARS | {"r": 4},
    "IA3": LINEARS | {"feedforward_modules": ["down_proj"]},
    "LILY": {"target_modules": ["q_proj", "v_proj"], "r": 4},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "LOHA": LINEARS | {"r": 4},
    "LOKR": LINEARS | {"r": 4},
    "LORA": LINEARS | {"r": 4},
    "MISS": LINEARS | {"r": 4},
    "MULTITASK_PROMPT_TUNING": VIRTUAL | {"num_tasks": 2},
    "OFT": LINEARS | {"oft_block_size": 16},
    "OSF": ONE | {"effective_rank": 4},
    "PEANUT": ONE | {"r": 4},
    "POLY": LINEARS | {"r": 4, "n_tasks": 2},
    "PREFIX_TUNING": VIRTUAL,
    "PROMPT_TUNING": VIRTUAL,
    "PSOFT": ONE | {"r": 8},
    "PVERA": ONE | {"r": 8},
    "P_TUNING": VIRTUAL | {"encoder_hidden_size": 32},
    "RANDLORA": ONE | {"r": 8},
    "ROAD": LINEARS | {"group_size": 16},
    "SHADOW": {"r": 4},
    "SHIRA": ONE | {"r": 4, "random_seed": 1},
    "SUPERTUNING": ONE,
    "TINYLORA": ONE | {"u": 8},
    "TRAINABLE_TOKENS": {"token_indices": [1, 2, 3]},
    "UNILORA": ONE | {"theta_d_length": 64},
    "VBLORA": ONE | {"r": 2, "num_vectors": 16, "vector_length": 16},
    "VERA": ONE | {"r": 8},
    "WAVEFT": ONE | {"n_frequency": 50},
    "XLORA": {"hidden_size": 64, "xlora_size": 16},
}
VARIANTS = {
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "pissa_niter_4": {"init_lora_weights": "pissa_niter_4"},
    "olora": {"init_lora_weights": "olora"},
    "kasa": {"kasa_config": peft.KasaConfig()},
    "alora": {"alora_invocation_tokens": [3]},
    "qalora": {"use_qalora": True},
}
CHANGE_THE_BASE = {"pissa", "pissa_niter_4", "olora", "kasa"}  # the rest of the weight is rounded again
TASKS = {"POLY", "MULTITASK_PROMPT_TUNING"}
IDS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(1))


def base(*, stored=True):
    """A tiny Llama with linears in NF4, or with the values that these linears hold."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=128, tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config).eval()
    for name, linear in list(model.model.layers.named_modules()):
        if type(linear) is torch.nn.Linear:
            quantized = QuantizedLinear.from_linear(linear, from_spec("blockwise4:nf4:64:nested"))
            if stored:
                model.model.layers.set_submodule(name, quantized)
            else:
                linear.weight.data = quantized.weight.dequantize()
    return model


def logits(model, inputs):
    torch.manual_seed(2)  # PVeRA samples
    with torch.no_grad():
        return model.eval()(input_ids=IDS, **inputs).logits


def trained(model, config, inputs):
    torch.manual_seed(0)
    model = get_peft_model(model, copy.deepcopy(config)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS, **inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return model, losses


def walk(peft_type, options, tmp_path, *, equal=True):
    inputs = {"task_ids": torch.tensor([0, 1])} if peft_type in TASKS else {}
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(peft_type)](task_type="CAUSAL_LM", **options)
    model, losses = trained(base(), config, inputs)
    if equal:
        assert losses == pytest.approx(trained(base(stored=False), config, inputs)[1], rel=1e-5)
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    fresh = base()
    torch.manual_seed(0)  # of PiSSA's randomized SVD
    reloaded = logits(PeftModel.from_pretrained(fresh, tmp_path), inputs)
    torch.testing.assert_close(reloaded, expected, rtol=1e-5, atol=1e-6)
    if equal:
        plain = logits(PeftModel.from_pretrained(base(stored=False), tmp_path), inputs)
        torch.testing.assert_close(plain, expected, rtol=1e-4, atol=1e-5)
    assert len(losses) == 3


@pytest.mark.sampled(6)
@pytest.mark.parametrize("peft_type", TYPES)
def test_a_type_trains_and_reloads(peft_type, tmp_path):
    if peft_type == "ADAMSS":
        pytest.importorskip("sklearn", reason="PEFT's AdaMSS needs scikit-learn")
    options = dict(TYPES[peft_type])
    if peft_type == "XLORA":
        saved = get_peft_model(base(), peft.LoraConfig(**LINEARS, r=4, task_type="CAUSAL_LM", init_lora_weights=False))
        saved.save_pretrained(tmp_path / "lora")
        options["adapters"] = {"0": str(tmp_path / "lora")}
    walk(peft_type, options, tmp_path / "adapter")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_lora_trains_and_reloads(variant, tmp_path):
    walk("LORA", LINEARS | {"r": 4} | VARIANTS[variant], tmp_path, equal=variant not in CHANGE_THE_BASE)


def test_glora_is_refused_by_peft():
    with pytest.raises(ValueError, match="plain"):
        get_peft_model(base(), peft.GloraConfig(target_modules=["q_proj"], r=4))


def test_every_type_is_walked():
    assert {*TYPES, "GLORA"} == {peft_type.value for peft_type in peft.PeftType}
