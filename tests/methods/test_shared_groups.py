"""Groups of sampled answers that share their prompt equal answers with separate prompts."""

import pytest
import torch

from halfbyte.data.batches import batches_of, longest_row
from halfbyte.data.prepare import PreparedData
from halfbyte.data.shared_prefix import GIVEN, as_trees, trees_of
from halfbyte.methods import METHODS
from tests.helpers.pair_models import VOCABULARY, assert_same_gradients, config, gradients, model
from tests.helpers.pair_models import tokenizer as make_tokenizer

ASKED = [
    {"method": "grpo", "beta": 0.1},
    {"method": "grpo", "importance_sampling_level": "sequence", "entropy_coef": 0.1},
    {"method": "grpo", "loss_type": "cispo", "top_entropy_quantile": 0.5},
    {"method": "rloo"},
]


def method(**asked):
    fixed = {"per_device_train_batch_size": 6, "max_completion_length": 12, "num_generations": 3}
    chosen = config(reward_funcs=["exact"], **fixed | asked)
    return METHODS[chosen.method].of(chosen), chosen


def answers(shared, seed=0, other=False):
    """Two groups of three answers, the last one cut off, and one answer to a third prompt."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    made = []
    for number, count in enumerate((3, 3, 1)):
        prompt = ids(15)
        for at in range(count):
            answer, drawn = ids(10), torch.rand(20, generator=generator)
            if other and (number, at) == (0, 1):
                answer = [(token + 1) % 90 + 5 for token in answer]
            trained = (number, at) != (1, 2)
            tokens = len(answer) if trained else 0
            row = {"input_ids": prompt + answer, "advantage": float(drawn[0]) - 0.5, "items": float(len(answer))}
            row["labels"] = [-100] * len(prompt) + (answer if trained else [-100] * len(answer))
            for name in ("sampled", "old", "reference"):
                row[name] = (-4.6 - drawn[1 : 1 + tokens]).tolist()
            made.append(row | ({GIVEN: len(prompt)} if shared else {}))
    return made


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(map(str, asked.values())))
@pytest.mark.parametrize("layout", [{}, {"padding_free": True}], ids=["padded", "flat"])
def test_losses_and_gradients_equal_those_of_separate_prompts(asked, layout):
    policy, (own, chosen) = model(), method(**asked, **layout)
    collate = own.collator(chosen, make_tokenizer())
    found, expected = (collate(answers(shared)) for shared in (True, False))
    assert found["input_ids"].numel() < expected["input_ids"].numel()
    assert found.keys() - expected.keys() >= {"branches"}
    for name in ("wanted", "answer", "advantages", "items", "sampled", "old", "reference"):
        assert torch.equal(found[name], expected[name]), name
    assert own.counts(found) == own.counts(expected)
    sums = [own.sums(policy, batch) for batch in (expected, found)]
    for name, value in sums[0].items():
        assert float(sums[1][name].detach()) == pytest.approx(float(value.detach()), rel=5e-6, abs=2e-6), name
    assert_same_gradients(gradients(sums[1]["loss"], policy), gradients(sums[0]["loss"], policy), 2e-6)


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(map(str, asked.values())))
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "apart"])
def test_padding_of_gpu_batches_is_not_trained(asked, shared):
    """Rounded batches, as for CUDA graphs, equal exact ones; and batches of other answers have the same shapes."""
    policy, (own, chosen) = model(), method(**asked)
    exact, filled = (own.collator(chosen, make_tokenizer(), where) for where in (None, torch.device("cuda")))
    rows = answers(shared)
    expected, found = exact(rows), filled(rows)
    assert len(found["at"]) > len(expected["at"])
    assert own.counts(found) == own.counts(expected)
    sums = [own.sums(policy, batch) for batch in (expected, found)]
    for name, value in sums[0].items():
        assert float(sums[1][name].detach()) == pytest.approx(float(value.detach()), rel=5e-6, abs=2e-6), name
    assert_same_gradients(gradients(sums[1]["loss"], policy), gradients(sums[0]["loss"], policy), 2e-6)
    shapes = [
        {name: getattr(value, "shape", value) for name, value in filled(answers(shared, seed)).items()}
        for seed in (0, 5)
    ]
    assert shapes[0] == shapes[1]


def test_another_answer_does_not_change_a_bit_of_its_siblings():
    policy, (own, chosen) = model(), method(method="grpo")
    collate = own.collator(chosen, make_tokenizer())
    before, after = (collate(answers(True, other=other)) for other in (False, True))
    (found, _), (changed, _) = (own.log_probs(policy, batch) for batch in (before, after))
    its = before["answer"] == 1
    assert torch.equal(found[~its], changed[~its])
    assert not torch.equal(found[its], changed[its])


def test_only_adjacent_answers_share_and_all_are_counted():
    own, _ = method(method="grpo")
    rows = answers(True)
    assert [[len(tree.answers) for tree in trees_of(row)] for row in as_trees(rows)] == [[3], [3], [1]]
    assert own.tokens(rows) == sum(len(row["input_ids"]) for row in as_trees(rows))
    prompts = [row[GIVEN] for row in rows]
    assert own.tokens(rows) == own.tokens(answers(False)) - 2 * prompts[0] - 2 * prompts[3]
    apart = [rows[0], rows[3], rows[1]]
    assert own.tokens(apart) == sum(len(row["input_ids"]) for row in apart)


@pytest.mark.parametrize(("rows", "tokens"), [(6, 2 * (10 + 3 * 12)), (3, 10 + 3 * 12), (2, 10 + 2 * 12), (1, 22)])
def test_plan_uses_groups_that_fit_a_micro_batch(rows, tokens):
    from datasets import Dataset

    own, chosen = method(
        method="grpo", padding_free=True, per_device_train_batch_size=rows, gradient_accumulation_steps=3
    )
    prompts = Dataset.from_list([{"prompt_ids": list(range(5, 5 + length))} for length in (4, 10, 10, 3, 5, 6)])
    report = {"train": {}, "eval": None}
    data = own.documents(chosen, PreparedData(prompts, None, report, shared=True))
    assert data.shared == (rows > 1)
    found = batches_of(chosen, data, torch.device("cpu"))
    assert found.largest.tokens == tokens
    assert found.prompts == (10, 10, 6, 5, 4, 3)[:rows]  # three micro-batches in groups of three
    assert longest_row(data.train, data.answers) == 22
    assert data.report["train"]["tokens"] == 38 + 6 * 12
    plain = own.documents(chosen, PreparedData(prompts, None, report))
    assert batches_of(chosen, plain, torch.device("cpu")).largest.tokens >= tokens
