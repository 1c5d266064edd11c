"""Keys and values of other tools: each is known by name, and never gets another key as advice by its spelling."""

import dataclasses
import importlib
import inspect
import pkgutil
import warnings

import peft
import pytest
import transformers

from halfbyte.cli.import_config import convert
from halfbyte.config import RunConfig, load_config
from halfbyte.config.aliases import HINTS, NO_EQUIVALENT, ON_BY_DEFAULT, REFUSED_VALUES, VALUES
from halfbyte.config.foreign import foreign_names, translate
from halfbyte.config.outcomes import Ignored, Mapped, Refused
from halfbyte.utils.errors import ConfigError

trl = pytest.importorskip("trl")


def config_classes(module, fields=dataclasses.is_dataclass):
    return [
        kind for name, kind in inspect.getmembers(module, inspect.isclass) if name.endswith("Config") and fields(kind)
    ]


def experimental_configs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("trl.experimental")
        names = [found.name for found in pkgutil.walk_packages(package.__path__, "trl.experimental.")]
        return [importlib.import_module(name) for name in names if name.endswith("_config")]


@pytest.mark.parametrize("package", ["peft", "transformers", "trl.experimental"])
def test_every_field_of_installed_packages_is_known(package):
    kinds = {
        "peft": lambda: config_classes(peft),
        "transformers": lambda: [transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments],
        "trl.experimental": lambda: [kind for module in experimental_configs() for kind in config_classes(module)],
    }[package]()
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert len(names) > 20
    assert not names - {*RunConfig.model_fields, *foreign_names(), *HINTS}


def test_known_names_have_one_outcome_and_a_reason():
    names = foreign_names()
    assert len(names) == len(set(names)) > 2000
    assert set(names) & {*RunConfig.model_fields, *HINTS} == {"peft_config"}  # LLaMA-Factory's has a `name`
    assert all(NO_EQUIVALENT.values())
    for key in ON_BY_DEFAULT:
        assert translate(key, {key: True}) == Ignored("")
        assert isinstance(translate(key, {key: False}), Refused)


def test_foreign_values_are_values_of_ours_elsewhere():
    assert {*VALUES, *REFUSED_VALUES} <= set(RunConfig.model_fields)
    assert not any(VALUES[key].keys() & REFUSED_VALUES.get(key, {}).keys() for key in VALUES)


@pytest.mark.parametrize(
    "key", ["layer_replication", "load_in_fp8", "sage_attention", "backend", "torch_compile", "cpu_offload"]
)
def test_a_known_key_gets_no_advice_by_spelling(key):
    with_value = translate(key, {key: "given"})
    assert with_value is not None
    assert not isinstance(with_value, Refused) or "did you mean" not in with_value.fix


# Key → values, as the tools enumerate them.
ENUMERATED = {
    # LLaMA-Factory
    "stage": ["pt", "sft", "rm", "ppo", "dpo", "kto"],
    "finetuning_type": ["lora", "oft", "freeze", "full"],
    "pref_loss": ["sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo"],
    "flash_attn": ["auto", "disabled", "sdpa", "fa2", "fa3"],
    "quantization_method": ["bnb", "gptq", "awq", "aqlm", "quanto", "eetq", "hqq", "mxfp4", "fp8"],
    "quantization_type": ["fp4", "nf4"],
    "rope_scaling": ["linear", "dynamic", "yarn", "llama3"],
    "mix_strategy": ["concat", "interleave_under", "interleave_over", "interleave_once"],
    "mixture_of_depths": ["convert", "load"],
    # Axolotl
    "adapter": ["lora", "qlora", "llama-adapter"],
    "rl": ["dpo", "gdpo", "grpo", "ipo", "orpo", "kto", "simpo", "ebft"],
    "optimizer": [
        *("optimi_adamw", "ao_adamw_4bit", "ao_adamw_8bit", "ao_adamw_fp8", "adopt_adamw", "came_pytorch", "muon"),
        *("dion", "sinkgd", "flash_adamw", "flash_adam", "flash_sgd", "flash_sgdw", "flash_lion", "normuon"),
        *(name.value for name in transformers.training_args.OptimizerNames),
    ],
    "lr_scheduler": ["rex", "one_cycle", "wsd", *(name.value for name in transformers.SchedulerType)],
    "attn_implementation": [
        "eager",
        "sdpa",
        "flash_attention_2",
        "flash_attention_3",
        "xformers",
        "sage",
        "fp8",
        "flex",
    ],
    "gradient_checkpointing": [True, "offload", "offload_disk", "unsloth"],
    "activation_offloading": [True, "legacy", "disk", "hidden_states"],
    "excess_length_strategy": ["drop", "truncate", "raise"],
    "train_on_eos": ["all", "turn", "last", "none"],
    # Surogate and Unsloth
    "recipe": ["bf16", "fp8_hybrid", "nvfp4"],
    "amax_compute_algo": ["MAX", "MOST_RECENT"],
    "lora_dtype": ["bf16", "fp32", "float16"],
    "load_in_fp8": [True, "row", "block"],
    "qat_scheme": ["int4", "int8-int4", "fp8-int4", "fp8-fp8"],
    # ms-swift
    "tuner_type": ["lora", "full", "longlora", "adalora", "llamapro", "vera", "boft", "fourierft", "reft", "bone"],
    "rlhf_type": ["dpo", "orpo", "simpo", "kto", "cpo", "rm", "ppo", "grpo", "gkd"],
    "quant_method": ["bnb", "hqq", "eetq", "quanto", "fp8"],
    "quant_bits": [1, 2, 3, 4, 8, "float8"],
    "truncation_strategy": ["delete", "left", "right", "split"],
    "task_type": ["causal_lm", "seq_cls", "embedding", "reranker", "generative_reranker"],
    "loss_scale": ["default", "all", "last_round", "ignore_empty_think", "react"],
    "init_weights": ["true", "gaussian", "pissa", "olora", "lora-ga"],
    "advantage_estimator": ["grpo", "rloo", "reinforce_plus_plus"],
}


