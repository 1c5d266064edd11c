"""halfbyte: QLoRA fine-tuning of language models whose frozen weights are stored in 2 to 8 bits.

Importing this package imports neither torch nor transformers; each public name is imported when first used.
"""

import os
from importlib import import_module
from typing import Any

from . import moved

# OpenMP's threads spin at every barrier until the last of them arrives: where another program has a core, 60 steps of a
# small model took 8.2 to 11.9 s instead of 2.1 (2 cores). With 1,000 turns, what libgomp itself takes where threads
# outnumber cores, they take 4.7 s, and 2.2 on a quiet machine; with no spinning at all 3.6 and 3.4. libgomp reads
# this when torch is imported, so it holds where halfbyte is imported first, as by the command line.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

_PUBLIC = {
    "finetune": "halfbyte.train.sft",
    "RunConfig": "halfbyte.config",
    "load_config": "halfbyte.config",
    "load_model": "halfbyte.models.load",
    "load_tokenizer": "halfbyte.models.load",
    "add_adapter": "halfbyte.adapters",
    "generate": "halfbyte.generation",
    "Sampling": "halfbyte.generation",
    "rollout_func": "halfbyte.generation.trl",
    "patch": "halfbyte.models.patch",
    "unpatch": "halfbyte.models.patch",
    "HalfbyteConfig": "halfbyte.models.quantizer",
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


moved.install()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    return getattr(module, name, module)  # `functional` is the module itself


def __dir__() -> list[str]:
    return __all__
