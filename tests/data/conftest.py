"""Tokenizers: a synthetic byte-level one, and the real ones of the shared data."""

import functools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from halfbyte.config import RunConfig

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}{%- if m['role'] == 'assistant' %}"
    "{%- generation %}{{- m['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- m['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


TEMPLATES = {"plain": CHATML, "marked": MARKED, None: None}


def byte_tokenizer(template: str | None = "plain") -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte plus the ChatML tokens; EOS is <|im_end|>. `template`: a name in
    TEMPLATES, or Jinja."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer():
    return functools.cache(byte_tokenizer)


@pytest.fixture(scope="session")
def real_tokenizer(shared):
    """Load llama-40m, llama-2, qwen2.5, qwen3 or phi-3 (from tokenizer.json and the template in its config)."""
    folder = shared / "data" / "tokenizers"
    files = {
        "qwen2.5": ("qwen2/tokenizer.qwen2.5.json", "qwen2/tokenizer_config.qwen2.5.json"),
        "qwen3": ("qwen2/tokenizer.qwen2.5.json", "qwen2/tokenizer_config.qwen3.json"),
        "phi-3": ("phi-3-mini/tokenizer.json", "phi-3-mini/tokenizer_config.json"),
    }

    folders = {"llama-40m": shared / "models" / "llama-40m", "llama-2": folder / "llama2-hf"}

    @functools.cache
    def load(name: str) -> PreTrainedTokenizerFast:
        if name in folders:
            return AutoTokenizer.from_pretrained(folders[name])
        tokenizer, config = files[name]
        keys = json.loads((folder / config).read_text())
        special_keys = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        special = {key: keys[key] for key in special_keys if keys.get(key)}
        return PreTrainedTokenizerFast(tokenizer_file=str(folder / tokenizer), **special)

    return load


@pytest.fixture
def write(tmp_path):
    """Write rows as JSONL (or text as it is) and return the path as a string."""

    def _write(content, name="data.jsonl") -> str:
        path = tmp_path / name
        text = content if isinstance(content, str) else "".join(json.dumps(row) + "\n" for row in content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return _write


@pytest.fixture
def config():
    def _config(dataset, **keys) -> RunConfig:
        return RunConfig(model_name_or_path="none", dataset=dataset, **keys)

    return _config
