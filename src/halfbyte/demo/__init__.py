"""`halfbyte demo`: a complete run without downloads, in a few minutes on two cores.

`corpus` collects text from the Python installation, `base` pretrains a small Llama on it, and `run` fine-tunes that
base as `halfbyte train` does, on the questions in `instructions.jsonl`.
"""

from .run import main

__all__ = ["main"]
