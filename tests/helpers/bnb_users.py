"""Programs of bitsandbytes' users, run once with the real package and once under `halfbyte.bitsandbytes.install()`.

`python -m tests.helpers.bnb_users PACKAGE FOLDER OTHER` runs the first function of each case, which trains or saves.
After a line on stdin it runs the second ones, which read the files of the other package. Results are dicts of tensors
and numbers; `results` reads them.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from ctypes import c_int
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    for name in ("nf4-nested", "fp4", "int8"):
        CASES[f"transformers-{name}"] = (
            lambda place, name=name: _load_and_save(place, name),
            lambda place, other, name=name: _reload(place, other),
        )
    for name, kind in (("nf4-nested", "lora"), ("nf4-nested", "dora"), ("int8", "lora")):
        CASES[f"peft-{kind}-{name}"] = (lambda place, name=name, kind=kind: _peft(place, name, kind), None)
    CASES["peft-dora-int8"] = _dora_of_int8, None
    CASES["peft-loftq"] = _loftq, None
    CASES["peft-loftq-quantized"] = _loftq_of_quantized, None
    for name in ("paged_adamw_8bit", "adamw_bnb_8bit"):
        CASES[f"trl-{name}"] = (
            lambda place, name=name: _sft(place, name, None),
            lambda place, other, name=name: _sft(place, name, other),
        )
    CASES["accelerate"] = lambda place: _accelerate(place, None), _accelerate
    CASES["axolotl"] = _axolotl, None
    CASES["vllm-nf4"] = _vllm_nf4, _vllm_prequantized
    CASES["vllm-int8"] = _vllm_int8, None
    CASES["q-galore"] = lambda place: _q_galore(8), None
    CASES["q-galore-32"] = lambda place: _q_galore(32), None


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


def _peft(place: Path, name: str, kind: str) -> Results:
    """Train adapters, save and load them, merge and unmerge them, and merge them for good."""
    from peft import PeftModel, prepare_model_for_kbit_training

    from tests.helpers.bnb_models import load

    model = _with_adapters(prepare_model_for_kbit_training(load(_llama(place), name)), use_dora=kind == "dora")
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


def _with_adapters(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    from tests.helpers.bnb_models import ROLES

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(target_modules=[*ROLES], r=4, init_lora_weights=False, **options))


def _dora_of_int8(place: Path) -> Results:
    """Train DoRA on int8 layers, and on their dequantized weights.

    bitsandbytes' CPU backend has no scales left in the second forward pass.
    """
    from tests.helpers.bnb_models import load

    model = _with_adapters(load(_llama(place), "int8"), use_dora=True)
    reference = _with_adapters(load(_llama(place), "int8").dequantize(), use_dora=True)
    return {"losses": _trained(model), "reference": _trained(reference)}


def _on_cpu(function: Any) -> None:
    """Replace the device "cuda", which PEFT's LoftQ names in its code, by "cpu"."""
    code = function.__code__
    function.__code__ = code.replace(co_consts=tuple("cpu" if each == "cuda" else each for each in code.co_consts))


