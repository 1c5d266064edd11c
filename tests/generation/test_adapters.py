"""Answers by the adapter's name: every module that PEFT wraps, kinds of adapters, states of the model."""

import copy

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from halfbyte import generation
from halfbyte.generation import Rollouts, Sampling
from halfbyte.utils.errors import ModelError
from tests.helpers.all_families import build
from tests.helpers.answers import KINDS, NAMES, PROMPTS, adapted, comparisons, expected
from tests.helpers.patch_models import tiny

# One or two families of each way to attend, rotate, route and keep states; `tests.helpers.answers` compares all.
ARCHITECTURES = (
    "bloom", "cohere2", "deepseek_v3", "diffllama", "ernie4_5_moe", "exaone4", "falcon", "falcon_mamba", "gemma2",
    "glm4_moe", "gpt2", "gpt_neo", "gpt_neox", "gpt_oss", "granitemoehybrid", "jamba", "lfm2", "llama", "llama4_text",
    "mamba2", "minimax", "mixtral", "mpt", "nemotron_h", "olmo2", "opt", "persimmon", "phi3", "qwen2_moe", "qwen3",
    "qwen3_5_text", "qwen3_next", "rwkv", "smollm3",
)  # fmt: skip


def check(name, kind):
    model = adapted(kind, build(name))
    if model is None:
        pytest.skip(f"{name} has no such modules")
    for what, result in comparisons(model):
        assert result is True, f"{name}, {kind}: {what}: {result}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", [kind for kind in KINDS[1:] if not kind.startswith("routers")])
def test_each_adapter_answers_as_in_peft(kind):
    """Alone, in a batch, as rollouts, by the server's code, and with one adapter a row; whichever adapter is active."""
    check("llama", kind)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", ["none", "another"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_answer_as_in_peft_and_transformers(name, kind):
    """`python -m tests.helpers.answers` compares all kinds for all causal LMs."""
    assert name in NAMES
    check(name, KINDS[1 + ARCHITECTURES.index(name) % (len(KINDS) - 1)] if kind == "another" else kind)


def greedy(model, **keys):
    return generation.generate(model, PROMPTS[:1], max_new_tokens=6, stops=[], **keys)[0]


@pytest.fixture
def wrapped():
    """A model with two adapters that train a copy of the last norm."""
    return adapted("norms", build("llama"))


def test_the_models_state_is_restored(wrapped):
    wrapped.base_model.set_adapter("second")
    trained = [parameter.requires_grad for parameter in wrapped.parameters()]
    for adapter in ("first", None):
        greedy(wrapped, adapter=adapter)
        assert wrapped.active_adapters == ["second"]
        assert [parameter.requires_grad for parameter in wrapped.parameters()] == trained


def test_several_active_adapters_are_refused():
    model = adapted("linears", build("llama"))
    model.base_model.set_adapter(["first", "second"])
    with pytest.raises(ModelError, match="first, second"):
        greedy(model)
    with pytest.raises(ModelError, match="first, second"):
        Rollouts(model).generate(PROMPTS[:1], max_new_tokens=2)
    assert greedy(model, adapter="second") == expected(model, "second", PROMPTS[0])


def test_a_merged_adapter_answers_and_stays_merged():
    model = adapted("linears", build("llama"))
    right = expected(model, "first", PROMPTS[0])
    model.merge_adapter()
    assert greedy(model) == right
    for adapter in (None, "second"):
        with pytest.raises(ModelError, match="merged"):
            greedy(model, adapter=adapter)
    assert model.get_base_model().model.layers[0].mlp.down_proj.merged


