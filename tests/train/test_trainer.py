"""The trainer's arithmetic: accumulation, evaluation, records, and the stops."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny_runs import collate, losses, make_trainer, rows, run_config, tiny_llama

from halfbyte.errors import ConfigError, TrainingError
from halfbyte.train.arguments import total_steps, training_arguments


def trained_weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


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
        runs[name] = make_trainer(config, train=rows(12).select(range(12)))
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
    trainer = make_trainer(config)
    order = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=order["input_ids"], attention_mask=order["attention_mask"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), order["labels"][:, 1:].flatten(), ignore_index=-100)
    trainer.train()
    (record,) = trainer.metrics.records()
    assert record["loss"] == pytest.approx(float(expected), rel=1e-6)
    assert record["tokens"] == int(order["attention_mask"].sum())
    assert record["trained_tokens"] == int((order["labels"][:, 1:] != -100).sum())
    assert record["learning_rate"] == config.learning_rate
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["step_seconds"])
    assert record["memory_bytes"] > 0


def test_logging_every_few_steps_averages_over_tokens(tmp_path):
    keys = {"num_train_epochs": 1, "lora_dropout": 0.0}
    each = make_trainer(run_config(tmp_path / "each", **keys))
    each.train()
    some = make_trainer(run_config(tmp_path / "some", logging_steps=5, **keys))
    some.train()
    records = each.metrics.records()
    first = records[:5]
    expected = sum(r["loss"] * r["trained_tokens"] for r in first) / sum(r["trained_tokens"] for r in first)
    assert [record["step"] for record in some.metrics.records()] == [5, 10, 12]
    assert losses(some)[0] == pytest.approx(expected, rel=1e-9)


def test_evaluation_weighs_every_token_alike(tmp_path):
    held_out = rows(5, seed=9)
    trainer = make_trainer(run_config(tmp_path, per_device_eval_batch_size=2), held_out=held_out)
    metrics = trainer.evaluate()
    batch = collate(list(held_out))
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    assert metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(float(expected)), rel=1e-5)
    (record,) = trainer.metrics.records()
    assert (record["kind"], record["step"]) == ("eval", 0)
    assert record["tokens"] == int((batch["labels"][:, 1:] != -100).sum())


def test_evaluations_and_checkpoints_fall_on_epochs_unless_told(tmp_path):
    trainer = make_trainer(run_config(tmp_path, num_train_epochs=2, gradient_accumulation_steps=5), held_out=rows(3, 9))
    trainer.train()
    assert [r["step"] for r in trainer.metrics.records() if r["kind"] == "eval"] == [3, 6]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_data_order_follows_the_seed(tmp_path):
    def order(name, **keys):
        trainer = make_trainer(run_config(tmp_path / name, num_train_epochs=1, save_total_limit=1, **keys))
        trainer.train()
        return [record["tokens"] for record in trainer.metrics.records()]

    assert order("a") == order("b") != order("c", seed=8)


def test_activation_checkpointing_gives_the_same_gradients(tmp_path):
    runs = []
    for name in ("plain", "checkpointed"):
        trainer = make_trainer(run_config(tmp_path / name, max_steps=2))
        if name == "checkpointed":
            trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer.train()
        runs.append(losses(trainer))
    assert runs[0] == runs[1]


def test_nan_stops_before_any_weight_moves(tmp_path):
    trainer = make_trainer(run_config(tmp_path, max_steps=6, save_steps=2))

    def poison(module, inputs, output):
        return output * float("nan") if trainer.state.global_step == 3 and module.training else output

    trainer.model.get_base_model().model.layers[0].register_forward_hook(poison)
    with pytest.raises(TrainingError, match=r"step 4: loss nan.*") as stopped:
        trainer.train()
    assert "checkpoint-2" in stopped.value.fix
    assert all(weight.isfinite().all() for weight in trained_weights(trainer).values())
    assert len(losses(trainer)) == 3
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_nan_gradient_under_a_finite_loss_stops_too(tmp_path):
    trainer = make_trainer(run_config(tmp_path, max_steps=2))
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    weight.register_hook(lambda gradient: gradient * float("inf") if trainer.state.global_step == 1 else gradient)
    with pytest.raises(TrainingError, match=r"step 2.*gradient norm"):
        trainer.train()


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """Makes trainers with float16's loss scaling, which `train` has on GPUs only, and a gradient that is spoilt."""
    return functools.partial(scaled_trainer, tmp_path, monkeypatch)


