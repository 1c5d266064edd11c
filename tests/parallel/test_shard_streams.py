"""Stream order of gathers on one GPU: one rank of two, with the other's shards in the same process.

Late bytes and slow layers reveal a layer that reads before its bytes arrive, or bytes that overwrite those in use.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import halfbyte
from halfbyte.config import Parallel
from halfbyte.mesh.mesh import Mesh
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.layer import decoder_layers
from halfbyte.parallel.shard import weights
from halfbyte.tensor import QuantizedTensor
from halfbyte.train.graph import WARMUP
from halfbyte.train.stepper import GraphedStepper, Stepper
from tests.helpers.patch_models import batch, quantize, tiny
from tests.helpers.steps import run_step

LAYERS = 6
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS, "head_dim": 64}
CYCLES = 2_000_000  # about a millisecond
STAYS = [["call"] * LAYERS, ["call"] * (LAYERS - 1) + ["backward"], ["always", "call"] * (LAYERS // 2)]


@pytest.fixture
def one_of_two():
    """Return a mesh of two ranks, of which only this one exists."""
    if dist.is_initialized():
        pytest.skip("the process is in a group already")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    groups = {("shard",): dist.group.WORLD, ("shard", "context"): dist.group.WORLD}
    yield lambda kind: Mesh(0, Parallel(shard=2), 0, kind, groups)
    dist.destroy_process_group()


def beside(monkeypatch, mesh, blocks, delay):
    """Emulate collectives with the other rank's bytes; they arrive late, over bytes that are no weights."""
    other, cut, slices = replace(mesh, rank=1), [], {}
    for block in blocks:
        seen = {id(p): p for m in block.modules() for p in m._parameters.values() if p is not None}
        frozen = [p for p in seen.values() if not p.requires_grad and p.dim()]
        cut.append([torch.cat([weights._template_and_shard(p, each)[1] for p in frozen]) for each in (mesh, other)])
    joined = weights._concatenated_shard

    def both(raws, mesh):
        parts = cut.pop(0)
        monkeypatch.setattr(weights, "all_gather", lambda *_: torch.cat(parts))
        own = joined(raws, mesh)
        slices[own[0].data_ptr()] = joined(raws, other)[0]
        return own

    def gather(out, own, group):
        out.fill_(255)
        delay()
        for place, part in zip(out.view(2, -1), (own, slices[own.data_ptr()]), strict=True):
            place.copy_(part)

    monkeypatch.setattr(weights, "_concatenated_shard", both)
    monkeypatch.setattr(weights, "_all_gather", gather)


def windows():
    torch.manual_seed(1)
    return [[batch(length=length), batch(length=12)] for length in [12, 24] * (2 * WARMUP + 2)]


def eager(_):
    return Stepper()


def trained(model, stepper, device):
    """Return losses and gradients of steps, with an evaluation after every fourth."""
    parameters, record = [p for p in model.parameters() if p.requires_grad], []
    steps = stepper(parameters)

    def sums(batch):
        return {"loss": causal_lm_loss(model, batch)[0]}

    for number, window in enumerate(windows()):
        on_device = [{name: value.to(device) for name, value in each.items()} for each in window]
        loss = run_step(steps, sums, on_device, torch.ones((), device=device), may_capture=True)
        record.append((loss, [p.grad.clone() for p in parameters]))
        for parameter in parameters:
            parameter.data.sub_(1e-3 * parameter.grad)
            parameter.grad = None
        if number % 4 == 3:
            with torch.no_grad():
                record.append((causal_lm_loss(model, on_device[0])[0], []))
    held = steps.holds_graphs
    steps.close()
    return record, held


@pytest.mark.parametrize(
    ("device", "stays", "late"),
    [pytest.param("cpu", STAYS[2], "bytes", marks=pytest.mark.slow)]  # nothing is late: that this test is right
    + [pytest.param("cuda", stays, late, marks=pytest.mark.gpu) for stays in STAYS for late in ("bytes", "layers")],
)
def test_layers_read_their_own_bytes(monkeypatch, one_of_two, device, stays, late):
    torch.manual_seed(0)
    model = quantize(tiny("Llama", shape=SIZES)).to(device)
    halfbyte.patch(model, "recompute")
    plain = copy.deepcopy(model)
    expected, _ = trained(plain, eager, device)

    def delay():
        if device == "cuda":
            torch.cuda._sleep(CYCLES)

    mesh, (name, blocks) = one_of_two(device), decoder_layers(model)
    root = model.get_base_model().get_submodule(name.rpartition(".")[0])
    beside(monkeypatch, mesh, blocks, delay if late == "bytes" else lambda: None)
    share = weights.shard_blocks(root, blocks, mesh, stays)
    for block in blocks if late == "layers" else ():
        block.register_forward_pre_hook(lambda *_: delay())
        block.register_full_backward_pre_hook(lambda *_: delay())

    found, held = trained(model, GraphedStepper if device == "cuda" else eager, device)
    assert held == (device == "cuda")
    assert share.stats.count
    for (loss, gradients), (its, theirs) in zip(found, expected, strict=True):
        torch.testing.assert_close(loss, its, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients, theirs, rtol=1e-4, atol=1e-5)
    theirs = dict(plain.named_parameters())
    with share.unsharded():
        for name, parameter in model.named_parameters():
            if isinstance(parameter.data, QuantizedTensor):
                assert torch.equal(parameter.data.to_bytes(), theirs[name].data.to_bytes()), name
