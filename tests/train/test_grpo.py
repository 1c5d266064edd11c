"""Policy optimization from a configuration to a finished run: rewards rise, records, completions, exact resume."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.optim import trained_parameters
from halfbyte.rl.rollout_batch import pass_rates
from halfbyte.rl.rollouts import ImportanceCorrection, PolicyRollouts
from halfbyte.rl.sampler import AnswerSampler
from halfbyte.runs import checkpoints
from halfbyte.train import run as runs
from halfbyte.train.run import finetune, train
from halfbyte.train.stepper import GraphedStepper
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, HalfbyteError, TrainingError
from tests.helpers.graph_stand_in import StandIn
from tests.helpers.marks import slow_except
from tests.helpers.run_records import lines, records_of

REWARD = '''
def letters(prompts, completions, completion_ids, kind, **columns):
    """Return the share of letters in each answer."""
    assert set(kind) == {"sum"}
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]
'''


PT = {"format": "pt"}


@pytest.fixture(scope="module")
def prompts(place):
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    lines = (json.dumps({"prompt": row["prompt"], "kind": "sum", "n": n}) for n, row in enumerate(rows))
    (place / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    (place / "mine.py").write_text(REWARD)
    shutil.copytree(place / "model", place / "sharp")  # a confident model, which training can change
    weights = load_file(place / "sharp/model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 15}, place / "sharp/model.safetensors", PT)
    return place


def keys(prompts, output, **more):
    found = {"model_name_or_path": str(prompts / "sharp"), "dataset": str(prompts / "prompts.jsonl")}
    found |= {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "r": 4}
    found |= {"method": "grpo", "reward_funcs": [f"{prompts / 'mine.py'}:letters"], "num_generations": 4}
    found |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_completion_length": 10}
    return found | {"learning_rate": 2e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64} | more


def run(prompts, output, resume=None, **more):
    return train(load_config(None, keys(prompts, output, **more)), resume=resume)


@pytest.mark.slow
def test_prompts_that_leave_no_tokens_for_an_answer_are_dropped(prompts, tmp_path):
    """Text and columns of the other prompts do not change."""
    rows = lines(prompts / "prompts.jsonl")
    mixed = [{**row, "prompt": row["prompt"] * (30 if at % 3 == 0 else 1)} for at, row in enumerate(rows)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))
    run(prompts, tmp_path / "out", dataset=str(tmp_path / "mixed.jsonl"), max_steps=1, warmup_steps=0)
    report = json.loads((tmp_path / "out/data_report.json").read_text())
    (dropped,) = report["train"]["dropped"].values()
    assert dropped == len(mixed[::3])
    kept = {row["prompt"] for at, row in enumerate(mixed) if at % 3}
    assert {each["prompt"] for each in lines(tmp_path / "out/completions.jsonl")} <= kept


@pytest.mark.slow
def test_rewards_rise(prompts, tmp_path):
    run(prompts, tmp_path / "out", max_steps=15, lr_scheduler_type="constant")
    records = [record for record in lines(tmp_path / "out/metrics.jsonl") if record["kind"] == "train"]
    rewards = [record["reward"] for record in records]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    last = records[-1]
    names = {"rewards/letters/mean", "rewards/letters/std", "reward_std", "frac_reward_zero_std", "entropy", "loss"}
    names |= {"completions/mean_length", "completions/clipped_ratio", "clip_ratio/low_mean", "rollout_seconds"}
    assert names <= last.keys()
    assert max(record["sampling/sampling_logp_difference/max"] for record in records) < 1e-4
    assert all(record["sampling/outside"] == 0 for record in records)
    answers = lines(tmp_path / "out/completions.jsonl")
    assert len(answers) == 15 * 16
    assert {"prompt", "completion", "rewards", "advantage", "step"} <= answers[0].keys()
    first = [each for each in answers if each["step"] == 1]
    mean = sum(each["rewards"]["letters"] for each in first) / len(first)
    assert mean == pytest.approx(records[0]["reward"])
    report = (tmp_path / "out/report.html").read_text()
    assert "Spread of rewards" in report
    assert "Answers it was trained on" in report
    assert report.count("letters ") >= 12


OPENING = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: <think>\n' }}{% endif %}"
)


@pytest.mark.slow
def test_a_thought_that_the_chat_template_opens_is_scored_with_the_answer(prompts, tmp_path, monkeypatch):
    """trl#6966: an answer to a prompt that ends with <think> has no opening tag of its own."""
    (tmp_path / "opening.jinja").write_text(OPENING)
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in lines(prompts / "prompts.jsonl")]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = AnswerSampler.sample

    def sample_thoughts(self, *args):
        answers = sample(self, *args)
        return answers._replace(texts=["so</think>4" if at % 2 else "so" for at in range(len(answers.texts))])

    monkeypatch.setattr(AnswerSampler, "sample", sample_thoughts)
    more = {"chat_template_path": str(tmp_path / "opening.jinja"), "reward_funcs": [{"format": "think"}]}
    run(
        prompts,
        tmp_path / "out",
        dataset=str(tmp_path / "talks.jsonl"),
        max_steps=1,
        warmup_steps=0,
        max_length=128,
        **more,
    )
    rewards = [next(iter(each["rewards"].values())) for each in lines(tmp_path / "out/completions.jsonl")]
    assert rewards == [0.0, 1.0] * (len(rewards) // 2)


WAYS = {
    "grpo": {"steps_per_generation": 4, "num_iterations": 2, "beta": 0.05},
    "rloo": {"method": "rloo", "num_generations": 2, "beta": 0.1, "steps_per_generation": 4},
    "truncated": {"mask_truncated_completions": True, "loss_type": "grpo", "padding_free": True},
    "entropy": {"entropy_coef": 0.02, "top_entropy_quantile": 0.5, "loss_type": "dr_grpo", "steps_per_generation": 6},
    "corrected": {"importance_sampling_correction": True, "dynamic_sampling": True, "min_p": 0.001},
}


@pytest.mark.parametrize(("more", "steps"), [
    pytest.param(WAYS["grpo"], [3], id="grpo within a generation"),
    *(pytest.param(more, [1, 3, 5], id=name, marks=pytest.mark.slow) for name, more in WAYS.items()),
])  # fmt: skip
def test_a_resumed_run_is_the_same_run(prompts, tmp_path, more, steps):
    """Most checkpoints are within a generation: completions, rewards, losses and adapter are bit-equal."""
    options = {"max_steps": 6, "save_steps": 1, "save_total_limit": 10, "eval_split_size": 4, "eval_steps": 3} | more
    whole = tmp_path / "whole"
    run(prompts, whole, **options)
    expected = records_of(whole)
    assert any(record.get("sampling/sampling_logp_difference/mean", 1) > 0 for record in expected["train"])
    for step in steps:
        other = tmp_path / f"from-{step}"
        shutil.copytree(whole, other)
        shutil.rmtree(other / "adapter")
        run(prompts, other, resume=str(other / f"checkpoint-{step}"), **{**options, "output_dir": str(other)})
        assert records_of(other) == expected
        mine, theirs = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (other, whole))
        assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", slow_except(["dapo", "grpo", "bnpo"], ["dapo"]))
def test_accumulated_equals_the_large_batch(loss_type, prompts, tmp_path):
    """Steps of two micro-batches of uneven lengths equal steps of one large batch."""
    more = {"max_steps": 2, "loss_type": loss_type, "entropy_coef": 0.01}
    run(prompts, tmp_path / "small", **more)
    run(prompts, tmp_path / "large", per_device_train_batch_size=16, gradient_accumulation_steps=1, **more)
    first, second = (records_of(tmp_path / name)["train"] for name in ("small", "large"))
    for mine, theirs in zip(first, second, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


@pytest.mark.slow
def test_prompts_are_computed_once_and_the_steps_are_the_same(prompts, tmp_path):
    """Compared with a run whose answers have a prompt each; generations of two steps, with old log-probabilities."""
    more = {"max_steps": 4, "steps_per_generation": 4, "beta": 0.1}
    run(prompts, tmp_path / "once", **more)
    run(prompts, tmp_path / "apart", use_kernels=False, **more)
    once, apart = (
        [record for record in lines(tmp_path / name / "metrics.jsonl") if record["kind"] == "train"]
        for name in ("once", "apart")
    )
    for mine, other in zip(once, apart, strict=True):
        assert mine["reward"] == other["reward"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-5)
        assert mine["tokens"] < other["tokens"]
        assert mine["trained_tokens"] == other["trained_tokens"]
    assert json.loads((tmp_path / "once/checks.json").read_text())["shared_prompts"]["largest_difference"] < 1e-4
    report = json.loads((tmp_path / "once/data_report.json").read_text())["train"]
    assert report["computed_tokens"] < report["tokens_apart"]


@pytest.mark.slow
def test_rollouts_while_graphs_are_held(prompts, tmp_path, monkeypatch):
    """A rollout that runs out of memory frees the graphs (a stand-in) and is repeated: answers, rewards and losses are
    the same. The optimizer is one that no graph holds: a stand-in's capture would step it, too."""
    from halfbyte.data import collate
    from halfbyte.generation import Rollouts

    monkeypatch.setattr(collate, "rounds_widths", lambda device: True)
    more = {"max_steps": 8, "optim": "adamw_torch"}
    run(prompts, tmp_path / "eager", **more)
    stand_in, graphs, held, generate = StandIn().install(monkeypatch), [], [], Rollouts.generate

    def in_graphs(run, model, _):
        stepper = GraphedStepper(list(trained_parameters(model).values()))
        graphs.append(stepper.graphs)
        stand_in.gradients = stepper.graphs.gradients
        return stepper

    def short(engine, *arguments, **keys):
        held.append(graphs[0].holds_graphs)
        if len(held) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(engine, *arguments, **keys)

    monkeypatch.setattr(runs, "make_stepper", in_graphs)
    monkeypatch.setattr(Rollouts, "generate", short)
    run(prompts, tmp_path / "graphed", **more)
    assert held == [False] * 2 + [True] * 5 + [False] * 2  # captured in the second step, freed in the seventh
    eager, graphed = (lines(tmp_path / name / "metrics.jsonl") for name in ("eager", "graphed"))
    for name in ("loss", "reward", "entropy", "trained_tokens", "completions/mean_length"):
        assert [record[name] for record in eager] == pytest.approx([record[name] for record in graphed], rel=1e-6), name


@pytest.mark.slow
def test_resident_rollout_memory_changes_no_result(prompts, tmp_path, monkeypatch):
    """One engine serves the run with the adapter of each generation; a failed rollout frees its memory."""
    from halfbyte.generation import Rollouts

    run(prompts, tmp_path / "fresh", max_steps=4)
    free, generate, freed, asked = Rollouts.free, Rollouts.generate, [], []

    init = AnswerSampler.__init__

    def stay(self, policy, engine, stops, plan):
        init(self, policy, engine, stops, replace(plan, stays=True))

    monkeypatch.setattr(AnswerSampler, "__init__", stay)
    monkeypatch.setattr(Rollouts, "free", lambda self: (freed.append(len(asked)), free(self)))
    monkeypatch.setattr(Rollouts, "generate", lambda self, *a, **k: (asked.append(self), generate(self, *a, **k))[1])
    run(prompts, tmp_path / "kept", max_steps=4)
    assert freed == [4]  # at the end
    assert records_of(tmp_path / "kept") == records_of(tmp_path / "fresh")

    def fails(self, *_, **__):
        raise TrainingError("no")

    monkeypatch.setattr(Rollouts, "generate", fails)
    freed.clear()
    with pytest.raises(TrainingError):
        run(prompts, tmp_path / "failed", max_steps=4)
    assert len(freed) == 2


def test_a_function_given_in_python(prompts, tmp_path):
    def long_answers(completion_ids, **columns):
        return [len(ids) for ids in completion_ids]

    more = keys(prompts, tmp_path / "out", max_steps=1, warmup_steps=0, reward_funcs=[long_answers, {"regex": "a"}])
    result = finetune(more.pop("model_name_or_path"), more.pop("dataset"), **more)
    assert result.metrics["steps"] == 1
    record = lines(tmp_path / "out/metrics.jsonl")[0]
    assert record["rewards/long_answers/mean"] == record["completions/mean_length"]


@pytest.mark.slow
def test_no_reward_at_all(prompts, tmp_path):
    """Groups without spread give no gradient, and do not stop a run."""
    run(prompts, tmp_path / "out", max_steps=2, reward_funcs=[{"regex": "never this"}])
    assert [record["grad_norm"] for record in records_of(tmp_path / "out")["train"]] == [0.0, 0.0]


@pytest.mark.slow
def test_resuming_with_a_changed_reward_file_is_refused(prompts, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(REWARD)
    more = {"reward_funcs": [f"{file}:letters"], "save_steps": 1}
    run(prompts, tmp_path / "out", max_steps=2, **more)
    file.write_text(REWARD + "\n")
    with pytest.raises(ConfigError):
        run(prompts, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-1"), max_steps=2, **more)


@pytest.mark.slow
def test_reward_functions_that_hang_or_return_nonsense(prompts, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "import time\n"
        "def hangs(completions, trainer_state, **columns):\n"
        "    if trainer_state.global_step == 1: time.sleep(600)\n"
        "    return [float(len(c)) for c in completions]\n"
        "def nonsense(completions, **columns): return ['x'] * len(completions)\n"
    )
    more = {"reward_timeout_s": 1.0, "max_steps": 3}
    run(prompts, tmp_path / "out", reward_funcs=[f"{file}:hangs", {"regex": "i"}], **more)
    records = records_of(tmp_path / "out")["train"]
    assert [record.get("rewards/hangs/failed") for record in records] == [None, 16, None]
    with pytest.raises(TrainingError):
        run(prompts, tmp_path / "other", reward_funcs=[f"{file}:nonsense"], **more)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"reward_funcs": None}, "reward_funcs"),
        ({"num_generations": 3}, "16 answers"),
        ({"steps_per_generation": 3, "num_generations": 8}, None),
        ({"reward_weights": [1.0, 2.0]}, "1 reward_funcs"),
        ({"loss_type": "luspo"}, None),
        ({"loss_type": "sigmoid"}, "'sigmoid'"),
        ({"method": "dpo"}, "method: dpo"),
        ({"parallel": {"data": 2}, "method": "grpo"}, "parallel"),
        ({"packing": True}, None),
        ({"delta": 1.1}, None),
        ({"reward_funcs": ["exact"]}, None),
        ({"max_completion_length": 60}, None),
        ({"per_device_train_batch_size": 64}, "32 prompts.*24"),
    ],
)
def test_invalid_configurations_are_refused_before_the_run(prompts, tmp_path, more, why):
    with pytest.raises(Exception, match=why) as raised:
        run(prompts, tmp_path / "out", **more)
    assert isinstance(raised.value, HalfbyteError)