# Values that are halfbyte's default, or that another key gives a meaning.
WITHOUT_EFFECT = {
    "sft",
    "bnb",
    "hqq",
    "eetq",
    "AUTO",
    "causal_lm",
    "default",
    "grpo",
    "all",
    "turn",
    "last",
    "orpo",
    "simpo",
}
OTHER_METHODS = {("rl", "ebft"), ("stage", "ppo"), ("rlhf_type", "ppo")}


@pytest.mark.parametrize("key", ENUMERATED)
def test_every_enumerated_value_maps_or_is_refused_by_name(tmp_path, key):
    for value in ENUMERATED[key]:
        value = getattr(value, "value", value)
        file = tmp_path / "theirs.yaml"
        file.write_text(f"model_name_or_path: m\ndataset: d\n{key}: {value}\n{'stage: dpo' * (key == 'pref_loss')}\n")
        if (key, value) in OTHER_METHODS:
            with pytest.raises(ConfigError, match=value):
                convert(file)
            continue
        imported = convert(file)
        assert key in {*imported.origin.values(), *imported.undecided, *imported.left_out} or value in WITHOUT_EFFECT
        for _, why in imported.undecided.values():
            assert "did you mean" not in why, (key, value)
            assert "unknown" not in why, (key, value)


SEEDS = {
    "qlora_fp8: true\nrecipe: bf16": {"quantization": "fp8", "recipe": "bf16"},
    "qlora_fp8: true\nrecipe: fp8-hybrid\namax_compute_algo: MOST_RECENT\nmargin: 0": {
        "quantization": "fp8", "recipe": "fp8-hybrid", "amax_compute_algo": "most_recent",
    },
    "qlora_fp8: true\nqlora_block_size: 128": {"quantization": "fp8-tile"},
    "qlora_fp4: true\nrecipe: nvfp4\nbackend: cutlass": {"quantization": "nvfp4-46", "enable_four_over_six": True},
    "qlora_fp4: true\nrecipe: nvfp4\nenable_four_over_six: false": {
        "quantization": "nvfp4", "enable_four_over_six": False,
    },
    "qlora_fp4: true\nrecipe: bf16\nenable_four_over_six: true\nfour_over_six_metric: L1": {
        "quantization": "nvfp4:2d:46l1", "enable_four_over_six": False, "four_over_six_metric": "MSE",
    },
    "qlora_fp4: true\nrecipe: nvfp4\ndisable_2d_quantization: true\nfour_over_six_metric: AbsMax": {
        "quantization": "nvfp4:1d:46absmax", "disable_2d_quantization": True, "enable_four_over_six": True,
    },
    "qlora_bnb: true\nqlora_bnb_block_size: 64\nqlora_bnb_double_quant: true": {
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_blocksize": 64, "load_in_4bit": True,
    },
    "recipe: bf16": {"load_in_4bit": False},
}  # fmt: skip


@pytest.mark.parametrize("lines", SEEDS)
def test_surogate_imports_without_a_line_to_decide(tmp_path, lines):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"model: m\ndataset: d\nlora: true\nlora_rank: 16\n{lines}\n")
    imported = convert(file)
    assert imported.tool == "Surogate"
    assert not imported.undecided
    assert not imported.missing
    (tmp_path / "ours.yaml").write_text(imported.as_yaml())
    for config in (load_config(tmp_path / "ours.yaml"), load_config(file)):
        assert {key: getattr(config, key) for key in SEEDS[lines]} == SEEDS[lines]


