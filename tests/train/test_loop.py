"""The loop's arithmetic: accumulation, evaluation, records, and the guards (a broken step: test_readback.py)."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import Trainer, set_seed

from halfbyte.adapters.lora import add_adapter
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.train import stepper
from halfbyte.train.callbacks import total_steps, training_arguments
from halfbyte.train.graph import Gradients
from halfbyte.train.sampler import batches
from halfbyte.utils.errors import ConfigError, TrainingError
from tests.helpers.tiny_runs import collate, losses, make_loop, rows, run_config, tiny_llama


def trained_weights(loop):
    return {name: p.detach().clone() for name, p in loop.model.named_parameters() if p.requires_grad}


def test_accumulation_equals_the_large_batch(tmp_path):
    """12 rows with uneven token counts, 5 per large batch: the last window of the epoch is incomplete in both."""
    runs = {}
    for name, batch, accumulation in (("large", 5, 1), ("small", 1, 5)):
        config = run_config(
            tmp_path / name,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=2,
            lora_dropout=0.0,
            optim="sgd",
            learning_rate=0.5,
        )
        runs[name] = make_loop(config, train=rows(12).select(range(12)))
        runs[name].train()
    large, small = runs["large"], runs["small"]
    assert len(losses(large)) == total_steps(large.config, 12) == 6
    counts = [record["trained_tokens"] for record in large.metrics.records()]
    assert len(set(counts)) > 1
    assert counts == [record["trained_tokens"] for record in small.metrics.records()]
    torch.testing.assert_close(losses(small), losses(large), rtol=1e-6, atol=1e-6)
    for name, weight in trained_weights(large).items():
        torch.testing.assert_close(trained_weights(small)[name], weight, rtol=1e-6, atol=1e-6)


def test_the_recorded_loss_is_the_mean_over_trained_tokens(tmp_path):
    config = run_config(tmp_path, per_device_train_batch_size=4, max_steps=1, lora_dropout=0.0)
    loop = make_loop(config)
    order = next(iter(batches(loop.rows, 4, loop.collate, SINGLE_PROCESS, shuffled=config.seed)))
    with torch.no_grad():
        logits = loop.model.eval()(input_ids=order["input_ids"], attention_mask=order["attention_mask"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), order["labels"][:, 1:].flatten(), ignore_index=-100)
    loop.train()
    (record,) = loop.metrics.records()
    assert record["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert record["tokens"] == int(order["attention_mask"].sum())
    assert record["trained_tokens"] == int((order["labels"][:, 1:] != -100).sum())
    assert record["learning_rate"] == config.learning_rate
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["step_seconds"])
    assert record["memory_bytes"] > 0


def test_evaluation_weights_every_token_equally(tmp_path):
    held_out = rows(5, seed=9)
    loop = make_loop(run_config(tmp_path, per_device_eval_batch_size=2), held_out=held_out)
    metrics = loop.evaluate()
    batch = collate(list(held_out))
    with torch.no_grad():
        logits = loop.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-5)
    (record,) = loop.metrics.records()
    assert (record["kind"], record["step"]) == ("eval", 0)
    assert record["tokens"] == int((batch["labels"][:, 1:] != -100).sum())


def test_it_trains_what_transformers_own_trainer_trains(tmp_path):
    """A model as `load_model` gives it goes through both: order of rows, warm-up, schedule, clipping, decay."""
    keys = {"num_train_epochs": 2, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
    keys |= {"warmup_steps": 0.3, "weight_decay": 0.1, "lora_dropout": 0.0, "max_grad_norm": 0.5}
    config, train = run_config(tmp_path / "ours", **keys), rows(20)
    ours = make_loop(config, train=train)
    ours.train()
    set_seed(config.seed)
    model = add_adapter(tiny_llama(), config)
    args = training_arguments(config, torch.device("cpu"), torch.float32, rows=20, evaluate=False)
    args.remove_unused_columns, args.save_strategy, args.output_dir = False, "no", str(tmp_path / "theirs")
    theirs = Trainer(model, args, train_dataset=train, data_collator=collate)
    theirs.train()
    logged = [entry for entry in theirs.state.log_history if "learning_rate" in entry]
    assert [entry["learning_rate"] for entry in logged] == [r["learning_rate"] for r in ours.metrics.records()]
    assert [entry["loss"] for entry in logged] == pytest.approx(losses(ours), rel=1e-5)
    for name, weight in trained_weights(ours).items():  # Adam divides a gradient near 0 by itself, rounding included
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=1e-5, atol=1e-3 * config.learning_rate)


def test_evaluations_and_checkpoints_fall_on_epochs_unless_told(tmp_path):
    loop = make_loop(run_config(tmp_path, num_train_epochs=2, gradient_accumulation_steps=5), held_out=rows(3, 9))
    loop.train()
    assert [r["step"] for r in loop.metrics.records() if r["kind"] == "eval"] == [3, 6]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_data_order_follows_the_seed(tmp_path):
    def order(name, **keys):
        loop = make_loop(run_config(tmp_path / name, max_steps=2, **keys))
        loop.train()
        return [record["tokens"] for record in loop.metrics.records()]

    assert order("a") == order("b") != order("c", seed=8)


def test_activation_checkpointing_gives_the_same_gradients(tmp_path):
    runs = []
    for name in ("plain", "checkpointed"):
        loop = make_loop(run_config(tmp_path / name, max_steps=2))
        if name == "checkpointed":
            loop.model.gradient_checkpointing_enable({"use_reentrant": False})
        loop.train()
        runs.append(losses(loop))
    assert runs[0] == runs[1]


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """Makes loops with float16's loss scaling, which runs have on GPUs only, and a gradient that is spoilt."""
    return functools.partial(scaled_loop, tmp_path, monkeypatch)


