"""Everything that knows Hugging Face transformers: loading, quantizing while loading, heads."""
