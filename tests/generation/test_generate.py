"""Generation compared with transformers token by token: families, padding, adapters, caches, sampling, errors."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig

from benchmarks import tables
from halfbyte import generation
from halfbyte.generation import Sampling
from halfbyte.generation.cache_dtypes import CACHES, INT4
from halfbyte.generation.engine import StaticEngine
from halfbyte.generation.sampling import unread_keys
from halfbyte.modeling import families
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.decoding import PROMPTS, transformers_greedy
from tests.helpers.families import FAMILIES, MULTIMODAL, OWN_LAYERS, TEXT_PARTS
from tests.helpers.patch_models import quantize, tiny

# Layers with more than two halves, or Mamba's state, and stacks that would be copied, since they lie transposed in 16
# bits: transformers' forward runs.
STOCK = (*OWN_LAYERS, "GptOss", "MuseGlimmer")


def test_the_readme_names_the_families_that_decode_here():
    rows = [row for row in families.FAMILIES if row.patched]
    own = {*(name.removesuffix("Text") for name in OWN_LAYERS), "MuseGlimmerText"}
    assert {row.name for row in rows if not tables.decodes(row)} == own


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", [*FAMILIES, *MULTIMODAL, *TEXT_PARTS])
def test_greedy_tokens_equal_transformers(family):
    model = tiny(family).eval()
    if family == "Gemma2":
        model.get_base_model().set_attn_implementation("eager")
    notices.reset_notices()
    found = generation.generate(model, PROMPTS, max_new_tokens=20, stops=[])
    assert any(key.startswith("generation") for key in notices.notices_so_far()) == (family in STOCK)
    for ids, mine in zip(PROMPTS, found, strict=True):
        assert mine == transformers_greedy(model, ids, 20), family


def adapted():
    model = tiny("Llama").eval()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B.other" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_each_row_uses_its_own_adapter():
    model = adapted()
    mixed = generation.generate(
        model, [PROMPTS[0]] * 4, max_new_tokens=12, stops=[], adapter=["other", None, "default", "active"]
    )
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        expected[name] = transformers_greedy(model, PROMPTS[0], 12)
    with model.disable_adapter():
        expected[None] = transformers_greedy(model, PROMPTS[0], 12)
    assert mixed == [expected["other"], expected[None], expected["default"], expected["default"]]
    assert len(set(map(tuple, mixed))) == 3
    for name in ("default", "other", None):
        assert generation.generate(model, [PROMPTS[0]], max_new_tokens=12, stops=[], adapter=name) == [expected[name]]


def test_an_unsupported_family_runs_transformers_forward():
    config = transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = generation.generate(model, PROMPTS, max_new_tokens=10, stops=[])
    assert found == [transformers_greedy(model, ids, 10) for ids in PROMPTS]
    assert any("GPT2LMHeadModel" in text for text in notices.notices_so_far().values())
    with pytest.raises(ModelError, match="kv_cache: fp8"):
        generation.generate(model, PROMPTS, kv_cache="fp8", max_new_tokens=2)


def test_dora_runs_transformers_forward():
    model = quantize(tiny("Llama", use_dora=True).eval())
    found = generation.generate(model, PROMPTS[:2], max_new_tokens=8, stops=[])
    assert found == [transformers_greedy(model, ids, 8) for ids in PROMPTS[:2]]


def test_rows_stop_independently_and_on_token_is_called():
    model = tiny("Llama", adapter=False).eval()
    whole = generation.generate(model, PROMPTS, max_new_tokens=16, stops=[])
    stop = next(token for token in whole[0][2:8] if token not in whole[0][:2])
    came = []
    found = generation.generate(
        model, PROMPTS, max_new_tokens=16, stops=[stop], on_token=lambda *pair: came.append(pair)
    )
    for mine, all_tokens in zip(found, whole, strict=True):
        cut = all_tokens.index(stop) + 1 if stop in all_tokens else 16
        assert mine == all_tokens[:cut]
    assert [[token for at, token in came if at == row] for row in range(3)] == found
    model.generation_config.eos_token_id = [stop]
    assert generation.generate(model, PROMPTS, max_new_tokens=16) == found


def test_caches_of_8_and_4_bits_stay_close():
    """Over full and unfinished pages; the second prompt is shorter, and its page is full after four steps."""
    model = tiny("Qwen3").eval()
    prompt = torch.randint(3, 97, (130,))
    prompts = torch.stack([prompt, F.pad(prompt[:60], (70, 0))])
    with torch.inference_mode():
        logits = {}
        for cache in CACHES.values():
            engine = StaticEngine(model, [None, None], 192, cache)
            engine.prefill(prompts, torch.tensor([0, 70]))
            logits[cache] = torch.stack([engine.step(torch.tensor([4 + at, 9])).clone() for at in range(6)])
    exact = logits.pop(None)
    for inexact in logits.values():
        assert 0 < (inexact - exact).norm() / exact.norm() < 0.1
    errors = (logits[INT4] - exact)[:, 1].norm(dim=-1) / exact[:, 1].norm(dim=-1)
    assert errors[0] < 1e-5 < errors[5]


def test_a_seed_repeats_draws():
    """Distributions are compared with transformers' in `test_grammar`."""
    logits = torch.tensor([[3.0, 2.0, 1.0, -1.0]])
    assert Sampling().draw(logits, None).tolist() == [0]
    draws = []
    for seed in (1, 1, 2):
        sampling = Sampling(1.0, seed=seed)
        generator = sampling.generator(logits.device)
        draws.append([sampling.draw(logits, generator).item() for _ in range(8)])
    assert draws[0] == draws[1] != draws[2]


