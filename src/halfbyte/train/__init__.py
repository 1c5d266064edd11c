"""Training: supervised fine-tuning in a loop of its own."""
