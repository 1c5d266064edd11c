"""Out of the trainer: models that run without halfbyte."""