def scaled_trainer(tmp_path, monkeypatch, broken, scale=2.0**16):
    trainer = make_trainer(run_config(tmp_path, max_steps=40, save_steps=1000))
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")  # which all accelerators share
    trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)
    factor = next(p for p in trainer.model.parameters() if p.requires_grad)
    factor.register_hook(lambda grad: grad * broken(trainer.state.global_step + 1))
    return trainer


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_float16_gradients_that_never_become_finite_stop(scaled, broken):
    trainer = scaled(lambda step: broken if step > 3 else 1.0)
    weights = []
    trainer.trained[0].register_hook(lambda _: weights.append(trainer.trained[1].detach().clone()))
    with pytest.raises(TrainingError, match=r"step 21: .* last 18 steps .* scale down to 0\.5") as stopped:
        trainer.train()
    assert "dtype: bfloat16" in stopped.value.fix
    assert not torch.equal(weights[0], weights[3])
    assert torch.equal(weights[3], weights[-1])


def test_float16_stops_after_twenty_steps_whatever_the_scale(scaled):
    with pytest.raises(TrainingError, match=r"step 20: .* last 20 steps"):
        scaled(lambda step: math.inf, scale=2.0**60).train()


def test_float16_overflows_that_end_are_skipped(scaled):
    trainer = scaled(lambda step: math.inf if step % 20 else 1.0, scale=2.0**60)
    trainer.train()
    assert len(losses(trainer)) == 40


def test_a_window_without_trained_tokens_stops(tmp_path):
    def masked(row):
        return {"labels": [-100] * len(row["labels"])}

    trainer = make_trainer(run_config(tmp_path, gradient_accumulation_steps=4), train=rows(8).map(masked))
    with pytest.raises(TrainingError, match="step 1 has no trained token"):
        trainer.train()
    one_masked = Dataset.from_list([*rows(3), *rows(1).map(masked)])
    make_trainer(run_config(tmp_path / "mixed", gradient_accumulation_steps=4), train=one_masked).train()


def test_a_label_on_the_first_position_alone_counts_as_nothing(tmp_path):
    first = [{"input_ids": [3, 4, 5], "labels": [3, -100, -100]}] * 2
    with pytest.raises(TrainingError, match="no trained token"):
        make_trainer(run_config(tmp_path), train=Dataset.from_list(first)).train()


def test_adapters_that_no_gradient_reaches_stop(tmp_path):
    trainer = make_trainer(run_config(tmp_path, max_steps=1))
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(torch.zeros_like)
    with pytest.raises(TrainingError, match="no gradient"):
        trainer.train()


def test_full_fine_tuning_saves_all_weights(tmp_path):
    trainer = make_trainer(run_config(tmp_path, use_peft=False, load_in_4bit=False, max_steps=2, learning_rate=1e-3))
    before = tiny_llama().state_dict()
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())


class Graphs:
    """Stands for captured micro-batches: counts what runs as them, and holds memory until it gives up."""

    def __init__(self, trainer):
        self.trainer, self.steps, self.holds_graphs, self.most_pool_bytes = trainer, [], True, 5

    def __call__(self, batch):
        self.steps.append(self.trainer.state.global_step + 1)
        return self.trainer._forward_and_backward(batch)

    def give_up(self):
        self.holds_graphs = False

    def close(self):
        self.closed = True


def test_graphs_begin_with_the_second_step_and_end_with_the_training(tmp_path):
    """The optimizer's state is made by the first, and must find room."""
    plain = make_trainer(run_config(tmp_path / "plain", max_steps=3))
    plain.train()
    trainer = make_trainer(run_config(tmp_path / "graphs", max_steps=3))
    trainer._graphs = graphs = Graphs(trainer)
    trainer.train()
    assert graphs.steps == [2, 3]
    assert graphs.closed
    assert trainer.graph_pool_bytes == 5
    assert losses(trainer) == losses(plain)


def test_an_evaluation_without_room_beside_the_graphs_frees_them(tmp_path, monkeypatch):
    from halfbyte.train import trainer as module

    trainer = make_trainer(run_config(tmp_path, per_device_eval_batch_size=2), held_out=rows(5, seed=9))
    expected = trainer.evaluate()
    trainer._graphs = graphs = Graphs(trainer)

    def loss(model, inputs, whole=module.causal_lm_loss):
        if graphs.holds_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, inputs)

    monkeypatch.setattr(module, "causal_lm_loss", loss)
    assert trainer.evaluate()["eval_loss"] == expected["eval_loss"]
    trainer._graphs = None
    graphs.holds_graphs = True
    with pytest.raises(torch.OutOfMemoryError):
        trainer.evaluate()


def test_a_schedule_transformers_does_not_know_is_a_config_error(tmp_path):
    config = run_config(tmp_path).model_copy(update={"lr_scheduler_type": "cosign"})  # past the config's own check
    with pytest.raises(ConfigError, match="cosign"):
        training_arguments(config, torch.device("cpu"), torch.float32, rows=4, evaluate=False)


def test_float16_is_refused_where_it_cannot_train(tmp_path):
    with pytest.raises(ConfigError, match="float16"):
        training_arguments(run_config(tmp_path), torch.device("cpu"), torch.float16, rows=4, evaluate=False)
