"""Training: supervised fine-tuning on transformers' Trainer."""
