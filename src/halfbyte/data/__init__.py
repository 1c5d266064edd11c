"""Data: from files or hub datasets to tokens, labels and batches. `prepare.prepare` does it all."""
