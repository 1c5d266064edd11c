"""Generation and exported files stop at every trained and every declared end token."""

import json
import re
import shutil

import gguf
import pytest
from transformers import GenerationConfig

from halfbyte.cli.commands import export_for_servers
from halfbyte.config import load_config
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.export.served_adapter import export_served
from halfbyte.generation import Sampling
from halfbyte.gguf.importer import import_gguf
from halfbyte.runs.saved import load_saved
from halfbyte.serve import model
from halfbyte.serve.conversation import Conversation
from halfbyte.serve.model import load
from halfbyte.serve.requests import CompletionRequest
from halfbyte.train.run import train
from tests.helpers.merge_runs import byte_tokenizer, save_base, save_run

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NAMES = ("</s>", "<|eom|>", "<|im_end|>", "<|other|>")


def tokenizer_of(folder, template=TEMPLATE):
    """A tokenizer whose EOS is </s>, with the other ends; its ids by name."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES[1:])})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return dict(zip(NAMES, tokenizer.convert_tokens_to_ids(list(NAMES)), strict=True))


def declare(folder, *ids):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": list(ids)}))


def learn(run, *names):
    """Let a run say that trained turns end with these tokens."""
    path = run / "data_report.json"
    report = json.loads(path.read_text()) | {"sources": [{"format": "messages"}], "stop_tokens": list(names)}
    path.write_text(json.dumps(report))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base that declares </s> and <|eom|>, a run on it that trained <|im_end|>, and ids by name."""
    place = tmp_path_factory.mktemp("ends")
    base = save_base(place / "base")
    ids = tokenizer_of(base)
    declare(base, ids["</s>"], ids["<|eom|>"])
    run = save_run(place / "run", base, tokenizer=base, load_in_4bit=False)
    learn(run, "<|im_end|>")
    return base, run, ids


@pytest.fixture
def copied(made, tmp_path):
    """The same run on a base of its own, which may be changed."""
    base, run, ids = made
    own = shutil.copytree(base, tmp_path / "base"), shutil.copytree(run, tmp_path / "run")
    resolved = own[1] / "config.resolved.yaml"
    resolved.write_text(resolved.read_text().replace(str(base), str(own[0])))
    return *own, ids


def ends_of(folder):
    return GenerationConfig.from_pretrained(folder).eos_token_id


def field(path, name):
    found = gguf.GGUFReader(path).get_field(f"tokenizer.ggml.{name}_token_id")
    return None if found is None else found.contents()


def stops_of(modelfile):
    return re.findall(r'^PARAMETER stop "(.*)"$', modelfile.read_text(), re.MULTILINE)


def test_a_merged_folder_declares_what_was_trained(made, tmp_path):
    _, run, ids = made
    merge(run, tmp_path / "merged", verify=False)
    assert ends_of(tmp_path / "merged") == [ids["</s>"], ids["<|eom|>"], ids["<|im_end|>"]]
    assert GenerationConfig.from_pretrained(tmp_path / "merged").max_new_tokens == 17


def test_a_merge_that_learned_nothing_else_keeps_the_file(copied, tmp_path):
    base, run, ids = copied
    learn(run, "</s>")
    declare(base, ids["</s>"])
    (base / "generation_config.json").write_text('{"eos_token_id": %d, "top_k": 3}\n' % ids["</s>"])  # noqa: UP031
    merge(run, tmp_path / "merged", verify=False)
    written, before = ((folder / "generation_config.json").read_text() for folder in (tmp_path / "merged", base))
    assert written == before


def test_a_merge_onto_a_base_without_a_generation_config_writes_one(copied, tmp_path):
    base, run, ids = copied
    (base / "generation_config.json").unlink()
    merge(run, tmp_path / "merged", verify=False)
    declared = json.loads((base / "config.json").read_text())["eos_token_id"]
    assert ends_of(tmp_path / "merged") == [*dict.fromkeys([declared, ids["</s>"], ids["<|im_end|>"]])]


