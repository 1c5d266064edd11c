"""Keys of training methods: their methods, their defaults, and other tools' names for them."""

import re
from pathlib import Path

import pytest

from halfbyte.config import RunConfig, dump_config, load_config
from halfbyte.config.methods import COMPARING, DEFAULTS, LOSS_TYPES, RATE, methods_of
from halfbyte.data.formats import METHODS_FOR
from halfbyte.methods import METHODS
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError

trl = pytest.importorskip("trl")
cpo, orpo = (pytest.importorskip(f"trl.experimental.{name}") for name in ("cpo", "orpo"))

GIVEN = {"model_name_or_path": "m", "dataset": "d"}
THEIRS = {
    "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig, "cpo": cpo.CPOConfig,
    "simpo": cpo.CPOConfig, "orpo": orpo.ORPOConfig,
    "grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig,
}  # fmt: skip
NOT_THEIRS = {"reward_funcs", "reward_timeout_s", "rollout", "rollout_weights", "rollout_memory_gib", "kv_cache"}
NOT_THEIRS |= {"dynamic_sampling", "importance_sampling_correction", "importance_sampling_mode"}
NOT_THEIRS |= {"importance_sampling_clip_max", "importance_sampling_clip_min"}  # named vllm_... in TRL
NEEDED = {method: {"reward_funcs": ["exact"], "gradient_accumulation_steps": 8} for method in ("grpo", "rloo")}
OTHERWISE = {  # intended differences from TRL
    ("dpo", "loss_type"): ["sigmoid"],  # a list in TRL
    ("simpo", "cpo_alpha"): 1.0,  # ours is 0, as in the paper
    ("dpo", "precompute_ref_log_probs"): False, ("kto", "precompute_ref_log_probs"): False,
    ("grpo", "disable_dropout"): False, ("rloo", "disable_dropout"): False,
    ("grpo", "steps_per_generation"): 1, ("rloo", "steps_per_generation"): 1,  # ours: one optimizer step
}  # fmt: skip


def keys_of(method):
    fields = RunConfig.model_fields.items()
    return [key for key, field in fields if method in methods_of(field)]


def problem(**keys):
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**GIVEN, **keys})
    return str(caught.value)


@pytest.mark.parametrize("method", THEIRS)
def test_names_and_defaults_match_trl(method):
    given = {**GIVEN, "method": method, **NEEDED.get(method, {})}
    ours, theirs = RunConfig(**given), THEIRS[method](output_dir="out", report_to="none", use_cpu=True)
    assert keys_of(method)
    for key in set(keys_of(method)) - NOT_THEIRS:
        expected = OTHERWISE.get((method, key), getattr(ours, key))
        assert getattr(theirs, key) == expected, key
    full = RunConfig(**given | {"beta": 0.0} if method == "rloo" else given, use_peft=False, load_in_4bit=False)
    if method != "reward":
        assert full.learning_rate == theirs.learning_rate == RATE[False]
    else:
        assert ours.learning_rate == theirs.learning_rate


def test_every_method_that_takes_a_key_has_defaults():
    of_keys = {method for field in RunConfig.model_fields.values() for method in methods_of(field)}
    assert of_keys - {"sft"} == set(DEFAULTS)  # sft has its defaults in the schema
    assert set(LOSS_TYPES) == {method for method in DEFAULTS if "loss_type" in keys_of(method)}


def test_method_default_is_not_a_given_key(tmp_path):
    config = load_config(None, {**GIVEN, "method": "dpo"})
    assert (config.beta, config.loss_type, config.learning_rate) == (0.1, "sigmoid", 1e-5)
    assert config.model_fields_set == {*GIVEN, "method"}
    assert notices.notices_so_far()["learning_rate"] == "learning_rate: 1e-05, the default of method: dpo for adapters"
    assert load_config(None, {**GIVEN, "method": "dpo", "learning_rate": 2e-4, "beta": 0.3}).beta == 0.3
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "run.yaml").model_dump() == config.model_dump()
    assert (load_config(None, GIVEN).learning_rate, load_config(None, GIVEN).beta) == (2e-4, None)


