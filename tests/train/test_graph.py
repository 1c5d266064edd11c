"""CUDA graphs of training steps: replays equal eager steps, each shape has a graph, steps that cannot be captured stay
eager, and all graphs share one set of gradients and one pool. On a stand-in for CUDA graphs, and on a GPU."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfbyte.optim.fused import AdamW
from halfbyte.train import graph
from halfbyte.train.graph import GraphedBackward, ShapeGraphs, pool_segments
from halfbyte.utils import notices
from halfbyte.utils.hardware import free_cached_memory
from tests.helpers.graph_stand_in import StandIn


def training(waits=False, ours=False):
    """A small model on the GPU and a function that trains it once, with torch's AdamW or `ours`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).cuda()
    kind = AdamW if ours else partial(torch.optim.AdamW, fused=True, capturable=True)
    optimizer = kind(model.parameters(), lr=0.05)

    def step(batch):
        loss = (model(batch["x"]) - batch["y"]).square().mean()
        if waits:
            assert loss.item() > 0
        loss.backward()
        if ours:
            optimizer.clip(0.5)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
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
@pytest.mark.parametrize("ours", [False, True])
def test_replays_equal_eager_steps_for_every_shape(ours):
    step, _ = training()
    expected = [step(batch).item() for batch in batches(20)]
    step, optimizer = training(ours=ours)
    graphed = ShapeGraphs(step, optimizer.zero_grad)
    found = [graphed(batch) for batch in batches(20)]
    assert [loss.item() for loss in found] == pytest.approx(expected, rel=1e-5)
    assert sum(captured is not None for captured in graphed._captured.values()) == 2


@pytest.mark.gpu
def test_a_step_that_synchronizes_stays_eager_with_a_notice():
    step, _ = training(waits=True)
    expected = [step(batch).item() for batch in batches(12)]
    step, optimizer = training(waits=True)
    graphed = ShapeGraphs(step, optimizer.zero_grad)
    assert [graphed(batch).item() for batch in batches(12)] == pytest.approx(expected, rel=1e-5)
    assert "cuda-graph" in notices.notices_so_far()


@pytest.mark.gpu
def test_a_failed_capture_restores_random_numbers_and_memory():
    step, optimizer = training(waits=True)
    graphed = ShapeGraphs(step, optimizer.zero_grad)
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
    seen = torch.empty(1, device="cuda")  # the allocator frees blocks whose streams have finished
    assert torch.cuda.memory_allocated() <= before + seen.untyped_storage().nbytes() + 512


@pytest.mark.gpu
def test_a_capture_does_not_change_random_numbers_of_a_running_graph():
    square = torch.randn(4096, 4096, device="cuda") / 64

    def step(batch):
        ones = batch["x"]
        for _ in range(30):  # long enough that the host runs ahead
            ones = ones @ square
        return torch.nn.functional.dropout(torch.ones_like(ones), 0.5)

    def results(wait):
        torch.cuda.manual_seed(3)
        graphed, found = GraphedBackward(step, []), []
        for rows in [2048] * 6 + [1024, 2048, 512, 1024]:  # the seventh is captured while the sixth runs
            found.append(graphed({"x": torch.randn(rows, 4096, device="cuda")}))
            if wait:
                torch.cuda.synchronize()
        assert graphed.holds_graphs
        graphed.close()
        return found

    for i, (found, expected) in enumerate(zip(results(False), results(True), strict=True)):
        assert torch.equal(found, expected), i


