"""TRL's GRPOTrainer with our rollouts in the place of transformers' `generate`."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import halfbyte
from halfbyte.utils.errors import ConfigError

trl = pytest.importorskip("trl")


def tokenizer_of():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["what is one plus two"], vocab_size=264, special_tokens=["</s>", "<pad>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="</s>", pad_token="<pad>")


def tiny(vocabulary):
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": vocabulary}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 0, "pad_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64))


@pytest.mark.slow
def test_grpo_trainer_with_rollout_func(tmp_path):
    """The trainer's old log-probabilities are those of the rollouts; its own differ by rounding."""
    tokenizer = tokenizer_of()
    model = tiny(len(tokenizer))
    seen = []

    def reward(prompts, completions, completion_ids, **columns):
        seen.append((prompts, completion_ids))
        return [float(sum(ids) % 7) for ids in completion_ids]

    class Compared(trl.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            keep = inputs["completion_ids"].shape[1]
            own, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, keep)
            apart = (own - inputs["sampling_per_token_logps"]).abs() * inputs["completion_mask"]
            differences.append(float(apart.max()))
            return super()._compute_loss(model, inputs)

    differences = []
    args = trl.GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
        max_steps=3, learning_rate=1e-2, report_to="none", use_cpu=True, bf16=False, temperature=0.8,
        save_strategy="no",
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"what is {n}"} for n in range(12)])
    trainer = Compared(
        model, reward_funcs=reward, args=args, train_dataset=rows, processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear"), rollout_func=halfbyte.rollout_func(model),
    )  # fmt: skip
    trainer.train()
    assert len(differences) == 3
    assert max(differences) < 1e-4
    for prompts, ids in seen:
        assert all(len({prompts[at] for at in range(start, start + 4)}) == 1 for start in (0, 4))
        assert len({tuple(each) for each in ids}) > 4
    factors = [tensor for name, tensor in trainer.model.named_parameters() if "lora_B" in name]
    assert any(tensor.abs().max() > 0 for tensor in factors)  # the model changed, and rollouts use the new weights
    trainer.model = tiny(len(tokenizer))
    with pytest.raises(ConfigError):
        trainer.rollout_func(["what"], trainer)
