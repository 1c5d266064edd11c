"""`halfbyte import-config` on files of other tools."""

from pathlib import Path

import pytest
import yaml

from halfbyte.cli.import_config import convert
from halfbyte.config import RunConfig, load_config
from halfbyte.utils.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
AXOLOTL = (CONFIGS / "axolotl_qlora.yml").read_text(encoding="utf-8")
LLAMAFACTORY = (CONFIGS / "llamafactory_qlora.yaml").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path):
    def write(text, name="theirs.yaml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def test_llamafactory_qlora(write, tmp_path):
    (tmp_path / "data").mkdir()
    write(
        '{"identity": {"file_name": "identity.json"}, "alpaca_en_demo": {"hf_hub_url": "me/alpaca"}}',
        "data/dataset_info.json",
    )
    imported = convert(write(LLAMAFACTORY))
    assert imported.tool == "LLaMA-Factory"
    assert imported.keys == {
        "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "load_in_4bit": True, "use_peft": True,
        "target_modules": "all-linear", "dataset": [str(tmp_path / "data/identity.json"), "me/alpaca"],
        "max_length": 2048, "dataset_num_proc": 16, "output_dir": "saves/llama3-8b/lora/sft", "logging_steps": 10,
        "save_steps": 500, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
        "num_train_epochs": 3.0, "warmup_steps": 0.1, "dtype": "bfloat16", "eval_split_size": 0.1,
        "per_device_eval_batch_size": 1, "eval_steps": 500, "max_samples": 1000,
        # defaults of LLaMA-Factory
        "lr_scheduler_type": "linear", "r": 8, "lora_alpha": 16.0,
    }  # fmt: skip
    assert set(imported.left_out) == {
        "do_train", "overwrite_cache", "plot_loss", "overwrite_output_dir", "ddp_timeout",
    }  # fmt: skip
    assert set(imported.undecided) == {"template"}
    assert "chat_template_path" in imported.undecided["template"][1]
    assert "lora_rank" not in imported.explain()


def test_imported_file_loads_with_the_listed_keys(write):
    imported = convert(write(AXOLOTL))
    config = load_config(write(imported.as_yaml(), "ours.yaml"))
    assert {key: getattr(config, key) for key in imported.keys} == imported.keys
    assert config == load_config(write(AXOLOTL))


def test_omitted_keys_are_comments_with_their_reason(write):
    text = convert(write(AXOLOTL)).as_yaml()
    assert "# dataset_prepared_path: " in text
    assert "# base_model" in text


def test_axolotl_without_an_adapter_is_full_fine_tuning(write):
    imported = convert(write("base_model: m\ndatasets: [{path: d, type: completion, field: body}]\n"))
    assert imported.keys | {"use_peft": False, "load_in_4bit": False, "max_length": 512} == imported.keys
    assert (imported.keys["dataset_format"], imported.keys["dataset_text_field"]) == ("text", "body")


def test_axolotl_chat_datasets(write):
    text = """\
base_model: m
adapter: lora
load_in_8bit: true
chat_template: llama3
datasets:
  - path: json
    data_files: [a.json, b.json]
    type: chat_template
    field_messages: turns
    message_field_role: role
    message_field_content: content
    roles: {user: [user], assistant: [assistant]}
"""
    imported = convert(write(text))
    assert imported.keys["dataset"] == ["a.json", "b.json"]
    assert imported.keys["column_mapping"] == {"messages": "turns"}
    assert (imported.keys["load_in_4bit"], imported.keys["quantization"]) == (True, "int8")
    assert set(imported.undecided) == {"chat_template"}
    assert imported.left_out == {}


def test_invalid_values_are_undecided(write):
    text = "base_model: m\nadapter: qlora\noptimizer: sophia\nmicro_batch_size: 0\nmade_up: 1\n"
    imported = convert(write(text))
    assert "optim" not in imported.keys
    assert "optim" in imported.undecided["optimizer"][1]
    assert imported.undecided.keys() == {"optimizer", "micro_batch_size", "made_up"}
    assert imported.missing == ["dataset"]
    assert "dataset" in imported.explain()
    RunConfig(**imported.keys, dataset="d")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("template: llama3", ""),
        ("optimizer: lomo", "optim"),
        ("learning_rate: fast", "learning_rate"),
        ("lora_rank: {a: 1}", "r"),
        ("made_up: 1", "'made_up'"),
        ("sequence_len: 5\nmax_length: 6", "max_length"),
        ("datasets: [{path: a, split: [b]}]", ""),
        ("datasets: 3", ""),
        ("peft: 3", "3"),
        ("bnb_config_kwargs: 3", "bnb_config_kwargs"),
        ("special_tokens: 3", "special_tokens"),
        ("warmup_ratio: much", "warmup_ratio"),
        ("evals_per_epoch: a", "evals_per_epoch"),
        ("chat_template_jinja: 3", "chat_template_jinja"),
        ("qat_scheme: int4", "load_in_4bit"),
        ("bias: all", ""),
        ('"a: b\\nr": 3', ""),
    ],
)
def test_undecided_keys_are_refused(write, line, said):
    """A key without equivalent is refused with any value (issue 63)."""
    imported = convert(write(f"base_model: m\ndataset: d\nload_in_4bit: true\n{line}\n"))
    assert ": :" not in imported.explain()
    with pytest.raises(ConfigError) as caught:
        load_config(write(imported.as_yaml(), "ours.yaml"))
    assert said in str(caught.value)


