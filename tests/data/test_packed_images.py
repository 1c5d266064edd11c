"""Packed rows with images: documents equal themselves alone, pixels of a row are limited, and leaks are detected."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig

from halfbyte.batch import ROPE_POSITIONS
from halfbyte.config import load_config
from halfbyte.data.batches import batches_of
from halfbyte.data.collate import PackedCollator, make_collator
from halfbyte.data.image_processor import ImageProcessor
from halfbyte.data.prepare import prepare
from halfbyte.data.rows import collating_threads
from halfbyte.data.tables import pack
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.modeling import packing
from halfbyte.modeling.architectures import all_linear
from halfbyte.modeling.head import backbone_inputs, causal_lm_loss
from halfbyte.modeling.packing import isolate_for_run
from halfbyte.plan.estimate import estimate
from halfbyte.utils.errors import ConfigError
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import KINDS, NEEDS_TORCHVISION, save_image_model, write_image_rows

# Where positions that restart do not isolate documents: linear attention, and Gemma 3's images, which see themselves.
METHODS = {"gemma3": "masks", "qwen3_5": "bounds", "qwen3_5_moe": "bounds"}
CROSS_ATTENTION = ("mllama",)
FLOAT32_ROUTERS = ("glm4v_moe",)  # the sums of their GEMM in float32 depend on the number of tokens
FAST = (*KINDS, "qwen3_5", "mllama")
FAMILIES = [
    pytest.param(
        name, marks=[NEEDS_TORCHVISION] * (name in ("lfm2_vl", "llama4")) + [pytest.mark.slow] * (name not in FAST)
    )
    for name in MODELS_OF_IMAGES
]
ONE_OF_EACH = {("gemma3", "packing"), ("qwen3_vl", "padding_free")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model of a name, and a folder with `model` and `data.jsonl`."""
    saved = {}

    def model(name):
        if name not in saved:
            folder = tmp_path_factory.mktemp(name)
            saved[name] = save_image_model(folder / "model", name), folder
            write_image_rows(folder)
        return saved[name]

    return model


def prepared(folder, **keys):
    """Return the run's keys, its rows and its collator."""
    keys = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / "data.jsonl"), "output_dir": "out",
            "max_length": 400, "device": "cpu", "dtype": "float32"} | keys  # fmt: skip
    config = load_config(None, keys)
    tokenizer = load_run_tokenizer(config)
    return config, list(prepare(config, tokenizer).train), make_collator(config, tokenizer)


def documents(rows, values):
    """Return ids → the values [T, ...] of each document of packed rows."""
    parts = {}
    for row, row_values in zip(rows, values, strict=True):
        lengths = row["seq_lengths"]
        ids = torch.tensor(row["input_ids"]).split(lengths)
        for document, value in zip(ids, row_values[: sum(lengths)].split(lengths), strict=True):
            parts[tuple(document.tolist())] = value
    return parts


@torch.no_grad()
def logits(model, batch):
    return model(**backbone_inputs(model, batch), use_cache=False).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_equal_themselves_alone(name, models):
    """Logits in float64 equal, bit for bit, those of padded batches of one row: transformers' positions and masks."""
    if name in CROSS_ATTENTION:
        with pytest.raises(ConfigError, match="packing"):
            prepared(models(name)[1], packing=True)
        return
    model, folder = models(name)
    length = 400 if name in KINDS else 900
    _, alone, pad = prepared(folder, max_length=length)
    config, rows, collate = prepared(folder, packing=True, max_length=length)
    assert max(len(row["seq_lengths"]) for row in rows) > 2
    assert max(len(row["images"]) for row in rows) > 3
    isolation = isolate_for_run(model, config, collate, rows)
    assert isolation.method == METHODS.get(name, "positions")
    if "moe" in name:
        model.set_experts_implementation("eager")  # grouped GEMMs have no float64
    model.double()
    try:
        together = documents(rows, logits(model, collate(rows)))
        for row in alone:
            packed, own = together[tuple(row["input_ids"])], logits(model, pad([row]))[0]
            torch.testing.assert_close(packed, own, rtol=0, atol=1e-5 if name in FLOAT32_ROUTERS else 0)
    finally:
        model.float()
        packing.remove_isolation(model)


@pytest.mark.parametrize(
    ("name", "key"),
    [pytest.param(name, key, marks=[] if (name, key) in ONE_OF_EACH else [pytest.mark.slow])
     for name in KINDS for key in ("packing", "padding_free")],
)  # fmt: skip
def test_gradients_are_the_sums_over_documents_alone(name, key, models):
    model, folder = models(name)
    _, alone, pad = prepared(folder)
    config, rows, collate = prepared(folder, **{key: True})
    torch.manual_seed(3)
    model = get_peft_model(model.double(), LoraConfig(r=4, target_modules=all_linear(model)))
    try:
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        isolate_for_run(model.train(), config, collate, rows)
        expected = sum(causal_lm_loss(model, pad([row]))[0] for row in alone)
        expected.backward()
        gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
        assert gradients
        model.zero_grad()
        loss, _ = causal_lm_loss(model, collate(rows))
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
        for key, parameter in model.named_parameters():
            if key in gradients:
                torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-6, atol=1e-9)
    finally:
        packing.remove_isolation(model)
        model.unload().float()


