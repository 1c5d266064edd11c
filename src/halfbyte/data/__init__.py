"""Data: from files or hub datasets to tokens, labels and batches. `prepare` does it all; see prepare.py."""

from .prepare import PreparedData, prepare

__all__ = ["PreparedData", "prepare"]
