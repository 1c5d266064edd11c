"""Importances: how they are computed, the file, and their effect on a quantized model."""

import shutil

import gguf
import pytest
import torch
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.importance import watch
from halfbyte.gguf.graph import checked_family
from halfbyte.gguf.imatrix import Seen, read_importances, write_importances
from halfbyte.gguf.tensors import Layout
from halfbyte.utils.errors import CheckpointError, ConfigError
from tests.helpers.gguf_models import save_model

TEXT = "".join(f"Question {n}: how much is {n} times {n}? Answer: {n * n}.\n" for n in range(60))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def values(path):
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }


def test_sums_are_those_of_the_inputs(tmp_path):
    """Against the hidden states that the model gives out, and a down projection computed here."""
    model = save_model(tmp_path / "m", "llama")
    ids = torch.arange(40, 80).view(2, 20)
    names = {f"blk.{layer}.{part}.weight" for layer in (0, 1) for part in ("attn_q", "ffn_up", "ffn_down")}
    layout = Layout(model.config, checked_family(model.config))
    seen = watch(model, [{"input_ids": ids}, {"input_ids": ids[:1]}], names, layout)
    assert seen.keys() == names
    layer = model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(ids))
    expected = x.square().sum(1)
    torch.testing.assert_close(seen["blk.0.attn_q.weight"].squares[0], expected.sum(0) + expected[0])
    assert seen["blk.1.ffn_down.weight"].squares.shape == (1, 96)
    assert all(each.tokens.tolist() == [60.0] for each in seen.values())


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_each_expert_has_its_own(tmp_path, name):
    """Summed over experts, importances equal a token's input times its number of experts; those of an identity down
    projection equal the experts' outputs."""
    model = save_model(tmp_path / "m", name)
    ids = torch.arange(40, 80).view(1, 40)
    inputs = []
    for key, module in model.named_modules():
        if key.endswith("layers.1.mlp.experts"):
            module.register_forward_pre_hook(lambda module, args: inputs.append(args[:2]))
    names = {f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")}
    seen = watch(model, [{"input_ids": ids}], names, Layout(model.config, checked_family(model.config)))
    x, chosen = inputs[0]
    up = seen["blk.1.ffn_up_exps.weight"]
    assert up.tokens.tolist() == [(chosen == expert).sum() for expert in range(4)]
    torch.testing.assert_close(up.squares.sum(0), 2 * x.square().sum(0))
    experts = next(module for key, module in model.named_modules() if key.endswith("layers.1.mlp.experts"))
    own = x[(chosen == 3).any(-1)]
    gate, high = (own @ experts.gate_up_proj[3].T).chunk(2, -1)
    expected = (experts.act_fn(gate) * high).square().sum(0)
    torch.testing.assert_close(seen["blk.1.ffn_down_exps.weight"].squares[3], expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "qwen2_moe", "gpt_oss", "glm4_moe"])
def test_every_quantized_matrix_but_the_embedding_has_importances(tmp_path, text, name):
    save_model(tmp_path / "m", name)
    report = export_gguf(tmp_path / "m", "q4_0", tmp_path / "m.gguf", importances=text, device="cpu")
    found = read_importances(tmp_path / "m.imatrix.gguf")
    quantized = {t.name: tuple(reversed(t.shape.tolist())) for t in gguf.GGUFReader(report.path).tensors}
    others = ("ffn_gate_inp", ".bias")
    matrices = {key for key, shape in quantized.items() if len(shape) > 1 and not any(map(key.count, others))}
    assert found.keys() == matrices - {"token_embd.weight", "output.weight"}
    for key, value in found.items():
        assert value.shape == (*quantized[key][:-2], quantized[key][-1])
        assert bool((value > 0).all())


def test_the_file_is_llamacpps(tmp_path):
    """The file has the names, shapes and keys of tools/imatrix."""
    seen = {"blk.0.attn_q.weight": Seen(torch.tensor([[8.0, 2.0]]), torch.tensor([4.0]))}
    seen["blk.0.ffn_up_exps.weight"] = Seen(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]), torch.tensor([1.0, 0.0]))
    write_importances(tmp_path / "i.gguf", seen, "some text", 3, 512)
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    assert reader.get_field("general.type").contents() == "imatrix"
    assert reader.get_field("imatrix.datasets").contents() == ["some text"]
    assert reader.get_field("imatrix.chunk_count").contents() == 3
    assert reader.get_field("imatrix.chunk_size").contents() == 512
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["blk.0.attn_q.weight.in_sum2"] == [2, 1]
    assert shapes["blk.0.attn_q.weight.counts"] == [1, 1]
    assert shapes["blk.0.ffn_up_exps.weight.counts"] == [1, 2]
    found = read_importances(tmp_path / "i.gguf")
    assert found["blk.0.attn_q.weight"].tolist() == pytest.approx([2.0, 0.5], rel=1e-3)
    assert found["blk.0.ffn_up_exps.weight"][0].tolist() == pytest.approx([1.0, 2.0, 3.0], rel=1e-3)
    assert bool((found["blk.0.ffn_up_exps.weight"][1] > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["q2_k", "q4_0"])
def test_the_weighted_error_falls(tmp_path, text, mix):
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    save_model(tmp_path / "m", "llama", **sizes)
    weighed = export_gguf(tmp_path / "m", mix, tmp_path / "a.gguf", importances=text, device="cpu")
    plain = export_gguf(tmp_path / "m", mix, tmp_path / "b.gguf", device="cpu")
    exact = values(export_gguf(tmp_path / "m", "f32", tmp_path / "c.gguf", device="cpu").path)
    means = read_importances(tmp_path / "m.imatrix.gguf")
    with_it, without = values(weighed.path), values(plain.path)
    for key, mean in means.items():
        lost = [float(((found[key] - exact[key]) ** 2 * mean.numpy()).sum()) for found in (with_it, without)]
        assert lost[0] < lost[1], key


def test_a_saved_importance_file_is_reused(tmp_path, text):
    save_model(tmp_path / "m", "llama")
    arguments = ["export", str(tmp_path / "m"), "--gguf", "q4_0", "--importance"]
    done = CliRunner().invoke(app, [*arguments, str(text)])
    assert done.exit_code == 0, done.output
    matrix = shutil.copy(tmp_path / "m/m.imatrix.gguf", tmp_path / "i.gguf")
    made = (tmp_path / "m/m-q4_0.gguf").read_bytes()
    for each in (tmp_path / "m").glob("*.gguf"):
        each.unlink()
    done = CliRunner().invoke(app, [*arguments, str(matrix)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "m/m-q4_0.gguf").read_bytes() == made
    assert not (tmp_path / "m/m.imatrix.gguf").exists()


def test_bad_importances_are_refused(tmp_path, text):
    save_model(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match="f16"):
        export_gguf(tmp_path / "m", "f16", importances=text)
    with pytest.raises(ConfigError):
        export_gguf(tmp_path / "m", "q4_0", importances=tmp_path / "i.dat")
    (tmp_path / "i.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"i\.gguf"):
        export_gguf(tmp_path / "m", "q4_0", importances=tmp_path / "i.gguf")
    (tmp_path / "m/m.imatrix.gguf").write_bytes(b"mine")
    with pytest.raises(ConfigError):
        export_gguf(tmp_path / "m", "q4_0", importances=text)
    assert sorted(each.suffix for each in (tmp_path / "m").iterdir() if "gguf" in each.name) == [".gguf"]