def run_backwards(wrap, given, window, device="cpu", dropout=0.0):
    """Train on `given` with windows of several backwards: (losses, weights, what `wrap` made)."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)
    model = nn.Sequential(*layers).to(device)
    unused = nn.Parameter(torch.ones(3, device=device))
    trained = [*model.parameters(), unused]
    optimizer = torch.optim.AdamW(trained, lr=0.05)

    def backward(batch):
        loss = (model(batch["x"]) - batch["y"]).square().mean() / window
        loss.backward()
        return loss.detach()

    call = wrap(backward, trained)
    losses = []
    for i, batch in enumerate(given):
        losses.append(call(batch).item())
        if (i + 1) % window == 0:
            torch.nn.utils.clip_grad_norm_(trained, 0.5)  # in place, on the graphs' gradient buffers
            optimizer.step()
            optimizer.zero_grad()
    assert unused.grad is None
    return losses, [parameter.detach().clone() for parameter in model.parameters()], call


def eager(step, _):
    return step


# --- on a stand-in ---------------------------------------------------------------------------------------------------


def sized(*rows):
    """Yield batches with these numbers of rows."""
    generator = torch.Generator().manual_seed(1)
    for count in rows:
        x = torch.randn(count, 8, generator=generator)
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def pools(graphed):
    """Return the pool of each captured shape, by its number of rows."""
    captured = graphed._captured.items()
    return {dict(shapes)["x"][0][0]: found.pool for shapes, found in captured if found is not None}


@pytest.mark.parametrize("window", [1, 4])
def test_all_shapes_and_eager_steps_share_one_set_of_gradients(monkeypatch, window):
    """Gradients equal autograd's bit by bit; at the first call some exist already."""
    stand_in = StandIn().install(monkeypatch)
    places = []

    def wrap(step, trained):
        graphed = stand_in.backwards(step, trained)

        def call(batch):
            result = step(batch) if not places else graphed(batch)
            places.append(tuple(p.grad.data_ptr() for p in trained if p.grad is not None))
            return result

        call.graphed = graphed
        return call

    rows = [8, 4] * 8 + [4, 8, 6, 6]
    expected = run_backwards(eager, sized(*rows), window, dropout=0.5)
    losses, weights, call = run_backwards(wrap, sized(*rows), window, dropout=0.5)
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
    assert set(places[1:]) == {places[-1]}  # over captures, replays and eager steps
    assert pools(call.graphed).keys() == {8, 4, 6}


def test_a_shape_is_captured_when_it_first_occurs(monkeypatch):
    """After the first steps of the run, no new shape runs eagerly."""
    stand_in, launched = StandIn().install(monkeypatch), []
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4), 1)
    monkeypatch.setattr(graphed, "_eager", lambda batch: launched.append(batch))
    for batch in sized(6, 4, 2, 12, 6):
        graphed(batch)
    assert not launched
    assert pools(graphed).keys() == {12, 6}


def test_steps_that_may_not_be_captured_yet_warm_up(monkeypatch):
    stand_in = StandIn().install(monkeypatch)
    graphed = stand_in.backwards(lambda batch: batch["x"].sum(), [nn.Parameter(torch.ones(1))])
    for batch in sized(*[8] * 5):
        graphed(batch, may_capture=False)
    assert not graphed.holds_graphs
    graphed(next(iter(sized(8))))
    assert graphed.holds_graphs


def test_no_graph_overwrites_a_tensor_that_a_capture_left_alive(monkeypatch):
    """All graphs are dropped, and from there on each shape is warmed up before its capture."""
    stand_in = StandIn().install(monkeypatch)
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4), 1)
    assert pools(graphed).keys() == {8}
    stand_in.left = 1
    expected = [loss for batch in sized(6, 8, 6, 4) for loss in [graphed.step(batch).item()]]
    assert [graphed(batch).item() for batch in sized(6, 8, 6, 4)] == expected
    assert pools(graphed).keys() == {8}  # it was warm and occurred again
    for batch in sized(*[4] * 3):
        graphed(batch)
    assert pools(graphed).keys() == {8, 4}


def test_a_shape_whose_first_capture_fails_is_warmed_up(monkeypatch):
    """After a second failure it stays eager with a notice; other shapes have graphs."""
    stand_in = StandIn().install(monkeypatch)
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4), 1)
    stand_in.refused = {4}
    for batch in sized(*[4] * 3, 6):
        graphed(batch)
    assert pools(graphed).keys() == {8, 6}
    assert "cuda-graph" not in notices.notices_so_far()
    for batch in sized(*[4] * 2):
        graphed(batch)
    assert "cuda-graph" in notices.notices_so_far()
    stand_in.refused = set()
    for batch in sized(*[4] * 2):
        graphed(batch)
    assert pools(graphed).keys() == {8, 6}  # it stays eager


