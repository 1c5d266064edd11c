"""Preflight checks of a run, which write no file."""

import contextlib
import dataclasses
import json
import os
import shutil
import sys

import pytest
import torch
import transformers
from datasets import Dataset
from transformers.modeling_utils import AttentionInterface

from halfbyte.config import load_config
from halfbyte.data.batch_shapes import Batches
from halfbyte.data.batches import largest_id, longest_row
from halfbyte.loading.load import check_attention
from halfbyte.modeling.architectures import check_token_ids
from halfbyte.modeling.tiny_model import check_positions
from halfbyte.optim import OPTIMIZERS, Optimizer
from halfbyte.plan.advice import check_fits
from halfbyte.runs.inputs import check_output_dir
from halfbyte.runs.lock import check_free, run_lock
from halfbyte.train import setup
from halfbyte.train.optimizer_checks import check_optimizer
from halfbyte.train.preflight import prepare_run
from halfbyte.train.trackers import check_trackers
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tests.helpers.sft_runs import keys, run
from tests.helpers.tiny_runs import rows

CPU = torch.device("cpu")


def prepared(place, output, **changed):
    return prepare_run(load_config(None, keys(place, output, **changed)))


@pytest.fixture(scope="module")
def adapter(place, tmp_path_factory):
    """A saved adapter of rank 4."""
    out = tmp_path_factory.mktemp("adapter") / "out"
    run(place, out, max_steps=1, warmup_steps=0, sample_prompts=0)
    return out / "adapter"


def test_prepare_run_writes_nothing_and_raises_the_errors_of_train(place, tmp_path):
    made = prepared(place, tmp_path / "new" / "out")
    assert made.plan.fits
    assert len(made.prompts) == 2
    assert made.total_steps == 6
    assert not list(tmp_path.iterdir())
    said = []
    for start in (prepared, run):
        with pytest.raises(ModelError, match="q_prj") as refused:
            start(place, tmp_path / "new" / "out", target_modules=["q_prj"])
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert not list(tmp_path.iterdir())


