"""The mmproj file of vision models: its contents and refusals."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.config import RunConfig
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.graph import checked_family
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.merge_runs import save_run, tensors
from tests.helpers.vision_models import IMAGE, LINE_BREAK, MODELS, PROCESSOR, WORDS, save_vision_model


def keys_of(path):
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def values_of(path):
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", MODELS)
def test_every_value_of_the_vision_part_is_in_its_file(tmp_path, name):
    """The file holds the checkpoint's values under other names, in parts, with one norm shifted."""
    model = save_vision_model(tmp_path / "m", name)
    report = export_gguf(tmp_path / "m", "f32", tmp_path / "x.gguf", device="cpu")
    assert report.mmproj == tmp_path / "mmproj-x.gguf"
    assert (tmp_path / "x.Modelfile").read_text().startswith("FROM ./x.gguf\nFROM ./mmproj-x.gguf\n")
    head, norm = "vision_tower.head.", "vision_tower.post_layernorm."
    unused = {"gemma3": head, "llava": norm, "llava_siglip": (head, norm)}.get(name, "none")
    parts = ("vision_", "visual.", "multi_modal_projector.", "connector.", "embed_vision.")
    expected = [
        value.flatten() + (key == "multi_modal_projector.mm_soft_emb_norm.weight")
        for key, value in tensors(tmp_path / "m").items()
        if (part := key.removeprefix("model.")).startswith(parts) and not part.startswith(unused)
    ]
    if "[IMG_BREAK]" in WORDS.get(name, []):
        expected.append(model.get_input_embeddings().weight[LINE_BREAK].detach())
    found = np.sort(np.concatenate([value.ravel() for value in values_of(report.mmproj).values()]))
    assert np.array_equal(found, torch.cat(expected).sort().values.numpy())
    text = {tensor.name for tensor in gguf.GGUFReader(report.path).tensors}
    assert not any(each.startswith(("v.", "mm.")) for each in text)


def test_metadata_of_each_kind(tmp_path):
    shared = {"clip.has_vision_encoder": True, "clip.vision.patch_size": 14, "clip.vision.projection_dim": 64}
    own = {
        "gemma3": {"clip.projector_type": "gemma3", "clip.use_gelu": True, "clip.vision.projector.scale_factor": 4},
        "llava": {"clip.projector_type": "mlp", "clip.vision.feature_layer": [2], "clip.vision.image_size": 112},
        "qwen2_5_vl": {
            "clip.projector_type": "qwen2.5vl_merger",
            "clip.use_silu": True,
            "clip.vision.n_wa_pattern": 2,
            "clip.vision.block_count": 4,
        },
    }
    for name, expected in own.items():
        save_vision_model(tmp_path / name, name)
        report = export_gguf(tmp_path / name, "q4_k_m", device="cpu")
        found = keys_of(report.mmproj)
        assert {key: found.get(key) for key in shared | expected} == shared | expected
        assert found["general.architecture"] == "clip"
        assert found["clip.vision.image_mean"] == pytest.approx(PROCESSOR["image_mean"])
        types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(report.mmproj).tensors}
        assert (types["v.blk.0.ffn_up.weight"], types["v.blk.0.ln1.weight"]) == ("F16", "F32")
        assert types.get("v.position_embd.weight", "F32") == "F32"
    assert keys_of(report.path)["qwen2vl.rope.dimension_sections"] == [2, 3, 3, 0]


@pytest.mark.parametrize("prefix", ["model.vision_tower.vision_model.", "vision_tower.vision_model."])
def test_names_of_older_checkpoints(tmp_path, prefix):
    save_vision_model(tmp_path / "m", "gemma3")
    before = export_gguf(tmp_path / "m", "f32", tmp_path / "a.gguf", device="cpu")
    file = tmp_path / "m/model.safetensors"
    save_file({key.replace("vision_tower.", prefix): value for key, value in load_file(file).items()}, file)
    after = export_gguf(tmp_path / "m", "f32", tmp_path / "b.gguf", device="cpu")
    old, new = values_of(before.mmproj), values_of(after.mmproj)
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[name], new[name]) for name in old)


def test_the_command_names_both_files_and_overwrites_neither(tmp_path):
    save_vision_model(tmp_path / "m", "gemma3")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "m"), "--gguf", "q8_0"])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "m/mmproj-m-q8_0.gguf") in done.output
    (tmp_path / "m/m-q8_0.gguf").unlink()
    with pytest.raises(ConfigError, match=r"mmproj-m-q8_0\.gguf"):
        export_gguf(tmp_path / "m", "q8_0", device="cpu")
    assert not (tmp_path / "m/m-q8_0.gguf").exists()