def test_frequent_shapes_have_the_graphs_if_there_are_more_shapes_than_graphs(monkeypatch):
    monkeypatch.setattr(graph, "MAX_GRAPHS", 2)
    stand_in = StandIn().install(monkeypatch)
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4, 6), 1)
    for batch in sized(4, 2, 8, *[4] * 2):
        graphed(batch)
    assert pools(graphed).keys() == {8, 6}
    next_one = next(iter(sized(4)))
    graphed(next_one)
    assert pools(graphed).keys() == {8, 4}  # 6 was not used for longest


def test_the_largest_shape_allocates_the_pool(monkeypatch):
    stand_in = StandIn().install(monkeypatch)
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[4] * 5), 1)
    first = pools(graphed)
    assert first.keys() == {4}
    for batch in sized(*[8] * 4):
        graphed(batch)
    assert pools(graphed).keys() == {8}
    assert pools(graphed)[8] != first[4]
    for batch in sized(6, 4):
        graphed(batch)
    assert pools(graphed) == dict.fromkeys((8, 6, 4), pools(graphed)[8])


@pytest.mark.parametrize("window", [1, 4])
def test_a_step_that_runs_out_of_memory_is_repeated_without_graphs(monkeypatch, window):
    """The failed step has already added all its gradients and drawn its random numbers."""
    monkeypatch.setattr(graph, "MAX_GRAPHS", 1)  # so that another shape's first steps are eager
    stand_in = StandIn(room=8).install(monkeypatch)
    rows = [8] * 5 + [12] * 5 + [8] * 6
    expected = run_backwards(eager, sized(*rows), window, dropout=0.5)
    losses, weights, graphed = run_backwards(stand_in.backwards, sized(*rows), window, dropout=0.5)
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
    assert not pools(graphed)
    assert "cuda-graph-memory" in notices.notices_so_far()


def test_a_capture_that_runs_out_of_memory_drops_all_graphs(monkeypatch):
    stand_in = StandIn().install(monkeypatch)
    rows = [8] * 5 + [12] * 6
    expected = run_backwards(eager, sized(*rows), 2)

    def given():
        for i, batch in enumerate(sized(*rows)):
            stand_in.capture_fits = i < 5
            yield batch

    losses, weights, graphed = run_backwards(stand_in.backwards, given(), 2)
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
    assert not pools(graphed)
    assert "cuda-graph-memory" in notices.notices_so_far()


@pytest.mark.parametrize("when", ["beside", "capture"])
def test_out_of_memory_ends_a_run_whose_ranks_share_collectives(monkeypatch, when):
    """The other ranks would not repeat the step."""
    stand_in = StandIn(room=8 if when == "beside" else None).install(monkeypatch)
    with_others = SimpleNamespace(shares_collectives=True, any=lambda flag: flag)
    graphed = []

    def wrap(step, trained):
        graphed.append(stand_in.backwards(step, trained, with_others))
        return graphed[0]

    run_backwards(wrap, sized(*[8] * 5), 1)
    assert pools(graphed[0]).keys() == {8}
    stand_in.capture_fits = when != "capture"
    given = list(sized(*[12 if when == "beside" else 6] * 5))
    for batch in [] if when == "beside" else given[:3]:
        graphed[0](batch)
    with pytest.raises(torch.OutOfMemoryError):
        graphed[0](given[-1])


def test_running_out_of_memory_without_graphs_is_an_error(monkeypatch):
    StandIn().install(monkeypatch)
    weight = nn.Parameter(torch.ones(2))

    def step(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        GraphedBackward(step, [weight])({"x": torch.ones(1)})


def test_close_removes_hooks_and_gradients():
    weight = nn.Parameter(torch.ones(2))
    found = graph.Gradients([weight])
    found.start()
    (weight * 2).sum().backward()
    found.flush()
    found.publish()
    assert weight.grad is found.buffers[0]
    found.close()
    assert weight.grad is None
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3]
    assert not found.nbytes


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3])
def test_gradients_of_a_window_equal_eager_backward(window):
    """Gradients accumulate over a window, also from an eager batch between replays."""
    expected = run_backwards(eager, batches(24), window, "cuda")
    losses, weights, graphed = run_backwards(GraphedBackward, batches(24), window, "cuda")
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for found, other in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
    assert sum(captured is not None for captured in graphed._captured.values()) == 2


def wide(rows, device="cuda"):
    """Yield batches with these numbers of rows for a model whose activations take megabytes."""
    for count in rows:
        yield {"x": torch.ones(count, 1024, device=device)}


