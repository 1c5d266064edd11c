"""A tiny model with a tokenizer of bytes, and adapters that change its answers."""

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 128
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: at for at, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<eos>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = TEMPLATE
    return fast


def random_model(tokenizer) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        **SIZES,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[256:] = 0  # special tokens are never the likeliest, so answers have their full length
        for parameter in model.parameters():
            parameter *= 5
    return model


def random_adapter(model_folder, folder, seed: int, modules_to_save=None):
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], modules_to_save=modules_to_save)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(model_folder), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder
