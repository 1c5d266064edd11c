"""The loss of a patched causal LM from `labels`: equal to transformers', without logits, and only where it is."""

import inspect

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import Trainer, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import halfbyte
from halfbyte.modeling.label_loss import is_ours
from halfbyte.modeling.patch import LABEL_LOSS
from tests.helpers.families import FAMILIES, MULTIMODAL
from tests.helpers.patch_models import assert_same, batch, tiny

SCALED = ("Gemma2", "Granite", "Llama", "Qwen3")


def labelled(**keywords) -> dict:
    torch.manual_seed(3)
    inputs = batch()
    inputs["labels"][:, :4] = -100
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, 11:] = 0
    inputs["labels"][1, 11:] = -100
    return inputs | keywords


def step(model, inputs: dict) -> tuple[float, dict]:
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output.loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def base(model):
    return model.get_base_model()


@pytest.mark.parametrize("keywords", [{}, {"num_items_in_batch": torch.tensor(37)}, {"num_items_in_batch": 5}])
@pytest.mark.parametrize("family", SCALED)
def test_loss_and_gradients_equal_transformers(family, keywords):
    model, inputs = tiny(family), labelled(**keywords)
    expected = step(model, inputs)
    report = halfbyte.patch(model)
    assert report.fused[LABEL_LOSS] == 1
    assert_same(step(model, inputs), expected)
    output = model(**inputs)
    assert output.logits is None
    assert [*output] == ["loss"]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("family", [*FAMILIES, *MULTIMODAL])
def test_every_family(family):
    model = tiny(family)
    inputs = {name: value for name, value in labelled().items() if name != "attention_mask"}
    torch.manual_seed(1)  # routers may draw
    expected = step(model, inputs)
    halfbyte.patch(model)
    torch.manual_seed(1)
    assert_same(step(model, inputs), expected, 5e-5)


def test_logits_are_returned_where_they_are_needed():
    model, inputs = tiny("Llama"), labelled()
    stock = model(**inputs)
    halfbyte.patch(model)
    model(**inputs)
    for keywords in ({"logits_to_keep": 18}, {"use_cache": True}):
        torch.testing.assert_close(model(**inputs, **keywords).logits, stock.logits)
    torch.testing.assert_close(model(**inputs, return_dict=False)[1], stock.logits)
    torch.testing.assert_close(model(inputs["input_ids"], inputs["attention_mask"]).logits, stock.logits)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, stock.logits)
    torch.testing.assert_close(model.eval()(**inputs).logits, stock.logits)


def test_another_loss_function_runs():
    model, inputs = tiny("Llama"), labelled()
    halfbyte.patch(model)
    base(model).loss_function = lambda logits, labels, vocab_size, **keywords: logits.square().mean()
    output = model(**inputs)
    assert output.loss.item() == pytest.approx(output.logits.square().mean().item())


class Penalized(LlamaForCausalLM):
    """A model whose forward adds to what its loss_function returns."""

    def forward(self, input_ids=None, labels=None, **keywords):
        output = super().forward(input_ids, labels=labels, **keywords)
        if labels is not None and self.loss_function is not None:
            output.loss = output.loss + output.logits.square().mean()
        return output


def test_a_forward_that_adds_to_the_loss_runs():
    config = transformers.LlamaConfig(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                      num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    model, inputs = Penalized(config).train(), labelled()
    expected = step(model, inputs)
    halfbyte.patch(model)
    assert_same(step(model, inputs), expected)
    assert model(**inputs).logits is not None


def test_an_adapter_on_the_head_needs_no_logits():
    model, inputs = tiny("Llama", target_modules=["q_proj", "lm_head"]), labelled()
    expected = step(model, inputs)
    halfbyte.patch(model)
    assert_same(step(model, inputs), expected)
    assert model(**inputs).logits is None


def test_unpatch_restores_the_forward_and_the_signature_is_the_class_s():
    model = tiny("Llama")
    halfbyte.patch(model)
    halfbyte.patch(model)
    assert is_ours(base(model).forward)
    assert inspect.signature(base(model).forward) == inspect.signature(LlamaForCausalLM.forward.__get__(base(model)))
    halfbyte.unpatch(model)
    assert "forward" not in vars(base(model))
    assert model(**labelled()).logits is not None


def test_a_foreign_forward_is_left_alone():
    model = tiny("Llama")
    stock = base(model).forward
    base(model).forward = lambda *args, **keywords: stock(*args, **keywords)
    foreign = base(model).forward
    report = halfbyte.patch(model)
    assert LABEL_LOSS not in report.fused
    assert any(operation == LABEL_LOSS for operation, _ in report.unfused)
    halfbyte.unpatch(model)
    assert base(model).forward is foreign


def test_a_batch_without_trained_tokens_has_zero_gradients():
    model, inputs = tiny("Llama"), labelled()
    inputs["labels"][:] = -100
    expected = step(model, inputs)
    halfbyte.patch(model)
    loss, gradients = step(model, inputs)
    assert torch.tensor([loss, expected[0]]).isnan().all()  # as transformers' mean of no tokens
    assert gradients.keys() == expected[1].keys()
    assert not any(gradient.any() for gradient in (*gradients.values(), *expected[1].values()))
    assert step(model, inputs | {"num_items_in_batch": 5})[0] == 0


def test_fused_loss_is_switched_off_and_on_in_a_patched_model():
    model, inputs = tiny("Llama"), labelled()
    halfbyte.patch(model)
    halfbyte.patch(model, fused_loss=False)
    assert model(**inputs).logits is not None
    assert halfbyte.patch(model).fused[LABEL_LOSS] == 1
    assert model(**inputs).logits is None


def test_a_replaced_forward_of_the_head_runs():
    """accelerate replaces it in a model on several devices, where the weight may be elsewhere."""
    model, inputs = tiny("Llama"), labelled()
    add_hook_to_module(base(model).lm_head, AlignDevicesHook(execution_device="cpu"))
    assert LABEL_LOSS not in halfbyte.patch(model).fused
    assert model(**inputs).logits is not None


def run_of_trainer(folder, is_patched: bool, **options) -> list[float]:
    torch.manual_seed(0)
    model = tiny("Qwen3")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(1, 101, (12, 9)).tolist()]
    if is_patched:
        assert halfbyte.patch(model).fused[LABEL_LOSS] == 1
    arguments = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:3])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"bf16": True}])
def test_a_trainer_has_the_same_losses(tmp_path, options):
    stock = run_of_trainer(tmp_path / "stock", False, **options)
    assert run_of_trainer(tmp_path / "patched", True, **options) == pytest.approx(
        stock, rel=2e-2 if "bf16" in options else 2e-4
    )