def test_preview_scores_rollouts_before_a_run(prompts, tmp_path):
    """`halfbyte preview --rollouts`."""
    file = tmp_path / "run.yaml"
    config = keys(prompts, tmp_path / "out", reward_funcs=[f"{prompts / 'mine.py'}:letters", {"length": {"max": 3}}])
    file.write_text(json.dumps(config))
    found = CliRunner().invoke(app, ["preview", str(file), "-n", "2", "--rollouts", "3"])
    assert found.exit_code == 0, found.output
    assert found.stdout.count("── answer") == 6
    assert found.stdout.count("length -1") + found.stdout.count("length 0") >= 6
    assert "letters: mean " in found.stdout
    assert not (tmp_path / "out").exists()
    other = ["preview", str(prompts / "model"), str(prompts / "data.jsonl"), "--rollouts", "3"]
    assert CliRunner().invoke(app, other).exit_code == 2


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_init_writes_a_run_that_checks(prompts, tmp_path, method):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"what is {n}?"}) + "\n" for n in range(64)))
    written = CliRunner().invoke(app, ["init", "--method", method, str(prompts / "model"), str(tmp_path / "p.jsonl")])
    assert written.exit_code == 0, written.output
    config = yaml.safe_load(written.stdout)
    answers = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert answers % config["num_generations"] == 0
    assert config["reward_funcs"]
    load_config(None, config)


