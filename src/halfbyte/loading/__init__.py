"""Find a checkpoint, read it, assign a format to each weight and quantize while it loads."""