def _loftq(place: Path) -> Results:
    """Initialize adapters of a float model from its quantization error."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import loftq_utils
    from transformers import AutoModelForCausalLM

    _on_cpu(loftq_utils.loftq_init.__wrapped__)
    model = AutoModelForCausalLM.from_pretrained(_llama(place))
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4)
    # set afterwards: the constructor asks for scipy, which is used without bitsandbytes only
    config.init_lora_weights, config.loftq_config = "loftq", {"loftq_bits": 4, "loftq_iter": 2}
    model = get_peft_model(model, config)
    return {"losses": _trained(model), "trained": _outputs(model)["logits"]}


def _loftq_of_quantized(place: Path) -> Results:
    """Replace the adapters of a model that is quantized already."""
    from peft import LoraConfig, get_peft_model, replace_lora_weights_loftq
    from peft.utils import loftq_utils

    from tests.helpers.bnb_models import load

    _on_cpu(loftq_utils._loftq_init_new.__wrapped__)
    model = get_peft_model(load(_llama(place), "nf4-nested"), LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
    replace_lora_weights_loftq(model, model_path=str(_llama(place) / "model.safetensors"))
    return {"losses": _trained(model), "trained": _outputs(model)["logits"]}


# --- TRL and accelerate ----------------------------------------------------------------------------------------------


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(98))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _sft(place: Path, optim: str, other: Path | None) -> Results:
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
            output_dir=str(place / ("run" if other is None else "resumed")), optim=optim, learning_rate=1e-3,
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


def _accelerate(place: Path, other: Path | None) -> Results:
    """Train a prepared model with an 8-bit optimizer; save its state after two of four steps, or load the other's."""
    import bitsandbytes as bnb
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from tests.helpers.bnb_models import ROLES, load

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    model = get_peft_model(load(_llama(place), "fp4"), LoraConfig(target_modules=[*ROLES], r=64))
    optimizer = bnb.optim.AdamW8bit((each for each in model.parameters() if each.requires_grad), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
    batches = torch.utils.data.DataLoader(torch.randint(0, 101, (8, 9)), batch_size=2)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    if other is not None:
        accelerator.load_state(str(other / "state"), strict=False)  # quantized layers load their state unlisted
        batches = accelerator.skip_first_batches(batches, 2)
    losses = []
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if other is None and number == 1:
            accelerator.save_state(str(place / "state"))
    weights = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    return {"losses": losses, "weights": weights, "bits": _bits(optimizer), "rate": scheduler.get_last_lr()}


# --- Axolotl, Unsloth and vLLM: their calls, on tensors --------------------------------------------------------------


def _axolotl(place: Path) -> Results:
    """Dequantize and multiply by pointers.

    bitsandbytes' CPU library does not export these symbols, so its results come from the functions on tensors.
    """
    import bitsandbytes.functional as F

    found: Results = {}
    for dtype, short in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        weight, x = torch.randn(48, 80, dtype=dtype), torch.randn(1, 80, dtype=dtype)
        packed, state = F.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
        if _is_real(F):
            found[f"values-{short}"] = F.dequantize_4bit(packed, state)
            found[f"row-{short}"] = x @ found[f"values-{short}"].t()
            continue
        pointer, nested = F.get_ptr, state.state2
        scales = torch.empty(state.absmax.shape)
        F.lib.cdequantize_blockwise_fp32(
            pointer(nested.code), pointer(state.absmax), pointer(nested.absmax), pointer(scales),
            c_int(nested.blocksize), c_int(state.absmax.numel()), None,
        )  # fmt: skip
        scales += state.offset
        out = torch.empty(state.shape, dtype=dtype)
        getattr(F.lib, f"cdequantize_blockwise_{short}_nf4")(
            pointer(None), pointer(packed), pointer(scales), pointer(out), c_int(state.blocksize), c_int(out.numel()),
            None,
        )  # fmt: skip
        row = torch.empty(1, 48, dtype=dtype)
        getattr(F.lib, f"cgemm_4bit_inference_naive_{short}")(
            c_int(48), c_int(1), c_int(80), pointer(x), pointer(packed), pointer(scales), pointer(state.code),
            pointer(row), c_int(48), c_int(40), c_int(48), c_int(state.blocksize), None,
        )  # fmt: skip
        found |= {f"values-{short}": out, f"row-{short}": row}
    return found


def _is_real(module: Any) -> bool:
    return module.__name__.startswith("bitsandbytes")


def _vllm_nf4(place: Path) -> Results:
    """Multiply by the parts of a fused weight, each with its own state, and by fused experts with flat scales."""
    import bitsandbytes as bnb
    import bitsandbytes.functional as F

    parts = [F.quantize_4bit(torch.randn(n, 128), compress_statistics=True, quant_type="nf4") for n in (64, 32, 32)]
    states = {f"{number}.{key}": value for number, (_, state) in enumerate(parts)
              for key, value in state.as_dict(packed=True).items()}  # fmt: skip
    fused, x = torch.cat([packed for packed, _ in parts]), torch.randn(5, 128)
    torch.save((fused, states, x), place / "checkpoint.pt")
    found = _fused_product(bnb, fused, [state for _, state in parts], x)
    scales = []
    for _, state in parts[1:]:
        values = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
        scales.append(values.float())
    experts = F.QuantState(
        absmax=torch.cat(scales), shape=(64, 128), code=parts[1][1].code, blocksize=64, quant_type="nf4",
        dtype=torch.float32,
    )  # fmt: skip
    packed = torch.cat([packed for packed, _ in parts[1:]]).view(2, -1, 1)
    found["experts"] = F.dequantize_4bit(packed.reshape(-1, 1), experts).view(2, 32, 128)
    return found


def _fused_product(bnb: Any, fused: Tensor, states: list[Any], x: Tensor) -> Results:
    out, start, row = torch.empty(len(x), sum(state.shape[0] for state in states)), 0, 0
    for state in states:
        rows, size = state.shape[0], state.shape[0] * state.shape[1] // 2
        out[:, row : row + rows] = bnb.matmul_4bit(x, fused[start : start + size].t(), state)
        row, start = row + rows, start + size
    return {"product": out}


def _vllm_prequantized(place: Path, other: Path) -> Results:
    """Read the states of the other package's checkpoint."""
    import bitsandbytes as bnb
    from bitsandbytes.functional import QuantState

    fused, entries, x = torch.load(other / "checkpoint.pt", weights_only=True)
    states = []
    for number in range(3):
        prefix = f"{number}."
        one = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
        states.append(QuantState.from_dict(one, device="cpu"))
    return _fused_product(bnb, fused, states, x)


def _vllm_int8(place: Path) -> Results:
    """Multiply by the parts of a fused int8 weight with a state of vLLM's own."""
    import bitsandbytes as bnb

    weights = [bnb.nn.Int8Params(torch.randn(n, 64), requires_grad=False, has_fp16_weights=False).to("cpu")
               for n in (32, 16)]  # fmt: skip
    fused, x = torch.cat([each.data for each in weights]), torch.randn(5, 64, dtype=torch.float16)
    x[:, 3] *= 9  # an outlier column
    out, row = torch.empty(5, 48, dtype=torch.float16), 0
    for weight in weights:
        rows = weight.shape[0]
        state = bnb.MatmulLtState()
        state.CB, state.SCB = fused[row : row + rows], weight.SCB
        state.threshold, state.has_fp16_weights, state.is_training = 6.0, False, False
        state.use_pool = True
        out[:, row : row + rows] = bnb.matmul(x, fused[row : row + rows], state=state)
        row += rows
    return {"product": out}


# --- Q-GaLore --------------------------------------------------------------------------------------------------------


def _q_galore(bits: int) -> Results:
    """Train by an optimizer as Q-GaLore derives it, save its state after three of six steps, and resume."""
    weights, optimizer = _galore_parameters(), None
    found: Results = {}
    for step, gradients in enumerate(_gradients(6)):
        if optimizer is None or step == 3:
            state = None if optimizer is None else optimizer.state_dict()
            optimizer = _galore_class()(
                [{"params": [weights[0]], "rank": 8, "weight_decay": 0.1}, {"params": weights[1:]}], bits, state
            )
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
    state = optimizer.state[weights[0]]
    found |= {f"weight-{number}": weight.detach() for number, weight in enumerate(weights)}
    sizes = {"elements": state["state1"].numel(), "bits": 8 * state["state1"].itemsize, "steps": int(state["step"])}
    return found | sizes


def _galore_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(96, 640)), nn.Parameter(torch.randn(70, 70)), nn.Parameter(torch.randn(9))]


