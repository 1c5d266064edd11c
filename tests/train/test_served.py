"""Rollouts by a vLLM server: it samples with the current adapter, resuming is exact, and errors name the fault."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from halfbyte.cli import main
from halfbyte.config import load_config
from halfbyte.rl.served import ServedRollouts
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, TrainingError
from halfbyte.utils.files import TemporaryPath
from tests.helpers.fake_vllm import FakeVllm, served
from tests.helpers.run_records import lines, timeless

PT = {"format": "pt"}


@pytest.fixture(scope="module")
def model(place, tmp_path_factory):
    """A confident model, which training can change, and prompts."""
    folder = tmp_path_factory.mktemp("served") / "sharp"
    shutil.copytree(place / "model", folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"] * 15}, folder / "model.safetensors", PT)
    rows = [{"prompt": json.loads(line)["prompt"]} for line in (place / "data.jsonl").read_text().splitlines()]
    (folder.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder.parent / "mine.py").write_text(
        "def letters(completions, **_):\n"
        "    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    return folder


def keys(model, output, url, **more):
    found = {"model_name_or_path": str(model), "dataset": str(model.parent / "prompts.jsonl"), "r": 4}
    found |= {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False}
    found |= {"method": "grpo", "reward_funcs": [f"{model.parent / 'mine.py'}:letters"], "num_generations": 4}
    found |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_completion_length": 8}
    found |= {"learning_rate": 2e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64, "max_steps": 3}
    return found | {"lr_scheduler_type": "constant", "rollout": "vllm", "vllm_server_base_url": url} | more


def run(model, output, url, resume=None, **more):
    return train(load_config(None, keys(model, output, url, **more)), resume=resume)


def records(folder, kind="train"):
    if not (folder / "metrics.jsonl").exists():
        return []
    return [record for record in timeless(lines(folder / "metrics.jsonl")) if record["kind"] == kind]


def answers(folder):
    return lines(folder / "completions.jsonl")


@pytest.mark.slow
def test_the_server_samples_with_the_current_adapter(model, tmp_path):
    """In every generation, although the server caches prefixes by the adapter's name; rewards rise."""
    fake = FakeVllm(model)
    with served(fake) as url:
        run(model, tmp_path / "out", url, max_steps=6, eval_split_size=4, eval_steps=4)
    found = records(tmp_path / "out")
    assert max(each["sampling/sampling_logp_difference/max"] for each in found) < 1e-4
    assert all(each["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3) for each in found)
    rewards = [each["reward"] for each in found]
    assert sum(rewards[-2:]) > 1.5 * sum(rewards[:2])
    drawn = [body for body in fake.asked if body["model"] != fake.name]
    groups = {(body["seed"], tuple(body["prompt"])) for body in drawn}
    assert len({seed for seed, _ in groups}) == len(groups) == 6 * 4 + 4  # evaluations use equal seeds
    assert not any(body.get("load_inplace") for body in fake.loads)
    assert not fake.adapters
    assert not list((tmp_path / "out").glob("*halfbyte-*"))
    assert json.loads((tmp_path / "out/memory.json").read_text()).get("rollouts") is None


def test_the_adapter_folder_of_a_killed_run_is_removed_by_the_next(model, tmp_path):
    (tmp_path / "out").mkdir()
    rollouts = ServedRollouts(load_config(None, keys(model, tmp_path / "out", "http://localhost:1")), None)
    assert (
        TemporaryPath.parse(rollouts.folder).target == tmp_path / "out" / rollouts.name
    )  # as `clear_leftovers` expects


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"steps_per_generation": 4, "num_iterations": 2, "temperature": 0.7},
        pytest.param({}, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_same_run(model, tmp_path, more):
    """Within a generation its rows come from the checkpoint; the next one uses the same seeds."""
    options = {"max_steps": 4, "save_steps": 1, "save_total_limit": 10} | more
    with served(FakeVllm(model, processed=True)) as url:
        run(model, tmp_path / "whole", url, **options)
    for step in (1,):
        other = tmp_path / f"from-{step}"
        shutil.copytree(tmp_path / "whole", other)
        with served(FakeVllm(model, processed=True)) as url:
            run(model, other, url, resume=str(other / f"checkpoint-{step}"), **options)
        assert records(other) == records(tmp_path / "whole")
        assert answers(other) == answers(tmp_path / "whole")
        mine, theirs = (load_file(each / "adapter/adapter_model.safetensors") for each in (other, tmp_path / "whole"))
        assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("faults", "said", "fix"),
    [
        ("not vllm", "404", ""),
        ("no ids", "", "0.10.2"),
        ("cuts prompts", "", ""),
        ("other vocabulary", "", "serve"),
    ],
)
def test_the_server_is_checked_before_a_run(model, tmp_path, faults, said, fix):
    with served(FakeVllm(model, faults=[faults])) as url, pytest.raises(ConfigError) as stop:
        prepare_run(load_config(None, keys(model, tmp_path / "out", url)))
    assert said in stop.value.message
    assert fix in stop.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_server_s_options_are_checked(model, tmp_path, monkeypatch):
    fake = FakeVllm(model)
    fake.longest, fake.keys = 20, {"secret"}

    def refused(**more):
        with served(fake) as url, pytest.raises(ConfigError) as stop:
            prepare_run(load_config(None, keys(model, tmp_path / "out", url, **more)))
        return str(stop.value)

    assert "VLLM_API_KEY" in refused()
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert "20 tokens" in (said := refused())
    assert "--max-model-len" in said
    assert "secret" not in said
    fake.longest = 2048
    assert "temperature 1" in refused(temperature=0.7)
    fake.processed = True
    assert "top_p, top_k" in refused(top_k=5)
    with served(fake) as url:
        prepare_run(load_config(None, keys(model, tmp_path / "out", url, temperature=0.7)))
    gone = f"{url} does not answer: Connection refused"
    with pytest.raises(ConfigError) as stop:
        prepare_run(load_config(None, keys(model, tmp_path / "out", url)))
    assert gone in stop.value.message
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in stop.value.fix
    assert "--max-lora-rank 8" in stop.value.fix


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("faults", "more", "said", "fix"),
    [
        ("no updating", {}, "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("another disk", {}, "", ""),
        ("", {"r": 32}, "max_lora_rank 16", "--max-lora-rank 32"),
        ("more tokens", {"temperature": 1.0}, "token 1000000", "serve"),
        ("nan", {}, "", "0.10.2"),
        ("slow", {"vllm_server_timeout": 0.2}, "0.2 s", "vllm_server_timeout"),
    ],
)
def test_an_adapter_that_cannot_be_loaded_ends_the_run(model, tmp_path, faults, more, said, fix):
    fake = FakeVllm(model)
    with served(fake) as url:
        config = load_config(None, keys(model, tmp_path / "out", url, **more))
        prepare = fake.complete

        def later(body):  # requests before the run succeed
            fake.faults = {faults} if body["model"] != fake.name else set()
            return prepare(body)

        fake.complete, own = later, fake.unload
        fake.unload = lambda body: (fake.faults.add(faults), own(body))[1]
        with pytest.raises(TrainingError) as stop:
            train(config)
    assert said in stop.value.message
    assert fix in stop.value.fix
    assert not records(tmp_path / "out")


@pytest.mark.slow
def test_preview_samples_from_the_server(model, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    with served(fake := FakeVllm(model)) as url:
        config.write_text(yaml.safe_dump(keys(model, tmp_path / "out", url)))
        with pytest.raises(SystemExit) as stop:
            main(["preview", str(config), "--rollouts", "2"])
    assert not stop.value.code
    assert "letters: mean" in capsys.readouterr().out
    assert fake.loads
    assert not fake.adapters
    assert not Path(fake.loads[0]["lora_path"]).exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["a\nb", pytest.param("ä", marks=pytest.mark.slow)])
def test_an_invalid_api_key_is_not_printed(model, tmp_path, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ConfigError, match="VLLM_API_KEY"):
        prepare_run(load_config(None, keys(model, tmp_path / "out", "http://127.0.0.1:9")))


@pytest.mark.slow
def test_a_server_of_other_weights_is_refused_with_both_numbers(model, tmp_path, caplog):
    other = tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"].flip(0)}, other / "model.safetensors", PT)
    notices.reset_notices()
    with (
        served(FakeVllm(other)) as url,
        pytest.raises(TrainingError, match=r"-\d+\.\d+.*-\d+\.\d+"),
    ):
        run(model, tmp_path / "out", url)
    assert f"serves {other}" in caplog.text
    assert not records(tmp_path / "out")


@pytest.mark.slow
def test_a_run_resumes_after_its_server_went_away(model, tmp_path):
    out, options = tmp_path / "out", {"max_steps": 2, "save_steps": 1}
    fake = FakeVllm(model)
    complete, fake.complete = fake.complete, lambda body: complete(body) if len(fake.asked) < 9 else (503, "")
    with served(fake) as url, pytest.raises(TrainingError):
        run(model, out, url, **options)
    assert len(records(out)) == 1
    with served(FakeVllm(model)) as url:
        run(model, out, url, resume=True, **options)
        run(model, tmp_path / "whole", url, **options)
    assert answers(out) == answers(tmp_path / "whole")
