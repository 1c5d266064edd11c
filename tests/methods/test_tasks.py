"""Losses of tasks equal transformers' and the formulas of sentence-transformers, in every layout of a batch."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.methods import method_of
from halfbyte.methods.answers import pooled
from halfbyte.methods.task_losses import cosent, listnet, ranknet
from halfbyte.methods.task_metrics import correlations, macro_f1, reranking, retrieval
from tests.helpers.merge_runs import byte_tokenizer
from tests.helpers.pair_models import assert_same_gradients, gradients, mean_loss
from tests.helpers.task_runs import rows_of, write
from tests.helpers.tiny_runs import tiny_llama

LAYOUTS = pytest.mark.parametrize(
    "layout", [{}, {"padding_free": True}, {"packing": True}], ids=["padded", "flat", "packed"]
)
TASK_TYPES = {"sequence_classification": "SEQ_CLS", "reranker": "SEQ_CLS", "token_classification": "TOKEN_CLS"}


class Case:
    """A tiny model with a non-zero adapter for a task, its rows, and batches of them."""

    def __init__(self, folder, task, rows=None, labels=None, **keys):
        path = write(folder / f"{task}.jsonl", rows or rows_of(task, 6))
        keys = {"max_length": 48, "per_device_train_batch_size": 6, "r": 4} | keys
        self.config = RunConfig(model_name_or_path="tiny", dataset=str(path), method=task, device="cpu", **keys)
        self.method, self.tokenizer = method_of(self.config), byte_tokenizer()
        data = self.method.ready(self.config, self.tokenizer)
        self.config = self.config.model_copy(update={"labels": data.report["train"].get("label_names")})
        self.rows = list(data.train)
        self.labels = labels or len(self.config.labels or [0])
        self.causal = tiny_llama(vocab_size=272, pad_token_id=258)

    def policy(self):
        torch.manual_seed(4)
        model = add_adapter(
            copy.deepcopy(self.causal), self.config, scores=self.method.scores,
            labels=self.labels if self.method.scores in TASK_TYPES.values() else 0,
        ).train()  # fmt: skip
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "score" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    def batch(self, rows=None):
        return self.method.collator(self.config, self.tokenizer)(self.rows if rows is None else rows)

    def theirs(self, policy):
        """transformers' class of the task with the weights of `policy`."""
        config = copy.deepcopy(self.causal.config)
        config.num_labels, config.classifier_dropout = self.labels, 0.0
        auto = (
            AutoModelForTokenClassification if self.method.scores == "TOKEN_CLS" else AutoModelForSequenceClassification
        )
        model = auto.from_config(config)
        plain = {name: value for name, value in self.causal.state_dict().items() if not name.startswith("lm_head")}
        model.load_state_dict(plain, strict=False)
        model = get_peft_model(model, copy.deepcopy(policy.peft_config["default"])).train()
        own = dict(policy.named_parameters())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data.copy_(own[name])
        return model


