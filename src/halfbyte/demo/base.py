"""Base model of the demo: a small Llama, pretrained from scratch in about a minute.

Pretraining is seeded and described by `Recipe`, whose hash names the cache entry; a second demo reuses it.
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

PAD = "<|pad|>"
START = "<|im_start|>"
END = "<|im_end|>"

# ChatML. The generation tags mark the assistant's tokens, which are trained later.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


PLAN_EVERY = 25  # steps between time checks: a slow or busy machine gets a shorter schedule
SHORTEST = 1 / 3  # least share of the steps: a base trained for less cannot learn the answers


@dataclass(frozen=True)
class Recipe:
    """Settings of the base's pretraining. The defaults take about a minute in fp32 on two cores."""

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
    exchange_share: float = 0.5  # share of the sequences in the chat format
    seed: int = 0

    def key(self) -> str:
        """Eight hex digits that identify the recipe and the Python version, whose texts are the data."""
        described = json.dumps([asdict(self), platform.python_version(), CHAT_TEMPLATE])
        return hashlib.sha256(described.encode()).hexdigest()[:8]


def base_model(recipe: Recipe | None = None, *, seconds: float = 75.0, console: Console | None = None) -> Path:
    """Return the folder with the base's checkpoint and tokenizer; builds them if they are not cached.

    Args:
        recipe: settings of the base.
        seconds: time for pretraining. A machine too slow for `recipe.steps` gets a shorter schedule and a notice.
        console: shows progress; None: silent.

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
            f"the demo's base has {done} of {recipe.steps} pretraining steps, because time ran out, so answers are "
            f"poorer; to train it again, remove {path}",
        )
    return path


def build_tokenizer(texts: corpus.Corpus, recipe: Recipe) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on `texts`, with ChatML tokens, `<|im_end|>` as EOS and a pad token."""
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
    """Training data of all steps, int64 [steps · rows, row_tokens]: documents joined with EOS, cut and shuffled."""
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
        The model, the number of steps, and the mean loss (nats per token) of their last tenth.
    """
    import torch
    from rich.progress import TextColumn, TimeRemainingColumn

    from ..utils.waiting import progress_bars

    torch.manual_seed(recipe.seed)
    rows = token_rows(texts, tokenizer, recipe)
    model = _llama(tokenizer, recipe)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay, fused=True
    )
    name, columns = "pretraining the base", (TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    steps, started = recipe.steps, time.monotonic()
    losses: list[float] = []
    with progress_bars(name, console, *columns) as progress:
        bar = progress.add_task(name, total=steps, loss="")
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
    """Learning rate factor: linear warm-up, then a cosine to 0.05."""
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
