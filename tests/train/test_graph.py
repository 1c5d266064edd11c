"""Graphs: replays train as eager steps do, each shape has its graph, what cannot be captured stays eager, and there is
one set of gradients and one pool, which go when memory runs out. On a stand-in for CUDA's graphs, and on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfbyte.train import gradients, graph
from halfbyte.train.graph import GraphedBackward, GraphedStep
from halfbyte.utils import notices
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.hardware import free_cached_memory
from tests.helpers.graph_stand_in import StandIn


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
    notices.reset_notices()
    step, _ = training(waits=True)
    expected = [step(batch).item() for batch in batches(12)]
    step, optimizer = training(waits=True)
    graphed = GraphedStep(step, optimizer)
    assert [graphed(batch).item() for batch in batches(12)] == pytest.approx(expected, rel=1e-5)
    assert "cuda-graph" in notices.notices_so_far()


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
def test_a_capture_does_not_touch_the_random_numbers_of_a_graph_that_still_runs():
    square = torch.randn(4096, 4096, device="cuda") / 64

    def step(batch):
        ones = batch["x"]
        for _ in range(30):  # so long that the host is ahead by far
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
            torch.nn.utils.clip_grad_norm_(trained, 0.5)  # in place, where a graph will write again
            optimizer.step()
            optimizer.zero_grad()
    assert unused.grad is None
    return losses, [parameter.detach().clone() for parameter in model.parameters()], call


def eager(step, _):
    return step


# --- on a stand-in ---------------------------------------------------------------------------------------------------


def sized(*rows):
    """Batches of so many rows."""
    generator = torch.Generator().manual_seed(1)
    for count in rows:
        x = torch.randn(count, 8, generator=generator)
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def pools(graphed):
    """Rows of each shape that has a graph → its pool."""
    captured = graphed._captured.items()
    return {dict(shapes)["x"][0][0]: found.pool for shapes, found in captured if found is not None}


@pytest.mark.parametrize("window", [1, 4])
def test_all_shapes_and_eager_steps_share_one_set_of_gradients(monkeypatch, window):
    """The numbers are those of autograd's own gradients to the bit; the first call finds some of those."""
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


def test_a_shape_is_captured_as_it_first_comes(monkeypatch):
    """After the first steps of the run: nothing is launched from Python beside the pool."""
    stand_in, launched = StandIn().install(monkeypatch), []
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4), 1)
    monkeypatch.setattr(graphed, "_eager", lambda batch: launched.append(batch))
    for batch in sized(6, 4, 2, 12, 6):
        graphed(batch)
    assert not launched
    assert pools(graphed).keys() == {12, 6}


def test_what_may_not_be_captured_yet_warms_up(monkeypatch):
    stand_in = StandIn().install(monkeypatch)
    graphed = stand_in.backwards(lambda batch: batch["x"].sum(), [nn.Parameter(torch.ones(1))])
    for batch in sized(*[8] * 5):
        graphed(batch, ready=False)
    assert not graphed.holds_graphs
    graphed(next(iter(sized(8))))
    assert graphed.holds_graphs


def test_what_a_capture_leaves_alive_no_other_graph_overwrites(monkeypatch):
    """All graphs go, and from there on each shape is warmed up before its capture, as what it leaves then is known."""
    stand_in = StandIn().install(monkeypatch)
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4), 1)
    assert pools(graphed).keys() == {8}
    stand_in.left = 1
    expected = [loss for batch in sized(6, 8, 6, 4) for loss in [graphed.step(batch).item()]]
    assert [graphed(batch).item() for batch in sized(6, 8, 6, 4)] == expected
    assert pools(graphed).keys() == {8}  # which was warm, and came again
    for batch in sized(*[4] * 3):
        graphed(batch)
    assert pools(graphed).keys() == {8, 4}


def test_a_shape_whose_first_capture_fails_is_warmed_up(monkeypatch):
    """And said, once it fails again; others have their graphs."""
    notices.reset_notices()
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


def test_of_more_shapes_than_graphs_those_that_come_often_have_them(monkeypatch):
    monkeypatch.setattr(graph, "MAX_GRAPHS", 2)
    stand_in = StandIn().install(monkeypatch)
    _, _, graphed = run_backwards(stand_in.backwards, sized(*[8] * 4, 6), 1)
    for batch in sized(4, 2, 8, *[4] * 2):
        graphed(batch)
    assert pools(graphed).keys() == {8, 6}
    next_one = next(iter(sized(4)))
    graphed(next_one)
    assert pools(graphed).keys() == {8, 4}  # 6 was not used for longest


