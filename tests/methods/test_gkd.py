"""Distillation equals TRL's DistillationTrainer, whose own loss is computed here on the same answers."""

from copy import deepcopy
from types import MethodType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from trl import DistillationTrainer

from halfbyte.config import RunConfig
from halfbyte.methods import method_of
from halfbyte.methods.answers import as_adapter
from halfbyte.modeling.distillation import Teacher, use_teacher
from tests.helpers.patch_models import tiny

PROMPTS, ANSWERS = (3, 7, 5, 1), (6, 2, 9, 1)


def texts():
    drawn = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(5, 60, (n,), generator=drawn) for n in lengths)
        for lengths in zip(PROMPTS, ANSWERS, strict=True)
    ]


def their_loss(student, teacher, beta, temperature):
    """DistillationTrainer's, of prompts padded on the left and answers on the right."""
    trainer = SimpleNamespace(
        beta=beta,
        temperature=temperature,
        teacher_model=teacher,
        _is_vlm=False,
        model_kwarg_keys=set(),
        accelerator=SimpleNamespace(unwrap_model=lambda model: model, is_main_process=True),
        _forward_redirection=lambda _, __, function, *given, **named: function(*given, **named),
    )
    trainer._get_last_hidden_state = MethodType(DistillationTrainer._get_last_hidden_state, trainer)
    sides = list(zip(*texts(), strict=True))
    inputs = {}
    for name, ids, side in zip(("prompt", "completion"), sides, ("left", "right"), strict=True):
        inputs[f"{name}_ids"] = pad_sequence(ids, batch_first=True, padding_side=side)
        mask = [torch.ones_like(each) for each in ids]
        inputs[f"{name}_mask"] = pad_sequence(mask, batch_first=True, padding_side=side)
    loss, entropy, tokens = DistillationTrainer._compute_loss(trainer, student, inputs, sum(ANSWERS))
    return loss, entropy / tokens


def batch_of(config, tokenizer_pad=0):
    method = method_of(config)
    collate = method.collator(config, SimpleNamespace(pad_token_id=tokenizer_pad))
    rows = [
        {"input_ids": [*prompt.tolist(), *answer.tolist()], "labels": [-100] * len(prompt) + answer.tolist()}
        for prompt, answer in texts()
    ]
    return method, collate(rows)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_equal_to_trl(family, beta, padding_free):
    """With a teacher of its own width, and with another adapter on the same weights."""
    torch.manual_seed(1)
    base = tiny(family, adapter=False)
    student = get_peft_model(deepcopy(base), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    student.add_adapter("teacher", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    config = RunConfig(
        model_name_or_path="m", dataset="d", method="gkd", teacher_model_name_or_path="t", beta=beta, temperature=0.8,
        padding_free=padding_free,
    )  # fmt: skip
    method, batch = batch_of(config)
    other = tiny(family, adapter=False, shape={"hidden_size": 40, "num_hidden_layers": 1}).eval()
    itself = Teacher(student, lambda: as_adapter(student, "teacher"))
    for teacher in (Teacher(other), itself):
        student.zero_grad()
        with use_teacher(student, teacher):
            sums = method.sums(student, batch)
        loss = sums["loss"] / method.counts(batch)["trained_tokens"]
        loss.backward()
        own = gradients(student)
        if teacher is itself:
            merged = get_peft_model(deepcopy(base), student.peft_config["teacher"])
            theirs = {n.replace(".default.", ".teacher."): p for n, p in merged.named_parameters() if "lora" in n}
            for name, parameter in student.named_parameters():
                if ".teacher." in name:
                    theirs[name].data.copy_(parameter)
            model = merged
        else:
            model = other
        expected, entropy = their_loss(student, model, beta, 0.8)
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(sums["entropy"] / sum(ANSWERS), entropy, rtol=1e-5, atol=0)
        for name, gradient in gradients(student).items():
            assert (own[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name
