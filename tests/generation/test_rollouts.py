"""Rollouts: tokens and log-probabilities equal a single row's, the training forward's and the model's, in any batch
and with any number of pages."""

import copy
import math

import pytest
import torch
import transformers

import halfbyte
from halfbyte import generation
from halfbyte.formats.linear import linear_rows
from halfbyte.generation import Rollouts, Sampling, rollouts
from halfbyte.generation.schedule import Schedule
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.decoding import SHAPE
from tests.helpers.families import EXPERTS, FAMILIES, HYBRIDS, OWN_LAYERS
from tests.helpers.patch_models import quantize, tiny

DENSE = [family for family in FAMILIES if family not in (*EXPERTS, *HYBRIDS, *OWN_LAYERS)]


def prompts_of(*lengths, vocabulary=90):
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def model_of(family="Llama", **keys):
    torch.manual_seed(1)
    return tiny(family, shape=SHAPE | keys.pop("shape", {}), **keys).eval()


def log_probs_of(model, prompt, ids, temperature=1.0):
    """fp64, by the model itself."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]], device=model.device)).logits[0, len(prompt) - 1 : -1]
    logits = logits.double().cpu()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("family", DENSE)
def test_greedy_rollouts_equal_generate(family):
    model, prompts = model_of(family), prompts_of(11, 2, 70, 64, 5)
    notices.reset_notices()
    found = Rollouts(model, rows=3).generate(prompts, max_new_tokens=20, sampling=Sampling(), stops=[])
    assert not any(key.startswith("rollouts") for key in notices.notices_so_far())
    assert [each.ids for each in found] == generation.generate(model, prompts, max_new_tokens=20, stops=[])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3Text"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_the_models(family, temperature):
    model, prompts = model_of(family), prompts_of(70, 3, 130)
    if family == "Gemma2":
        model.get_base_model().set_attn_implementation("eager")
    sampling = Sampling(temperature, seed=5)
    found = Rollouts(model).generate(prompts, 3, max_new_tokens=70, sampling=sampling, stops=[])
    assert len({tuple(each.ids) for each in found}) == 9
    for number, each in enumerate(found):
        assert each.log_probs.dtype is torch.float32
        truth = log_probs_of(model, prompts[number // 3], each.ids, temperature)
        torch.testing.assert_close(each.log_probs.double(), truth, rtol=0, atol=2e-5)


@pytest.fixture
def bound(request):
    """Return the tolerance for log-probabilities: 0 where a product's rows do not depend on their number.

    With several threads MKL splits sums by the number of rows; on Intel processors with AVX-512 also with one.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    x, weight = torch.randn(64, 48), torch.randn(96, 48)
    whole = linear_rows(x, weight)
    depends = any(not torch.equal(linear_rows(x[:count], weight), whole[:count]) for count in range(2, 64))
    yield 1e-5 if depends or request.param > 1 else 0
    torch.set_num_threads(before)


SLOW = pytest.mark.slow  # each family with the other number of threads
EACH = [(1, "Llama"), *(pytest.param(*case, marks=SLOW) for case in [(2, "Gemma2"), (2, "Llama"), (1, "Gemma2")])]


@pytest.mark.parametrize(("bound", "family"), EACH, indirect=["bound"])
def test_a_completion_does_not_depend_on_the_batch(family, bound):
    """To the bit, on one thread of a CPU."""
    model, prompts = model_of(family), prompts_of(70, 3, 130, 64, 1, 20, 33, 90)
    options = {"max_new_tokens": 80, "sampling": Sampling(1.0, seed=11), "stops": [7]}
    together = Rollouts(model, rows=64).generate(prompts, 8, **options)
    few = Rollouts(model, rows=5).generate(prompts, 8, **options)
    reversed_ = Rollouts(model).generate(prompts[::-1], 8, keys=range(7, -1, -1), **options)
    reversed_ = [each for at in range(7, -1, -1) for each in reversed_[8 * at : 8 * at + 8]]
    alone = Rollouts(model).generate([prompts[2]], 4, keys=[2], **options)
    for others in (few, reversed_):
        assert [(each.ids, each.ended) for each in others] == [(each.ids, each.ended) for each in together]
        for mine, other in zip(together, others, strict=True):
            torch.testing.assert_close(mine.log_probs, other.log_probs, rtol=0, atol=bound)
    for mine, other in zip(together[16:20], alone, strict=True):
        assert mine.ids == other.ids
        torch.testing.assert_close(mine.log_probs, other.log_probs, rtol=0, atol=bound)
    assert {each.ended for each in together} == {True, False}
    assert all((each.ids[-1] == 7) == each.ended and 7 not in each.ids[:-1] for each in together)


