"""Files of a case's folder: a tiny model with a tokenizer, a dataset, a run.yaml, and a finished run of them."""

import json
from pathlib import Path

TEXT = "a small model reads nine short rows and answers each of them with one of these words"
WORDS = TEXT.split()
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RUN = """\
model_name_or_path: model
dataset: data.jsonl
output_dir: out
max_length: 128
max_steps: 2
r: 2
sample_prompts: 0
device: cpu
"""
# The keys of a run that is killed after its second checkpoint.
STOPPED = "output_dir=stopped max_steps=8 save_steps=2 lora_dropout=0.1"
ROWS = [
    {"messages": [{"role": "user", "content": " ".join(WORDS[at : at + 3])}, {"role": "assistant", "content": word}]}
    for at, word in enumerate(WORDS)
]
DATA = "".join(json.dumps(row) + "\n" for row in ROWS)


SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
VOCABULARY, LONGEST = 259, 41  # tokens: of the tokenizer, and of the longest row


def make_model(folder: str) -> None:
    """A Llama of 64 by 2 with random weights, a tokenizer of bytes and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(fast), eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)


def replay() -> None:
    """A step of that model and data as `check` replays it on shapes: torch keeps which shapes its operators return, and
    finding that is most of what a plan of so small a model takes. Other shapes than a case's would spare it nothing.

    A process's first backward starts one thread for each accelerator, and after that no forked child can run backward.
    With a CUDA build of torch and no GPU, a FakeTensorMode registers 8 fake devices. The backward of a scalar before
    it finds no device, starts no thread, and children can run backward.
    """
    import torch
    from transformers import LlamaConfig

    from halfbyte.config import RunConfig
    from halfbyte.plan.shapes import ModelShapes, Shape

    torch.ones((), requires_grad=True).backward()
    given = {"model_name_or_path": "model", "dataset": "data.jsonl", "output_dir": "out", "device": "cpu", "r": 2}
    for dropout in (0.0, 0.1):
        config = LlamaConfig(vocab_size=VOCABULARY, **SIZES)
        shapes = ModelShapes(RunConfig(**given, lora_dropout=dropout), config, torch.device("cpu"))
        shapes.step(Shape(1, LONGEST), ("keep",))


def make_common(folder: Path) -> None:
    """Write the files of every case's folder except the model."""
    (folder / "run.yaml").write_text(RUN)
    (folder / "data.jsonl").write_text(DATA)
    (folder / "prompts.jsonl").write_text('{"prompt": "a small model"}\n{"prompt": "nine rows"}\n')