CAUSAL = {"task_type": "CAUSAL_LM"}
OUTSIDE = {
    "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "P_TUNING": peft.PromptEncoderConfig(num_virtual_tokens=3, **CAUSAL),
    "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "ADAPTION_PROMPT": peft.AdaptionPromptConfig(adapter_len=3, adapter_layers=1, **CAUSAL),
    "activated LoRA": LoraConfig(alora_invocation_tokens=[11], target_modules=["q_proj"], **CAUSAL),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_adapters_outside_of_layers_are_refused(kind):
    base = tiny("Llama", adapter=False).eval()
    alone = greedy(base)
    model = get_peft_model(base, copy.deepcopy(OUTSIDE[kind])).eval()
    with pytest.raises(ModelError, match=kind):
        greedy(model)
    with pytest.raises(ModelError, match=kind):
        Rollouts(model).generate(PROMPTS[:1], max_new_tokens=2)
    if kind == "ADAPTION_PROMPT":  # its modules stay in the base
        with pytest.raises(ModelError, match=kind):
            greedy(model, adapter=None)
    else:
        assert greedy(model, adapter=None) == alone


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LNTuningConfig(target_modules=["norm", "input_layernorm"]),
        peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
        peft.TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=[11, 22, 33]),
        LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"]),
    ],
    ids=lambda config: str(config.peft_type.value),
)
def test_other_kinds_of_layers_answer_as_in_peft(config):
    model = get_peft_model(tiny("Llama", adapter=False), copy.deepcopy(config)).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter)
    found = [greedy(model), greedy(model, adapter=None)]
    assert found == [expected(model, "default", PROMPTS[0]), expected(model, None, PROMPTS[0])]
    assert found[0] != found[1]


# --- transformers' own forward ---------------------------------------------------------------------------------------


def log_probs_of(model, prompt, ids):
    """Log-probabilities of a completion by one forward without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)


def test_log_probs_of_rollouts_are_the_models_own():
    model = build("rwkv")
    prompts = [PROMPTS[1], PROMPTS[0]]
    sampling = Sampling(temperature=1.0, seed=4)
    for prompt, completion in zip(
        prompts, Rollouts(model).generate(prompts, max_new_tokens=8, sampling=sampling, stops=[]), strict=True
    ):
        torch.testing.assert_close(
            completion.log_probs, log_probs_of(model, prompt, completion.ids), atol=1e-4, rtol=1e-3
        )


def recurrent_gemma():
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "lru_width": 32}
    torch.manual_seed(0)
    config = transformers.RecurrentGemmaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = transformers.RecurrentGemmaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("make", [recurrent_gemma, lambda: build("rwkv")], ids=["RecurrentGemma", "RWKV"])
def test_rows_of_models_that_read_padding_answer_as_alone(make):
    """RecurrentGemma keeps its states in its modules, where another group would overwrite them."""
    model = make()
    prompts = [[7, 8, 9], [*range(20, 40)], [3, 4, 5], [60]]
    keys = {"max_new_tokens": 8, "stops": []}
    alone = [generation.generate(model, [prompt], **keys)[0] for prompt in prompts]
    assert generation.generate(model, prompts, **keys) == alone
    found = Rollouts(model).generate(prompts, max_new_tokens=8, stops=[], sampling=Sampling())
    assert [completion.ids for completion in found] == alone


@pytest.fixture(scope="module")
def longrope():
    """A Phi-3 whose rotation changes after 24 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3]}
    rope |= {"long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 24}
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    positions = {"max_position_embeddings": 256, "original_max_position_embeddings": 24}
    torch.manual_seed(3)
    config = transformers.Phi3Config(**sizes, **heads, **positions, rope_parameters=rope, initializer_range=0.2)
    return transformers.Phi3ForCausalLM(config).eval()


def uncached(model, prompt, new):
    """Greedy tokens by a forward over all tokens in each step."""
    ids = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("lengths", [(10, 20, 30), (20, 23), (4, 9), (25, 40)], ids=str)
def test_rows_answer_as_alone_across_the_switch_of_longrope(longrope, lengths):
    prompts = [[(7 * length + 3 * at) % 90 + 5 for at in range(length)] for length in lengths]
    right = [uncached(longrope, prompt, 6) for prompt in prompts]  # transformers 5.17 errs at the switch
    assert generation.generate(longrope, prompts, max_new_tokens=6, stops=[]) == right
    found = Rollouts(longrope).generate(prompts, max_new_tokens=6, stops=[], sampling=Sampling())
    assert [completion.ids for completion in found] == right
