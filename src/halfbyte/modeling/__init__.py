"""A Hugging Face model as halfbyte trains it: its family, layers, patched forwards, head, adapters and packed rows."""