def wide_backward():
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.Tanh())]
    model = nn.Sequential(*layers).cuda()

    def backward(batch):
        loss = model(batch["x"]).square().mean()
        loss.backward()
        return loss.detach()

    return backward, list(model.parameters())


@pytest.mark.gpu
def test_one_pool_and_one_set_of_gradients_on_a_gpu():
    """8 shapes in any order take the memory of the largest one; `close` frees it."""
    rows = range(256, 2049, 256)
    inputs = sum(4096 * count for count in rows)

    def held(shapes, first=False):
        """Return bytes of the pool, and bytes allocated outside; the first call may allocate cuBLAS's workspaces."""
        backward, trained = wide_backward()
        torch.cuda.empty_cache()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        graphed = GraphedBackward(backward, trained)
        for batch in wide([rows for rows in shapes for _ in range(4)] + [*shapes] * 2):
            graphed(batch)
            for parameter in trained:
                parameter.grad = None
        beside = torch.cuda.memory_allocated() - allocated
        assert graphed.holds_graphs
        pool = graphed.pool_bytes
        graphed.close()
        del graphed, batch
        torch.cuda.empty_cache()
        assert first or torch.cuda.memory_reserved() <= reserved + 2**21
        return pool, beside, sum(parameter.nbytes for parameter in trained)

    held([256], first=True)
    one, _, _ = held([2048])
    assert one >= 8 * 2048 * 1024 * 4  # saved activations of the largest shape
    for shapes in (rows, rows[::-1]):
        pool, beside, gradients_bytes = held(shapes)
        assert pool <= one + 32 * 2**20
        assert beside <= gradients_bytes + 2 * inputs


@pytest.mark.gpu
@pytest.mark.parametrize("frees", ["torch", "we"])
def test_memory_that_another_stream_reads_is_not_freed(frees):
    """By `empty_cache` for a step's result, by `free_cached_memory` for tensors of other streams."""
    graphs = GraphedBackward(lambda batch: batch["x"] + 1.0, [torch.zeros(1, device="cuda", requires_grad=True)])
    batch = {"x": torch.zeros(2**24, device="cuda")}
    batch["x"].sum()  # loads the kernel, for which the device may wait
    torch.cuda.synchronize()
    if frees == "torch":
        result = graphs(batch)
    else:
        with torch.cuda.stream(graphs.stream):
            result = batch["x"] + 1.0
        torch.cuda.current_stream().wait_stream(graphs.stream)
    torch.cuda._sleep(200_000_000)  # clocks: the host runs far ahead of the stream that reads the result
    total = result.sum()
    read = torch.cuda.Event()
    read.record()
    del result
    assert not read.query()
    torch.cuda.empty_cache() if frees == "torch" else free_cached_memory(batch["x"].device)
    assert read.query()
    assert total.item() == 2**24


@pytest.mark.gpu
def test_a_larger_shape_out_of_memory_on_a_gpu(monkeypatch):
    """The process may allocate little more than it has: graphs are freed for an eager step."""
    monkeypatch.setattr(graph, "MAX_GRAPHS", 1)
    backward, trained = wide_backward()
    graphed = GraphedBackward(backward, trained)
    for batch in wide([8192] * 6):
        graphed(batch)
    assert graphed.holds_graphs
    batch = next(wide([9000]))
    torch.cuda.empty_cache()
    total, share = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 128 * 2**20) / total)
    try:
        for parameter in trained:
            parameter.grad = None
        loss = graphed(batch)
        found = [parameter.grad.clone() for parameter in trained]
    finally:
        torch.cuda.set_per_process_memory_fraction(share)
    assert not graphed.holds_graphs
    assert "cuda-graph-memory" in notices.notices_so_far()
    graphed.close()
    assert backward(batch).item() == pytest.approx(loss.item(), rel=1e-5)
    for gradient, parameter in zip(found, trained, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_segments_of_a_pool_keep_its_number():
    number = int("123456")  # not one of the small integers that Python keeps
    held = [number] * 20
    before = sys.getrefcount(number)
    for _ in range(10):
        assert pool_segments((0, number)) == []
    assert sys.getrefcount(number) >= before
    assert held == [123456] * 20
