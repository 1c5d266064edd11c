"""A recipe of a few steps, and a few texts."""

from halfbyte.demo import base, corpus

TINY = base.Recipe(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    steps=2,
    rows=2,
    row_tokens=32,
)
TEXTS = corpus.Corpus(
    prose=[f"Return the number of items in container {number}, counted from the left." for number in range(40)],
    exchanges=[(f"What is `item{number}`?", f"`item{number}`: Return item {number}.") for number in range(40)],
)
