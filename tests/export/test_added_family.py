"""A family that this test adds, without a line in src/: Llama under another name, with scaled residuals, embeddings and
logits. It trains fused, decodes statically, goes to GGUF and comes back."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.modeling_llama import eager_attention_forward  # noqa: F401  (patched attention asks here)
from typer.testing import CliRunner

import halfbyte
from halfbyte import generation
from halfbyte.cli import app
from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.importer import import_gguf
from halfbyte.modeling import families
from halfbyte.modeling.families import Family, Gguf
from halfbyte.utils import notices
from halfbyte.utils.errors import ModelError
from tests.helpers.gguf_models import SIZES, byte_tokenizer
from tests.helpers.patch_models import assert_same, batch, loss_and_gradients

ROW = Family(
    "ScaledLlama",
    "scaled_llama",
    module=__name__,
    residual_scale="residual_multiplier",
    embedding_scale="embedding_multiplier",
    gguf=Gguf(
        "internlm2",
        permute=True,
        keys={
            "residual_scale": "residual_multiplier",
            "embedding_scale": "embedding_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
)
SCALES = {"residual_multiplier": 0.25, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
TEXTS = [f"what is {n}? it is {n * n}." for n in range(24)]


class ScaledLlamaConfig(transformers.LlamaConfig):
    model_type = "scaled_llama"


class ScaledLlamaRMSNorm(llama.LlamaRMSNorm): ...


class ScaledLlamaAttention(llama.LlamaAttention): ...


class ScaledLlamaMLP(llama.LlamaMLP): ...


class ScaledLlamaDecoderLayer(llama.LlamaDecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn, self.mlp = ScaledLlamaAttention(config, layer_idx), ScaledLlamaMLP(config)
        norms = [ScaledLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)]
        self.input_layernorm, self.post_attention_layernorm = norms
        self.scale = config.residual_multiplier

    def forward(self, hidden_states, **kwargs):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended * self.scale
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)) * self.scale


class ScaledLlamaModel(llama.LlamaModel):
    config_class = ScaledLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        layers = [ScaledLlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        self.layers, self.norm = nn.ModuleList(layers), ScaledLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return super().forward(inputs_embeds=embedded * self.config.embedding_multiplier, **kwargs)


class ScaledLlamaForCausalLM(llama.LlamaForCausalLM):
    config_class = ScaledLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = ScaledLlamaModel(config)
        self.post_init()

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        found = self.model(input_ids, **kwargs)
        hidden = found.last_hidden_state[:, -logits_to_keep:]
        logits = self.lm_head(hidden) / self.config.logits_scaling
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=found.past_key_values)


@pytest.fixture(scope="module", autouse=True)
def _known():
    """Known to transformers and to halfbyte as long as these tests run."""
    transformers.AutoConfig.register("scaled_llama", ScaledLlamaConfig)
    transformers.AutoModelForCausalLM.register(ScaledLlamaConfig, ScaledLlamaForCausalLM)
    families.register(ROW)
    yield
    families.FAMILIES.remove(ROW)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _known):
    torch.manual_seed(1)
    model = ScaledLlamaForCausalLM(ScaledLlamaConfig(**SIZES | SCALES)).float()
    for parameter in model.parameters():  # norms start at one: make them matter
        parameter.data += 0.03 * torch.randn_like(parameter)
    out = tmp_path_factory.mktemp("models") / "scaled"
    model.save_pretrained(out)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '</s>' }}{% endfor %}"
    tokenizer.save_pretrained(out)
    return out


@pytest.fixture
def model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("level", [None, "keep", "recompute", "recompute_mlp", "checkpoint", "tiled"])
def test_it_trains_fused(model, level):
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear")).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    inputs = batch(packed=True)
    expected = loss_and_gradients(model, inputs)
    report = halfbyte.patch(model, level)
    assert report.family == "ScaledLlama"
    assert not report.unfused
    assert report.fused["residual additions into the norms"] == 2
    assert_same(loss_and_gradients(model, inputs), expected)


def test_it_decodes_statically(model):
    prompts = [[5, 9, 17, 33], [7, 64], [50, 51, 52]]
    notices.reset_notices()
    found = generation.generate(model.eval(), prompts, max_new_tokens=20, stops=[])
    assert not any(key.startswith("generation") for key in notices.notices_so_far())
    keys = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    for ids, mine in zip(prompts, found, strict=True):
        theirs = model.generate(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **keys)
        assert mine == theirs[0, len(ids) :].tolist()
    one = model(torch.tensor([prompts[0]])).logits
    model.config.residual_multiplier = 0.5
    for layer in model.model.layers:
        layer.scale = 0.5
    assert not torch.allclose(model(torch.tensor([prompts[0]])).logits, one, atol=0.01)  # the scales matter


def test_it_goes_to_gguf_and_comes_back(tmp_path, folder, model):
    export_gguf(folder, "f32", tmp_path / "m.gguf", device="cpu")
    back = transformers.AutoModelForCausalLM.from_pretrained(import_gguf(tmp_path / "m.gguf", tmp_path / "back"))
    assert type(back) is ScaledLlamaForCausalLM
    assert {key: getattr(back.config, key) for key in SCALES} == SCALES
    ids = torch.arange(40, 90)[None]
    assert torch.equal(back(ids).logits, model(ids).logits)


@pytest.mark.slow
def test_finetune_and_the_commands_take_it(tmp_path, folder):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run = tmp_path / "run"
    keys = {"output_dir": str(run), "device": "cpu", "max_steps": 3, "max_length": 64, "r": 4, "logging_steps": 1}
    halfbyte.finetune(str(folder), str(tmp_path / "data.jsonl"), **keys)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in metrics if "loss" in row]
    assert losses
    assert all(loss < 20 for loss in losses)
    (tmp_path / "prompts.txt").write_text("what is 3?\n")
    config = tmp_path / "run.yaml"
    lines = [f"{key}: {value}" for key, value in {**keys, "output_dir": tmp_path / "second"}.items()]
    config.write_text("\n".join([f"model_name_or_path: {folder}", f"dataset: {tmp_path}/data.jsonl", *lines]) + "\n")
    for command in (
        ["train", str(config)],
        ["generate", str(run), str(tmp_path / "prompts.txt"), "--max-new-tokens", "4"],
        ["merge", str(run), str(tmp_path / "merged")],
        ["export", str(run), "--gguf", "q8_0"],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.output)
    assert (run / "run-q8_0.gguf").is_file()


def test_without_its_row_it_is_unknown(monkeypatch, folder, model):
    monkeypatch.setattr(families, "FAMILIES", [row for row in families.FAMILIES if row is not ROW])
    assert halfbyte.patch(model).family is None
    with pytest.raises(ModelError, match="scaled_llama"):
        export_gguf(folder, "f32", device="cpu")