@pytest.mark.parametrize(
    ("lines", "ours"),
    [
        ("load_in_fp8: block", {"load_in_4bit": True, "quantization": "fp8-tile"}),
        ("load_in_16bit: true", {"load_in_4bit": False}),
        ("quantization_bit: 8\nquantization_method: eetq", {"load_in_4bit": True, "quantization": "int8"}),
        ("quantization: eetq", {"load_in_4bit": True, "quantization": "int8"}),
        ("quant_bits: 8\nquant_method: eetq", {"load_in_4bit": True, "quantization": "int8"}),
        ("finetune_language_layers: true\nfinetune_mlp_modules: true", {"target_modules": "all-linear"}),
        ("lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1", {
            "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        }),
        ("lr_scheduler_type: linear\nlearning_rate: 1.0e-4\nfinal_lr_fraction: 0.1", {
            "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 1.0, "lr_end": 1e-5},
        }),
        ("lr_scheduler_type: wsd\nwsd_decay_steps_fraction: 0.1\nmax_steps: 100", {
            "lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10},
        }),
        ("add_tokens: <a>,<b>\nresize_vocab: true", {"add_tokens": ["<a>", "<b>"]}),
        ("tokens: [<a>]\nspecial_tokens: {additional_special_tokens: [<b>]}\npeft_trainable_token_indices: [3]", {
            "add_tokens": ["<a>"], "add_special_tokens": ["<b>"], "trainable_token_indices": [3],
        }),
        ("recompute: true\noffload_residual: true", {"activation_checkpointing": "offload"}),
        ("use_mlflow: true\nuse_wandb: true", {"report_to": ["mlflow", "wandb"]}),
        ("wandb_project: p\nwandb_name: mine", {"report_to": ["wandb"], "project": "p", "run_name": "mine"}),
        ("use_wandb: false\nwandb_project: p\nwandb_name: mine", {"report_to": [], "project": None, "run_name": None}),
        ("report_to: [swanlab, tensorboard]\nswanlab_project: p\nswanlab_exp_name: mine\nwandb_name: other", {
            "report_to": ["swanlab", "tensorboard"], "project": "p", "run_name": "mine",
        }),
        ("use_mlflow: true\nmlflow_experiment_name: p", {"report_to": ["mlflow"], "project": "p"}),
        ("mask_history: true", {"train_on": "last"}),
        ("mix_strategy: interleave_over", {"mixing": "interleave", "stopping": "all"}),
        ("early_stopping_steps: 3\neval_split_size: 0.1", {"early_stopping_patience": 3}),
        ("quant_method: hqq\nquant_bits: 3\ntuner_type: lora", {"quantization": "hqq3", "load_in_4bit": True}),
        ("training: {batch_size: 2, num_epochs: 0, max_steps: 30}\nlora: {lora_r: 64, target_modules: 'q_proj'}", {
            "per_device_train_batch_size": 2, "max_steps": 30, "r": 64, "target_modules": ["q_proj"],
        }),
        ("peft_config: {name: lora, r: 4}\nquant_config: {name: bnb, quantization_bit: 8}", {
            "use_peft": True, "r": 4, "quantization": "int8",
        }),
    ],
)  # fmt: skip
def test_values_of_other_tools_are_converted(tmp_path, lines, ours):
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: m\ndataset: d\n{lines}\n")
    config = load_config(tmp_path / "run.yaml")
    assert {key: getattr(config, key) for key in ours} == ours


def test_probabilities_become_weights():
    values = {"dataset": "a, b", "mix_strategy": "interleave_under", "interleave_probs": "0.3,0.7"}
    entries = [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 0.7}]
    assert translate("interleave_probs", values) == Mapped({"dataset": entries})


def test_only_attention_or_only_mlps_are_linear_layers():
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfbyte.adapters.targets import adapted_modules

    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(tiny)
    found = {}
    for part, other in (("attention", "mlp"), ("mlp", "attention")):
        values = {f"finetune_{part}_modules": True, f"finetune_{other}_modules": False}
        targets = translate(f"finetune_{part}_modules", values).keys["target_modules"]
        adapter = load_config(None, {"model_name_or_path": "m", "dataset": "d", "target_modules": targets}).adapter
        found[part] = {name.rpartition(".")[2] for name in adapted_modules(model, adapter)[1]}
    assert found["attention"] == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert found["mlp"] == {"gate_proj", "up_proj", "down_proj"}


def test_swifts_number_of_rows_is_a_limit(tmp_path):
    file = tmp_path / "theirs.yaml"
    file.write_text("model: m\ntuner_type: lora\ndataset: ['a/b#500', c]\n")
    assert convert(file).keys["dataset"] == [{"path": "a/b", "max_samples": 500}, "c"]