@pytest.mark.slow
def test_checked_and_not_evaluated_by_a_loss(prompts, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(keys(prompts, tmp_path / "out", max_steps=1, warmup_steps=0)))
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 0, found.output
    assert "SHA-256" in found.output
    run(prompts, tmp_path / "out", max_steps=1, warmup_steps=0)
    with pytest.raises(ConfigError):
        evaluate(str(tmp_path / "out"), str(prompts / "data.jsonl"))


@pytest.mark.slow
def test_importance_correction_is_enabled_by_a_large_mismatch(prompts, tmp_path, monkeypatch):
    """auto: a step's ratios enable the correction of the next generation; it stays enabled, with one notice."""
    monkeypatch.setattr("halfbyte.rl.rollouts.MISMATCH_SHARE", 0.5)
    own, shares = ImportanceCorrection.add_step, iter([0.6, 0.0, 0.0])

    def add_step(self, sums, counts):
        own(self, sums, counts)
        self.outside = next(shares)

    monkeypatch.setattr(ImportanceCorrection, "add_step", add_step)
    bounds = {"importance_sampling_mode": "token_truncate", "importance_sampling_clip_max": 0.5}
    run(prompts, tmp_path / "out", max_steps=3, **bounds)
    weights = [each["sampling/importance_sampling_ratio/mean"] for each in records_of(tmp_path / "out")["train"]]
    assert weights == [1.0, 0.5, 0.5]
    assert "60% of the last step's ratios" in notices.notices_so_far()["importance-sampling"]


