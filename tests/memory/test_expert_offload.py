"""Offloaded experts: bit-equal results, and one copy of each layer per pass."""

from __future__ import annotations

import pytest
import torch

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.loading.expert_offload import WINDOW, offload_experts
from halfbyte.loading.load import load_model
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.patch import patch, unpatch
from halfbyte.modeling.transformers_versions import enable_checkpointing
from tests.helpers.expert_models import TOKENS, mixture, stacks

LAYERS = 5
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


@pytest.fixture(scope="module", params=["Qwen3Moe", "GptOss"])
def folder(request, tmp_path_factory):
    at = tmp_path_factory.mktemp(request.param)
    mixture(request.param, num_hidden_layers=LAYERS).save_pretrained(at)
    return str(at)


def trained(folder, **keys):
    model = load_model(folder, dtype="float32", device=keys.pop("device", "cpu"))
    torch.manual_seed(1)
    model = add_adapter(model, RunConfig(model_name_or_path="m", dataset="d", r=4, **keys)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    return model


def offloaded(model, chosen=range(LAYERS)):
    return offload_experts(model.get_base_model().model.layers, chosen, torch.device("cpu"))


def step(model):
    """Loss, and all gradients."""
    model.zero_grad()
    total, count = causal_lm_loss(model, BATCH)
    (total / count).backward()
    return total.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Poisoned:
    """A window that overwrites a slot as soon as another layer may use it."""

    def __init__(self, window):
        self.window, self.asked = window, []
        own = window._copy

        def copy_into(host, slot):
            slot.memory.fill_(255)
            own(host, slot)

        window._copy = copy_into


@pytest.mark.sampled(9)
@pytest.mark.parametrize("level", ["keep", "recompute_mlp", "checkpoint", "tiled", "transformers"])
def test_numbers_are_those_of_resident_experts(folder, level):
    resident, model = trained(folder), trained(folder)
    window = offloaded(model)
    Poisoned(window)
    for each in (resident, model):
        if level == "transformers":
            enable_checkpointing(each.get_base_model())
        else:
            patch(each, level)
    for _ in range(2):
        for found, expected in zip(step(model), step(resident), strict=True):
            assert torch.equal(found, expected)
    unpatch(model)


def test_each_layer_is_copied_once_per_pass(folder):
    model = trained(folder)
    window = offloaded(model)
    patch(model, "checkpoint")
    step(model)
    before = window.copies
    step(model)
    assert window.copies == before + 2 * (LAYERS - WINDOW)  # a pass starts with the layers left by the previous pass
    assert window.nbytes == WINDOW * window.host_bytes // LAYERS


def test_next_layer_is_prefetched(folder):
    window = offloaded(trained(folder))

    def there():
        return {slot.layer for slot in window.slots}

    for at in range(LAYERS - 1):
        window.fetch(at)
        assert there() == {at, at + 1}
    window.fetch(LAYERS - 1)
    for at in reversed(range(1, LAYERS - 1)):
        window.fetch(at)
        assert there() == {at, at - 1}


@pytest.mark.slow
def test_files_and_answers_equal_resident_experts(folder):
    resident, model = trained(folder).eval(), trained(folder).eval()
    expected = {name: value.clone() for name, value in resident.state_dict().items()}
    offloaded(model)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(TOKENS, **asked), resident.generate(TOKENS, **asked))


@pytest.mark.gpu
def test_stacks_are_left_on_the_host_while_loading(folder):
    model = load_model(folder, dtype="float32", device="cuda", experts_on_host=[0, 3])
    on_host = {name for name, stack in stacks(model).items() if all(part.is_cpu for part in stack.parts.values())}
    assert on_host == {name for name in stacks(model) if ".layers.0." in name or ".layers.3." in name}


@pytest.mark.gpu
def test_adapters_are_on_the_computing_device(folder):
    """PEFT creates factors on the stack's device, which is the host for a model loaded with offloaded experts."""
    model = load_model(folder, dtype="float32", device="cuda", experts_on_host=range(LAYERS))
    offload_experts([*model.model.layers], range(LAYERS), torch.device("cuda"))
    model = add_adapter(model, RunConfig(model_name_or_path="m", dataset="d", r=4)).train()
    assert all(p.is_cuda for p in model.parameters() if p.requires_grad)
    total, _ = causal_lm_loss(model, {"input_ids": TOKENS.cuda(), "labels": TOKENS.cuda()})
    total.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["keep", "checkpoint", "tiled"])
def test_on_a_gpu(folder, level):
    resident, model = trained(folder, device="cuda"), trained(folder, device="cuda")
    window = offload_experts(model.get_base_model().model.layers, range(LAYERS), torch.device("cuda"))
    assert all(part.is_cpu for stack in stacks(model).values() for part in stack.parts.values())
    own = {"input_ids": TOKENS.cuda(), "labels": TOKENS.cuda()}
    for each in (resident, model):
        patch(each, level)
    for _ in range(4):
        results = []
        for each in (resident, model):
            each.zero_grad()
            total, count = causal_lm_loss(each, own)
            (total / count).backward()
            results.append((total.detach(), *[p.grad for p in each.parameters() if p.grad is not None]))
        assert all(torch.equal(found, expected) for found, expected in zip(*results, strict=True))
    assert window.copies
