"""`halfbyte demo`: the whole of a run on a machine with nothing but Python, in a few minutes on two cores.

`corpus` finds text that every Python installation has, `base` pretrains a small Llama on it, and `run` fine-tunes that
base with the same main job as `halfbyte train`, on the questions in `instructions.jsonl`.
"""

from .run import main

__all__ = ["main"]
