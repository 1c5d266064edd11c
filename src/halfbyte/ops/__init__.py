"""Reference implementations: short torch functions that specify each op and run where no kernel does."""

IGNORE_INDEX = -100  # label of a token that is not trained
ELSEWHERE = -(2**30)  # label of a token whose label is in another shard of the vocabulary
