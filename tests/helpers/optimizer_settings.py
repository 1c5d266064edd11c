"""Settings of an optimizer without the rest of a run's configuration."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OptimizerSettings:
    """The fields of `halfbyte.optim.Settings` with the configuration's defaults."""

    optim: str = "adamw"
    optim_args: dict[str, Any] = field(default_factory=dict)
    optim_bits: int | dict[str, int] | None = None
    optim_in_backward: bool | str = "auto"
    optim_offload: bool | str = "auto"
    optim_target_modules: str | list[str] | None = None
    learning_rate: float = 1e-3
    embedding_learning_rate: float | None = None
    loraplus_lr_ratio: float | None = None
    loraplus_lr_embedding: float | None = None
    lora_preconditioner: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    lr_scheduler_type: str = "cosine"
    lr_scheduler_kwargs: dict | None = None
    warmup_steps: float = 0.03
    max_steps: int = -1
    max_grad_norm: float = 1.0
    gradient_accumulation_steps: int = 1
    seed: int = 42
    use_peft: bool = True
