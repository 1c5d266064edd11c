"""A small server that speaks OpenAI's HTTP interface: one model, several adapters, one answer at a time."""