PROBLEMS = {
    "single_label_classification": [{"text": "abc" * (n + 1), "label": n % 3} for n in range(6)],
    "multi_label_classification": [{"text": "abc" * (n + 1), "labels": [n % 2, 1, n % 3 // 2]} for n in range(6)],
    "regression": [{"text": "abc" * (n + 1), "label": n / 4} for n in range(6)],
}


@pytest.mark.parametrize("problem", list(PROBLEMS))
@LAYOUTS
def test_classification_of_texts_equals_transformers(tmp_path, problem, layout):
    rows = PROBLEMS[problem]
    case = Case(tmp_path, "sequence_classification", rows, problem_type=problem, **layout)
    policy = case.policy()
    loss, sums, counts = mean_loss(case.method, policy, [case.batch()])
    assert counts == {"texts": 6}
    theirs = case.theirs(policy)
    theirs.config.problem_type = problem
    key = "label" if "label" in rows[0] else "labels"
    labels = torch.tensor([row[key] for row in rows])
    inputs = case.tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    output = theirs(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
                    labels=labels if problem == "single_label_classification" else labels.float())  # fmt: skip
    assert float(loss) == pytest.approx(float(output.loss), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(output.loss, theirs))
    if problem == "single_label_classification":
        assert float(sums["accuracy"]) == float((output.logits.argmax(-1) == labels).sum())


@LAYOUTS
def test_classification_of_words_equals_transformers(tmp_path, layout):
    case = Case(tmp_path, "token_classification", **layout)
    policy = case.policy()
    loss, _, counts = mean_loss(case.method, policy, [case.batch()])
    assert counts == {"words": 24}
    plain = Case(tmp_path, "token_classification")
    width = max(len(row["input_ids"]) for row in plain.rows)
    labels = torch.full((6, width), -100)
    ids = torch.full((6, width), 258)
    for at, row in enumerate(plain.rows):
        read = [n for n, label in enumerate(row["labels"]) if label != -100]
        labels[at, read] = torch.tensor(row["target"]).long()
        ids[at, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    theirs = case.theirs(policy)
    expected = theirs(input_ids=ids, attention_mask=(ids != 258).long(), labels=labels).loss
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(expected, theirs))


def embeddings_alone(case, policy, rows):
    """The pooled hidden states of every text, computed by itself, row by row."""
    found = []
    for row in rows:
        begin, texts = 0, []
        for size in row["seq_lengths"]:
            ids = torch.tensor([row["input_ids"][begin : begin + size]])
            hidden = policy.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state[0]
            begin += size
            texts.append({"last": hidden[-1], "mean": hidden.mean(0)}[case.config.pooling])
        found.append(torch.stack(texts))
    return found


@pytest.mark.parametrize("pooling", ["last", "mean"])
@LAYOUTS
def test_multiple_negatives_ranking_is_the_formula(tmp_path, pooling, layout):
    """Candidates are all positives and negatives of the batch; a copy of the positive is none."""
    rows = rows_of("embedding", 5)
    rows[1]["negative"] = rows[0]["positive"]
    case = Case(tmp_path, "embedding", rows, pooling=pooling, similarity_scale=7.0, **layout)
    policy = case.policy()
    loss, sums, counts = mean_loss(case.method, policy, [case.batch()])
    assert counts == {"queries": 5}
    plain = Case(tmp_path, "embedding", rows, pooling=pooling)
    texts = embeddings_alone(plain, policy, plain.rows)
    candidates = F.normalize(torch.cat([row[1:] for row in texts]), dim=-1)
    names = [name for row in rows for name in (row["positive"], row["negative"])]
    losses, right = [], 0
    for number, (row, named) in enumerate(zip(texts, rows, strict=True)):
        similarities = 7.0 * candidates @ F.normalize(row[0], dim=-1)
        kept = [at for at, name in enumerate(names) if name != named["positive"] or at == 2 * number]
        losses.append(torch.logsumexp(similarities[kept], 0) - similarities[2 * number])
        right += int(similarities[kept].argmax() == kept.index(2 * number))
    expected = torch.stack(losses).mean()
    assert float(loss) == pytest.approx(float(expected), rel=2e-5)
    assert float(sums["accuracy"]) == right
    assert_same_gradients(gradients(loss, policy), gradients(expected, policy), 2e-5)


@pytest.mark.parametrize("loss_type", ["cosent", "cosine_similarity"])
def test_losses_of_scored_pairs_are_the_formulas(tmp_path, loss_type):
    rows = [{"sentence1": f"a{n}", "sentence2": f"{n}b{n}", "score": n / 10} for n in range(5)]
    case = Case(tmp_path, "embedding", rows, loss_type=loss_type)
    policy = case.policy()
    loss, *_ = mean_loss(case.method, policy, [case.batch()])
    similarities = torch.stack([F.cosine_similarity(*row, dim=-1) for row in embeddings_alone(case, policy, case.rows)])
    scores = torch.tensor([row["score"] for row in rows])
    if loss_type == "cosine_similarity":
        expected = F.mse_loss(similarities, scores)
    else:
        terms = [
            (20 * (similarities[i] - similarities[j])).exp()
            for i in range(5)
            for j in range(5)
            if scores[i] < scores[j]
        ]
        expected = torch.log(1 + torch.stack(terms).sum())
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert_same_gradients(gradients(loss, policy), gradients(expected, policy), 1e-4)


@pytest.mark.parametrize("loss_type", ["binary_cross_entropy", "ranknet", "listnet"])
@LAYOUTS
def test_losses_of_a_query_s_documents_are_the_formulas(tmp_path, loss_type, layout):
    documents = [[f"d{n}{m}" for m in range(n + 2)] for n in range(3)]
    scores = [[(n + m) % 3 / 2 for m in range(n + 2)] for n in range(3)]
    lists = zip(documents, scores, strict=True)
    rows = [{"query": f"q{n}", "documents": texts, "scores": values} for n, (texts, values) in enumerate(lists)]
    case = Case(tmp_path, "reranker", rows, loss_type=loss_type, **layout)
    policy = case.policy()
    loss, _, counts = mean_loss(case.method, policy, [case.batch()])
    assert counts == {"documents": 9, "queries": 3}
    theirs = case.theirs(policy).eval()
    losses = []
    for row in rows:
        ids = [
            case.tokenizer(row["query"], document, return_tensors="pt")["input_ids"] for document in row["documents"]
        ]
        scores = torch.cat([theirs(input_ids=text).logits[:, 0] for text in ids])
        target = torch.tensor(row["scores"])
        if loss_type == "binary_cross_entropy":
            losses += F.binary_cross_entropy_with_logits(scores, target, reduction="none").unbind()
        elif loss_type == "listnet":
            losses.append(-(target.softmax(0) * scores.log_softmax(0)).sum())
        else:
            pairs = [
                F.softplus(scores[j] - scores[i])
                for i in range(len(target))
                for j in range(len(target))
                if target[i] > target[j]
            ]
            losses.append(torch.stack(pairs).mean())
    expected = torch.stack(losses).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(expected, theirs))


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification", "embedding", "reranker"])
def test_padding_and_blank_batches_change_nothing(tmp_path, task):
    """A GPU's rounded shapes have the same loss and outputs; a blank batch has none."""
    case = Case(tmp_path, task)
    policy = case.policy().eval()
    plain = case.batch()
    collator = case.method.collator(case.config, case.tokenizer)
    object.__setattr__(collator, "rounded", True)
    rounded = collator(case.rows)
    assert len(rounded["real"]) % 16 == 0
    with torch.no_grad():
        found, expected = (case.method.evaluate(policy, batch) for batch in (rounded, plain))
        assert case.method.counts(rounded) == case.method.counts(plain)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        blank = case.method.blank(rounded)
        assert set(case.method.counts(blank).values()) == {0}
        values = case.method.evaluate(policy, blank)
        sums = {metric.name for metric in case.method.numbers.trained}
        assert all(float(values[name]) == 0 for name in sums)
        assert all(len(value) == 0 for name, value in values.items() if name not in sums)


def test_a_mean_of_several_tokens_survives_padding_to_the_number_of_texts(tmp_path):
    rows = [{"anchor": "a", "positive": "b", "negative": "c"}] * 19 + [
        {"anchor": "d", "positive": "e", "negative": "fg"}
    ]
    case = Case(tmp_path, "embedding", rows, pooling="mean")
    policy = case.policy().eval()
    collator = case.method.collator(case.config, case.tokenizer)
    object.__setattr__(collator, "rounded", True)
    rounded = collator(case.rows)
    assert len(rounded["real"]) == 64  # of 60 texts with 61 tokens
    with torch.no_grad():
        torch.testing.assert_close(pooled(policy, rounded)[:60], pooled(policy, case.batch()), rtol=1e-5, atol=1e-5)


def test_padding_has_no_gradient_of_nan():
    scores = torch.tensor([0.3, -0.2, 5.0], requires_grad=True)
    target, row = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, -1])
    for loss in (ranknet, listnet):
        (gradient,) = torch.autograd.grad(loss(scores, target, row), scores)
        assert gradient.isfinite().all()
        assert gradient[2] == 0
    (gradient,) = torch.autograd.grad(cosent(scores, target, torch.tensor([1.0, 0.0, 0.0])), scores)
    assert gradient.isfinite().all()