def test_a_file_for_preferences_keeps_its_method(write):
    """LLaMA-Factory has separate keys for method and loss; dpo with pref_ftx becomes two losses."""
    theirs = "stage: dpo\nmodel_name_or_path: m\ndataset: d\npref_beta: 0.2\npref_loss: hinge\npref_ftx: 0.5\n"
    imported = convert(write(theirs))
    assert imported.undecided == {}
    config = load_config(write(imported.as_yaml(), "ours.yaml"))
    assert (config.method, config.beta, config.learning_rate) == ("dpo", 0.2, 5e-5)
    assert (config.loss_type, config.loss_weights) == (["hinge", "sft"], [1.0, 0.5])


@pytest.mark.parametrize("line", ["rl: ppo", "stage: ppo", "stage: [a]"])
def test_another_method_is_not_imported(write, line):
    """A file for PPO is refused instead of training another method (issue 64)."""
    with pytest.raises(ConfigError, match=f"theirs.yaml:2: {line.split(':')[0]}:"):
        convert(write(f"base_model: m\n{line}\n"))


def test_keys_without_effect_on_the_result_are_omitted(write):
    imported = convert(write("base_model: m\ndataset: d\npush_to_hub: true\noverwrite_output_dir: true\n"))
    assert imported.undecided == {}
    load_config(write(imported.as_yaml(), "ours.yaml"))


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "dataset_info.json:1:.*JSON"), ("[]", None), ('{"identity": []}', None), ("[" * 10_000, None)],
)
def test_invalid_dataset_info_is_refused(write, tmp_path, text, said):
    (tmp_path / "data").mkdir()
    write(text, "data/dataset_info.json")
    with pytest.raises(ConfigError, match=said):
        convert(write(LLAMAFACTORY))


def test_every_key_of_the_file_is_accounted_for(write):
    for text in (AXOLOTL, LLAMAFACTORY):
        imported = convert(write(text))
        off = {key for key, value in yaml.safe_load(text).items() if not value}
        same = {"quantization_method", "stage", "eval_strategy", "gradient_checkpointing_kwargs"}
        told = set(imported.origin.values()) | set(imported.left_out) | set(imported.undecided) | off | same
        assert set(yaml.safe_load(text)) <= told


def test_file_without_known_keys_is_refused(write):
    with pytest.raises(ConfigError):
        convert(write("hello: world\n"))