@pytest.mark.slow
def test_preempted_rows_continue_unchanged(monkeypatch):
    model, prompts = model_of(), prompts_of(70, 3, 130, 64)
    options = {"max_new_tokens": 150, "sampling": Sampling(1.0, seed=11), "stops": [7]}
    plenty = Rollouts(model).generate(prompts, 4, **options)
    preempted = []
    preempt = Schedule.preempt
    monkeypatch.setattr(Schedule, "preempt", lambda self, row: preempted.append(row) or preempt(self, row))
    engine = Rollouts(model)
    engine.generate(prompts, max_new_tokens=1)  # makes a decoder
    few = Rollouts(model, memory_gib=11 * engine._decoder.page_bytes / 2**30)
    found = few.generate(prompts, 4, **options)
    assert few._decoder.pages == 11
    assert preempted
    assert [each.ids for each in found] == [each.ids for each in plenty]
    for mine, other in zip(found, plenty, strict=True):
        torch.testing.assert_close(mine.log_probs, other.log_probs, rtol=0, atol=1e-5)
    short = Rollouts(model, memory_gib=5 * engine._decoder.page_bytes / 2**30)
    with pytest.raises(ModelError, match="280 tokens"):
        short.generate(prompts, 4, **options)


def test_current_adapter_values_are_used():
    model, prompts = model_of(), prompts_of(20, 9)
    engine, options = Rollouts(model), {"max_new_tokens": 12, "sampling": Sampling(1.0, seed=2), "stops": []}
    before = engine.generate(prompts, 2, **options)
    decoder = engine._decoder
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    after = engine.generate(prompts, 2, **options)
    assert engine._decoder is decoder
    assert [each.ids for each in after] != [each.ids for each in before]
    truth = log_probs_of(model, prompts[0], after[0].ids)
    torch.testing.assert_close(after[0].log_probs.double(), truth, rtol=0, atol=2e-5)
    base = engine.generate(prompts, 2, adapter=None, **options)
    with model.disable_adapter():
        truth = log_probs_of(model, prompts[1], base[2].ids)
    torch.testing.assert_close(base[2].log_probs.double(), truth, rtol=0, atol=2e-5)
    engine.free()
    assert engine._decoder is None
    assert [each.ids for each in engine.generate(prompts, 2, **options)] == [each.ids for each in after]


def test_unpacked_weights_are_refreshed_in_each_call():
    model = quantize(model_of())
    engine, options = Rollouts(model, weights="unpacked"), {"max_new_tokens": 6, "sampling": Sampling(), "stops": []}
    prompts = prompts_of(9, 4)
    before = engine.generate(prompts, **options)
    weight = model.get_base_model().model.layers[0].self_attn.v_proj.base_layer.weight
    weight.parts["packed"].copy_(weight.parts["packed"].flip(0))
    after = engine.generate(prompts, **options)
    assert not torch.equal(after[0].log_probs, before[0].log_probs)
    torch.testing.assert_close(
        after[0].log_probs.double(), log_probs_of(model, prompts[0], after[0].ids), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize(("keys", "most"), [({"top_k": 3}, 3), ({"top_p": 0.2}, None), ({"min_p": 0.5}, None)])
def test_filtered_tokens_are_never_drawn_and_log_probs_cover_the_vocabulary(keys, most):
    model, prompts = model_of(), prompts_of(9)
    sampling = Sampling(1.0, seed=3, **keys)
    found = Rollouts(model).generate(prompts, 40, max_new_tokens=3, sampling=sampling, stops=[])
    assert most is None or len({each.ids[0] for each in found}) <= most
    for each in found[:5]:
        truth = log_probs_of(model, prompts[0], each.ids)
        torch.testing.assert_close(each.log_probs.double(), truth, rtol=0, atol=2e-5)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompts[0], *each.ids]])).logits[0, len(prompts[0]) - 1 : -1]
        assert (sampling.probabilities(logits).gather(1, torch.tensor(each.ids)[:, None]) > 0).all()