def test_a_leak_through_another_documents_image_is_detected(models, monkeypatch):
    """Image features that are shifted by one document, as a missing image would shift them, leave texts unchanged."""
    model, folder = models("llava")
    config, rows, collate = prepared(folder, packing=True)
    features = type(model.base_model).get_image_features

    def shifted(self, *args, **kwargs):
        output = features(self, *args, **kwargs)
        output.pooler_output = [*output.pooler_output[1:], output.pooler_output[0]]
        return output

    monkeypatch.setattr(type(model.base_model), "get_image_features", shifted)
    with pytest.raises(ConfigError, match="packing"):
        isolate_for_run(model, config, collate, rows)
    monkeypatch.undo()
    assert isolate_for_run(model, config, collate, rows).method == "positions"
    monkeypatch.setattr(ImageProcessor, "probe_image", None)
    text = [{key: value for key, value in row.items() if key != "images"} for row in rows]
    assert isolate_for_run(model, config, collate, text).method == "positions"  # a run on text needs no images


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_padding_and_documents_of_text_have_equal_positions(name, models):
    _, folder = models(name)
    _, rows, collate = prepared(folder, packing=True)
    batch = PackedCollator(0, False, True, 400, True, collate.images)(rows)
    text, axes = batch["position_ids"], batch[ROPE_POSITIONS]
    assert axes.shape == (*text.shape, 3)
    starts = (text == 0).flatten().nonzero().flatten()
    assert torch.equal(batch["cu_seq_lens_q"].unique()[:-1].long(), starts)
    for row, positions, row_axes in zip(rows, text, axes, strict=True):
        length = sum(row["seq_lengths"])
        for part, part_axes in [*zip(positions[:length].split(row["seq_lengths"]),
                                     row_axes[:length].split(row["seq_lengths"]), strict=True)]:  # fmt: skip
            assert torch.equal(part, torch.arange(len(part)))
            assert torch.equal(part_axes[0], torch.zeros(3, dtype=torch.int64))
        assert torch.equal(row_axes[length:], positions[length:, None].expand(-1, 3))
    assert not torch.equal(axes[..., 1], axes[..., 2])  # images are wider than they are high, or the reverse


def test_the_plan_counts_the_inputs_of_the_tower(models):
    _, folder = models("qwen2_5_vl")
    config, rows, collate = prepared(folder, packing=True)
    largest = max(rows, key=lambda row: sum(image["nbytes"] for image in row["images"]))
    batch = collate([largest])
    nbytes = sum(batch[name].nbytes for name in ("pixel_values", "image_grid_thw"))
    config = config.model_copy(update={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3})
    data = prepare(config, load_run_tokenizer(config))
    batches = batches_of(config, data, torch.device("cpu"))
    assert batches.image_bytes == nbytes
    assert batches.largest.tokens == max(len(row["input_ids"]) for row in rows)  # tokens of images are tokens
    model_config = AutoConfig.from_pretrained(folder / "model")
    plans = [
        estimate(config, model_config, device=device, batches=replace(batches, image_bytes=size), capacity_bytes=2**33)
        for device in ("cpu", "cuda") for size in (0, nbytes)
    ]  # fmt: skip
    held = [plans[1].activations - plans[0].activations, plans[3].activations - plans[2].activations]
    assert held == [(3 + 1 + collating_threads()) * nbytes, 3 * nbytes]


def test_rows_keep_to_a_number_of_pixels(models):
    _, folder = models("qwen2_5_vl")
    _, plain, _ = prepared(folder, packing=True)
    _, rows, _ = prepared(folder, packing=True, image_max_pixels_per_row=20_000)
    sums = [[sum(image["pixels"] for image in row["images"]) for row in those] for those in (plain, rows)]
    assert max(sums[0]) > 20_000 >= max(sums[1])
    assert sum(sums[0]) == sum(sums[1])
    with pytest.raises(ConfigError, match=r"image_max_pixels_per_row.*data\.jsonl:"):
        prepared(folder, packing=True, image_max_pixels_per_row=5_000)
    with pytest.raises(ConfigError, match="image_max_pixels_per_row"):
        prepared(folder, image_max_pixels_per_row=20_000)


@given(st.lists(st.tuples(st.integers(1, 64), st.sampled_from([0, 0, 1, 5, 9])), max_size=60), st.integers(9, 30))
def test_pack_within_tokens_and_pixels(sizes, most):
    lengths, pixels = [length for length, _ in sizes], [count for _, count in sizes]
    rows = pack(lengths, 64, pixels, most)
    assert sorted(document for row in rows for document in row) == list(range(len(sizes)))
    assert all(sum(lengths[i] for i in row) <= 64 and sum(pixels[i] for i in row) <= most for row in rows)
    assert rows == sorted(sorted(row) for row in rows)


def test_pixels_cost_few_rows():
    """Rows of 2,048 tokens with up to 8 images each: within 5% of the rows that tokens or pixels need at least."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(np.log(200), 0.6, 2000).astype(int).clip(1, 2048)
    pixels = np.where(random.random(2000) < 0.5, random.integers(1, 5, 2000), 0)
    rows = pack(lengths.tolist(), 2048, pixels.tolist(), 8)
    least = max(lengths.sum() / 2048, pixels.sum() / 8)
    assert len(rows) <= 1.05 * least