def test_a_vision_part_that_export_does_not_know_is_named(tmp_path):
    save_vision_model(tmp_path / "m", "llava")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config |= {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"multi_modal_projector\.linear_1\.bias.*llava_next"):
        export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf")


def test_llama_3_2_vision_is_refused_by_name():
    model = MODELS_OF_IMAGES["mllama"]
    config = transformers.MllamaConfig(**model.config, image_token_index=IMAGE)
    with pytest.raises(ModelError, match="mllama"):
        checked_family(config.get_text_config())


@pytest.mark.parametrize(
    ("name", "part", "key", "value"),
    [
        ("gemma3", "vision_config", "hidden_act", "relu"),
        ("gemma3", "vision_config", "intermediate_size", 32),
        ("llava", "vision_config", "model_type", "siglip2_vision_model"),
        ("llava", None, "vision_feature_select_strategy", "full"),
        ("llava_siglip", None, "vision_feature_select_strategy", "default"),
        ("llava", None, "projector_hidden_act", "relu"),
        ("qwen2_5_vl", "vision_config", "fullatt_block_indexes", [0, 3]),
        ("qwen2_5_vl", "vision_config", "window_size", 56),
        ("gemma4", "text_config", "use_bidirectional_attention", None),
        ("internvl", "vision_config", "norm_type", "rms_norm"),
        ("mistral3", "text_config", "rms_norm_eps", 1e-6),
    ],
)
def test_what_llamacpp_would_compute_otherwise_is_refused(tmp_path, name, part, key, value):
    save_vision_model(tmp_path / "m", name)
    config = json.loads((tmp_path / "m/config.json").read_text())
    (config[part] if part else config)[key] = value
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=key):
        export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf")


def test_without_the_processors_numbers_there_is_no_file(tmp_path):
    save_vision_model(tmp_path / "m", "gemma3")
    (tmp_path / "m/preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf")
    (tmp_path / "m/processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    assert export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf").mmproj


@pytest.mark.parametrize("name", ["llava_siglip", "mistral3", "glm4v", "gemma4"])
def test_an_adapter_on_the_tower_is_merged_into_its_file(tmp_path, name):
    save_vision_model(tmp_path / "m", name, dtype=torch.bfloat16)
    keys = {"load_in_4bit": False, "freeze_vision_tower": False}
    run = save_run(tmp_path / "run", tmp_path / "m", tokenizer=tmp_path / "m", **keys)
    merged, base = (values_of(export_gguf(folder, "f32", device="cpu").mmproj) for folder in (run, tmp_path / "m"))
    changed = {name for name, value in merged.items() if not np.array_equal(value, base[name])}
    matrices = {name for name in base if ".blk." in name and base[name].ndim == 2}
    assert changed - {"v.patch_embd.weight"} == matrices  # Gemma 4's is a linear layer
    with pytest.raises(CheckpointError, match=r"vision_tower|visual"):
        export_adapter(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_run_on_a_vision_model_is_exported_as_its_merge(tmp_path, name):
    """The adapter is merged into the language model; the vision part is the base's."""
    save_vision_model(tmp_path / "m", name, dtype=torch.bfloat16)
    run = save_run(tmp_path / "run", tmp_path / "m", tokenizer=tmp_path / "m", load_in_4bit=False)
    report = export_gguf(run, "f32", device="cpu")
    base = export_gguf(tmp_path / "m", "f32", device="cpu")
    assert report.mmproj == run / "mmproj-run-f32.gguf"
    seen, untouched = values_of(report.mmproj), values_of(base.mmproj)
    assert seen.keys() == untouched.keys()
    assert all(np.array_equal(seen[key], untouched[key]) for key in seen)
    adapter = load_file(run / "adapter/adapter_model.safetensors")
    a, b = (next(v for k, v in adapter.items() if f"layers.0.mlp.up_proj.lora_{each}" in k) for each in "AB")
    update = values_of(report.path)["blk.0.ffn_up.weight"] - values_of(base.path)["blk.0.ffn_up.weight"]
    scale = RunConfig(model_name_or_path="m", dataset="d").lora_alpha / a.shape[0]
    assert np.allclose(update, scale * (b @ a).numpy(), atol=4e-3)
