"""Tiny models with non-zero adapters, pairs of answers for them, and TRL's trainers."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from halfbyte.config import RunConfig
from halfbyte.data.answer_documents import as_documents
from halfbyte.methods import METHODS
from halfbyte.train.stepper import SharedNumbers
from tests.helpers.patch_models import tiny

VOCABULARY = 101
PAIRED = (("chosen_ids", "chosen_mask"), ("rejected_ids", "rejected_mask"))


def tokenizer():
    """Return a tokenizer with one token per word: the numbers from 0."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")


def pairs(count, seed=0, longest=9):
    """Return rows with prompts and answers of uneven lengths; every token of the answers is trained."""
    generator = torch.Generator().manual_seed(seed)

    def ids():
        length = int(torch.randint(1, longest + 1, (), generator=generator))
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    made = [{"prompt_ids": ids(), "chosen_ids": ids(), "rejected_ids": ids()} for _ in range(count)]
    return [row | {f"{side}_mask": [1] * len(row[f"{side}_ids"]) for side in ("chosen", "rejected")} for row in made]


def documents(rows, numbers=()):
    return as_documents(Dataset.from_list(rows), PAIRED, numbers)


def config(**keys):
    fixed = {"model_name_or_path": "tiny", "dataset": "d", "device": "cpu", "max_length": 64}
    return RunConfig(**fixed | {"method": "dpo"} | keys)


def method(**keys):
    chosen = config(**keys)
    return METHODS[chosen.method].of(chosen)


def batch_of(rows, **keys):
    chosen = config(**keys)
    return METHODS[chosen.method].of(chosen).collator(chosen, tokenizer())(list(documents(rows)))


def model(family="Llama", seed=0, **keys):
    """A policy whose adapter matters; without it, its reference."""
    torch.manual_seed(seed)
    return tiny(family, **keys)


def mean_loss(asked, model, batches):
    """The loss of a step over these micro-batches, as the loop and the stepper have it, and all sums and counts."""
    counts = [asked.counts(batch) for batch in batches]
    counts = {name: sum(each[name] for each in counts) for name in counts[0]}
    sums = [asked.sums(model, batch) for batch in SharedNumbers(asked, model).add(batches, counts)]
    sums = {name: sum(each[name] for each in sums) for name in sums[0]}
    return sums["loss"] / counts[asked.numbers.trained[0].over], sums, counts


def gradients(loss, model):
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def assert_same_gradients(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference <= tolerance, (name, float(difference))