@pytest.mark.slow
def test_an_fp8_cache_weights_tokens_and_small_weights_give_a_notice(prompts, tmp_path):
    """Every token's ratio is far from 1, and an answer's ratio is their product."""
    keys_ = {"kv_cache": "fp8", "importance_sampling_correction": True, "max_steps": 1, "warmup_steps": 0}
    run(prompts, tmp_path / "fp8", **keys_)
    (record,) = records_of(tmp_path / "fp8")["train"]
    assert record["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.1)
    assert "faint-weights" not in notices.notices_so_far()
    run(prompts, tmp_path / "mask", **keys_, importance_sampling_mode="sequence_mask", importance_sampling_clip_max=0.8)
    assert "token_truncate" in notices.notices_so_far()["faint-weights"]


@pytest.mark.slow
def test_dynamic_sampling_replaces_groups_without_spread(prompts, tmp_path):
    """DAPO's dynamic sampling: a prompt whose answers have equal rewards is replaced."""
    file = tmp_path / "some.py"
    file.write_text(  # rewards differ for odd prompts only
        "def some(completions, n, **columns):\n"
        "    return [len(c) / 50 if number % 2 else 0.5 for c, number in zip(completions, n)]\n"
    )
    more = {"reward_funcs": [f"{file}:some"], "max_steps": 2, "max_completion_length": 6}
    run(prompts, tmp_path / "plain", **more)
    run(prompts, tmp_path / "out", dynamic_sampling=True, **more)
    plain, dynamic = (records_of(tmp_path / name) for name in ("plain", "out"))
    assert max(record["frac_reward_zero_std"] for record in plain["train"]) > 0
    assert [record["frac_reward_zero_std"] for record in dynamic["train"]] == [0.0, 0.0]
    assert any(record["dynamic_sampling/prompts"] > 4 for record in dynamic["train"])
    for step in (1, 2):
        own = [each for each in dynamic["completions"] if each["step"] == step]
        assert len({each["prompt"] for each in own}) == 4
        assert all(int(each["prompt"].split()[2]) % 2 for each in own)
        rewards = [each["rewards"]["some"] for each in own]
        assert sum(rewards) / len(rewards) == pytest.approx(dynamic["train"][step - 1]["reward"])


@pytest.mark.slow
def test_a_copy_of_the_continued_adapter_is_the_reference(prompts, tmp_path):
    """KL is 0 in the first step and grows; without the adapter it would not be 0. The copy is not saved."""
    run(prompts, tmp_path / "first", max_steps=4, lr_scheduler_type="constant")
    adapter = tmp_path / "first/adapter"
    more = {"adapter_path": str(adapter), "beta": 0.1, "max_steps": 3, "save_steps": 1, "lr_scheduler_type": "constant"}
    more["save_total_limit"] = 3
    run(prompts, tmp_path / "out", **more)
    kl = [record["kl"] for record in records_of(tmp_path / "out")["train"]]
    assert abs(kl[0]) < 1e-6
    assert min(kl[1:]) > 1e-3
    assert {path.name for path in (tmp_path / "out/adapter").iterdir() if path.is_dir()} == set()
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, adapter / "adapter_model.safetensors", PT)
    with pytest.raises(ConfigError, match="adapter_path"):
        run(prompts, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-1"), **more)


def test_evaluated_by_the_answers_that_pass(prompts, tmp_path):
    more = {
        "eval_split_size": 4,
        "eval_steps": 1,
        "max_steps": 1,
        "warmup_steps": 0,
        "num_generations_eval": 3,
        "min_p": 0.01,
    }
    notices.reset_notices()
    run(prompts, tmp_path / "out", reward_funcs=[{"regex": "[a-m]"}], **more)
    evaluations = records_of(tmp_path / "out")["eval"]
    assert len(evaluations) == 2
    for each in evaluations:
        assert each["pass@1"] == pytest.approx(each["reward"])
        assert each["pass@1"] <= each["pass@3"] <= 1
    assert "trl#6789" in notices.notices_so_far()["narrowed-sampling"]
    assert pass_rates([1, 0, 0, 0, 1, 1], 3) == {"pass@1": 0.5, "pass@3": 1.0}
    assert pass_rates([1, None, 0, 0.5], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    assert pass_rates([-1, 0], 2) == {}


@pytest.mark.slow
def test_rewards_of_none_and_constant_rewards_give_a_notice(prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.rl.rollout_batch.CONSTANT_GENERATIONS", 2)
    notices.reset_notices()
    file = tmp_path / "silent.py"
    file.write_text("def silent(completions, **columns): return [None] * len(completions)\n")
    more = {"max_steps": 2, "save_steps": 1}
    run(prompts, tmp_path / "out", reward_funcs=[f"{file}:silent", {"regex": "never this"}], **more)
    said = notices.notices_so_far()
    assert "all 16" in said["reward-none:silent"]
    assert "2 generations" in said["reward-constant:regex"]
    assert "what is" in said["reward-constant:regex"]
    notices.reset_notices()  # a resumed run continues the count
    again = {"reward_funcs": [f"{file}:silent", {"regex": "never this"}], **more}
    run(prompts, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-1"), **again)
    assert "reward-constant:regex" in notices.notices_so_far()


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(prompts, tmp_path, monkeypatch):
    """By the rewards of held-out prompts, in addition to the newest; without evaluations there is no best."""
    rewards = iter([0.1, 0.5, 0.9, 0.4, 0.3])
    evaluate = PolicyRollouts.evaluate
    monkeypatch.setattr(PolicyRollouts, "evaluate", lambda *a: evaluate(*a) | {"reward": next(rewards)})
    more = {"max_steps": 4, "save_steps": 1, "save_total_limit": 1, "eval_steps": 1, "eval_split_size": 2}
    run(prompts, tmp_path / "out", max_completion_length=3, **more)
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert checkpoints.best(tmp_path / "out").name == "checkpoint-2"
