"""Prompts with images, answered as by transformers' `generate` token for token: families, uneven rows, adapters."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from halfbyte import generation
from halfbyte.generation import Rollouts, Sampling
from halfbyte.generation.schedule import PAGE, Schedule, page_count
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import KINDS, load_processor, picture, save_image_model
from tests.helpers.patch_models import quantize

SIZES = [[(90, 70)], [], [(60, 118), (110, 50)]]  # pictures of each prompt
TEXTS = ["what is this?", "say something", " and this"]
BY_TRANSFORMERS = ("gemma4", "qwen3_vl_moe", "glm4v", "glm46v")
OTHERS = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in (
        "qwen3_5_moe", "qwen3_vl_moe", "gemma4", "mistral3", "llava_next", "llava_onevision", "internvl", "glm4v",
        "glm46v", "idefics3", "smolvlm",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Return (model, token ids, inputs for images) of a family; models with an adapter that matters."""
    cache = {}

    def build(name):
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            model = get_peft_model(save_image_model(folder, name), LoraConfig(r=4, target_modules="all-linear"))
            processor, mark = load_processor(folder, name), MODELS_OF_IMAGES[name].image
            rows = []
            for number, (sizes, text) in enumerate(zip(SIZES, TEXTS, strict=True)):
                pictures = [picture(10 * number + at, *size) for at, size in enumerate(sizes)]
                asked = f"<s>look{f': {mark}' * len(sizes)} {text}"
                options = {"return_tensors": "pt", "add_special_tokens": False}
                rows.append(processor(text=[asked], images=pictures or None, **options))
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    torch.nn.init.normal_(parameter, std=0.1)
            model.config.get_text_config().max_position_embeddings = 1024  # tiles of images have many tokens
            cache[name] = model.eval(), rows
        return cache[name]

    return build


@torch.no_grad()
def expected(model, row, new=12):
    """Return the tokens of transformers' greedy answer, and the logits that they are drawn from [new, V]."""
    keys = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(**row, **keys, output_logits=True, return_dict_in_generate=True)
    return output.sequences[0, row["input_ids"].shape[1] :].tolist(), torch.cat(output.logits)


def answers(model, rows, new=12, **keys):
    """Return the tokens of halfbyte's greedy answers, and their logits."""
    ids = [row["input_ids"][0].tolist() for row in rows]
    columns = [{k: v for k, v in row.items() if k not in ("input_ids", "attention_mask")} for row in rows]
    images = [values if "pixel_values" in values else None for values in columns]
    logits = []
    keys |= {"images": images, "watch": lambda values, _: logits.append(values.clone())}
    tokens = list(generation.stream(model, ids, max_new_tokens=new, stops=[], **keys))
    return list(zip(map(list, zip(*tokens, strict=True)), torch.stack(logits, 1), strict=True))


def assert_equal_answers(answered, expected):
    for (tokens, logits), (expected_tokens, expected_logits) in zip(answered, expected, strict=True):
        assert tokens == expected_tokens
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*KINDS, "qwen3_5", *OTHERS])
def test_greedy_answers_equal_transformers(name, prompts):
    """Alone and in a batch of uneven rows, by the adapter and the base."""
    model, rows = prompts(name)
    notices.reset_notices()
    adapted = [expected(model, row) for row in rows]
    assert_equal_answers(answers(model, rows), adapted)
    assert_equal_answers([answers(model, [row])[0] for row in rows], adapted)
    with model.disable_adapter():
        base = [expected(model, row) for row in rows]
    assert_equal_answers(answers(model, rows, adapter=[None, "default", None]), [base[0], adapted[1], base[2]])
    assert any(key.startswith("generation") for key in notices.notices_so_far()) == (name in BY_TRANSFORMERS)


@pytest.mark.parametrize("name", KINDS)
def test_a_quantized_base_answers_as_transformers(name, prompts, tmp_path):
    """Rows with images and later ones without use one cached engine."""
    model = quantize(save_image_model(tmp_path, name))
    _, rows = prompts(name)
    for batch in (rows[:1], rows[1:2], rows[2:], rows):
        assert_equal_answers(answers(model, batch), [expected(model, row) for row in batch])


