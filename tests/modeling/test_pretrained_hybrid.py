"""A small Qwen3.5 pretrained on the demo's text: rows of packed documents teach it what padded ones do."""

import pytest
import torch
import transformers

from halfbyte.data.collate import PackedCollator, PaddedCollator
from halfbyte.demo import base, corpus
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.packing import isolate_documents, remove_isolation

ROWS, LENGTH, LONGEST, STEPS = 2, 192, 64, 40
SIZES = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": True, "pad_token_id": 0,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip


def steps_of_documents():
    """A step's rows: lists of documents that fill a row, as long as there are any."""
    texts = corpus.gather()
    tokenizer = base.build_tokenizer(texts, base.Recipe())
    documents = (ids[:LONGEST] for ids in tokenizer([text + base.END for text in texts.prose])["input_ids"])
    rows, row = [], []
    for ids in documents:
        if sum(map(len, row)) + len(ids) > LENGTH:
            rows, row = [*rows, row], []
        row.append(ids)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return [[rows[index] for index in order[at : at + ROWS]] for at in range(0, STEPS * ROWS, ROWS)]


def packed(step):
    rows = [[token for ids in row for token in ids] for row in step]
    return PackedCollator(0)(
        [
            {"input_ids": ids, "labels": ids, "seq_lengths": [*map(len, row)]}
            for ids, row in zip(rows, step, strict=True)
        ]
    )


def padded(step):
    return PaddedCollator(0)([{"input_ids": ids, "labels": ids} for row in step for ids in row])


def model_of():
    torch.manual_seed(0)
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES)).train()


def losses(model, steps, collate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    found = []
    for step in steps:
        loss, tokens = causal_lm_loss(model, collate(step))
        optimizer.zero_grad()
        (loss / tokens).backward()
        optimizer.step()
        found.append(float(loss.detach()) / int(tokens))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_packed_and_padded_pretraining_have_the_same_loss():
    steps, model = steps_of_documents(), model_of()
    assert 3e6 < model.num_parameters() < 6e6
    assert sum(map(len, steps[0])) > 2 * ROWS  # documents a row
    expected = losses(model, steps, padded)
    model = model_of()
    tokens = [token for ids in steps[0][0] for token in ids]
    assert isolate_documents(model, PackedCollator(0), key="packing", length=LENGTH, tokens=tokens).way == "bounds"
    found = losses(model, steps, packed)
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[-1] < 0.8 * found[0]  # it has learnt
    with torch.no_grad():
        apart = float(causal_lm_loss(model, packed(steps[0]))[0])
        remove_isolation(model)
        assert abs(float(causal_lm_loss(model, packed(steps[0]))[0]) / apart - 1) > 1e-3  # it would leak
