"""Evaluating and chatting with saved runs: finding, loading and answers."""

import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from halfbyte.cli.answers import chat
from halfbyte.config import dump_config, load_config
from halfbyte.data.encode import INSTRUCTION
from halfbyte.evaluation.held_out import evaluate, measure
from halfbyte.generation import Sampling
from halfbyte.runs import saved
from halfbyte.serve import conversation
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, DataError, ModelError

TEXTS = ("The cat sat on the mat.", "Once upon a time there was a small, small house by the sea.")


@pytest.fixture(scope="module")
def tokenizer(shared):
    return AutoTokenizer.from_pretrained(str(shared / "models/llama-40m"))


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=tokenizer.eos_token_id))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run_folder(model_folder, tmp_path_factory):
    """A finished run: an adapter that changes the logits, and the resolved configuration."""
    folder = tmp_path_factory.mktemp("run")
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(model_folder), LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "adapter")
    keys = {"model_name_or_path": str(model_folder), "dataset": "d.jsonl", "load_in_4bit": False, "dtype": "float32"}
    (folder / "config.resolved.yaml").write_text(dump_config(load_config(None, keys)))
    report = {"sources": [{"format": "messages"}], "stop_tokens": ["<|im_end|>"]}
    (folder / "data_report.json").write_text(json.dumps(report))
    return folder


@pytest.fixture
def texts(tmp_path):
    rows = [
        {"text": "The cat sat on the mat."},
        {"text": "Once upon a time there was a small, small house by the sea."},
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "texts.jsonl")


class TestFinding:
    def test_a_run_its_adapter_a_checkpoint_and_a_model(self, run_folder, model_folder):
        resolved = run_folder / "config.resolved.yaml"
        assert saved.find(str(run_folder)) == saved.SavedPaths("", run_folder / "adapter", resolved)
        assert saved.find(str(run_folder / "adapter")) == saved.SavedPaths("", run_folder / "adapter", resolved)
        assert saved.find(str(model_folder)) == saved.SavedPaths(str(model_folder), None, None)
        assert saved.find("org/name") == saved.SavedPaths("org/name", None, None)

    def test_a_full_fine_tuning(self, tmp_path, run_folder):
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text("{}")
        keys = {"model_name_or_path": "org/base", "dataset": "d", "use_peft": False, "load_in_4bit": False}
        (tmp_path / "config.resolved.yaml").write_text(dump_config(load_config(None, keys)))
        place = saved.find(str(tmp_path))
        assert saved.saved_config(place).model_name_or_path == str(tmp_path / "model")

    def test_an_adapter_from_elsewhere_names_its_base(self, tmp_path):
        (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
        place = saved.find(str(tmp_path))
        config = saved.saved_config(place, ["load_in_4bit=true"])
        assert (config.model_name_or_path, config.load_in_4bit) == ("org/base", True)
        assert saved.saved_config(place).load_in_4bit is False

    def test_a_quantized_checkpoint_loads_as_it_is_stored(self, tmp_path):
        (tmp_path / "config.json").write_text('{"quantization_config": {"load_in_4bit": true}}')
        assert saved.saved_config(saved.find(str(tmp_path))).load_in_4bit is True

    def test_nothing_there(self, tmp_path):
        with pytest.raises(CheckpointError):
            saved.find(str(tmp_path))


class TestEvaluating:
    @pytest.mark.slow
    def test_the_loss_is_the_mean_over_tokens_whatever_the_batches(self, model_folder, tokenizer, texts):
        model = LlamaForCausalLM.from_pretrained(model_folder)
        total, count = 0.0, 0
        for text in TEXTS:
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
            count += ids.shape[1] - 1
        for keys in (["per_device_eval_batch_size=1"], ["per_device_eval_batch_size=2"], ["packing=true"]):
            result = evaluate(str(model_folder), texts, ["dtype=float32", *keys])
            assert result.tokens == count
            assert result.loss == pytest.approx(total / count, rel=1e-5)
            assert result.perplexity == pytest.approx(math.exp(total / count), rel=1e-4)

    def test_a_run_is_evaluated_with_its_adapter(self, run_folder, model_folder, texts):
        base = evaluate(str(model_folder), texts, ["dtype=float32"])
        assert abs(evaluate(str(run_folder), texts).loss - base.loss) > 1e-3

    def test_no_tensor_is_as_large_as_the_logits(self):
        """Evaluation needs no more memory than training."""
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=20_000, **sizes))
        ids = torch.randint(0, 20_000, (1, 2000))
        largest = 0

        class Sizes(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), keys=None):
                nonlocal largest
                result = function(*arguments, **(keys or {}))
                largest = max([largest, *(x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor))])
                return result

        with Sizes():
            result = measure(model, [{"input_ids": ids, "labels": ids}], lambda group: dict(group[0]), 1)
        assert result.loss == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-5)
        assert largest <= ids.numel() * 20_000 // 4

    def test_nothing_to_predict(self, model_folder):
        model = LlamaForCausalLM.from_pretrained(model_folder)
        rows = [{"input_ids": torch.tensor([[1, 2]]), "labels": torch.tensor([[-100, -100]])}]
        with pytest.raises(DataError):
            measure(model, rows, lambda group: dict(group[0]), 1)


