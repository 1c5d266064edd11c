"""Rows that store a prompt once before its answers: contents, batch layout, and saved tokens."""

import pytest
import torch
from datasets import Dataset

from halfbyte.config import RunConfig
from halfbyte.data.answer_documents import as_documents, documents_in, documents_of, trained_tokens, with_own_prompts
from halfbyte.data.batches import batches_of, document_lengths, longest_row
from halfbyte.data.prepare import PreparedData
from halfbyte.data.shared_prefix import BranchCollator, Tree, trees_of
from halfbyte.data.tables import packed

ANSWERS = (("chosen_ids", "chosen_mask"), ("rejected_ids", "rejected_mask"))
COLUMNS = ("prompt_ids", *(name for answer in ANSWERS for name in answer))
ROWS = Dataset.from_list(
    [
        dict(zip(COLUMNS, ([11, 12, 13], [21, 22], [1, 1], [31], [1]), strict=True)),
        dict(zip(COLUMNS, ([14], [23], [1], [32, 33, 34], [0, 1, 1]), strict=True)),
    ]
)


def rows(shared=True):
    return as_documents(ROWS, ANSWERS, shared=shared)


def test_shared_rows_have_the_documents_of_separate_rows():
    first, second = rows()
    assert first["input_ids"] == [11, 12, 13, 21, 22, 31]
    assert first["labels"] == [-100, -100, -100, 21, 22, 31]
    assert trees_of(first) == [Tree(3, (2, 1))]
    packed_rows = list(packed(rows(), 12))
    assert [trees_of(row) for row in packed_rows] == [[Tree(3, (2, 1)), Tree(1, (1, 3))]]
    for shared, alone in zip((first, second), rows(shared=False), strict=True):
        assert documents_of(shared) == documents_of(alone)
        assert with_own_prompts(shared) == alone
        assert trained_tokens(shared) == trained_tokens(alone)
    assert documents_of(packed_rows[0]) == documents_of(first) + documents_of(second)
    assert document_lengths(rows()).tolist() == document_lengths(rows(shared=False)).tolist() == [5, 4, 2, 4]
    assert longest_row(rows(), 2) == 5


def sees(batch):
    """Return which token attends to which, from the columns of a batch: bool [N, N]."""
    begins, _, openings, closings = batch["branches"]
    at = torch.arange(len(begins))
    return ((at <= at[:, None]) & (at >= begins[:, None])) | ((at >= openings[:, None]) & (at < closings[:, None]))


def by_hand(width):
    """Return the expected attention of both padded rows: bool [N, N]."""
    whose = [["p", "p", "p", "a", "a", "b"], ["p", "a", "b", "b", "b"]]
    whose = [
        f"{row}{segment}"
        for row, segments in enumerate(whose)
        for segment in [*segments, *["-"] * (width - len(segments))]
    ]
    attends = torch.zeros(len(whose), len(whose), dtype=torch.bool)
    for query, owner in enumerate(whose):
        for key in range(query + 1):
            attends[query, key] = whose[key] == owner or (whose[key] == f"{owner[0]}p" and owner[1] in "ab")
    return attends


@pytest.mark.parametrize("rounded", [False, True])
def test_padded_batch_attends_like_the_mask(rounded):
    batch, positions = BranchCollator(0, rounded=rounded)(list(rows()))
    width = 128 if rounded else 6
    assert batch["input_ids"].shape == batch["position_ids"].shape == (2, width)
    assert batch["input_ids"][1, :6].tolist() == [14, 23, 32, 33, 34, 0]
    assert batch["position_ids"][0, :6].tolist() == [0, 1, 2, 3, 4, 3]
    assert batch["position_ids"][1, :6].tolist() == [0, 1, 1, 2, 3, 0]
    assert [document.tolist() for document in positions] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 5], [width, width + 1], [width, width + 2, width + 3, width + 4],
    ]  # fmt: skip
    assert torch.equal(sees(batch), by_hand(width))


def test_bounds_key_places_and_branches_agree():
    batch, _ = BranchCollator(0, rounded=True)(list(rows()))
    seen, (bounds, keys) = sees(batch), (batch[f"cu_seq_lens_{name}"] for name in "qk")
    assert len(bounds) == len(keys) == 33
    for number in range(32):
        begin, end = bounds[number : number + 2].tolist()
        attended = batch["key_places"][keys[number] : keys[number + 1]]
        queries = torch.arange(begin, end)
        for at, query in enumerate(queries):  # queries are the last of the keys
            assert (
                seen[query].nonzero().flatten().tolist() == attended[: len(attended) - len(queries) + at + 1].tolist()
            )
        assert end - begin <= batch["max_length_q"]
        assert len(attended) <= batch["max_length_k"]
    for key, last in enumerate(batch["branches"][1].tolist()):
        assert seen[:, key].nonzero().max() == last - 1


@pytest.mark.parametrize("layout", [{}, {"padding_free": True}, {"packing": True}], ids=["padded", "flat", "packed"])
def test_plan_and_report_count_computed_tokens(layout):
    config = RunConfig(model_name_or_path="m", dataset="d", max_length=8, per_device_train_batch_size=2, **layout)
    report = {"train": {"tokens": 1}, "eval": None}
    data = documents_in(config, PreparedData(ROWS, None, report, shared=True), ANSWERS)
    assert (data.report["train"]["computed_tokens"], data.report["train"]["tokens_apart"]) == (11, 15)
    assert report == {"train": {"tokens": 1}, "eval": None}
    assert batches_of(config, data, torch.device("cpu")).largest.tokens == (12 if not layout else 11)
    unshared = documents_in(config, PreparedData(ROWS, None, report), ANSWERS)
    assert "computed_tokens" not in unshared.report["train"]
    assert batches_of(config, unshared, torch.device("cpu")).largest.tokens == (20 if not layout else 15)
