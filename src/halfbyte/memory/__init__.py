"""Where the memory of a run goes, known before it starts."""