@pytest.mark.parametrize(
    ("keys", "said", "fix"),
    [
        ({"beta": 0.1}, "method: sft", "method: dpo"),
        ({"method": "dpo", "simpo_gamma": 1.0}, "simpo_gamma: 1.0", "method: simpo"),
        ({"method": "orpo", "precompute_ref_log_probs": True}, "", ""),
        ({"method": "dpo", "loss_type": "simpo"}, "method: dpo", "method: simpo"),
        ({"method": "dpo", "loss_type": ["sigmoid", "apo_zero_unpaired"]}, "'apo_zero_unpaired'", "method: kto"),
        ({"method": "dpo", "loss_type": "sigmod"}, "'sigmod'", ""),
        ({"method": "cpo", "loss_type": "alphapo"}, "'alphapo'", "method: simpo"),
        ({"method": "kto", "loss_type": ["kto", "kto"]}, "", "method: dpo"),
        ({"method": "dpo", "beta": 0}, "method: dpo", "above 0"),
        ({"method": "dpo", "loss_weights": [1.0, 2.0]}, "", ""),
        ({"method": "dpo", "loss_type": "exo_pair"}, "label_smoothing", "1e-3"),
        ({"method": "dpo", "loss_type": "aot", "use_weighting": True}, "", ""),
        ({"method": "dpo", "loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "", "ipo"),
        ({"method": "dpo", "label_smoothing": 0.5}, "label_smoothing", ""),
        ({"method": "dpo", "loss_weights": ["a"]}, "loss_weights", ""),
        ({"method": "dpo", "loss_type": []}, "loss_type", ""),
        ({"method": "dpo", "dataset_format": "text"}, "dataset_format: text", "column_mapping"),
        ({"method": "kto", "completion_only_loss": False}, "completion_only_loss: false", "remove"),
    ],
)  # fmt: skip
def test_keys_that_do_not_apply_to_the_method_are_refused(keys, said, fix):
    text = problem(**keys)
    assert said in text
    assert fix in text.split("fix:")[1]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"rl": "dpo", "rl_beta": 0.2, "dpo_label_smoothing": 0.1}, {"beta": 0.2, "label_smoothing": 0.1}),
        ({"rl": "ipo", "dpo_use_weighting": True}, {"method": "dpo", "loss_type": "ipo", "use_weighting": True}),
        ({"rl": "orpo", "orpo_alpha": 0.3}, {"method": "orpo", "beta": 0.3}),
        ({"rl": "simpo", "simpo_gamma": 1.0}, {"method": "simpo", "simpo_gamma": 1.0}),
        ({"rl": "kto", "kto_undesirable_weight": 2.0}, {"method": "kto", "undesirable_weight": 2.0}),
        ({"reward_model": True, "center_rewards_coefficient": 0.01}, {"method": "reward"}),
        ({"process_reward_model": True, "step_separator": "\n\n"}, {"method": "prm"}),
        ({"stage": "dpo", "pref_loss": "hinge"}, {"method": "dpo", "loss_type": "hinge"}),
        ({"stage": "dpo", "pref_beta": 0.2}, {"method": "dpo", "loss_type": "sigmoid", "beta": 0.2}),
        ({"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.2}, {"method": "orpo", "beta": 0.2}),
        ({"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.7}, {"method": "simpo", "simpo_gamma": 0.7}),
        ({"stage": "dpo", "pref_ftx": 0.5}, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ({"stage": "kto", "kto_chosen_weight": 1.5}, {"method": "kto", "desirable_weight": 1.5}),
        ({"stage": "rm"}, {"method": "reward"}),
        ({"stage": "sft", "pref_loss": "hinge", "pref_ftx": 1.0}, {"method": "sft", "loss_type": None}),
    ],
)  # fmt: skip
def test_other_tools_keys_are_mapped(theirs, ours):
    config = load_config(None, {**GIVEN, **theirs})
    assert {key: getattr(config, key) for key in ours} == ours


def test_axolotl_trl_section():
    section = {"num_generations": 4, "max_completion_length": 64, "reward_funcs": ["my.rewards.right", "exact"],
               "scale_rewards": False, "use_vllm": False, "vllm_server_host": "a", "log_completions": True}  # fmt: skip
    config = load_config(None, {**GIVEN, "rl": "grpo", "gradient_accumulation_steps": 4, "trl": section})
    assert (config.method, config.num_generations, config.max_completion_length) == ("grpo", 4, 64)
    assert (config.reward_funcs, config.scale_rewards) == (["my/rewards.py:right", "exact"], "none")
    said = problem(rl="grpo", gradient_accumulation_steps=8, trl={"use_vllm": True, "reward_funcs": ["exact"]})
    assert "use_vllm" in said
    assert "3" in problem(rl="grpo", trl=3)


ENGINE = {"method": "grpo", "reward_funcs": "exact", "gradient_accumulation_steps": 8}
SERVER = {"rollout": "vllm", "vllm_server_base_url": "http://here:8000"}


@pytest.mark.parametrize(
    ("theirs", "url", "seconds"),
    [
        ({"use_vllm": True, "vllm_mode": "server"}, "http://localhost:8000", 240),
        ({"vllm_mode": "server", "use_vllm": True, "vllm_server_host": "h", "vllm_server_port": 9}, "http://h:9", 240),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": "https://x", "vllm_server_timeout": 9},
            "https://x",
            9,
        ),
        ({"trl": {"use_vllm": True, "vllm_mode": "server", "vllm_server_timeout": 5}}, "http://localhost:8000", 5),
    ],
)
def test_trl_server_keys_are_mapped(theirs, url, seconds):
    config = load_config(None, {**GIVEN, **ENGINE, **theirs})
    assert (config.rollout, config.vllm_server_base_url, config.vllm_server_timeout) == ("vllm", url, seconds)


def test_trl_server_keys_without_use_vllm_are_ignored():
    config = load_config(None, {**GIVEN, **ENGINE, "use_vllm": False, "vllm_mode": "colocate", "vllm_server_port": 1})
    assert (config.rollout, config.vllm_server_base_url) == ("halfbyte", None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"vllm_server_base_url": None}, "vllm_server_base_url"),
        ({"rollout": "halfbyte"}, ""),
        *(({"vllm_server_base_url": url}, "vllm_server_base_url: ") for url in (
            "here:8000", "http://", "http://here:99999", "http://here/v1", "http://u:p@here", "ftp://here", "http://h?x",
        )),
        ({"kv_cache": "fp8"}, "kv_cache: fp8"),
        ({"rollout_memory_gib": 2.0}, "rollout_memory_gib: 2.0"),
        ({"use_peft": False, "load_in_4bit": False}, "use_peft: false"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"temperature": 0.5, "top_k": 3}, "temperature: 0.5"),
        ({"method": "gkd", "reward_funcs": None}, "method: gkd"),
    ],
)  # fmt: skip
def test_keys_unsupported_with_a_server_are_refused(more, said):
    keys = {**ENGINE, **SERVER, **more}
    assert said in problem(**{key: value for key, value in keys.items() if value is not None})


def test_axolotl_pair_fields_become_columns():
    entry = {"path": "p.jsonl", "type": "chat_template.default", "field_chosen": "good", "field_rejected": "bad"}
    config = load_config(None, {"model_name_or_path": "m", "rl": "dpo", "datasets": [entry]})
    assert (config.dataset, config.column_mapping) == ("p.jsonl", {"chosen": "good", "rejected": "bad"})
    assert config.dataset_format == "auto"


def test_the_preference_page_lists_every_key_of_a_method():
    page = (Path(__file__).parents[2] / "docs/preference.md").read_text()
    table = page.split("## Methods")[1].split("\n## ")[0]
    named = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", table, re.MULTILINE))
    assert set(named) == set(COMPARING)
    for method, keys in named.items():
        assert set(re.findall(r"`(\w+)`", keys)) == set(keys_of(method)) - {"disable_dropout"}  # below the table


def test_suggested_methods_accept_the_rows():
    """The methods that `data` suggests for a kind of rows accept these rows."""
    assert set(METHODS) == {"sft", *DEFAULTS}
    for name, method in METHODS.items():
        assert name in METHODS_FOR[method.rows].replace(",", "").split()