def test_transformers_forward_answers_about_images_too(prompts, monkeypatch):
    """Each row of a batch has positions of its own, which models with M-RoPE hold in a module."""
    model, rows = prompts("qwen3_vl")
    adapted = [expected(model, row) for row in rows]
    monkeypatch.setattr("halfbyte.generation.decoder.text_model", lambda causal: causal)
    generation.forget(model)
    notices.reset_notices()
    assert_equal_answers(answers(model, rows), adapted)
    assert any(key.startswith("generation") for key in notices.notices_so_far())


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llava", "qwen2_5_vl", "qwen3_5")]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", *SLOW, *OTHERS])
def test_rollouts_equal_greedy_answers(name, prompts, monkeypatch):
    """Answers that share their prompt's pages, some of which are preempted and read it again with their own tokens."""
    (model, rows), new = prompts(name), PAGE + 4
    ids = [row["input_ids"][0].tolist() for row in rows]
    columns = [{k: v for k, v in row.items() if k not in ("input_ids", "attention_mask")} for row in rows]
    options = {"max_new_tokens": new, "sampling": Sampling(), "stops": []}
    options["images"] = [values if "pixel_values" in values else None for values in columns]
    answers = [tokens for row in rows for tokens in [expected(model, row, new)[0]] * 3]
    engine = Rollouts(model.train(), rows=4)
    assert [completion.ids for completion in engine.generate(ids, 3, **options)] == answers
    assert model.training
    model.eval()
    if engine._decoder is None or engine._decoder.state_bytes:
        assert name in (*BY_TRANSFORMERS, "qwen3_5", "qwen3_5_moe")
        return
    preempted, preempt = [], Schedule.preempt
    monkeypatch.setattr(Schedule, "preempt", lambda self, row: preempted.append(row) or preempt(self, row))
    pages = page_count(max(map(len, ids)) + new) + 2
    few = Rollouts(model, rows=4, memory_gib=pages * engine._decoder.page_bytes / 2**30)
    assert [completion.ids for completion in few.generate(ids, 3, **options)] == answers
    assert preempted or name == "llava"  # whose prompts have equal numbers of pages


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_on_a_gpu_rollouts_have_the_log_probabilities_of_the_forward(name, dtype, prompts):
    """By CUDA graphs, with M-RoPE's shifts and images that see themselves."""
    model, rows = copy.deepcopy(prompts(name)[0]).to("cuda", dtype), prompts(name)[1]
    ids = [row["input_ids"][0].tolist() for row in rows]
    columns = [{k: v for k, v in row.items() if k not in ("input_ids", "attention_mask")} for row in rows]
    images = [values if "pixel_values" in values else None for values in columns]
    engine = Rollouts(model, rows=16)
    sampling = Sampling(1.0, seed=3)
    completions = engine.generate(ids, 4, max_new_tokens=20, sampling=sampling, stops=[], images=images)
    assert engine._batch.graphs
    for number, completion in enumerate(completions):
        row = {key: value.cuda() for key, value in rows[number // 4].items()}
        tokens = torch.tensor([completion.ids], device="cuda")
        longer = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        longer |= dict.fromkeys(("token_type_ids", "mm_token_type_ids"), torch.zeros_like(tokens))
        row |= {key: torch.cat([value, longer[key]], 1) for key, value in row.items() if key in longer}
        if (tokens >= model.config.image_token_id - 4).any():  # a token of images, which the forward would count
            continue
        with torch.no_grad():
            logits = model(**row).logits[0, -21:-1].float()
        truth = logits.log_softmax(-1).gather(1, tokens[0].unsqueeze(1)).squeeze(1).cpu()
        bound = 2e-3 if dtype == torch.float32 else 0.15
        torch.testing.assert_close(completion.log_probs, truth, rtol=0, atol=bound)


def test_images_for_another_number_of_prompts_are_refused(prompts):
    model, _ = prompts("llava")
    with pytest.raises(ConfigError, match="images"):
        generation.generate(model, [[5, 6], [7]], images=[None])
    with pytest.raises(ConfigError, match="images"):
        Rollouts(model).generate([[5, 6], [7]], images=[None])
