"""llama.cpp's vocabulary files of known tokenizers, and GGUF files with a tokenizer alone."""

import gguf
from transformers import PreTrainedTokenizerFast

from halfbyte.gguf.tokenizer import add_tokenizer

SOURCES = {
    "llama-spm": ("llama2-hf/tokenizer.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, 32000),
    "llama-bpe": (
        "llama3/tokenizer.json", {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}, 128256,
    ),
    "qwen2": ("qwen2/tokenizer.qwen2.5.json", {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}, 151936),
    "gpt-2": ("gpt2/tokenizer.json", {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}, 50257),
}  # fmt: skip


def write_vocabulary(shared, fixture, path):
    """A GGUF file with the tokenizer alone, the other keys those of the fixture."""
    file, keys, size = SOURCES[fixture]
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(shared / "data/tokenizers" / file), **keys)
    reader = gguf.GGUFReader(shared / f"data/gguf/ggml-vocab-{fixture}.gguf")
    arch = reader.get_field("general.architecture").contents()
    writer = gguf.GGUFWriter(path, arch)
    for name, field in reader.fields.items():
        if name.startswith(f"{arch}."):
            writer.add_key_value(name, field.contents(), field.types[0])
    add_tokenizer(writer, tokenizer, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def fixture_texts(shared, fixture):
    stem = shared / f"data/gguf/ggml-vocab-{fixture}.gguf"
    texts = stem.with_name(stem.name + ".inp").read_text().split("\n__ggml_vocab_test__\n")
    rows = stem.with_name(stem.name + ".out").read_text().split("\n")
    return [(text, [int(each) for each in row.split()]) for text, row in zip(texts, rows, strict=False)]
