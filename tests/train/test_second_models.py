"""Auxiliary models: at which token they are read, in which mode they run, and checks of their files on resume."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.methods import method_of
from halfbyte.methods.answers import as_adapter, in_eval_mode, score, turn_dropout_off
from halfbyte.rewards.model_scores import answer_suffix, loaded_reward_models
from halfbyte.rewards.score import Rewards
from halfbyte.rewards.specs import read_specs
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import finetune, train
from halfbyte.utils.errors import ConfigError

PT = {"format": "pt"}
CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def talks(place, tmp_path_factory):
    """A model whose chat template writes a line break after an answer's end token, and pairs of conversations."""
    folder = tmp_path_factory.mktemp("talks")
    shutil.copytree(place / "model", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / "model")
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    said = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    pairs = [
        {
            "prompt": prompt,
            "chosen": [{"role": "assistant", "content": row["completion"].strip()}],
            "rejected": [{"role": "assistant", "content": f"no {n}"}],
        }
        for n, (prompt, row) in enumerate(zip(said, rows, strict=True))
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in said))
    return folder


def keys(folder, output, data="pairs", **more):
    found = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / f"{data}.jsonl"), "r": 4}
    found |= {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "max_length": 96}
    found |= {"learning_rate": 1e-2, "warmup_steps": 0, "sample_prompts": 0, "per_device_train_batch_size": 4}
    return found | more


def losses(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.slow
def test_a_reward_model_scores_a_rollout_as_the_row_it_was_trained_on(talks, tmp_path):
    """The score is trained at the line break after the end token; a rollout ends with the end token."""
    train(load_config(None, keys(talks, tmp_path / "reward", method="reward", max_steps=6)))
    saved = load_saved(str(tmp_path / "reward"), (), "reward", scores=True)
    method = method_of(saved.config)
    rows = method.ready(saved.config, saved.tokenizer, saved.model.config).train
    collate = method.collator(saved.config, saved.tokenizer)
    wanted = [score(saved.model, collate([rows[n]])).flatten().tolist()[0] for n in range(4)]
    end, behind = answer_suffix(saved.tokenizer)
    assert saved.tokenizer.decode(list(behind)) == "\n"
    config = load_config(None, keys(talks, tmp_path / "out", "prompts", method="grpo", num_generations=2,
                                    reward_funcs=[{"model": str(tmp_path / "reward")}]))  # fmt: skip
    asked = Rewards(read_specs(config.reward_funcs, []), [], 1.0, 8)
    prompts, answers = [], []
    for line in (talks / "pairs.jsonl").read_text().splitlines()[:4]:
        row = json.loads(line)
        prompts.append(saved.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"])
        text = row["chosen"][0]["content"]
        answers.append([*saved.tokenizer(text, add_special_tokens=False)["input_ids"], end])
    where = torch.device("cpu"), torch.float32
    with torch.no_grad(), loaded_reward_models(config, asked, saved.model, saved.tokenizer, *where):
        [judge] = asked.models.values()
        found = judge(prompts, answers)
        cut = judge(prompts, [answer[:-1] for answer in answers])
    assert found == pytest.approx(wanted, abs=1e-5)
    assert cut != pytest.approx(wanted, abs=1e-3)


def test_an_answer_has_no_suffix_if_the_template_writes_none(talks):
    tokenizer = AutoTokenizer.from_pretrained(talks / "model")
    tokenizer.chat_template = CHATML.replace("'</s>\n'", "'</s>'")
    assert answer_suffix(tokenizer) == (tokenizer.eos_token_id, ())
    tokenizer.chat_template = None
    assert answer_suffix(tokenizer) == (tokenizer.eos_token_id, ())


def mistral(folder, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None, "num_key_value_heads": 1}
    model = MistralForCausalLM(MistralConfig(vocab_size=270, **sizes, **ids, **more))
    model.save_pretrained(folder / "model")


@pytest.mark.slow
def test_a_cached_reference_is_not_used_with_another_config(talks, tmp_path):
    """sliding_window 60, then 8, with equal weights: the second run computes its own reference, and starts at ln 2."""
    folder = tmp_path / "mistral"
    shutil.copytree(talks, folder)
    (folder / "model/model.safetensors").unlink()
    mistral(folder, sliding_window=60)
    for window in (60, 8):
        config = json.loads((folder / "model/config.json").read_text())
        (folder / "model/config.json").write_text(json.dumps(config | {"sliding_window": window}))
        train(load_config(None, keys(folder, tmp_path / f"out{window}", method="dpo", max_steps=1, warmup_steps=0,
                                     precompute_ref_log_probs=True)))  # fmt: skip
        assert losses(tmp_path / f"out{window}")[0] == pytest.approx(0.693147, abs=1e-4)


@pytest.mark.slow
def test_a_reference_of_each_step_has_no_noise_and_no_dropout(talks, tmp_path):
    train(load_config(None, keys(talks, tmp_path / "out", method="dpo", max_steps=2, neftune_noise_alpha=50.0,
                                 precompute_ref_log_probs=False)))  # fmt: skip
    quiet = losses(tmp_path / "out")[0]
    train(load_config(None, keys(talks, tmp_path / "kept", method="dpo", max_steps=2, neftune_noise_alpha=50.0,
                                 precompute_ref_log_probs=True)))  # fmt: skip
    assert quiet == pytest.approx(losses(tmp_path / "kept")[0], abs=1e-5)  # the same noise, in the policy alone


def test_the_mode_is_restored_after_a_forward_in_eval_mode(talks):
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    with in_eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False]


def gpt2(folder):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=270, n_embd=32, n_layer=2, n_head=2, eos_token_id=0, bos_token_id=0))
    model.save_pretrained(folder / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "exact"), [({}, True), ({"disable_dropout": False}, False)])
