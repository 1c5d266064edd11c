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
from halfbyte.export.gguf_model import export_gguf, open_source
from halfbyte.export.merge import merge
from halfbyte.gguf.graph import checked_family
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError
from halfbyte.utils.notices import notices_so_far, reset_notices
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


def exported_with(folder, **processor):
    """Keys of the vision part's file with this preprocessor_config.json."""
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    report = export_gguf(folder, "f16", folder / f"{len(list(folder.iterdir()))}.gguf", device="cpu")
    return keys_of(report.mmproj)


def test_settings_of_the_processor_are_completed_from_its_class(tmp_path):
    """transformers' class has defaults, and values may be normalised or scaled otherwise, or not at all."""
    mean, std = (f"clip.vision.image_{name}" for name in ("mean", "std"))
    save_vision_model(tmp_path, "gemma3")
    found = exported_with(tmp_path)
    assert (found[mean], found[std]) == ([0.5] * 3, [0.5] * 3)
    found = exported_with(tmp_path, image_std=[0.25] * 3)
    assert (found[mean], found[std]) == ([0.5] * 3, [0.25] * 3)
    found = exported_with(tmp_path, **PROCESSOR, do_normalize=False)
    assert (found[mean], found[std]) == ([0.0] * 3, [1.0] * 3)
    found = exported_with(tmp_path, **PROCESSOR, rescale_factor=1 / 510)
    assert found[mean] == pytest.approx([2 * value for value in PROCESSOR["image_mean"]])
    assert found[std] == pytest.approx([2 * value for value in PROCESSOR["image_std"]])
    save_vision_model(tmp_path / "idefics3", "idefics3")
    assert exported_with(tmp_path / "idefics3", **PROCESSOR)["clip.vision.preproc_image_size"] == 4 * 364


@pytest.mark.parametrize(
    ("name", "limits", "keys", "flags"),
    [
        ("qwen2_5_vl", {"min_pixels": 8 * 28**2, "max_pixels": 4096 * 28**2}, {}, ""),
        ("qwen2_5_vl", {"min_pixels": 4 * 28**2, "max_pixels": 512 * 28**2}, {},
         "--image-min-tokens 4 --image-max-tokens 512"),
        ("qwen3_vl", {"size": {"shortest_edge": 8 * 32**2, "longest_edge": 4096 * 32**2}},
         {"image_max_pixels": 100 * 32**2}, "--image-max-tokens 100"),
        ("glm4v", {"size": {"shortest_edge": 16 * 28**2, "longest_edge": 400 * 28**2}}, {}, "--image-max-tokens 200"),
    ],
)  # fmt: skip
def test_flags_for_limits_of_images_that_the_file_cannot_have_are_reported(tmp_path, name, limits, keys, flags):
    save_vision_model(tmp_path / "m", name, dtype=torch.bfloat16)
    (tmp_path / "m/preprocessor_config.json").write_text(json.dumps(PROCESSOR | limits))
    run = save_run(tmp_path / "run", tmp_path / "m", tokenizer=tmp_path / "m", load_in_4bit=False, **keys)
    reset_notices()
    open_source(str(run), "cpu")
    assert notices_so_far().get("gguf-image-tokens", "").partition(" with --")[2] == flags.removeprefix("--")


def test_a_file_without_settings_that_no_class_completes_is_named(tmp_path):
    save_vision_model(tmp_path / "m", "gemma3")
    file = tmp_path / "m/preprocessor_config.json"
    for keys, error in (
        ({"image_processor_type": "NoSuchProcessor", "auto_map": {}}, r"preprocessor_config\.json.*image_mean"),
        (PROCESSOR | {"image_std": None}, r"preprocessor_config\.json.*image_std"),
    ):
        file.write_text(json.dumps(keys))
        with pytest.raises(CheckpointError, match=error):
            export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf")
    (tmp_path / "m/processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    assert export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf").mmproj


QUICK = ("llava_siglip", "mistral3", "qwen3_vl", "gemma4")
# Linear layers that are convolutions in the file, or matrices in the file that are convolutions or no layers.
LINEAR_PATCHES = {"gemma4": {"v.patch_embd.weight"}, "lfm2_vl": {"v.patch_embd.weight"}}


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_adapters_of_tower_and_projector_are_merged_into_their_file(tmp_path, name):
    """All matrices change, and they are those of the merged checkpoint."""
    save_vision_model(tmp_path / "m", name, dtype=torch.bfloat16)
    keys = {"load_in_4bit": False, "freeze_vision_tower": False, "freeze_multi_modal_projector": name == "gemma3"}
    run = save_run(tmp_path / "run", tmp_path / "m", tokenizer=tmp_path / "m", **keys)
    merge(run, tmp_path / "merged", verify=False)
    of_run, of_merged, base = (
        values_of(export_gguf(folder, "f32", device="cpu").mmproj)
        for folder in (run, tmp_path / "merged", tmp_path / "m")
    )
    assert of_run.keys() == of_merged.keys()
    assert [key for key, value in of_run.items() if not np.array_equal(value, of_merged[key])] == []
    changed = {key for key, value in of_run.items() if not np.array_equal(value, base[key])}
    parts = (".blk.", "mm.", ".deepstack.")
    matrices = {key for key, value in base.items() if value.ndim == 2 and any(part in key for part in parts)}
    frozen = {"mm.input_projection.weight"} if name == "gemma3" else set()
    assert changed == (matrices | LINEAR_PATCHES.get(name, set())) - frozen
    with pytest.raises(CheckpointError):  # names the first module that GGUF's adapters have no place for
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
