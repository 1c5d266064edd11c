"""halfbyte: QLoRA fine-tuning of language models whose frozen weights are stored in 2 to 8 bits.

Importing this package imports neither torch nor transformers; each public name is imported when first used.
"""

import os
from importlib import import_module
from typing import Any

# OpenMP threads spin at each barrier until the last one arrives. When another program occupies one of two cores, 60
# steps of the demo take 21.2 s instead of 3.1 s. A limit of 3,000 spins makes that 5.9 s, and 3.4 s on an idle machine
# (AMD EPYC, November 2026). libgomp reads the variable when torch is imported, so halfbyte must be imported first.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

__version__ = "0.1.0"

_PUBLIC = {
    "finetune": "halfbyte.train.run",
    "compare": "halfbyte.report.compare",
    "RunConfig": "halfbyte.config",
    "load_config": "halfbyte.config",
    "load_model": "halfbyte.loading.load",
    "load_tokenizer": "halfbyte.loading.load",
    "add_adapter": "halfbyte.adapters.lora",
    "generate": "halfbyte.generation",
    "Sampling": "halfbyte.generation",
    "rollout_func": "halfbyte.generation.rollouts",
    "patch": "halfbyte.modeling.patch",
    "unpatch": "halfbyte.modeling.patch",
    "HalfbyteConfig": "halfbyte.loading.quantizer",
    "QuantizedTensor": "halfbyte.tensor",
    "Linear4bit": "halfbyte.layers",
    "LinearNF4": "halfbyte.layers",
    "QuantizedLinear": "halfbyte.layers",
    "LinearFP4": "halfbyte.layers",
    "Embedding4bit": "halfbyte.layers",
    "Linear8bitLt": "halfbyte.layers.int8",
    "functional": "halfbyte.functional",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    from .utils.versions import check_versions

    check_versions()
    module = import_module(_PUBLIC[name])
    return getattr(module, name, module)  # `functional` is the module itself


def __dir__() -> list[str]:
    return __all__