def _gradients(steps: int) -> Iterator[list[Tensor]]:
    for step in range(steps):
        torch.manual_seed(step)
        yield [torch.randn_like(weight) for weight in _galore_parameters()]


def _galore_class() -> Any:
    from bitsandbytes.optim.optimizer import Optimizer2State

    class AdamW8bit(Optimizer2State):
        """Weights of groups with a rank are updated in a subspace; each one is replaced by its projection meanwhile."""

        def __init__(self, params: Any, bits: int, state: Any = None):
            super().__init__("adam", params, 1e-2, (0.9, 0.995), 1e-8, 1e-2, bits, None, 4096)
            if state is not None:
                self.load_state_dict(state)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if not self.initialized:
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            for gindex, group in enumerate(self.param_groups):
                for pindex, p in enumerate(group["params"]):
                    state = self.state[p]
                    if "step" not in state:
                        state["step"] = 0
                    if "rank" in group:
                        if "projector" not in state:
                            state["projector"] = torch.linalg.svd(p.grad)[0][:, : group["rank"]]
                        decay, group["weight_decay"] = group["weight_decay"], 0
                        full = p.data.clone()
                        gradient = state["projector"].t() @ p.grad
                        p.data = torch.zeros_like(gradient)
                        p.grad = gradient
                    if "state1" not in state:
                        self.init_state(group, p, gindex, pindex)
                    self.prefetch_state(p)
                    self.update_step(group, p, gindex, pindex)
                    if "rank" in group:
                        p.data = full.add_(self.state[p]["projector"] @ p.data)
                        p.data.add_(p.data, alpha=-group["lr"] * decay)
                        group["weight_decay"] = decay

    return AdamW8bit


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