def test_dropout_of_the_base_is_off_if_models_are_compared(talks, tmp_path, asked, exact):
    folder = tmp_path / "gpt2"
    shutil.copytree(talks, folder)
    (folder / "model/model.safetensors").unlink()
    gpt2(folder)
    train(load_config(None, keys(folder, tmp_path / "out", method="dpo", max_steps=2, use_peft=False, **asked)))
    assert (losses(tmp_path / "out")[0] == pytest.approx(0.693147, abs=1e-5)) == exact


def test_dropout_is_turned_off_in_modules_and_in_attributes():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1))
    turn_dropout_off(model)
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


def teacher_of(talks, folder, dropout):
    shutil.copytree(talks / "taught/adapter", folder)
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(said | {"lora_dropout": dropout}))
    return str(folder)


@pytest.mark.slow
def test_a_teacher_on_shared_weights_draws_no_dropout(talks, tmp_path):
    if not (talks / "taught").is_dir():
        train(load_config(None, keys(talks, talks / "taught", method="sft", dataset=str(talks / "sft.jsonl"),
                                     max_steps=4) | {"dataset": sft_rows(talks)}))  # fmt: skip
    found = []
    for dropout in (0.0, 0.5):
        teacher = teacher_of(talks, tmp_path / f"teacher{dropout}", dropout)
        train(load_config(None, keys(talks, tmp_path / f"out{dropout}", "prompts", method="gkd", max_steps=2,
                                     teacher_model_name_or_path=teacher, max_completion_length=8)))  # fmt: skip
        found.append(losses(tmp_path / f"out{dropout}")[0])
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def sft_rows(talks):
    pairs = [json.loads(line) for line in (talks / "pairs.jsonl").read_text().splitlines()]
    rows = [{"messages": [*row["prompt"], *row["chosen"]]} for row in pairs]
    (talks / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(talks / "sft.jsonl")


@pytest.mark.slow
def test_resuming_with_another_dataset_of_equal_size_is_refused(talks, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(talks, folder)
    config = keys(folder, tmp_path / "out", method="dpo", max_steps=2, save_steps=1)
    train(load_config(None, config))
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    swapped = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in pairs]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in swapped))
    with pytest.raises(ConfigError) as found:
        train(load_config(None, config), resume=str(tmp_path / "out/checkpoint-1"))
    assert found.value.message.startswith("dataset")


