"""A run's configuration: reading, overrides, errors, other tools' keys, and writing."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.config import RunConfig, allowed, dump_config, load_config
from halfbyte.config import aliases as config_aliases
from halfbyte.config import foreign as config_foreign
from halfbyte.optim import OPTIMIZERS, SCHEDULES
from halfbyte.train.optimizer_checks import check_optimizer
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError

NEEDED = {"model_name_or_path": "some/model", "dataset": "data.jsonl"}

IN_8_BITS = {"load_in_4bit": True, "quantization": "int8"}
AXOLOTL = (Path(__file__).parents[1] / "cli/configs/axolotl_qlora.yml").read_text(encoding="utf-8")


BOMB = "dataset: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n" for before, after in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        return tmp_path / "run.yaml"

    return write


def problem(*arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)
    return str(caught.value)


def with_needed(*overrides: str) -> list[str]:
    return [f"{key}={value}" for key, value in NEEDED.items()] + list(overrides)


class TestReading:
    def test_values_and_defaults(self, write):
        config = load_config(write("model_name_or_path: m\ndataset: [a.jsonl, b.csv]\nr: 8\nlearning_rate: 1e-4\n"))
        assert (config.dataset, config.r, config.learning_rate) == (["a.jsonl", "b.csv"], 8, 1e-4)
        assert config.load_in_4bit is True
        assert config.output_path == Path("out")

    @pytest.mark.parametrize(
        "tokens",
        [["learning_rate=1e-4", "r=8"], ["--learning_rate", "1e-4", "--r=8"], ["--learning-rate", "1e-4", "r=8"]],
    )
    def test_overrides_win_over_the_file(self, write, tokens):
        config = load_config(write("model_name_or_path: m\ndataset: d\nr: 64\n"), tokens)
        assert (config.learning_rate, config.r) == (1e-4, 8)

    def test_negative_and_structured_overrides(self):
        config = load_config(
            None, with_needed("--max_steps", "-1", "target_modules=[q_proj, v_proj]", "rank_pattern={a: 4}")
        )
        assert config.max_steps == -1
        assert config.target_modules == ["q_proj", "v_proj"]
        assert config.rank_pattern == {"a": 4}

    def test_text_keys_stay_text(self, write):
        config = load_config(write("model_name_or_path: 2024\ndataset: d\nmodel_revision: 12e4567\n"), ["output_dir=7"])
        assert (config.model_name_or_path, config.model_revision, config.output_dir) == ("2024", "12e4567", "7")

    def test_a_dictionary_may_hold_paths(self, tmp_path):
        assert load_config(None, NEEDED | {"output_dir": tmp_path}).output_dir == str(tmp_path)

    def test_the_file_overrides_defaults(self, write):
        config = load_config(write("r: 8\n"), ["lora_alpha=4"], NEEDED | {"r": 2, "lora_alpha": 2.0, "seed": 5})
        assert (config.r, config.lora_alpha, config.seed) == (8, 4.0, 5)

    def test_a_name_for_report_to(self):
        assert load_config(None, with_needed("report_to=wandb")).report_to == ["wandb"]
        assert load_config(None, with_needed("report_to=none")).report_to == []


class TestRefusing:
    def test_unknown_key_has_its_line_and_a_suggestion(self, write):
        text = problem(write("model_name_or_path: m\ndataset: d\nlearning_rte: 1e-4\n"))
        assert "'learning_rte'" in text
        assert "learning_rate?" in text

    @pytest.mark.parametrize(
        ("wrong", "near"),
        [("lr", "learning_rate"), ("epochs", "num_train_epochs"), ("max_len", "max_length"), ("packin", "packing")],
    )
    def test_misspelled_key_has_a_suggestion(self, wrong, near):
        assert f"{near}?" in problem(None, with_needed(f"{wrong}=1"))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("r: sixteen", "'sixteen'"),
            ("r: 0", "above 0"),
            ("r: true", "above 0"),
            ("lora_dropout: 1.5", "lora_dropout"),
            ("packing: 'yes'", "packing"),
            ("dtype: bf16", "bfloat16?"),
            ("bnb_4bit_blocksize: 100", "bnb_4bit_blocksize"),
            ("optim: adam_torch", "adamw_torch?"),
            ("lr_scheduler_type: cosin", ""),
            ("max_steps: 0", "max_steps"),
            ("eval_steps: 1.5", "eval_steps"),
            ("device: gpu", "device"),
            ("target_modules: []", "target_modules"),
            ("learning_rate: .nan", "learning_rate"),
            ("seed:", "4,294,967,295"),
        ],
    )
    def test_wrong_value_names_key_place_and_what_is_allowed(self, write, line, said):
        text = problem(write(f"model_name_or_path: m\ndataset: d\n{line}\n"))
        assert "run.yaml:3: " in text
        assert said in text

    def test_all_problems_at_once(self):
        text = problem(None, ["r=x", "dtype=bf16", "model_name_or_path=m"])
        assert text.startswith("3 problems:")
        assert "dataset" in text

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a: b: c\n", "run.yaml:1:"),
            ("model_name_or_path: m\n\tdataset: d\n", "run.yaml:2:"),
            ("- a\n- b\n", ""),
            ("r: 8\nseed: 1\nr: 9\n", "run.yaml:3:"),
            ("", ""),
            ("rank_pattern: {q_proj: 4, q_proj: 8}", "run.yaml:1: q_proj"),
            ("output_dir: a\x07b", "run.yaml:1:"),
            ("r: 8\nseed: " + "9" * 5000, "run.yaml:2: '999"),
            ("seed: !!int foo", "run.yaml:1: 'foo'"),
            ("foo: !!timestamp 2024-13-45", "run.yaml:1: '2024-13-45'"),
            ("use_peft: !!bool maybe", "run.yaml:1: 'maybe'"),
            ("r: !!python/object/apply:os.system [ls]", ""),
            ("a: &a [*a]", "run.yaml:1:"),
            ("a: " + "[" * 10_000, "run.yaml:1:"),
            (BOMB, "200,000 values"),
            ("r: 8\n---\nr: 9\n", "run.yaml:2:"),
        ],
    )
    def test_invalid_files_are_refused(self, write, text, said):
        assert said in problem(write(text))

    def test_values_in_messages_are_cut(self, write):
        """The value has 729 texts, below the limit (issue 11)."""
        bomb = (
            BOMB[: BOMB.index("d:")].replace("dataset: &a", "target_modules: &a").replace("b: &b", "rank_pattern: &b")
        )
        text = problem(write(bomb.replace("c: &c", "r: &c")), with_needed())
        assert "[[['x', 'x', 'x', 'x'" in text
        assert len(text) < 2000

    def test_merge_key_with_an_override(self, write):
        config = load_config(write("rank_pattern: &a {x: 8}\nalpha_pattern: {<<: *a, x: 4, y: 2}"), with_needed())
        assert config.alpha_pattern == {"x": 4, "y": 2}

    def test_invalid_override_is_reported_in_one_line(self):
        error = "command line: target_modules='[q_proj': not valid YAML: expected ',' or ']', but got the end\n  fix: "
        assert problem(None, with_needed("target_modules=[q_proj")).startswith(error)
        assert load_config(None, with_needed("output_dir=[bold]x[/nope]")).output_dir == "[bold]x[/nope]"  # a text key
        assert r"\x1b" in problem(None, with_needed("output_dir=a\x1b[31mb"))

    def test_at_most_20_problems_are_listed(self):
        assert problem(None, [f"k{number}=1" for number in range(50)]).endswith("- and 30 more")

    def test_missing_file(self, tmp_path):
        assert "none.yaml" in problem(tmp_path / "none.yaml")

    def test_binary_file(self, tmp_path):
        (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
        assert "run.yaml" in problem(tmp_path / "run.yaml")

    @pytest.mark.parametrize("tokens", [["--r"], ["--r", "--seed"], ["r"]])
    def test_overrides_without_a_value(self, tokens):
        assert problem(None, tokens)

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["use_peft=false"], ""),
            (["use_peft=false", "load_in_4bit=false", "use_dora=true"], "use_peft: false"),
            (["parallel={pipeline: 2, tensor: 2}"], ""),
            (["device=cuda:1", "parallel={data: 2}"], "parallel: {data: 2}:"),
            (["use_peft=false", "load_in_4bit=false", "adapter_path=x"], "adapter_path"),
        ],
    )
    def test_contradictions(self, overrides, said):
        text = problem(None, with_needed(*overrides))
        assert said in text
        assert "fix:" in text

    def test_an_optimizer_whose_package_is_missing(self, monkeypatch):
        """The file means the same on every machine; what prepares a run looks (65)."""
        monkeypatch.setattr("halfbyte.train.optimizer_checks.find_spec", lambda name: None)
        row = OPTIMIZERS["sgd"]
        monkeypatch.setitem(OPTIMIZERS, "sgd", dataclasses.replace(row, package="missing"))
        config = load_config(None, with_needed("optim=sgd"))
        with pytest.raises(ConfigError):
            check_optimizer(config, torch.device("cpu"))

    def test_eval_steps_without_data_to_evaluate(self):
        load_config(None, with_needed("eval_steps=10"))
        assert "eval_steps" in notices.notices_so_far()


class TestForeignNames:
    def test_axolotl_file_is_accepted(self, write):
        config = load_config(write(AXOLOTL))
        expected = {
            "model_name_or_path": "NousResearch/Llama-3.2-1B", "dataset": "teknium/GPT4-LLM-Cleaned",
            "dataset_format": "alpaca", "eval_split_size": 0.1, "load_in_4bit": True, "use_peft": True, "r": 32,
            "lora_alpha": 16.0, "lora_dropout": 0.05, "target_modules": ["gate_proj", "down_proj"], "packing": True,
            "max_length": 2048, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4,
            "num_train_epochs": 2.0, "optim": "adamw_torch", "lr_scheduler_type": "cosine", "learning_rate": 2e-4,
            "dtype": "bfloat16", "activation_checkpointing": True, "attn_implementation": "flash_attention_2",
            "warmup_steps": 0.1, "eval_steps": 1 / 8, "save_steps": None, "completion_only_loss": True,
        }  # fmt: skip
        assert {key: getattr(config, key) for key in expected} == expected

    def test_one_notice_for_each_name(self, write):
        load_config(write("base_model: m\ndataset: d\nstrict: true\nlora_model_dir:\n"))
        said = notices.notices_so_far()
        assert said["alias base_model"].endswith("run.yaml:1: base_model is read as model_name_or_path: m")
        assert "ignored strict" in said
        assert len(said) == 2

    @pytest.mark.parametrize(
        ("line", "ours"),
        [
            ("adapter: lora", {"load_in_4bit": False, "use_peft": True}),
            ("finetuning_type: full", {"load_in_4bit": False, "use_peft": False}),
            ("finetuning_type: lora\nquantization_bit: 4", {"load_in_4bit": True, "use_peft": True}),
            ("finetuning_type: lora", {"load_in_4bit": False}),
            ("load_in_8bit: true", IN_8_BITS),
            ("load_in_8bit: true\nload_in_4bit: false", IN_8_BITS),
            ("adapter: lora\nload_in_8bit: true\nload_in_4bit: false", IN_8_BITS | {"use_peft": True}),
            ("adapter: lora\ngptq: true\nload_in_4bit: false", {"load_in_4bit": True, "quantization": None}),
            ("load_in_4bit: false\nload_in_8bit: false", {"load_in_4bit": False, "quantization": None}),
            ("finetuning_type: lora\nquantization_bit: 8", IN_8_BITS),
            ("quantization_bit: 3\nquantization_method: hqq", {"load_in_4bit": True, "quantization": "hqq3"}),
            ("qat: {weight_dtype: int4}", {"qat_scheme": "int4", "load_in_4bit": False}),
            ("gradient_checkpointing: true\nactivation_offloading: true", {"activation_checkpointing": "offload"}),
            ("lora_target: all", {"target_modules": "all-linear"}),
            ("lora_target: q_proj, v_proj", {"target_modules": ["q_proj", "v_proj"]}),
            ("lora_target_linear: true\nlora_target_modules:", {"target_modules": "all-linear"}),
            ("bnb_config_kwargs: {bnb_4bit_quant_type: fp4}", {"bnb_4bit_quant_type": "fp4"}),
            ("bf16: false\nfp16: true", {"dtype": "float16"}),
            ("bf16: false\nfp16: false", {"dtype": "float32"}),
            ("torch_dtype: torch.bfloat16", {"dtype": "bfloat16"}),
            ("train_on_inputs: true", {"assistant_only_loss": False, "completion_only_loss": False}),
            ("train_on_prompt: false", {"assistant_only_loss": True, "completion_only_loss": True}),
            ("disable_gradient_checkpointing: true", {"activation_checkpointing": False}),
            ("flash_attn: fa2", {"attn_implementation": "flash_attention_2"}),
            ("wandb_project: mine", {"report_to": ["wandb"]}),
            ("chat_template_jinja: my.jinja", {"chat_template_path": "my.jinja"}),
            ("max_seq_length: 512", {"max_length": 512}),
            ("qlora_fp8: true", {"quantization": "fp8"}),
            ("qlora_fp4: true", {"quantization": "nvfp4-46"}),
            ("qlora_fp4: false", {"quantization": None}),
            ("qlora_bnb: true", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
            ("qlora_bnb_block_size: 128", {"bnb_4bit_blocksize": 128}),
            ("qlora_bnb_double_quant: false", {"bnb_4bit_use_double_quant": False}),
            ("save_strategy: epoch", {"save_steps": None}),
            ("random_state: 3407", {"seed": 3407}),
            ("use_gradient_checkpointing: unsloth", {"activation_checkpointing": "offload"}),
            ("bias: none\ntask_type: CAUSAL_LM", {"r": 16}),
            ("full_finetuning: true", {"use_peft": False}),
            ("dp_shard_size: 2\ncontext_parallel_size: 2", {"parallel": {"shard": 2, "context": 2}}),
            ("dp_replicate_size: 2\ntp_size: 1", {"parallel": {"data": 2}}),
            ("parallelism_config: {dp_shard_size: 4, tp_size: 2}", {"parallel": {"shard": 4, "tensor": 2}}),
            ("tensor_parallel_size: 1\npipeline_parallel_size: 1", {"parallel": "auto"}),
            ("fsdp: [full_shard, auto_wrap]\nfsdp_config: {version: 2}", {"parallel": "auto"}),
        ],
    )
    def test_converted_values(self, write, line, ours):
        config = load_config(write(f"model_name_or_path: m\ndataset: d\n{line}\n"))
        assert {key: getattr(config, key) for key in ours} == ours

    @pytest.mark.parametrize(
        ("line", "said", "fix"),
        [
            ("load_in_8bit: true\nload_in_4bit: true", "load_in_8bit", ""),
            ("fsdp: full_shard offload", "FSDP", "memory plan"),
            ("fsdp_config: {offload_params: true}", "FSDP", "memory plan"),
            ("deepspeed: zero3.json", "", "{shard:"),
            ("tp_size: 2\ntensor_parallel_size: 4", "tensor_parallel_size: 4", "set parallel"),
            ("cp_size: 0", "cp_size", "set parallel"),
            ("cp_size: two", "cp_size", ""),
            ("parallelism_config: {ep_size: 2}", "parallelism_config", "set parallel"),
            ("quantization_bit: 5", "quantization_bit: 5", "4"),
            ("qat: {weight_dtype: int4, group_size: 32}", "group_size", "qat_scheme: int4"),
            ("activation_offloading: disk", "activation_offloading:", "true"),
            ("adapter: llama-adapter", "", ""),
            ("stage: ppo", "'ppo'", "dpo"),
            ("pref_loss: kto_pair\nstage: dpo", "pref_loss: 'kto_pair'", "loss_type"),
            ("pref_ftx: 1\nstage: dpo\npref_loss: simpo", "pref_ftx: 1", "loss_weights"),
            ("rl: ppo", "'ppo'", "dpo"),
            ("rollout: vllm", "method: sft", "method: grpo"),
            ("use_vllm: true", "vllm_mode:", ""),
            ("chat_template: llama3", "", "chat_template_path"),
            ("datasets: [{path: a, type: alpaca, shards: 4}]", "", "dataset"),
            ("special_tokens: {eos_token: x}", "special_tokens", "tokenizer"),
        ],
    )
    def test_unsupported_values_have_a_fix(self, write, line, said, fix):
        text = problem(write(f"model_name_or_path: m\ndataset: d\n{line}\n"))
        assert "run.yaml:3: " in text
        assert said in text
        assert fix in text.split("fix:")[1]

    def test_two_names_of_a_key_with_different_values(self, write):
        text = problem(write("base_model: a\nmodel_name_or_path: b\ndataset: d\n"))
        assert "run.yaml:1" in text
        assert "run.yaml:2" in text

    def test_wrong_value_of_a_foreign_key_names_both_keys(self, write):
        assert "run.yaml:3: sequence_len: max_length" in problem(
            write("model_name_or_path: m\ndataset: d\nsequence_len: -1\n")
        )

    def test_an_override_replaces_a_foreign_key_of_the_file(self, write):
        assert load_config(write(AXOLOTL), ["r=4", "micro_batch_size=8"]).per_device_train_batch_size == 8

    def test_foreign_keys_are_unique_and_not_ours(self):
        names = config_foreign.foreign_names()
        assert len(names) == len(set(names))
        assert set(names) & set(RunConfig.model_fields) == {"peft_config"}  # LLaMA-Factory's has a `name`
        assert set(config_aliases.RENAMED.values()) | set(config_aliases.HINTS.values()) <= set(RunConfig.model_fields)

    def test_foreign_keys_that_are_off_give_no_notice(self):
        for key in config_foreign.foreign_names():
            assert config_foreign.translate(key, {key: None}) == config_foreign.Ignored(""), key


FIELDS = {
    "text": st.text(min_size=1, max_size=12),
    "name": st.text(min_size=1, max_size=12).filter(str.strip),
    "share": st.floats(0, 0.99),
    "positive": st.floats(1e-8, 1e8),
    "count": st.integers(1, 10**6),
}
CONFIGS = st.fixed_dictionaries(
    {
        "model_name_or_path": FIELDS["name"],
        "dataset": FIELDS["name"] | st.lists(FIELDS["name"], min_size=1, max_size=3),
    },
    optional={
        "model_revision": FIELDS["text"],
        "attn_implementation": st.none() | FIELDS["name"],
        "dtype": st.sampled_from(["auto", "float32"]),
        "bnb_4bit_blocksize": st.sampled_from([32, 4096]),
        "r": FIELDS["count"],
        "lora_alpha": FIELDS["positive"],
        "lora_dropout": FIELDS["share"],
        "target_modules": FIELDS["text"] | st.lists(FIELDS["text"], min_size=1, max_size=3),
        "rank_pattern": st.dictionaries(FIELDS["text"], FIELDS["count"], max_size=3),
        "alpha_pattern": st.dictionaries(FIELDS["text"], FIELDS["positive"], max_size=3),
        "column_mapping": st.dictionaries(FIELDS["text"], FIELDS["text"], max_size=3),
        "learning_rate": FIELDS["positive"],
        "eval_split_size": FIELDS["share"],
        "activation_checkpointing": st.sampled_from([True, False, "auto"]),
        "resume_from_checkpoint": st.none() | st.booleans() | FIELDS["text"],
        "sample_prompts": st.integers(0, 9) | st.lists(FIELDS["text"], max_size=3),
        "report_to": st.lists(FIELDS["text"], max_size=2),
        "seed": st.integers(0, 2**32 - 1),
    },
)


class TestWriting:
    @settings(max_examples=8, deadline=None)
    @given(keys=CONFIGS)
    def test_round_trip_is_exact(self, keys, tmp_path_factory):
        config = RunConfig(**keys)
        path = tmp_path_factory.getbasetemp() / "round.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        loaded = load_config(path)
        assert loaded == config
        assert dump_config(loaded) == dump_config(config)

    @pytest.mark.parametrize(
        "text", ["1e5", "no", "null", "2024-01-01", "a # b", "é: {x}", "\n", "'", " x ", "~", "..."]
    )
    def test_ambiguous_text_is_quoted(self, write, text):
        config = RunConfig(**NEEDED, resume_from_checkpoint=text, column_mapping={text: text})
        assert load_config(write(dump_config(config))) == config

    def test_every_key_is_written_with_its_description(self):
        lines = dump_config(RunConfig(**NEEDED)).splitlines()
        for key, field in RunConfig.model_fields.items():
            if field.exclude:
                assert not [line for line in lines if line.startswith(f"{key}: ")]
                continue
            assert [line for line in lines if line.startswith(f"{key}: ") and line.endswith(f"# {field.description}")]


class TestNames:
    def test_every_key_describes_its_values(self):
        assert allowed("bnb_4bit_quant_type") == "nf4 or fp4"
        assert allowed("lora_alpha") == "a number from 1e-08"
        assert allowed("rank_pattern") == "a mapping from text to a whole number above 0"
        assert all(allowed(key) for key in RunConfig.model_fields)

    def test_schedules_and_optimizers_match_transformers(self):
        assert set(SCHEDULES) == {kind.value for kind in transformers.SchedulerType}
        known = {kind.value for kind in transformers.training_args.OptimizerNames}
        own = {"adamw", "apollo_mini", "badam", "lamb", "lars", "muon", "muon_8bit", "q_galore_adamw8bit"}
        assert set(OPTIMIZERS) - known == own
        others = {"adamw_torch_xla", "adamw_torch_npu_fused", "galore_adafactor", "galore_adafactor_layerwise"}
        assert known - set(OPTIMIZERS) <= others


# ---- quantization


def run_keys(**keys):
    return {"model_name_or_path": "m", "dataset": "d.jsonl", **keys}


def test_quantization_is_a_name_a_mapping_or_a_file(tmp_path):
    assert load_config(None, run_keys()).quantization is None
    assert load_config(None, run_keys(quantization="kbit4")).quantization == "kbit4"
    patterns = {"*.down_proj": "kbit5", "*": "nf4"}
    assert load_config(None, run_keys(quantization=patterns)).quantization == patterns
    (tmp_path / "mixed.yaml").write_text('"*.down_proj": kbit5\n"*": nf4\n')
    config = load_config(None, run_keys(quantization=str(tmp_path / "mixed.yaml")))
    assert config.quantization == patterns  # the resolved configuration does not need the file
    assert list(config.quantization) == list(patterns)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml") == config


def test_quantized():
    assert load_config(None, run_keys()).quantized
    assert load_config(None, run_keys(quantization={"*": "nf4"})).quantized
    assert not load_config(None, run_keys(load_in_4bit=False)).quantized
    assert not load_config(None, run_keys(quantization="16bit", use_peft=False)).quantized


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"quantization": "kbit4", "load_in_4bit": False}, "load_in_4bit: false.*quantization: kbit4"),
        ({"quantization": "kbit4", "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type: fp4.*kbit4"),
        ({"quantization": "kbit4", "bnb_4bit_blocksize": 128}, "bnb_4bit_blocksize: 128.*kbit4"),
        ({"quantization": {"*": "kbit4"}, "bnb_4bit_use_double_quant": False}, "bnb_4bit_use_double_quant: false"),
        ({"quantization": "kbit4", "use_peft": False}, "quantization: kbit4.*use_peft: false"),
        ({"load_in_4bit": False, "skip_quant_last_layers": 2}, "skip_quant_last_layers"),
        ({"quantization": {}}, None),
        ({"quantization": "missing.yaml"}, "missing.yaml"),
        ({"skip_quant_first_layers": -1}, "skip_quant_first_layers.*0"),
    ],
)
def test_contradicting_quantization_is_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, run_keys(**keys))


def test_quantization_with_the_options_of_its_formats():
    load_config(None, run_keys(quantization="fp4", bnb_4bit_quant_type="fp4", bnb_4bit_blocksize=128))
    load_config(None, run_keys(quantization={"*.up_proj": "nf4", "*": "kbit3"}, bnb_4bit_use_double_quant=False))
