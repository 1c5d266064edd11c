"""bitsandbytes' diagnostics, by its names."""
