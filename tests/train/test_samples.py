"""Answers to a run's sample prompts."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import load_config
from halfbyte.generation import engine
from halfbyte.train.run import train
from halfbyte.train.samples import Prompt, answer
from halfbyte.utils import notices
from tests.helpers import run_inputs
from tests.helpers.tiny_runs import VOCABULARY, run_config, tiny_llama


class Numbers:
    """A tokenizer whose texts are the ids; 0 is a special token."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(str(token) for token in ids if token)


def answers(model, lengths, stops=(), new=6):
    prompts = [Prompt([1 + (7 * i) % (VOCABULARY - 1) for i in range(length)], "") for length in lengths]
    return prompts, answer(model, Numbers(), prompts, max_new_tokens=new, stops=list(stops))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("keys", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_answers_are_transformers_greedy_ones_and_end_with_a_stop(tmp_path, keys, trained):
    model = add_adapter(tiny_llama(), run_config(tmp_path, **keys)).train()
    if trained:
        base = answers(model, [3, 9])[1]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and ".lora_A." not in name:
                parameter.data += torch.randn_like(parameter)
    prompts, whole = answers(model, [3, 9])
    assert not trained or whole != base
    assert model not in engine._engines  # no cache remains during training
    for prompt, text in zip(prompts, whole, strict=True):
        ids = torch.tensor([prompt.ids])
        keys = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **keys)[0, ids.shape[1] :]
        assert text == Numbers().decode(expected.tolist(), True)
    stop = int(whole[0].split()[2])
    first = whole[0].split()
    assert answers(model, [3], stops=[stop])[1] == [" ".join(first[: first.index(str(stop)) + 1])]


def test_answers_are_limited_by_the_context():
    model = tiny_llama(max_position_embeddings=12)
    assert [len(text.split()) for text in answers(model, [4, 10, 12, 15])[1]] == [6, 2, 0, 0]
    assert "long-samples" in notices.notices_so_far()


CHECKPOINTED = {"theirs": {"use_kernels": False}, "whole": {"use_peft": False, "load_in_4bit": False}, "ours": {}}


@pytest.mark.slow
@pytest.mark.parametrize("keys", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_the_engine_answers_in_checkpointed_runs(tmp_path, keys):
    """transformers' checkpointing hooks the embeddings, and another forward, much slower, would answer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=run_inputs.VOCABULARY, pad_token_id=1, eos_token_id=0, bos_token_id=None)
    run_inputs.write_model(tmp_path / "model", LlamaForCausalLM(config))
    run_inputs.write_rows(tmp_path / "rows.jsonl", [20] * 12)
    keys = {
        "activation_checkpointing": True,
        "max_steps": 1,
        "warmup_steps": 0,
        "max_length": 64,
        "sample_max_new_tokens": 4,
    } | keys
    keys |= {"output_dir": str(tmp_path / "out"), "device": "cpu", "sample_prompts": 1}
    places = {"model_name_or_path": str(tmp_path / "model"), "dataset": str(tmp_path / "rows.jsonl")}
    notices.reset_notices()
    train(
        load_config(None, places | {"output_dir": str(tmp_path / "out"), "device": "cpu", "sample_prompts": 1} | keys)
    )
    said = json.loads((tmp_path / "out" / "environment.json").read_text())["notices"]
    assert not [key for key in said if key.startswith("generation")]
