"""Programs of bitsandbytes' users, run once with the real package and once under `halfbyte.bitsandbytes.install()`.

`python -m tests.helpers.bnb_users PACKAGE FOLDER OTHER` runs the first function of each case, which trains or saves.
After a line on stdin it runs the second ones, which read the files of the other package. Results are dicts of tensors
and numbers; `results` reads them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("real", "own")
STAGES = ("first", "second")
Results = dict[str, Any]
CASES: dict[str, tuple[Callable[[Path], Results], Callable[[Path, Path], Results] | None]] = {}


def results(folder: Path, case: str, stage: str) -> Results:
    """Return the results of a case.

    Raises:
        AssertionError: the case raised; the message is its traceback.
    """
    place = folder / case
    error = place / f"{stage}.txt"
    assert not error.exists(), error.read_text()
    return torch.load(place / f"{stage}.pt", weights_only=True)


def main(package: str, folder: Path, other: Path) -> None:
    if package == "own":
        import halfbyte.bitsandbytes

        halfbyte.bitsandbytes.install()
    else:
        from tests.helpers import real_bnb

        real_bnb.settle()
    _load_cases()
    for stage in STAGES:
        for name, functions in CASES.items():
            function = functions[STAGES.index(stage)]
            if function is None:
                continue
            place = folder / name
            place.mkdir(exist_ok=True)
            torch.manual_seed(0)
            try:
                found = function(*((place,) if stage == "first" else (place, other / name)))
                torch.save(found, place / f"{stage}.pt")
            except Exception:
                (place / f"{stage}.txt").write_text(traceback.format_exc())
        print(stage, flush=True)
        if stage == "first":
            sys.stdin.readline()


def _load_cases() -> None:
    """Fill `CASES`. Its functions import bitsandbytes, and what asks for it, after `install`."""
    for name in ("nf4-nested", "int8"):
        CASES[f"transformers-{name}"] = (
            lambda place, name=name: _load_and_save(place, name),
            lambda place, other, name=name: _reload(place, other),
        )
        CASES[f"peft-{name}"] = (lambda place, name=name: _peft(place, name), None)
    CASES["trl"] = (lambda place: _sft(place, None), _sft)


# --- transformers ----------------------------------------------------------------------------------------------------


def _llama(place: Path) -> Path:
    """The float model, saved by the test for both packages."""
    return place.parents[1] / "llama"


def _tokens() -> Tensor:
    return torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(2))


def _outputs(model: Any) -> Results:
    """Logits of a batch, and greedily generated tokens."""
    with torch.no_grad():
        logits = model.eval()(input_ids=_tokens()).logits
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return {"logits": logits, "tokens": model.generate(input_ids=_tokens()[:1, :5], **options)}


def _load_and_save(place: Path, name: str) -> Results:
    from tests.helpers.bnb_models import load

    model = load(_llama(place), name)
    found = _outputs(model)
    model.save_pretrained(place / "saved")
    return found


def _reload(place: Path, other: Path) -> Results:
    """Load the other package's checkpoint; transformers cannot save a model that it has loaded quantized."""
    from safetensors.torch import load_file

    from tests.helpers.bnb_models import bytes_of, load

    model = load(other / "saved", None)
    state, stored = model.state_dict(), load_file(other / "saved" / "model.safetensors")
    differ = [name for name in stored if not torch.equal(bytes_of(state[name]), bytes_of(stored[name]))]
    return _outputs(model) | {"differ": differ, "entries": sorted(stored)}


# --- PEFT ------------------------------------------------------------------------------------------------------------


def _trained(model: Any) -> list[float]:
    """Losses of three steps of SGD."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        loss = model.train()(input_ids=_tokens(), labels=_tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _peft(place: Path, name: str) -> Results:
    """Train adapters, save and load them, merge and unmerge them, and merge them for good."""
    from peft import PeftModel, prepare_model_for_kbit_training

    from tests.helpers.bnb_models import load

    model = _with_adapters(prepare_model_for_kbit_training(load(_llama(place), name)))
    found: Results = {"losses": _trained(model), "trained": _outputs(model)["logits"]}
    model.save_pretrained(place / "adapter")
    model.merge_adapter()
    found["merged"] = _outputs(model)["logits"]
    model.unmerge_adapter()
    found["unmerged"] = _outputs(model)["logits"]
    again = PeftModel.from_pretrained(load(_llama(place), name), place / "adapter")
    found["loaded"] = _outputs(again)["logits"]
    merged = again.merge_and_unload()
    found["unloaded"] = _outputs(merged)["logits"]
    merged.save_pretrained(place / "merged")
    return found


def _with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    from tests.helpers.bnb_models import ROLES

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=[*ROLES], r=4, init_lora_weights=False))


# --- TRL -------------------------------------------------------------------------------------------------------------


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(98))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _sft(place: Path, other: Path | None) -> Results:
    """Train three steps of QLoRA, or resume the other package's run after two of them."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from tests.helpers.bnb_models import ROLES, load

    texts = [" ".join(f"w{(i * j + i) % 98}" for j in range(12)) for i in range(6)]
    # 64 × 64 = 4,096 elements are the smallest weight with 8-bit state
    adapter = LoraConfig(target_modules=[*ROLES], r=64, lora_alpha=64, task_type="CAUSAL_LM")
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "save_steps": 2, "logging_steps": 1}
    trainer = SFTTrainer(
        model=load(_llama(place), "nf4-nested"),
        args=SFTConfig(
            output_dir=str(place / ("run" if other is None else "resumed")), optim="paged_adamw_8bit",
            learning_rate=1e-3,
            weight_decay=0.1, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, max_length=None, **options,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=_tokenizer(),
        peft_config=adapter,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if other is None else str(other / "run" / "checkpoint-2"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = {name: each.detach() for name, each in trainer.model.named_parameters() if each.requires_grad}
    return {"losses": losses, "weights": weights, "bits": _bits(trainer.optimizer)}


def _bits(optimizer: Any) -> list[int]:
    """Bits of the elements of the first state of each parameter, by bitsandbytes' name of it."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [8 * inner.state[each]["state1"].itemsize for group in inner.param_groups for each in group["params"]]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
