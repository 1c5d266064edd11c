"""NEFTune's noise: its scale by document, and when there is none."""

import pytest
import torch

from halfbyte.modeling import embedding_noise
from halfbyte.modeling.embedding_noise import document_lengths, noisy_embeddings
from halfbyte.modeling.patch import patch
from tests.helpers.patch_models import tiny

ALPHA, LENGTHS = 5.0, (60, 7, 33)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def noise(model, **inputs):
    """Noise [B, T, D] on the embeddings of a forward of the backbone."""
    embeddings, outputs = model.get_input_embeddings(), []
    ids = torch.randint(1, 100, (1, 100)) if "input_ids" not in inputs else inputs.pop("input_ids")
    plain = embeddings(ids).detach()
    with noisy_embeddings(model, ALPHA):
        hook = embeddings.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
        model.base_model(input_ids=ids, use_cache=False, **inputs)
        hook.remove()
    return outputs[0] - plain


@pytest.mark.parametrize("patched", [False, True])
def test_scale_follows_each_document(patched):
    model = tiny("Llama", adapter=False).train()
    if patched:
        patch(model)
    added = noise(model, position_ids=POSITIONS)
    for document, length in zip(added.split(LENGTHS, 1), LENGTHS, strict=True):
        bound = ALPHA / (length * document.shape[-1]) ** 0.5
        assert document.abs().max() <= bound * (1 + 1e-5)
        assert document.abs().mean() == pytest.approx(bound / 2, rel=0.15)  # uniform


def test_padding_does_not_count():
    model = tiny("Llama", adapter=False).train()
    mask = (torch.arange(100) < torch.tensor([[100], [25]])).long()
    added = noise(model, input_ids=torch.randint(1, 100, (2, 100)), attention_mask=mask)
    full, short = (float(row.abs().max()) for row in added)
    assert short / full == pytest.approx(2, rel=0.05)


def test_full_rows_have_the_scale_of_transformers():
    from transformers.integrations.neftune import neftune_post_forward_hook

    model = tiny("Llama", adapter=False).train()
    embeddings = model.get_input_embeddings()
    embeddings.neftune_noise_alpha = ALPHA
    added = noise(model)
    expected = neftune_post_forward_hook(embeddings, None, torch.zeros_like(added))
    assert added.std() == pytest.approx(float(expected.std()), rel=0.05)
    assert added.abs().max() <= ALPHA / (100 * added.shape[-1]) ** 0.5 * (1 + 1e-5)


def test_evaluation_has_none():
    model = tiny("Llama", adapter=False).train()
    assert noise(model.eval()).abs().max() == 0
    assert noise(model.train()).abs().max() > 0
    embeddings = model.get_input_embeddings()
    assert not embeddings._forward_hooks
    assert not model.base_model._forward_pre_hooks


def test_embeddings_without_a_forward_have_the_scale_of_the_row():
    model = tiny("Llama", adapter=False).train()
    embeddings, ids = model.get_input_embeddings(), torch.randint(1, 100, (1, 400))
    with noisy_embeddings(model, ALPHA), torch.no_grad():
        model.base_model(input_ids=ids[:, :25], use_cache=False)
        noisy = embeddings(ids)
    bound = ALPHA / (400 * noisy.shape[-1]) ** 0.5
    assert float((noisy - embeddings(ids)).detach().abs().max()) == pytest.approx(bound, rel=0.01)


def test_lengths_need_no_values_of_the_batch():
    """Meta tensors have no values, as a CUDA graph's capture has none on the host."""
    ids = torch.empty(2, 50, dtype=torch.int64, device="meta")
    lengths = document_lengths(ids, {"position_ids": ids})
    assert lengths.shape == (2, 50)


@pytest.mark.gpu
def test_captured_noise_is_new_and_follows_the_batch():
    model = tiny("Llama", adapter=False).cuda().to(torch.bfloat16).train()
    patch(model)
    ids, positions = torch.randint(1, 100, (1, 100), device="cuda"), POSITIONS.cuda()
    bounds = torch.tensor([0, 60, 67, 100], dtype=torch.int32, device="cuda")
    inputs = {"position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    inputs |= {"max_length_q": 64, "max_length_k": 64, "use_cache": False}
    embeddings, outputs = model.get_input_embeddings(), []
    plain = embeddings(ids).float().detach()
    with noisy_embeddings(model, ALPHA), torch.no_grad():
        embeddings.register_forward_hook(lambda module, args, output: outputs.append(output))
        for _ in range(3):
            model.base_model(input_ids=ids, **inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.base_model(input_ids=ids, **inputs)
    draws = []
    for lengths in (LENGTHS, LENGTHS, (30, 30, 40)):
        positions.copy_(torch.cat([torch.arange(n) for n in lengths])[None])
        graph.replay()
        torch.cuda.synchronize()
        draws.append((outputs[-1].float() - plain).cpu())
        for document, length in zip(draws[-1].split(lengths, 1), lengths, strict=True):
            assert document.abs().max() == pytest.approx(ALPHA / (length * document.shape[-1]) ** 0.5, rel=0.1)
    assert not torch.equal(draws[0], draws[1])


def test_prompts_padded_on_the_left_keep_their_mask(monkeypatch):
    """transformers' decoding loop samples rollouts while the noise is on."""
    monkeypatch.setattr(embedding_noise, "ATTENTION_NAME", "sdpa")  # what a CPU runs
    model = tiny("Llama", adapter=False).eval()
    patch(model)
    ids, mask = torch.randint(1, 100, (2, 10)), torch.ones(2, 10, dtype=torch.long)
    mask[0, :6] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = model(**inputs, use_cache=True).logits[:, -1]
    with noisy_embeddings(model, ALPHA):
        torch.testing.assert_close(model(**inputs, use_cache=True).logits[:, -1], expected)
