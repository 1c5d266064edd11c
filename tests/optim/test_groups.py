"""Parameter groups: LoRA+ as in PEFT, embeddings, schedules; Riemannian preconditioning against PEFT's function."""

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from halfbyte.adapters.lora import add_adapter
from halfbyte.optim import OPTIMIZERS, make_optimizer, parameter_groups
from halfbyte.optim.riemannian import lora_pairs
from tests.helpers.optimizer_settings import OptimizerSettings
from tests.helpers.tiny_runs import run_config, tiny_llama

TARGETS = ["q_proj", "v_proj", "embed_tokens"]


def adapted(tmp_path, **keys):
    config = run_config(tmp_path, **{"target_modules": TARGETS, "modules_to_save": ["norm", "lm_head"], **keys})
    model = add_adapter(tiny_llama(), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # B starts at zero
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def named(groups, model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(sorted(names[id(p)] for p in group["params"]), group["weight_decay"], group.get("lr")) for group in groups]


@pytest.mark.parametrize("embedding", [None, 3e-5])
def test_lora_plus_has_the_groups_of_peft(embedding, tmp_path):
    model = adapted(tmp_path)
    keys = {} if embedding is None else {"loraplus_lr_embedding": embedding}
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1, **keys
    )
    settings = OptimizerSettings(weight_decay=0.1, loraplus_lr_ratio=16.0, loraplus_lr_embedding=embedding)
    assert named(parameter_groups(model, settings), model) == named(theirs.param_groups, model)
    assert all(group["params"] for group in theirs.param_groups[:3])


def test_embeddings_and_head_have_their_own_rate(tmp_path):
    whole = tiny_llama(tie_word_embeddings=False)
    settings = OptimizerSettings(weight_decay=0.1, embedding_learning_rate=1e-5)
    *others, last = named(parameter_groups(whole, settings), whole)
    assert last == (["lm_head.weight", "model.embed_tokens.weight"], 0.1, 1e-5)
    assert [rate for _, _, rate in others] == [None, None]
    model = adapted(tmp_path)
    *others, (names, _, rate) = named(parameter_groups(model, settings), model)
    assert rate == 1e-5
    assert len(names) == 1
    assert "lm_head" in names[0]
    assert not any("lm_head" in name for part, _, _ in others for name in part)


def test_a_schedule_acts_on_every_group(tmp_path):
    model = adapted(tmp_path)
    settings = OptimizerSettings(loraplus_lr_ratio=8.0, embedding_learning_rate=1e-4)
    optimizer = make_optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    before = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [rate / 2 for rate in before]
    assert len(set(before)) == 4


@pytest.mark.parametrize("name", ["adamw_torch_fused", "sgd", "galore_adamw"])
def test_riemannian_preconditioning_equals_peft(name, tmp_path):
    """Gradients after the preconditioner, and weights after three steps, as of PEFT's optimizer."""
    model, twin = adapted(tmp_path), adapted(tmp_path)
    settings = OptimizerSettings(optim=name, lora_preconditioner="riemannian", learning_rate=1e-2)
    ours = make_optimizer(model, settings)
    if name == "galore_adamw":  # PEFT's takes no factory; its preconditioner runs before the same optimizer
        from peft.optimizers.riemannian import _collect_lora_pairs, _RiemannianPreconditioner

        theirs = OPTIMIZERS[name].make(twin, settings)
        preconditioner = _RiemannianPreconditioner(_collect_lora_pairs(twin), reg=1e-2)
        theirs.register_step_pre_hook(lambda *_: preconditioner.step())
    else:
        kind = torch.optim.AdamW if name.startswith("adamw") else torch.optim.SGD
        keys = {"weight_decay": 0.0}
        theirs = peft.optimizers.create_riemannian_optimizer(twin, kind, lr=1e-2, **keys)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            if own.requires_grad:
                own.grad = torch.randn(own.shape, generator=generator)
                other.grad = own.grad.clone()
        ours.step()
        theirs.step()
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            if own.requires_grad:
                torch.testing.assert_close(own.grad, other.grad, rtol=2e-4, atol=2e-5)
    for own, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=2e-4, atol=2e-5)


def test_preconditioning_leaves_other_parameters_and_missing_gradients(tmp_path):
    model = adapted(tmp_path)
    optimizer = make_optimizer(model, OptimizerSettings(lora_preconditioner="riemannian", learning_rate=0.0))
    (a, b), *others = lora_pairs(model)
    a.grad = torch.ones_like(a)
    norm = next(p for name, p in model.named_parameters() if p.requires_grad and ".norm." in name)
    norm.grad = torch.ones_like(norm)
    optimizer.step()
    assert b.grad is None
    assert torch.equal(norm.grad, torch.ones_like(norm))
    expected = torch.linalg.solve(b.T.double() @ b.double() + 1e-2 * torch.eye(len(a)), torch.ones_like(a).double())
    torch.testing.assert_close(a.grad.double(), expected, rtol=1e-4, atol=1e-5)
    assert len(others) == 3


def test_pairs_are_linear_factors_only():
    model = nn.Linear(3, 4)
    assert lora_pairs(model) == []