def test_texts_need_a_tokenizer(shared):
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / "models/llama-40m")
    model = tiny("Llama", adapter=False, shape={"vocab_size": len(tokenizer)}).eval()
    texts = ["Hello", "Once upon a time"]
    found = generation.generate(model, texts, tokenizer, max_new_tokens=4, stops=[])
    ids = generation.generate(model, [tokenizer(text)["input_ids"] for text in texts], max_new_tokens=4, stops=[])
    assert found == [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    with pytest.raises(ConfigError):
        generation.generate(model, texts)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 4096}, "11 tokens.*max_new_tokens 4096.*2048"),
        ({"kv_cache": "int3"}, "kv_cache.*'int3'"),
        ({"adapter": "missing"}, "'missing'"),
        ({"adapter": [None]}, "names 1.*3 prompts"),
    ],
)
def test_bad_requests_are_refused(keys, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        generation.generate(tiny("Llama", adapter=False).eval(), PROMPTS, **keys)


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_by_default_answers_end_at_the_last_position(family):
    """Each row at its own end: a prompt's answer does not depend on its neighbours."""
    if family == "Llama":
        model = tiny("Llama", adapter=False, shape={"max_position_embeddings": 32}).eval()
    else:  # learned positions: a finished row must not read past the table
        config = transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=32)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompts = [*PROMPTS, [5] * 31]
    found = generation.generate(model, prompts, stops=[])
    assert [len(ids) + len(answer) for ids, answer in zip(prompts, found, strict=True)] == [32] * 4
    assert found == [generation.generate(model, [ids], stops=[])[0] for ids in prompts]
    assert generation.generate(model, PROMPTS, max_new_tokens=[3, 1, 2], stops=[]) == [
        answer[:length] for answer, length in zip(found, (3, 1, 2), strict=False)
    ]
    with pytest.raises(ModelError, match=r"32 tokens.*32 positions"):
        generation.generate(model, [[5] * 32], stops=[])
    with pytest.raises(ModelError, match=r"11 tokens.*max_new_tokens 22.*32"):
        generation.generate(model, PROMPTS, max_new_tokens=22)


def test_nan_logits_raise():
    model = tiny("Llama", adapter=False).eval()
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        generation.generate(model, PROMPTS, max_new_tokens=2)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -1), ("temperature", float("nan")), ("temperature", "hot"), ("top_k", -2), ("top_p", 0),
    ("top_p", 1.5),
])  # fmt: skip
def test_sampling_out_of_range_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        Sampling(**{name: value})


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text"])
def test_captured_steps_equal_the_cpus(family):
    """In float32, so that two orders of the same sums choose the same token."""
    model = tiny(family).eval()
    expected = generation.generate(model, PROMPTS, max_new_tokens=24, stops=[])
    assert generation.generate(model.cuda(), PROMPTS, max_new_tokens=24, stops=[]) == expected


@pytest.mark.parametrize(
    ("keys", "sampling", "unread"),
    [
        ({}, Sampling(), set()),
        ({"repetition_penalty": 1.0, "num_beams": 1, "top_k": 50, "min_length": 0}, Sampling(), set()),
        ({"repetition_penalty": 1.1, "suppress_tokens": [1]}, Sampling(), {"repetition_penalty", "suppress_tokens"}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, Sampling(), {"do_sample", "temperature", "top_p"}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, Sampling(0.8), {"top_k"}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, Sampling(0.8, top_k=5), set()),
        ({"num_beams": 4, "length_penalty": 2.0, "forced_eos_token_id": 0}, Sampling(),
         {"num_beams", "length_penalty", "forced_eos_token_id"}),
        ({"eos_token_id": [1, 2], "max_new_tokens": 9, "cache_implementation": "hybrid"}, Sampling(), set()),
    ],
)  # fmt: skip
def test_keys_of_the_generation_config_that_are_not_read_are_reported(keys, sampling, unread):
    model = tiny("Llama", adapter=False).eval()
    for key, value in keys.items():
        setattr(model.generation_config, key, value)
    assert unread_keys(model, sampling).keys() == unread
    notices.reset_notices()
    for _ in range(2):
        generation.generate(model, PROMPTS[:1], max_new_tokens=1, sampling=sampling)
    reported = [key for key in notices.notices_so_far() if key.startswith("unread generation_config")]
    assert len(reported) == bool(unread)
    assert all(key in reported[0] for key in unread)