def test_without_a_record_the_chat_template_gives_the_end(copied, tmp_path):
    base, run, ids = copied
    alone = shutil.copytree(run / "adapter", tmp_path / "alone")
    config = alone / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}))
    merge(alone, tmp_path / "merged", verify=False)
    assert ends_of(tmp_path / "merged") == [ids["</s>"], ids["<|eom|>"], ids["<|im_end|>"]]


def test_a_gguf_file_and_its_modelfile_name_all_ends(made, tmp_path):
    _, run, ids = made
    report = export_gguf(run, "f32", tmp_path / "m.gguf", device="cpu")
    found = {name: field(report.path, name) for name in ("eos", "eot", "eom")}
    assert found == {"eos": ids["</s>"], "eot": ids["<|im_end|>"], "eom": ids["<|eom|>"]}
    assert set(stops_of(report.modelfile)) == {"</s>", "<|im_end|>", "<|eom|>"}
    imported = import_gguf(report.path, tmp_path / "imported")
    assert set(ends_of(imported)) == {ids["</s>"], ids["<|im_end|>"], ids["<|eom|>"]}


@pytest.mark.slow
def test_a_merged_model_is_exported_as_its_run(made, tmp_path):
    _, run, _ = made
    merge(run, tmp_path / "merged", verify=False)
    paths = [export_gguf(source, "f32", tmp_path / f"{name}.gguf", device="cpu").path
             for name, source in (("run", run), ("whole", tmp_path / "merged"))]  # fmt: skip
    for name in ("eos", "eot", "eom"):
        assert field(paths[0], name) == field(paths[1], name)


@pytest.mark.slow
def test_a_fully_fine_tuned_model_declares_what_was_trained(made, tmp_path):
    base, _, ids = made
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    keys = {"model_name_or_path": str(base), "dataset": str(tmp_path / "d.jsonl"), "output_dir": str(tmp_path / "out")}
    keys |= {"use_peft": False, "load_in_4bit": False, "device": "cpu"}
    keys |= {"max_steps": 1, "warmup_steps": 0, "sample_prompts": 0}
    train(load_config(None, keys))
    assert ends_of(tmp_path / "out/model") == [ids["</s>"], ids["<|eom|>"], ids["<|im_end|>"]]


def test_an_adapter_for_servers_brings_a_generation_config(made, tmp_path, capsys):
    _, run, ids = made
    assert ends_of(export_served(run, tmp_path / "out")) == [ids["</s>"], ids["<|eom|>"], ids["<|im_end|>"]]
    assert GenerationConfig.from_pretrained(tmp_path / "out").max_new_tokens == 17
    export_for_servers(str(run), "vllm", tmp_path / "again", [], False)
    assert f"--generation-config {tmp_path / 'again'}" in capsys.readouterr().out


def test_loaded_models_and_conversations_stop_at_all_ends(made):
    _, run, ids = made
    ends = {ids["</s>"], ids["<|eom|>"], ids["<|im_end|>"]}
    saved = load_saved(str(run))
    assert set(saved.model.generation_config.eos_token_id) == ends
    assert set(Conversation(saved, Sampling()).stops) == ends


def test_serve_stops_each_adapter_at_its_own_ends(made, tmp_path, monkeypatch):
    _, run, ids = made
    other = shutil.copytree(run, tmp_path / "other")
    learn(other, "<|other|>")
    served = load(str(run), {"second": str(other)})
    stopped = {}

    def continued(*_, ends, adapter, **__):
        stopped[adapter] = set(ends)
        return []

    monkeypatch.setattr(model, "continue_texts", continued)
    for name in served.names:
        request = CompletionRequest(model=name, prompt="a", max_tokens=2)
        list(served.answer(served.prepare(request)))
    own = {ids["</s>"], ids["<|eom|>"], ids["<|im_end|>"]}
    assert stopped == {None: own, "default": own, served.names["second"]: own | {ids["<|other|>"]}}
