"""Exporting trained models: merged checkpoints, GGUF files and adapters for inference servers."""