def test_where_a_run_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("", " ", "a\0b", "file", "file/below", "link", "x" * 300, "new/" + "x" * 300, "deep/" * 1000):
        with pytest.raises(ConfigError, match="output_dir"):
            check_output_dir(name if name.strip() == "" else f"{tmp_path}/{name}")
    if sys.platform == "linux":
        for name in ("/proc/x", "/sys/kernel/x", f"/proc/{os.getpid()}/root/proc/x"):  # os.access allows root
            with pytest.raises(ConfigError, match="output_dir"):
                check_output_dir(name)
        check_output_dir(f"/proc/self/cwd/{os.path.relpath(tmp_path)}/new")
    for name in ("new", "new/below", ".", "[bold]ü"):
        check_output_dir(f"{tmp_path}/{name}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_checking_a_folder_does_not_lock_it(tmp_path):
    check_free(tmp_path / "out")
    with run_lock(tmp_path / "out"):
        with pytest.raises(ConfigError):
            check_free(tmp_path / "out")
        with pytest.raises(ConfigError):  # the check has not released it
            run_lock(tmp_path / "out").__enter__()
    assert not list(tmp_path.iterdir())


def test_a_run_that_does_not_fit_is_refused_with_alternatives(place, tmp_path):
    with pytest.raises(ConfigError, match=r"memory_limit_gib: 0.001.*1.0 MiB") as refused:
        run(place, tmp_path / "out", memory_limit_gib=0.001)
    assert "memory_limit_gib" in refused.value.fix
    assert not list(tmp_path.iterdir())


def test_memory_limit_above_free_memory_overrides_the_plan(place, tmp_path):
    """A limit above the free memory allows a run that the plan refuses."""
    made = prepared(place, tmp_path)
    plan = dataclasses.replace(made.plan, capacity_bytes=made.plan.total // 2)
    fit = {"rows": 20, "batches": lambda config: Batches.uniform(1, 8)}
    with pytest.raises(ConfigError, match="memory_limit_gib: 0"):
        check_fits(plan, made.config, made.files.config, **fit)
    notices.reset_notices()
    check_fits(plan, made.config.model_copy(update={"memory_limit_gib": 1.0}), made.files.config, **fit)
    assert "memory_limit_gib" in notices.notices_so_far()["memory_plan"]


def test_a_rough_guess_refuses_nothing(place, tmp_path):
    made = prepared(place, tmp_path)
    plan = dataclasses.replace(made.plan, capacity_bytes=1000, rough=True)
    notices.reset_notices()
    check_fits(plan, made.config, made.files.config, rows=20, batches=None)
    assert "memory_plan" in notices.notices_so_far()


def test_a_continued_adapter_is_planned_by_its_own_rank(place, tmp_path, adapter):
    same = prepared(place, tmp_path, r=4)
    other = prepared(place, tmp_path, r=64, adapter_path=str(adapter))
    assert other.plan.adapters == same.plan.adapters


def test_a_continued_adapter_must_fit_the_model(place, tmp_path, adapter):
    shutil.copytree(adapter, tmp_path / "wrong")
    saved = json.loads((tmp_path / "wrong/adapter_config.json").read_text())
    (tmp_path / "wrong/adapter_config.json").write_text(json.dumps(saved | {"r": 2}))
    with pytest.raises(CheckpointError):
        prepared(place, tmp_path / "out", adapter_path=str(tmp_path / "wrong"))


def test_a_full_vision_run_trains_the_planned_weights(tmp_path, place):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Gemma3Config(
        text_config=sizes | {"head_dim": 16, "num_hidden_layers": 2, "vocab_size": 272, "sliding_window": 16},
        vision_config={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"patch_size": 14, "image_size": 56},
        mm_tokens_per_image=4,
        image_token_index=271,
    )
    shutil.copytree(place / "model", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    keys = {"model_name_or_path": str(tmp_path / "model"), "use_peft": False, "load_in_4bit": False}
    made = prepared(place, tmp_path / "out", **keys)
    model = setup.ModelSource().load(made, {})
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not [name for name in trained if "vision" in name or "projector" in name]
    assert made.plan.adapters == sum(parameter.nbytes for parameter in trained.values())


# --- dry runs ---------------------------------------------------------------------------------------------------------


def test_missing_trackers_are_named():
    assert not check_trackers([])
    assert not check_trackers(["none"])
    check_trackers(["all"])
    for names, wrong in ((["nonsense"], "nonsense"), (["comet_ml"], "comet_ml"), (["none", "all"], "none")):
        with pytest.raises(ConfigError, match=f"report_to: {wrong}: "):
            check_trackers(names)


def test_an_optimizer_takes_a_step_before_it_is_needed(tmp_path, monkeypatch):
    def config(**changed):
        return load_config(None, {"model_name_or_path": "m", "dataset": "d", **changed})

    for name in ("adamw_torch_fused", "adafactor", "sgd"):
        check_optimizer(config(optim=name), CPU)

    def broken(model, settings):
        raise RuntimeError("\nno CUDA here\nmore")

    monkeypatch.setitem(OPTIMIZERS, "sgd", Optimizer(broken, lambda model, settings: 0))
    with pytest.raises(ConfigError, match=r"(?s)optim: sgd.*CUDA"):
        check_optimizer(config(optim="sgd"), CPU)
    monkeypatch.setitem(OPTIMIZERS, "sgd", Optimizer(broken, lambda model, settings: 0, package="not_there"))
    with pytest.raises(ConfigError, match="not_there"):
        check_optimizer(config(optim="sgd"), CPU)


def test_a_schedule_is_tried_at_its_ends(place, tmp_path):
    for changed in ({"learning_rate": 1e-9}, {"max_steps": 1, "warmup_steps": 1}):
        with pytest.raises(ConfigError, match="lr_scheduler_type: polynomial"):
            prepared(place, tmp_path, lr_scheduler_type="polynomial", **changed)


def test_attention_is_tried_on_a_small_model(place, monkeypatch):
    config = transformers.AutoConfig.from_pretrained(place / "model")

    def broken(*inputs, **options):
        raise RuntimeError("no kernel for sm_61")

    AttentionInterface.register("mine", broken)
    with pytest.raises(ConfigError, match="attn_implementation: mine"):
        check_attention(config, "mine", CPU, trains=True)
    check_attention(config, "eager", CPU, trains=True)


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_ids_beyond_the_embeddings_are_named():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_layer=1, vocab_size=10))
    check_token_ids(model, {"tokens of the data": 9, "padding": None})
    for largest, pad, words in ((10, 0, "tokens of the data the id 10"), (9, 11, "padding the id 11")):
        with pytest.raises(ModelError, match=f"{words}.*0.*9"):
            check_token_ids(model, {"tokens of the data": largest, "padding": pad})


def test_rows_longer_than_the_positions_are_refused():
    learned = transformers.GPT2Config(n_positions=64, n_layer=1)
    check_positions(learned, 64)
    with pytest.raises(ConfigError, match=r"65 tokens.*64") as refused:
        check_positions(learned, 65)
    assert refused.value.fix == "set max_length: 64"
    notices.reset_notices()
    check_positions(transformers.LlamaConfig(max_position_embeddings=64), 65)
    assert "64" in notices.notices_so_far()["positions of the model"]


def test_rows_that_were_left_out_count_for_nothing():
    data = rows(8)
    lengths = [len(row["input_ids"]) for row in data]
    kept = [index for index in range(8) if lengths[index] < max(lengths)]
    assert longest_row(data.select(kept)) < max(lengths)
    assert largest_id(Dataset.from_dict({"input_ids": [[1, 99], [3]]}).select([1])) == 3


def test_weights_that_are_nan_leave_no_file(place, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(place / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="NaN"):
        run(place, tmp_path / "out", model_name_or_path=str(tmp_path / "model"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("limit", "copies"), [(1, 2), (2, 3), (None, 6)])
def test_space_for_all_kept_checkpoints_is_checked(place, tmp_path, monkeypatch, limit, copies):
    """A checkpoint is removed after the next one is written; the trained weights are saved in addition."""
    plan = prepared(place, tmp_path / "out", save_steps=1, save_total_limit=limit).plan
    needed = copies * (plan.adapters + plan.optimizer) + plan.adapters
    for free in (needed, needed - 1):
        usage = shutil._ntuple_diskusage(2 * needed, 2 * needed - free, free)
        monkeypatch.setattr("shutil.disk_usage", lambda folder, usage=usage: usage)
        with contextlib.nullcontext() if free == needed else pytest.raises(TrainingError):
            prepared(place, tmp_path / "out", save_steps=1, save_total_limit=limit)


def test_keys_of_images_of_a_run_without_images(place, tmp_path):
    """A folder that does not exist is an error, and keys without effect get a notice."""
    (tmp_path / "file").touch()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(ConfigError, match="media_dir"):
            prepared(place, tmp_path / "out", media_dir=str(folder))
    notices.reset_notices()
    prepared(place, tmp_path / "out", media_dir=str(tmp_path), image_max_pixels=10_000, allow_image_urls=False)
    assert {"media_dir", "image_max_pixels"} <= notices.notices_so_far().keys()
    assert not {"image_min_pixels", "allow_image_urls"} & notices.notices_so_far().keys()
