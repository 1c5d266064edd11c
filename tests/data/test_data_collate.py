"""Batches, and the isolation of packed documents in real model classes of transformers."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.data.collate import PackedCollator, PaddedCollator, head_share, make_collator, with_head_rows

PAD = 0
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
}
# A window of 8 tokens is shorter than some documents below, which tests sliding layers.
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8, **LAYERS},
}
NO_SDPA = ("gemma2", "sdpa")  # transformers refuses it for the softcap of Gemma 2
LENGTHS = [[13, 5, 1, 9], [6, 17]]  # two packed rows, 28 and 23 tokens


def tiny_model(family, attention):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    config._attn_implementation = attention
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def packed_rows():
    generator = torch.Generator().manual_seed(1)
    rows = []
    for lengths in LENGTHS:
        ids = torch.randint(3, 64, (sum(lengths),), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": list(ids), "seq_lengths": lengths})
    return rows


def split(row):
    start, documents = 0, []
    for length in row["seq_lengths"]:
        documents.append((start, start + length))
        start += length
    return documents


@torch.no_grad()
def logits(model, batch):
    return model(**{"use_cache": False} | {key: value for key, value in batch.items() if key != "labels"}).logits


def test_padded():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = PaddedCollator(PAD)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]


def test_packed_rows_restart_positions_and_pad_with_another_document():
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "seq_lengths": [3, 1]},
        {"input_ids": [9, 4], "labels": [9, 4], "seq_lengths": [2]},
    ]
    batch = PackedCollator(PAD)(rows)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 4, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100], [-100, 4, -100, -100]]


def test_padding_free_is_one_row():
    rows = [
        {"input_ids": [5, 6], "labels": [5, 6]},
        {"input_ids": [7, 8, 9], "labels": [7, 8, 9], "seq_lengths": [1, 2]},
    ]
    batch = PackedCollator(PAD, one_row=True)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, 9]]


def test_fused_batches_come_in_few_shapes_and_without_a_mask():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    batch = PaddedCollator(PAD, fused=True)(rows)
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 128)
    assert batch["input_ids"][0, :4].tolist() == [5, 6, 7, PAD]
    assert batch["labels"][:, 3:].eq(-100).all()


def test_fused_flat_batches_have_document_bounds():
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "seq_lengths": [3, 1]},
        {"input_ids": [9, 4], "labels": [9, 4], "seq_lengths": [2]},
    ]
    batch = PackedCollator(PAD, fused=True)(rows)
    assert batch["position_ids"].shape == (2, 128)
    bounds = batch["cu_seq_lens_q"]
    assert (bounds.dtype, len(bounds)) == (torch.int32, 33)
    assert bounds[:6].tolist() == [0, 3, 4, 128, 130, 256]
    assert bounds[5:].eq(256).all()
    assert batch["max_length_q"] == batch["max_length_k"] == 128
    begins = batch["position_ids"].flatten().eq(0).nonzero().flatten()
    assert begins.tolist() == bounds[:5].tolist()
    assert PackedCollator(PAD, True, True)(rows)["input_ids"].shape == (1, 128)


def test_make_collator(config, make_tokenizer):
    tokenizer = make_tokenizer("plain")
    pad, max_length = tokenizer.pad_token_id, config("d").max_length
    padded = make_collator(config("d"), tokenizer)
    assert replace(padded, images=None) == PaddedCollator(pad, max_length=max_length)
    packed = make_collator(config("d", packing=True), tokenizer)
    assert replace(packed, images=None) == PackedCollator(pad, max_length=max_length)
    one_row = make_collator(config("d", padding_free=True), tokenizer)
    assert replace(one_row, images=None) == PackedCollator(pad, one_row=True, max_length=max_length)
    gpu = torch.device("cuda")
    padded = make_collator(config("d"), tokenizer, gpu)
    assert replace(padded, images=None) == PaddedCollator(pad, True, max_length, True)
    packed = make_collator(config("d", packing=True), tokenizer, gpu)
    assert replace(packed, images=None) == PackedCollator(pad, False, True, max_length, True)
    stock = make_collator(config("d", use_kernels=False), tokenizer, gpu)
    assert replace(stock, images=None) == PaddedCollator(pad, False, max_length, True)
    batch = stock([{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])  # in few widths, too
    assert batch["attention_mask"].shape == (1, 128)
    assert batch["attention_mask"].sum() == 3


@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "padding-free"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager") if (family, attention) != NO_SDPA],
)
def test_documents_of_a_row_do_not_see_each_other(family, attention, one_row):
    model, rows, collate = tiny_model(family, attention), packed_rows(), PackedCollator(PAD, one_row=one_row)
    unperturbed = logits(model, collate(rows))
    # Alone, each document gives the logits it gives in the pack.
    spans = [(index, *span) for index, row in enumerate(rows) for span in split(row)]
    offsets = [0, len(rows[0]["input_ids"])] if one_row else [0, 0]
    for index, start, stop in spans:
        alone = model(input_ids=torch.tensor([rows[index]["input_ids"][start:stop]])).logits[0]
        packed = unperturbed[0 if one_row else index, offsets[index] + start : offsets[index] + stop]
        torch.testing.assert_close(packed, alone, rtol=0, atol=2e-6)
    # Perturbed, a document changes its own logits and not one bit of the others'.
    for index, start, stop in spans[:3] + spans[-1:]:
        perturbed = [{**row, "input_ids": list(row["input_ids"])} for row in rows]
        perturbed[index]["input_ids"][start] = 2
        changed = (logits(model, collate(perturbed)) != unperturbed).any(-1)
        inside = torch.zeros_like(changed)
        inside[0 if one_row else index, offsets[index] + start : offsets[index] + stop] = True
        assert not changed[~inside].any()
        assert changed[inside][:13].all()  # as far as two windows reach


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("extra", [{"attention_mask": torch.ones(1, 28, dtype=torch.int64)}, {"use_cache": True}])
def test_mask_of_ones_or_cache_leaks_between_documents(attention, extra):
    """A flat batch has neither, because transformers then does not isolate documents."""
    model, [row, _] = tiny_model("llama", attention), packed_rows()
    batch = PackedCollator(PAD)([row]) | extra
    unperturbed = logits(model, batch)
    batch["input_ids"][0, 0] = 2
    assert (logits(model, batch) != unperturbed).any(-1)[0, 13:].any()


def test_packed_loss_is_the_sum_of_the_documents_losses():
    """No token is trained across documents: the summed loss equals the sum over separate documents."""
    model, rows = tiny_model("llama", "sdpa"), packed_rows()
    with torch.no_grad():
        packed_loss = model(**PackedCollator(PAD)(rows), use_cache=False, num_items_in_batch=1).loss
        sum_of_losses = sum(
            model(
                input_ids=torch.tensor([row["input_ids"][start:stop]]),
                labels=torch.tensor([row["labels"][start:stop]]),
                num_items_in_batch=1,
            ).loss
            for row in rows
            for start, stop in split(row)
            if stop - start > 1
        )
    torch.testing.assert_close(packed_loss, sum_of_losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize("collate", [PaddedCollator(PAD), PackedCollator(PAD), PackedCollator(PAD, one_row=True)])
@pytest.mark.parametrize("share", [None, 0.25, 0.5, 0.75])
@pytest.mark.parametrize("trained", [0, 3, 60])
def test_the_head_computes_what_comes_before_trained_tokens(collate, trained, share):
    """Of documents whose last tokens are trained."""
    rows = packed_rows()
    for row in rows:
        for start, end in split(row):
            row["labels"][start : max(end - trained, start)] = [-100] * max(end - start - trained, 0)
    batch = with_head_rows(collate, share)(rows)
    wanted = set((batch["labels"].flatten()[1:] != -100).nonzero().flatten().tolist())
    total = batch["labels"].numel()
    count = max(len(wanted), 1) if share is None else int(share * total)
    if count < len(wanted) or count > 0.75 * total:
        assert "head_rows" not in batch
        return
    chosen = batch["head_rows"].tolist()
    assert wanted <= set(chosen)
    assert len(set(chosen)) == len(chosen) == count


@pytest.mark.parametrize(("trained", "share"), [(1, 0.125), (3, 0.375), (6, 0.75), (8, None)])
def test_a_run_has_one_share_for_nearly_all_rows(trained, share):
    row = {"input_ids": list(range(8)), "labels": [-100] * (8 - trained) + [1] * trained}
    full = {"input_ids": list(range(8)), "labels": [1] * 8}
    assert head_share(Dataset.from_list([row] * 2000 + [full] * 50)) == share
