"""A small Llama, pretrained from nothing in about a minute, as a stand-in for a base model from a hub.

Everything is seeded and written down in `Recipe`; its hash names the cache entry, so a second demo starts at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import read_json
from ..utils.errors import ModelError
from ..utils.files import cache_folder, new_directory, write_json
from ..utils.notices import notice
from . import corpus

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"

# ChatML. The generation marks tell which tokens are the assistant's, so that only those are trained later.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


PLAN_EVERY = 25  # steps between looks at the clock: a slow or busy machine gets a shorter schedule
SHORTEST = 1 / 3  # share of the steps that is done in any case; a base that read less cannot be taught the answers


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what the base becomes. Sizes suit about a minute of fp32 on two ordinary cores."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    max_position_embeddings: int = 512
    initializer_range: float = 0.06
    steps: int = 1500
    rows: int = 4
    row_tokens: int = 128
    learning_rate: float = 5e-3
    warmup_share: float = 0.06
    weight_decay: float = 0.1
    exchange_share: float = 0.5  # of the rows, those in the chat format
    seed: int = 0

    def key(self) -> str:
        """Eight hex digits that change with the recipe and with the Python version, whose texts are the data."""
        described = json.dumps([asdict(self), platform.python_version(), CHAT_TEMPLATE])
        return hashlib.sha256(described.encode()).hexdigest()[:8]


def base_model(recipe: Recipe | None = None, *, seconds: float = 75.0, console: Console | None = None) -> Path:
    """A folder with the base's checkpoint and tokenizer: from the cache, or built now.

    Args:
        recipe: what to build.
        seconds: time for pretraining. A machine too slow for `recipe.steps` gets a shorter schedule and a notice.
        console: where progress is shown; none: silent.

    Raises:
        TrainingError: the cache cannot be written.
    """
    recipe = recipe or Recipe()
    path = cache_folder() / f"demo-base-{recipe.key()}"
    if not (path / "recipe.json").is_file():
        texts = corpus.gather(recipe.seed)
        tokenizer = build_tokenizer(texts, recipe)
        model, steps, loss = pretrain(texts, tokenizer, recipe, seconds=seconds, console=console)
        with new_directory(path) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            described = {"steps_done": steps, "final_loss": loss, "parameters": model.num_parameters()}
            write_json(folder / "recipe.json", asdict(recipe) | described)
    done = read_json(path / "recipe.json")["steps_done"]
    if done < recipe.steps:
        notice(
            "demo-base",
            f"this machine had time for {done} of {recipe.steps} pretraining steps, so answers are poorer; to train "
            f"the base anew, remove {path}",
        )
    return path


def build_tokenizer(texts: corpus.Corpus, recipe: Recipe) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `texts`, with ChatML marks, `<|im_end|>` as EOS and a pad token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.prose, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=recipe.max_position_embeddings,
    )


def token_rows(texts: corpus.Corpus, tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> torch.Tensor:
    """What all steps read, int64 (steps * rows, row_tokens): documents ended by EOS, joined, cut and shuffled."""
    import torch

    chats = [f"{START}user\n{question}{END}\n{START}assistant\n{answer}{END}\n" for question, answer in texts.exchanges]
    prose = _cut(tokenizer([text + END for text in texts.prose], verbose=False)["input_ids"], recipe.row_tokens)
    talk = _cut(tokenizer(chats, verbose=False)["input_ids"], recipe.row_tokens)
    needed = recipe.steps * recipe.rows
    talks = round(needed * recipe.exchange_share)
    rows = torch.cat([prose[torch.arange(needed - talks) % len(prose)], talk[torch.arange(talks) % len(talk)]])
    return rows[torch.randperm(needed, generator=torch.Generator().manual_seed(recipe.seed))]


def _cut(documents: list[list[int]], length: int) -> torch.Tensor:
    import torch

    stream = torch.tensor([token for ids in documents for token in ids])
    return stream[: len(stream) // length * length].view(-1, length)


def pretrain(
    texts: corpus.Corpus,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    *,
    seconds: float,
    console: Console | None = None,
) -> tuple[LlamaForCausalLM, int, float]:
    """Train a Llama on `texts` with AdamW and a cosine schedule, fp32 on the CPU.

    Returns:
        the model, the steps done, and the mean loss (nats per token) of the last tenth of them.
    """
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    torch.manual_seed(recipe.seed)
    rows = token_rows(texts, tokenizer, recipe)
    model = _llama(tokenizer, recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    steps, started = recipe.steps, time.monotonic()
    losses: list[float] = []
    with Progress(*columns, console=console, disable=console is None) as progress:
        bar = progress.add_task("pretraining the base", total=steps, loss="")
        while len(losses) < steps:
            done = len(losses)
            if done and done % PLAN_EVERY == 0:
                affordable = int(seconds * done / (time.monotonic() - started))
                steps = min(recipe.steps, max(done, affordable, round(recipe.steps * SHORTEST)))
                progress.update(bar, total=steps)
                if done == steps:
                    break
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _schedule(done, steps, recipe.warmup_share)
            batch = rows[done * recipe.rows : (done + 1) * recipe.rows]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(bar, completed=len(losses), loss=f"loss {losses[-1]:.2f}")
    if not math.isfinite(losses[-1]):
        raise ModelError(f"pretraining the demo's base ended with loss {losses[-1]}", "report this with `halfbyte env`")
    last = losses[-max(1, len(losses) // 10) :]
    return model.eval(), len(losses), sum(last) / len(last)


def _schedule(step: int, steps: int, warmup_share: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warmup = max(1, round(steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _llama(tokenizer: PreTrainedTokenizerFast, recipe: Recipe) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_hidden_layers,
            num_attention_heads=recipe.num_attention_heads,
            num_key_value_heads=recipe.num_attention_heads,
            initializer_range=recipe.initializer_range,
            max_position_embeddings=recipe.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