def scaled_loop(tmp_path, monkeypatch, broken, scale=2.0**16):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    loop = make_loop(run_config(tmp_path, max_steps=40, save_steps=1000), scaler=scaler)
    factor = next(p for p in loop.model.parameters() if p.requires_grad)
    factor.register_hook(lambda grad: grad * broken(loop.state.global_step + 1))
    return loop


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_float16_gradients_that_never_become_finite_stop(scaled, broken):
    loop = scaled(lambda step: broken if step > 3 else 1.0)
    weights = []
    loop.trained[0].register_hook(lambda _: weights.append(loop.trained[1].detach().clone()))
    with pytest.raises(TrainingError, match=r"step 21:.*last 18.*0\.5") as stopped:
        loop.train()
    assert "dtype: bfloat16" in stopped.value.fix
    assert not torch.equal(weights[0], weights[3])
    assert torch.equal(weights[3], weights[-1])


def test_float16_overflows_that_end_are_skipped(scaled):
    loop = scaled(lambda step: math.inf if step % 20 else 1.0, scale=2.0**60)
    loop.train()
    assert len(losses(loop)) == 40


def test_a_window_without_trained_tokens_stops(tmp_path):
    def masked(row):
        return {"labels": [-100] * len(row["labels"])}

    loop = make_loop(run_config(tmp_path, gradient_accumulation_steps=4), train=rows(8).map(masked))
    with pytest.raises(TrainingError, match="step 1"):
        loop.train()
    one_masked = Dataset.from_list([*rows(3), *rows(1).map(masked)])
    make_loop(run_config(tmp_path / "mixed", gradient_accumulation_steps=4), train=one_masked).train()


def test_adapters_that_no_gradient_reaches_stop(tmp_path):
    loop = make_loop(run_config(tmp_path, max_steps=1))
    for parameter in loop.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.zeros_like)
    with pytest.raises(TrainingError):
        loop.train()


def test_full_fine_tuning_saves_all_weights(tmp_path):
    loop = make_loop(run_config(tmp_path, use_peft=False, load_in_4bit=False, max_steps=2, learning_rate=1e-3))
    before = tiny_llama().state_dict()
    loop.train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    assert any(not torch.equal(weight, before[name]) for name, weight in loop.model.state_dict().items())


class Graphs:
    """Replaces captured micro-batches: records the steps that run as graphs, and holds memory until `give_up`."""

    def __init__(self, backward, parameters, alike):
        self.backward, self.steps, self.holds_graphs, self.peak_pool_bytes = backward, [], True, 5
        self.gradients = Gradients(parameters)
        self.begun = lambda: 0  # steps that the loop has finished

    def __call__(self, batch, ready):
        self.steps += [self.started() + 1] * ready
        return self.backward(batch)

    def give_up(self):
        self.holds_graphs = False

    def close(self):
        self.closed = True


class EagerOptimizer:
    """Replaces the captured end of steps."""

    def __init__(self, step, optimizer):
        self.step = step

    def __call__(self, sums, may_capture):
        return self.step(sums)

    def drop(self):
        pass


@pytest.fixture
def graphed(monkeypatch):
    """Makes a loop with such graphs, and an eager optimizer."""
    monkeypatch.setattr(stepper, "GraphedBackward", Graphs)
    monkeypatch.setattr(stepper, "GraphedOptimizer", EagerOptimizer)

    def make(config, **keys):
        loop = make_loop(config, graphs=True, **keys)
        loop.stepper.graphs.started = lambda: loop.state.global_step
        return loop, loop.stepper.graphs

    return make


def test_graphs_start_in_the_second_step_and_are_freed_at_the_end(tmp_path, graphed):
    """The first step allocates the optimizer's state."""
    plain = make_loop(run_config(tmp_path / "plain", max_steps=3))
    plain.train()
    loop, graphs = graphed(run_config(tmp_path / "graphs", max_steps=3))
    loop.train()
    assert graphs.steps == [2, 3]
    assert graphs.closed
    assert loop.stepper.peak_graph_bytes == 5
    assert losses(loop) == losses(plain)


def test_an_evaluation_that_runs_out_of_memory_frees_the_graphs(tmp_path, monkeypatch, graphed):
    config, held_out = run_config(tmp_path, per_device_eval_batch_size=2), rows(5, seed=9)
    eager = make_loop(config, held_out=held_out)
    expected = eager.evaluate()
    loop, graphs = graphed(config, held_out=held_out)

    def sums(model, batch, whole=loop.method.sums):
        if graphs.holds_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, batch)

    monkeypatch.setattr(type(loop.method), "sums", staticmethod(sums))
    assert loop.evaluate()["loss"] == expected["loss"]
    graphs.holds_graphs = True
    with pytest.raises(torch.OutOfMemoryError):
        eager.evaluate()


def test_a_schedule_transformers_does_not_know_is_a_config_error(tmp_path):
    config = run_config(tmp_path).model_copy(update={"lr_scheduler_type": "cosign"})  # past the config's own check
    with pytest.raises(ConfigError, match="cosign"):
        training_arguments(config, torch.device("cpu"), torch.float32, rows=4, evaluate=False)


def test_float16_is_refused_where_it_cannot_train(tmp_path):
    with pytest.raises(ConfigError, match="float16"):
        training_arguments(run_config(tmp_path), torch.device("cpu"), torch.float16, rows=4, evaluate=False)