def test_the_largest_shape_makes_the_pool(monkeypatch):
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
def test_a_step_without_room_beside_the_graphs_runs_again_without_them(monkeypatch, window):
    """Its first try has added all its gradients, in a window that held some, and drawn its random numbers."""
    notices.reset_notices()
    monkeypatch.setattr(graph, "MAX_GRAPHS", 1)  # so that another shape's first steps run beside
    stand_in = StandIn(room=8).install(monkeypatch)
    rows = [8] * 5 + [12] * 5 + [8] * 6
    expected = run_backwards(eager, sized(*rows), window, dropout=0.5)
    losses, weights, graphed = run_backwards(stand_in.backwards, sized(*rows), window, dropout=0.5)
    assert losses == expected[0]
    assert all(map(torch.equal, weights, expected[1]))
    assert not pools(graphed)
    assert "cuda-graph-memory" in notices.notices_so_far()


def test_a_capture_without_room_ends_all_graphs(monkeypatch):
    notices.reset_notices()
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
def test_a_process_that_others_wait_for_neither_runs_again_nor_goes_on_without(monkeypatch, when):
    """What it computed with them they would not compute again."""
    stand_in = StandIn(room=8 if when == "beside" else None).install(monkeypatch)
    with_others = SimpleNamespace(is_alone=False, any_says=lambda said: said)
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


def test_a_closed_set_leaves_no_hook_and_no_gradient():
    weight = nn.Parameter(torch.ones(2))
    found = gradients.Gradients([weight])
    found.begin()
    (weight * 2).sum().backward()
    found.flush()
    found.hand_over()
    assert weight.grad is found.buffers[0]
    found.close()
    assert weight.grad is None
    (weight * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3]
    assert not found.nbytes


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("window", [1, 3])
def test_gradients_of_a_window_are_those_of_eager_backward(window):
    """Gradients are handed over, added up over a window, and an eager batch in between adds to them too."""
    expected = run_backwards(eager, batches(24), window, "cuda")
    losses, weights, graphed = run_backwards(GraphedBackward, batches(24), window, "cuda")
    assert losses == pytest.approx(expected[0], rel=1e-4)
    for found, other in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5)
    assert sum(captured is not None for captured in graphed._captured.values()) == 2


def wide(rows, device="cuda"):
    """Batches of so many rows of a model whose activations are megabytes."""
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
    """8 shapes hold what one does, in any order of their coming; a run's end frees it."""
    rows = range(256, 2049, 256)
    inputs = sum(4096 * count for count in rows)

    def held(shapes, first=False):
        """Bytes of the pool, and bytes allocated beside it; in the first call cuBLAS may make its workspaces."""
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
    assert one >= 8 * 2048 * 1024 * 4  # what backward reads of the largest
    for shapes in (rows, rows[::-1]):
        pool, beside, gradients_bytes = held(shapes)
        assert pool <= one + 32 * 2**20
        assert beside <= gradients_bytes + 2 * inputs


@pytest.mark.gpu
@pytest.mark.parametrize("frees", ["torch", "we"])
def test_memory_that_another_stream_still_reads_is_not_given_back(frees):
    """A step's result by torch's own `empty_cache`; what any other stream has made by `free_cached_memory`."""
    graphs = GraphedBackward(lambda batch: batch["x"] + 1.0, [torch.zeros(1, device="cuda", requires_grad=True)])
    batch = {"x": torch.zeros(2**24, device="cuda")}
    torch.cuda.synchronize()
    if frees == "torch":
        result = graphs(batch)
    else:
        with torch.cuda.stream(graphs.stream):
            result = batch["x"] + 1.0
        torch.cuda.current_stream().wait_stream(graphs.stream)
    torch.cuda._sleep(200_000_000)  # clocks: the host is far ahead of what reads the result
    total = result.sum()
    read = torch.cuda.Event()
    read.record()
    del result
    assert not read.query()
    torch.cuda.empty_cache() if frees == "torch" else free_cached_memory(batch["x"].device)
    assert read.query()
    assert total.item() == 2**24


@pytest.mark.gpu
def test_a_larger_shape_without_room_on_a_gpu(monkeypatch):
    """The process may take what it has and little more: the graphs make room for a step beside them."""
    notices.reset_notices()
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


def test_an_optimizer_that_cannot_be_captured_is_refused():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(TrainingError, match="capturable"):
        GraphedStep(lambda batch: batch, optimizer)