def test_an_unsupported_family_runs_transformers_forward():
    config = transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model, prompts = transformers.AutoModelForCausalLM.from_config(config).eval(), prompts_of(11, 2, 5)
    notices.reset_notices()
    options = {"max_new_tokens": 12, "sampling": Sampling(1.0, seed=2), "stops": [9]}
    found = Rollouts(model.train(), rows=4).generate(prompts, 3, **options)
    assert model.training
    model.eval()  # it has dropout
    assert any("GPT2LMHeadModel" in text for text in notices.notices_so_far().values())
    alone = Rollouts(model).generate([prompts[1]], 3, keys=[1], **options)
    assert [each.ids for each in found[3:6]] == [each.ids for each in alone]
    for number, each in enumerate(found):
        truth = log_probs_of(model, prompts[number // 3], each.ids)
        torch.testing.assert_close(each.log_probs.double(), truth, rtol=0, atol=2e-5)
        assert each.ended == (each.ids[-1] == 9)
        assert len(each.ids) == 12 or each.ended


def test_each_prompt_has_its_own_max_new_tokens():
    model, prompts = model_of(), prompts_of(9, 70, 3)
    found = Rollouts(model, rows=4).generate(prompts, 2, max_new_tokens=[5, 1, 70], stops=[])
    assert [len(each.ids) for each in found] == [5, 5, 1, 1, 70, 70]
    short = model_of(shape={"max_position_embeddings": 32})
    assert [len(each.ids) for each in Rollouts(short).generate(prompts_of(9, 31), stops=[])] == [23, 1]


def test_longest_rows_start_first(monkeypatch):
    begun = []

    class Seen(generation.rollouts.Schedule):
        def _seat(self, row, document, found):
            begun.append(row.max_tokens)
            super()._seat(row, document, found)

    monkeypatch.setattr(generation.rollouts, "Schedule", Seen)
    Rollouts(model_of(), rows=2).generate(prompts_of(9, 7, 3), 2, max_new_tokens=[5, 1, 30], stops=[])
    assert begun == [30, 30, 5, 5, 1, 1]


@pytest.mark.parametrize(
    ("make", "keys", "message"),
    [
        ({"rows": 0}, {}, "rows is 0"),
        ({"kv_cache": "int3"}, {}, "kv_cache.*'int3'"),
        ({"weights": "half"}, {}, "'half'"),
        ({"memory_gib": math.nan}, {}, "memory_gib.*nan"),
        ({}, {"n": 0}, "n is 0"),
        ({}, {"keys": [1]}, "1.*2 prompts"),
        ({}, {"prompts": [[1], []]}, "prompt 1"),
        ({}, {"prompts": [[1], [2, 10**6]]}, "prompt 1.*token 1000000"),
    ],
)
def test_bad_requests_are_refused(make, keys, message):
    options = {"prompts": prompts_of(3, 4), "max_new_tokens": 2} | keys
    with pytest.raises((ConfigError, ModelError), match=message):
        Rollouts(model_of(), **make).generate(**options)


def on_gpu(dtype, family="Llama", shape=None):
    """A model in NF4 with an adapter that does something."""
    model = quantize(model_of(family, shape=shape or {})).to(dtype).cuda()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma2", "Gemma3Text"])
@pytest.mark.parametrize("weights", ["packed", "unpacked"])
def test_on_a_gpu_log_probs_equal_the_models(family, weights):
    """Graphs of several sizes, rows that come and go a step late; in float32."""
    model, prompts = on_gpu(torch.float32, family), prompts_of(70, 3, 130, 64, 1, 20, 33, 90)
    if family == "Gemma2":
        model.get_base_model().set_attn_implementation("eager")
    engine = Rollouts(model, rows=20, weights=weights)
    options = {"max_new_tokens": 100, "sampling": Sampling(1.0, seed=11), "stops": [7]}
    found = engine.generate(prompts, 4, **options)
    assert engine._batch.graphs
    again = engine.generate(prompts, 4, **options)  # graphs of the call before
    assert [each.ids for each in again] == [each.ids for each in found]
    assert {each.ended for each in found} == {True, False}
    assert all((each.ids[-1] == 7) == each.ended and 7 not in each.ids[:-1] for each in found)
    for number, each in enumerate(found):
        truth = log_probs_of(model, prompts[number // 4], each.ids)
        torch.testing.assert_close(each.log_probs.double(), truth, rtol=0, atol=2e-4)


@pytest.mark.gpu
def test_on_a_gpu_a_completion_does_not_depend_on_batch_or_preemption():
    model, prompts = on_gpu(torch.float32), prompts_of(70, 3, 130, 64, 1, 20, 33, 90)
    options = {"max_new_tokens": 150, "sampling": Sampling(1.0, seed=11), "stops": [7]}
    engine = Rollouts(model, rows=32)
    together = engine.generate(prompts, 8, **options)
    few = Rollouts(model, rows=32, memory_gib=30 * engine._decoder.page_bytes / 2**30)
    found = few.generate(prompts, 8, **options)
    assert few._decoder.pages == 30
    alone = Rollouts(model).generate([prompts[2]], 4, keys=[2], **options)
    pairs = [*zip(found, together, strict=True), *zip(alone, together[16:20], strict=True)]
    same = [(mine, other) for mine, other in pairs if mine.ids == other.ids]
    assert len(same) >= 0.95 * len(pairs)  # kernels go by the number of rows: two tokens may be as near as last bits
    for mine, other in same:
        torch.testing.assert_close(mine.log_probs, other.log_probs, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "saved"), [(8, 10**6), (96, 10**6), (96, 0)])
def test_on_a_gpu_in_16_bits_log_probs_equal_the_training_forward(rows, saved, monkeypatch):
    """Rollouts in bfloat16 are as close to float32 as the model's own forward; packed GEMMs take fewer than 96 rows."""
    monkeypatch.setattr(generation.batch, "MIN_SAVED_READS", saved)
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64, "vocab_size": 512}
    model, prompts = on_gpu(torch.bfloat16, shape=wide), prompts_of(70, 3, 130, 64, vocabulary=500)
    engine = Rollouts(model, rows=rows)
    found = engine.generate(prompts, 24, max_new_tokens=70, sampling=Sampling(1.0, seed=1), stops=[])
    assert any(shares for _, shares, _ in engine._batch.graphs) == (saved == 0)
    exact, mine, theirs = copy.deepcopy(model).float(), [], []
    for number in range(0, 96, 8):
        prompt, ids = prompts[number // 24], found[number].ids
        truth = log_probs_of(exact, prompt, ids)
        mine.append(found[number].log_probs.double() - truth)
        theirs.append(log_probs_of(model, prompt, ids) - truth)
    assert torch.cat(mine).std() <= 1.5 * torch.cat(theirs).std()


@pytest.mark.parametrize("pages", [None, 8])
def test_a_4_bit_cache_stays_close(monkeypatch, pages):
    """Rows share the full pages of their prompt; with few pages, some are preempted and prefilled again."""
    model, prompts, preempted = model_of(), prompts_of(70, 64), []
    preempt = Schedule.preempt
    monkeypatch.setattr(Schedule, "preempt", lambda self, row: preempted.append(row) or preempt(self, row))
    if pages is not None:
        monkeypatch.setattr(rollouts, "pages_needed", lambda *_: pages)
    options = {"max_new_tokens": 66, "sampling": Sampling(1.0, seed=1), "stops": []}
    answers = Rollouts(model, kv_cache="int4", rows=6).generate(prompts, 3, **options)
    assert bool(preempted) == (pages is not None)
    for number, answer in enumerate(answers):
        truth = log_probs_of(model, prompts[number // 3], answer.ids)
        assert 0 < (answer.log_probs.double() - truth).abs().mean() < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache", ["fp8", "int4"])
def test_on_a_gpu_a_smaller_cache_stays_close(kv_cache):
    model, prompts = on_gpu(torch.bfloat16), prompts_of(70, 3)
    options = {"max_new_tokens": 140, "sampling": Sampling(1.0, seed=1), "stops": []}
    found = Rollouts(model, kv_cache=kv_cache).generate(prompts, 4, **options)
    for number, each in enumerate(found):
        truth = log_probs_of(model, prompts[number // 4], each.ids)
        assert (each.log_probs.double() - truth).abs().mean() < 0.25


def test_foreign_hooks_are_run():
    model = model_of()
    halfbyte.patch(model)
    notices.reset_notices()
    model.get_base_model().model.norm.register_forward_hook(lambda *_: None)
    Rollouts(model).generate(prompts_of(9), 2, max_new_tokens=6, sampling=Sampling(1.0, seed=3), stops=[])
    assert any(key.startswith("rollouts") for key in notices.notices_so_far())