class TestTalking:
    def conversation(self, folder, tokens=6):
        return conversation.Conversation(saved.load_saved(str(folder)), Sampling(), tokens)

    def test_an_answer_equals_generate_and_the_adapter_can_be_left_out(self, run_folder):
        talk = self.conversation(run_folder)
        model, tokenizer = talk.saved.model, talk.saved.tokenizer
        ids = tokenizer(talk.prompt("Hello"), return_tensors="pt", add_special_tokens=False)
        answers = {}
        for adapter in (True, False):
            answers[adapter] = "".join(talk.answer("Hello", adapter=adapter))
            with torch.no_grad(), model.disable_adapter() if not adapter else torch.no_grad():
                found = model.generate(**ids, max_new_tokens=6, do_sample=False, eos_token_id=talk.stops)
            expected = tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            assert answers[adapter] == expected
        assert answers[True] != answers[False]

    def test_turns_are_remembered_in_the_template(self, run_folder):
        talk = self.conversation(run_folder)
        talk.remember("Hello", "Hi!")
        assert talk.prompt("Bye") == (
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_answers_end_with_eos_and_with_the_turn(self, run_folder, model_folder, tokenizer):
        ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
        assert set(self.conversation(run_folder).stops) == ends
        assert set(self.conversation(model_folder).stops) == ends

    def test_leaving_an_answer_stops_the_generation(self, run_folder):
        answer = self.conversation(run_folder, tokens=1900).answer("Hello")
        next(answer)
        answer.close()

    def test_an_error_while_generating_is_raised_where_the_answer_is_read(self, run_folder, monkeypatch):
        talk = self.conversation(run_folder)
        monkeypatch.setattr("halfbyte.generation.text.stream", lambda *rows, **keys: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(talk.answer("Hello"))

    @pytest.mark.parametrize(("format", "prompt"), [("text", "Hi"), ("alpaca", INSTRUCTION.format(prompt="Hi"))])
    def test_without_a_template_prompts_are_as_in_training(self, run_folder, format, prompt, monkeypatch):
        loaded = saved.load_saved(str(run_folder))
        monkeypatch.setattr(loaded.tokenizer, "chat_template", None)
        monkeypatch.setattr("halfbyte.runs.stop_tokens.data_report", lambda folder: {"sources": [{"format": format}]})
        talk = conversation.Conversation(loaded, Sampling())
        assert talk.prompt("Hi") == prompt
        assert "chat" in notices.notices_so_far()

    def test_a_piped_conversation(self, run_folder, monkeypatch, capsys):
        lines = iter(["Hello", "", "/reset", "Again", "/quit", "never read"])
        monkeypatch.setattr("builtins.input", lambda *prompt: next(lines))
        chat(str(run_folder), compare_base=True, max_new_tokens=3, temperature=0.0)
        starts = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines() if ": " in line]
        assert starts[:2] == ["base", "adapter"]
        assert starts.count("adapter") == 2
        assert next(lines) == "never read"

    def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(self, run_folder, monkeypatch, capsys):
        lines = iter(["word " * 3000, "Hello", "/quit"])
        monkeypatch.setattr("builtins.input", lambda *prompt: next(lines))
        with pytest.raises(DataError, match="line 1"):
            chat(str(run_folder), compare_base=False, max_new_tokens=3, temperature=0.0)
        said = capsys.readouterr()
        assert "2048 positions" in said.err
        assert said.out.count("model: ") == 2

    def test_comparing_needs_an_adapter(self, model_folder):
        with pytest.raises(ModelError):
            chat(str(model_folder), compare_base=True, max_new_tokens=3, temperature=0.0)
