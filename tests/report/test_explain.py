"""`halfbyte explain`: planted faults are named first or second, healthy runs are left alone."""

import json
import math
import random

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.report.explain import explain
from halfbyte.report.page import write_report
from halfbyte.report.run import read_run
from tests.helpers.board_runs import document_line, eval_record, train_record, write_run


def records(count=120, evals=((0, 2.6), (60, 1.6), (120, 1.3)), **changed):
    """Records of a healthy run; `changed` maps a key to its value, or to a function of the step."""
    lines = [eval_record(step, loss) for step, loss in evals]
    for step in range(1, count + 1):
        values = {key: value(step) if callable(value) else value for key, value in changed.items()}
        lines.append(train_record(step, **values))
    return lines


def split(**changed):
    split = {"documents": 100, "rows": 100, "tokens": 20_000, "trained_tokens": 8000, "dropped": {}, "truncated": 0}
    split |= {"empty_answers": 0, "packing_efficiency": None, "length_histogram": {"edges": [9, 300], "counts": [100]}}
    return {"data_report_json": {"eos_trained": True, "train": split | changed}}


def losses(pairs):
    lines = [document_line(name, at, 2.0, 1.0, "text", digest) for at, (name, digest) in enumerate(pairs)]
    return {"row_losses_jsonl": "".join(json.dumps(line) + "\n" for line in lines)}


def memory(**changed):
    return {"memory_json": {"device": "cuda:0", "predicted": {"total": 2**30}, "measured": {}} | changed}


CONFIG = "model_name_or_path: m\nmethod: sft\nmax_grad_norm: 1.0\nper_device_train_batch_size: 8\n"
MERGE = {"merge-q4_k_m_json": {"written": "a", "quantize": "q4_k_m", "update_kept": {"a": {"share": 0.4}}}}
FAULTS = {
    "an error": ({"environment_json": {"stopped": "out of memory in step 3"}}, "ended with an error"),
    "held-out rows are trained": (losses([("train", "a"), ("train", "b"), ("eval", "b")]), "reads training rows"),
    "repeated rows": (losses([("train", str(at % 5)) for at in range(20)]), "are repeated"),
    "no end of turn": ({"data_report_json": {"eos_trained": False, "train": {}}}, "to end its answers"),
    "hardly trained": (split(trained_tokens=20), "Hardly any token"),
    "dropped": (split(dropped={"too long": 40}), "are dropped"),
    "cut": (split(truncated=40), "are cut"),
    "empty answers": (split(empty_answers=30), "Empty answers"),
    "contradictory": (split(contradicting=30), "contradict"),
    "empty packing": (split(packing_efficiency=0.3), "Packing leaves"),
    "padding": (
        split(tokens=3000, length_histogram={"edges": [1, 9000], "counts": [100]}) | {"config_resolved_yaml": CONFIG},
        "padding",
    ),
    "low from the start": ({"records": records(loss=0.01)}, "implausibly low"),
    "rises": ({"records": records(loss=lambda step: 1 + step / 40)}, "The loss rises"),
    "flat": ({"records": records(loss=lambda step: 2 + 1e-4 * (step % 2))}, "stays flat"),
    "spikes": (
        {"records": records(loss=lambda step: 9.0 if step == 77 else 2 - step / 100 + 0.01 * (step % 3))},
        "spikes",
    ),
    "a rate of 0": ({"records": records(learning_rate=0.0)}, "Nothing is learned"),
    "overfits": ({"records": records(evals=((0, 2.6), (40, 1.4), (80, 1.7), (120, 2.2)))}, "overfits"),
    "gradients grow": ({"records": records(grad_norm=lambda step: 0.1 * 1.1**step)}, "Gradients grow"),
    "clipped": ({"records": records(grad_norm=40.0), "config_resolved_yaml": CONFIG}, "clipped"),
    "no gradient": ({"records": records(grad_norm=0.0)}, "Gradients are 0"),
    "equal rewards": ({"records": records(frac_reward_zero_std=0.95)}, "Rewards do not"),
    "cut completions": ({"records": records(**{"completions/clipped_ratio": 0.7})}, "cut by their limit"),
    "a lossy merge": (MERGE, "loses part of the training"),
    "another adapter on disk": (
        {"checks_json": {"adapter_reload": {"largest_difference": 3.0, "largest_logit": 9.0}}},
        "gives other answers",
    ),
    "memory grows": (
        {"records": records(memory_bytes=lambda step: 2**30 + step * 2**24), **memory(capacity_bytes=2**32)},
        "Memory grows",
    ),
    "sharding waits": ({"records": records(gather_share=0.5)}, "sharded weights"),
    "stages idle": ({"records": records(idle_share=0.5)}, "stages are idle"),
    "unequal ranks": ({"records": records(fastest_seconds=1.0, slowest_seconds=2.0)}, "unequally fast"),
    "slow steps": (memory(step_seconds=0.1), "slower than planned"),
    "no kernels": (
        {**memory(), "environment_json": {"kernels": {"enabled": False, "reason": "no compiler"}}},
        "kernels are off",
    ),
}


def findings_of(folder, files):
    return explain(read_run(write_run(folder, 120, **files)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(tmp_path, fault):
    files, problem = FAULTS[fault]
    findings = findings_of(tmp_path / "run", files)
    assert any(problem in finding.problem for finding in findings[:2]), findings
    assert all(finding.evidence and finding.keys for finding in findings)


@pytest.mark.parametrize("seed", range(40))
def test_a_healthy_run_is_left_alone(tmp_path, seed):
    """Noise of different sizes, lengths, warm-ups, packing and a last evaluation that is slightly worse."""
    random.seed(seed)
    count, noise, end = random.choice([10, 40, 120, 400]), random.uniform(0.01, 0.25), random.uniform(0.3, 1.5)
    rate = random.uniform(1e-5, 3e-4)

    def loss(step):
        return (end + math.exp(-4 * step / count)) * math.exp(random.gauss(0, noise))

    evals = [(at * count // 4, end * 1.1 + math.exp(-at)) for at in range(5)]
    evals[-1] = (evals[-1][0], evals[-2][1] * random.uniform(0.98, 1.03))
    norms = {"grad_norm": lambda step: math.exp(random.gauss(0, 0.4)) * (3 if step < 5 else 1)}
    files = {"records": records(count, evals, loss=loss, learning_rate=lambda step: rate * min(step / 10, 1), **norms)}
    files |= split(packing_efficiency=random.choice([None, 0.9]), dropped={"too long": 3}, truncated=2)
    assert findings_of(tmp_path / "run", files) == []


def test_the_command_and_the_report_show_the_findings(tmp_path):
    run = write_run(tmp_path / "run", **FAULTS["a rate of 0"][0])
    answer = CliRunner().invoke(app, ["explain", str(run)])
    assert answer.exit_code == 0
    assert "learning_rate" in answer.output
    assert "Nothing is learned" in write_report(run).read_text()
    sound = CliRunner().invoke(app, ["explain", str(write_run(tmp_path / "sound"))])
    assert "nothing stands out" in sound.output
    assert CliRunner().invoke(app, ["explain", str(tmp_path / "none")]).exit_code == 1


def test_malformed_files_silence_rules_only(tmp_path):
    files = {"data_report_json": {"train": {"dropped": 3, "tokens": "x"}}, "checks_json": {"adapter_reload": 1}}
    files |= {
        "memory_json": {"predicted": 1},
        "merge-x_json": {"update_kept": 2},
        "records": records(learning_rate=0.0),
    }
    assert [finding.problem for finding in findings_of(tmp_path / "run", files)] == ["Nothing is learned"]
