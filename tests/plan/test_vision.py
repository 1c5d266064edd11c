"""Bytes of vision towers in the memory plan, against allocations and saved tensors on a CPU."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import load_config
from halfbyte.data.batch_shapes import Shape
from halfbyte.data.collate import make_collator
from halfbyte.data.prepare import prepare
from halfbyte.loading.find import load_model_config
from halfbyte.loading.load import load_model
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.modeling.transformers_versions import enable_checkpointing
from halfbyte.modeling.vision import bind_vision
from halfbyte.plan.estimate import estimate
from halfbyte.plan.ledger import Ledger
from halfbyte.plan.shapes import ModelShapes
from halfbyte.plan.vision import vision_bytes
from halfbyte.train.inputs import most_images
from halfbyte.train.preflight import prepare_run
from tests.helpers.image_models import save_image_model, write_image_rows

ROWS, ALL = 3, "all-linear"


def configured(folder, **keys):
    keys = {"model_name_or_path": str(folder), "dataset": str(folder / "data.jsonl"), "output_dir": str(folder / "out"),
            "device": "cpu", "dtype": "float32", "r": 4, "load_in_4bit": False, "max_length": 400,
            "per_device_train_batch_size": ROWS} | keys  # fmt: skip
    return load_config(None, keys)


def measured(config, tokenizer, data, checkpointed):
    """Highest bytes of tower and projector for the rows with most image tokens, and bytes after the forward."""
    rows = sorted(data.train, key=lambda row: -sum(image["tokens"] for image in row["images"]))[:ROWS]
    batch = make_collator(config, tokenizer)(rows)
    model = load_model(config.model_name_or_path, load_in_4bit=False, device="cpu", dtype="float32")
    model = add_adapter(model, config).train()
    bind_vision(model)
    backbone = model.get_base_model().model
    if checkpointed:
        enable_checkpointing(backbone.visual)
    inputs = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
    ledger = Ledger()
    ledger.ignore(iter((*model.parameters(), *model.buffers(), *inputs.values())))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    ledger.ignore(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    with ledger:
        output = backbone.get_image_features(**inputs)
        saved = ledger.live
        if not config.freeze_vision_tower:
            named = (output.pooler_output, getattr(output, "deepstack_features", None))
            sum(leaf.float().sum() for leaf in tree_leaves(named) if isinstance(leaf, torch.Tensor)).backward()
    return ledger.peak, saved


@pytest.mark.parametrize(
    ("name", "frozen", "checkpointed", "targets"),
    [("qwen2_5_vl", True, False, ALL), ("qwen2_5_vl", False, False, ALL), ("qwen2_5_vl", False, True, ALL),
     ("qwen2_5_vl", False, True, ["up_proj", "down_proj"]),  # the first block's attention has no backward
     ("qwen3_vl", False, False, ALL), ("llava", True, False, ALL), ("llava", False, False, ALL)],
)  # fmt: skip
def test_planned_bytes_are_those_that_the_tower_allocates(name, frozen, checkpointed, targets, tmp_path):
    save_image_model(tmp_path, name)
    write_image_rows(tmp_path)
    config = configured(tmp_path, freeze_vision_tower=frozen, target_modules=targets)
    tokenizer = load_run_tokenizer(config)
    data = prepare(config, tokenizer)
    shapes = ModelShapes(config, load_model_config(str(tmp_path)), torch.device("cpu"))
    images = most_images(config, data, tokenizer, cached=False)
    peak, saved = measured(config, tokenizer, data, checkpointed)
    planned = vision_bytes(shapes.model, images, torch.float32, checkpointed)
    assert planned.peak == pytest.approx(peak, rel=0.05)
    assert planned.saved == pytest.approx(saved, rel=0.05)


def test_image_rows_are_planned_with_cuda_graphs_if_nothing_before_the_language_model_is_trained(tmp_path):
    """The plan then also counts the embeddings that graphs read."""
    save_image_model(tmp_path, "qwen2_5_vl")
    write_image_rows(tmp_path)
    for keys in ({"freeze_vision_tower": False}, {"modules_to_save": ["embed_tokens"]}, {"method": "kto"}, {}):
        config = configured(tmp_path, **keys)
        tokenizer, model_config = load_run_tokenizer(config), load_model_config(str(tmp_path))
        shapes = ModelShapes(config, model_config, torch.device("cuda"))
        assert shapes.images_before_graphs
        shapes.images = most_images(configured(tmp_path), prepare(config, tokenizer), tokenizer, cached=False)
        assert shapes.images_before_graphs is not bool(keys)
    assert estimate(config, model_config, device="cuda", capacity_bytes=2**30, shapes=shapes).use_graphs
    batch = Shape(2, 64)
    width = batch.tokens * shapes.text_config.hidden_size * shapes.dtype.itemsize
    assert shapes.vision_bytes(batch, 0, False, graphs=0) == shapes.vision_bytes(batch, 0, False) + width


def test_models_whose_graphs_no_gpu_has_confirmed_run_eagerly(tmp_path):
    save_image_model(tmp_path, "llava")
    write_image_rows(tmp_path)
    config = configured(tmp_path)
    tokenizer = load_run_tokenizer(config)
    shapes = ModelShapes(config, load_model_config(str(tmp_path)), torch.device("cuda"))
    shapes.images = most_images(config, prepare(config, tokenizer), tokenizer, cached=False)
    assert not shapes.images_before_graphs


def test_gated_units_of_a_trained_tower_are_planned_without_their_kernel(tmp_path):
    """The kernel would read the addresses of fake tensors, which ends the process."""
    save_image_model(tmp_path, "gemma4")
    write_image_rows(tmp_path)
    assert prepare_run(configured(tmp_path, freeze_vision_tower=False, max_steps=9), writes=False).plan.vision > 0


def test_the_plan_has_a_line_for_images(tmp_path):
    """A frozen tower frees its bytes before the language model runs; a cached one computes one image at a time."""
    save_image_model(tmp_path, "qwen2_5_vl")
    write_image_rows(tmp_path)
    plans = {name: prepare_run(configured(tmp_path, max_steps=9, **keys), writes=False).plan for name, keys in (
        ("frozen", {"vision_cache": False}), ("cached", {}), ("trained", {"freeze_vision_tower": False}))}  # fmt: skip
    features = plans["cached"].vision
    assert 0 < features <= plans["frozen"].vision < plans["trained"].vision
    assert plans["trained"].predicted()["vision"] == plans["trained"].vision
    text = configured(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"text": "no image"}\n' * 4)
    assert prepare_run(text, writes=False).plan.vision == 0
