"""The forward of a model that reads images in two parts: loss and gradients equal those of one, bit for bit, and the
columns of the second have shapes that do not depend on images."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import halfbyte
from halfbyte.config import load_config
from halfbyte.data.collate import make_collator
from halfbyte.data.prepare import prepare
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.modeling.architectures import all_linear
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.language_inputs import LanguageInputs, unsplit_reason
from halfbyte.modeling.vision import bind_vision
from halfbyte.utils.errors import ModelError
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import NEEDS_TORCHVISION, save_image_model, write_image_rows

FAST = (("qwen2_5_vl", True), ("qwen3_vl", False), ("qwen3_vl", True), ("qwen3_5", True), ("llava", False))
CASES = [
    pytest.param(
        *(name, packing),
        marks=[NEEDS_TORCHVISION] * (name in ("lfm2_vl", "llama4"))
        + [pytest.mark.slow] * ((name, packing) not in FAST),
    )
    for name in MODELS_OF_IMAGES
    for packing in (False, True)
    if name != "mllama"
]


def adapted(folder, name, **options):
    """Return the patched model of a name with LoRA whose factors are not zero."""
    model = save_image_model(folder / "model", name)
    write_image_rows(folder)
    config = LoraConfig(r=2, target_modules=all_linear(model), init_lora_weights=False, **options)
    model = get_peft_model(model, config)
    halfbyte.patch(model)
    bind_vision(model)
    return model.train()


def batches(folder, packing):
    """Return two batches of equally many rows as a GPU gets them: with several images, and with none or few."""
    keys = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / "data.jsonl"), "output_dir": "out",
            "max_length": 900, "device": "cpu", "dtype": "float32", "packing": packing}  # fmt: skip
    config = load_config(None, keys)
    tokenizer = load_run_tokenizer(config)
    rows = sorted(prepare(config, tokenizer).train, key=lambda row: len(row["images"]))
    collate = make_collator(config, tokenizer, torch.device("cuda"))
    count = 1 if packing else 2
    return collate(rows[-count:]), collate(rows[:1] * count)


def sums_and_gradients(model, batch):
    model.zero_grad()
    loss, count = causal_lm_loss(model, batch)
    loss.backward()
    return loss, count, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def shapes(columns):
    """Return the shapes of the tensors in a batch, and its other values."""
    return {name: value.shape if isinstance(value, torch.Tensor) else value for name, value in columns.items()}


@pytest.mark.parametrize(("name", "packing"), CASES)
def test_loss_and_gradients_equal_those_of_one_forward(name, packing, tmp_path):
    """Also of batches without images, whose columns have the same names and shapes where the tokens have."""
    model = adapted(tmp_path, name)
    assert unsplit_reason(model) is None
    language_inputs, seen = LanguageInputs(model), []
    for batch in batches(tmp_path, packing):
        expected = sums_and_gradients(model, batch)
        columns = language_inputs(batch, lambda columns: causal_lm_loss(model, columns))
        loss, count, gradients = sums_and_gradients(model, columns)
        assert torch.equal(loss, expected[0])
        assert torch.equal(count, expected[1])
        assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[2].items())
        seen.append(columns)
    if seen[0]["input_ids"].shape == seen[1]["input_ids"].shape:
        assert shapes(seen[0]) == shapes(seen[1])
    assert not seen[0].keys() & {"pixel_values", "image_grid_thw", "image_sizes", "position_ids"}


@pytest.mark.parametrize("options", [
    {"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [3]}, {"modules_to_save": ["visual"]},
])  # fmt: skip
def test_a_forward_that_trains_something_before_the_language_model_is_not_split(options, tmp_path):
    assert unsplit_reason(adapted(tmp_path, "qwen2_5_vl", **options)) is not None


def test_a_forward_that_passes_no_embeddings_is_refused(tmp_path):
    model = adapted(tmp_path, "mllama")
    assert unsplit_reason(model) is not None
    with pytest.raises(ModelError):
        LanguageInputs(model)(batches(tmp_path, False)[0], lambda columns: causal_lm_loss(model, columns))