def test_a_pooled_mean_in_half_precision_is_summed_in_single(tmp_path):
    case = Case(tmp_path, "embedding", pooling="mean")
    policy = case.policy().eval()
    with torch.no_grad():
        expected = torch.cat(embeddings_alone(case, policy, case.rows))
        torch.testing.assert_close(pooled(policy, case.batch()), expected, rtol=1e-5, atol=1e-5)


# --- numbers of evaluations ------------------------------------------------------------------------------------------


def test_macro_f1():
    predicted = F.one_hot(torch.tensor([0, 0, 1, 1]), 4).bool()
    actual = F.one_hot(torch.tensor([0, 1, 1, 3]), 4).bool()
    assert macro_f1(predicted, actual) == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)  # label 2 does not occur


def test_correlations():
    x, y = torch.tensor([1.0, 2.0, 2.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 10.0])
    ranks, others = torch.tensor([0, 1.5, 1.5, 3]), torch.tensor([0.0, 2, 1, 3])
    assert correlations(x, y)["spearman"] == pytest.approx(float(torch.corrcoef(torch.stack([ranks, others]))[0, 1]))
    assert correlations(x, y)["pearson"] == pytest.approx(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), abs=1e-6)
    assert correlations(x, torch.ones(4)) == {}


def test_ranking_of_documents():
    scores, gains = torch.tensor([3.0, 2.0, 1.0, 5.0, 4.0]), torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])
    numbers = reranking(scores, gains, [3, 2])
    ideal, found = 1 + 1 / math.log2(3), 1 / math.log2(3) + 1 / math.log2(4)
    assert numbers["ndcg_at_10"] == pytest.approx((found / ideal + 1) / 2)
    assert (numbers["recall_at_1"], numbers["recall_at_10"]) == (0.5, 1.0)
    assert reranking(scores[:3], torch.zeros(3), [3]) == {}


def test_retrieval_counts_equal_texts_once_and_several_positives():
    documents = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [1.0, 0.0]]), dim=-1)
    hashes = torch.tensor([7, 8, 9, 7])
    queries = documents[[0, 1, 0]]
    numbers = retrieval(queries, torch.tensor([1, 2, 1]), documents, hashes, torch.tensor([7, 9, 9]))
    # query 1 has the positives 7 and 9, which are its first two; query 2 has 9, after 8
    assert numbers["recall_at_1"] == pytest.approx((0.5 + 0) / 2)
    assert numbers["ndcg_at_10"] == pytest.approx((1 + 1 / math.log2(3)) / 2)