@pytest.mark.slow
def test_resuming_with_a_changed_reward_column_is_refused(talks, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(talks, folder)
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]

    def write(answer):
        rows = [row | {"answer": answer} for row in prompts]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("3")
    config = keys(folder, tmp_path / "out", "prompts", method="grpo", reward_funcs=["exact"], max_steps=2,
                  save_steps=1, num_generations=2, max_completion_length=4)  # fmt: skip
    train(load_config(None, config))
    write("4")
    with pytest.raises(ConfigError) as found:
        train(load_config(None, config), resume=str(tmp_path / "out/checkpoint-1"))
    assert found.value.message.startswith("dataset")


@pytest.mark.slow
def test_resuming_with_a_changed_initial_adapter_is_refused(talks, tmp_path):
    train(load_config(None, keys(talks, tmp_path / "first", method="dpo", max_steps=1, warmup_steps=0)))
    config = keys(talks, tmp_path / "out", method="dpo", max_steps=2, save_steps=1,
                  adapter_path=str(tmp_path / "first/adapter"))  # fmt: skip
    train(load_config(None, config))
    file = tmp_path / "first/adapter/adapter_model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(file).items()}, file, PT)
    with pytest.raises(ConfigError) as found:
        train(load_config(None, config), resume=str(tmp_path / "out/checkpoint-1"))
    assert found.value.message.startswith("adapter_path")


@pytest.mark.slow
def test_a_generation_of_truncated_answers_has_a_loss_of_0(talks, tmp_path):
    config = keys(talks, tmp_path / "out", "prompts", method="grpo", reward_funcs=["repetition"], max_steps=2,
                  save_steps=1, num_generations=2, max_completion_length=1,
                  mask_truncated_completions=True)  # fmt: skip
    train(load_config(None, config))
    assert losses(tmp_path / "out") == [0.0, 0.0]
    again = config | {"output_dir": str(tmp_path / "again")}
    shutil.copytree(tmp_path / "out/checkpoint-1", tmp_path / "again/checkpoint-1")
    train(load_config(None, again), resume=str(tmp_path / "again/checkpoint-1"))
    assert losses(tmp_path / "again")[-1] == 0.0


@pytest.mark.slow
def test_the_configured_dtype_is_named(talks, tmp_path):
    finetune(str(talks / "model"), sft_rows(talks), **{
        key: value for key, value in keys(talks, tmp_path / "out", max_steps=1, warmup_steps=0).items()
        if key not in ("model_name_or_path", "dataset")
    })  # fmt: skip
    found = json.loads((tmp_path / "out/environment.json").read_text())["compute_dtype"]
    assert found["dtype"] == "float32"


@pytest.mark.slow
def test_a_run_that_balances_its_routers_is_evaluated(talks, tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    folder = tmp_path / "mixture"
    shutil.copytree(talks, folder)
    (folder / "model/model.safetensors").unlink()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_local_experts": 4, "num_key_value_heads": 1, "pad_token_id": 1, "eos_token_id": 0}
    MixtralForCausalLM(MixtralConfig(vocab_size=270, **sizes, **more)).save_pretrained(folder / "model")
    rows = sft_rows(folder)
    config = keys(folder, tmp_path / "out", max_steps=2, router_aux_loss_coef=0.1, eval_dataset=rows)
    train(load_config(None, config | {"dataset": rows}))
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    found = evaluate(str(tmp_path / "out"), rows)
    assert found.loss == pytest.approx(last["loss"], abs=1e-5)
    assert found.numbers["aux_loss"] == pytest.approx(last["aux_loss"], rel=1e-4)


def test_another_adapter_runs_in_eval_mode(talks, tmp_path):
    saved = load_saved(_trained(talks, tmp_path), (), "x", scores=True)
    saved.model.train()
    with as_adapter(saved.model, "default"):
        assert not saved.model.training
    assert saved.model.training


def _trained(talks, tmp_path):
    train(load_config(None, keys(talks, tmp_path / "run", method="dpo", max_steps=1, warmup_steps=0)))
    return str(tmp_path / "run")
