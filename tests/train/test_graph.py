"""GraphedStep: replays train as eager steps do, each shape has its graph, and what cannot be captured stays eager."""

import pytest
import torch
from torch import nn

from halfbyte import notices
from halfbyte.errors import TrainingError
from halfbyte.train.graph import GraphedBackward, GraphedStep


def training(waits=False):
    """A small model on the GPU and a function that trains it once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True, capturable=True)

    def step(batch):
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        if waits:
            assert loss.item() > 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, optimizer


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for i in range(count):
        x = torch.randn(4 + 4 * (i % 2), 8, generator=generator).cuda()
        yield {"x": x, "y": x.sum(1, keepdim=True)}


@pytest.mark.gpu
def test_replays_train_as_eager_steps_do_for_every_shape():
    step, _ = training()
    expected = [step(batch).item() for batch in batches(20)]
    step, optimizer = training()
    graphed = GraphedStep(step, optimizer)
    found = [graphed(batch) for batch in batches(20)]
    assert [loss.item() for loss in found] == pytest.approx(expected, rel=1e-5)
    assert sum(captured is not None for captured in graphed._captured.values()) == 2


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_stays_eager_and_is_said():
    notices.forget()
    step, _ = training(waits=True)
    expected = [step(batch).item() for batch in batches(12)]
    step, optimizer = training(waits=True)
    graphed = GraphedStep(step, optimizer)
    assert [graphed(batch).item() for batch in batches(12)] == pytest.approx(expected, rel=1e-5)
    assert "cuda-graph" in notices.said()


@pytest.mark.gpu
def test_after_a_failed_capture_random_numbers_and_memory_are_as_before():
    step, optimizer = training(waits=True)
    graphed = GraphedStep(step, optimizer)
    for batch in batches(12):
        graphed(batch)
    torch.cuda.manual_seed(3)
    first = torch.rand(100, device="cuda")
    torch.cuda.manual_seed(3)
    assert torch.equal(torch.rand(100, device="cuda"), first)
    before = torch.cuda.memory_allocated()
    used = torch.empty(2**24, device="cuda")
    used.record_stream(torch.cuda.Stream())
    del used
    torch.cuda.synchronize()
    seen = torch.empty(1, device="cuda")  # the allocator looks who has finished
    assert torch.cuda.memory_allocated() <= before + seen.untyped_storage().nbytes() + 512


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3])
def test_gradients_of_a_window_are_those_of_eager_backward(window):
    """Gradients are handed over, added up over a window, and an eager batch in between adds to them too."""

    def run(wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
        unused = nn.Parameter(torch.ones(3, device="cuda"))
        trained = [*model.parameters(), unused]
        optimizer = torch.optim.AdamW(trained, lr=0.05, fused=True)

        def backward(batch):
            loss = (model(batch["x"]) - batch["y"]).square().mean() / window
            loss.backward()
            return loss.detach()

        call = wrap(backward, trained)
        losses = []
        for i, batch in enumerate(batches(24)):
            losses.append(call(batch).item())
            if (i + 1) % window == 0:
                torch.nn.utils.clip_grad_norm_(trained, 0.5)  # in place, where a graph will write again
                optimizer.step()
                optimizer.zero_grad()
        assert unused.grad is None
        return losses

    graphs = []
    found = run(lambda step, trained: graphs.append(GraphedBackward(step, trained, window > 1)) or graphs[0])
    assert found == pytest.approx(run(lambda step, _: step), rel=1e-4)
    assert sum(captured is not None for captured in graphs[0]._captured.values()) == 2


def test_an_optimizer_that_cannot_be_captured_is_refused():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(TrainingError, match="capturable"):
        GraphedStep(lambda batch: batch, optimizer)
