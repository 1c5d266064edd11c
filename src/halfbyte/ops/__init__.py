"""References: short torch functions that specify each op, and run where no kernel does."""

IGNORE_INDEX = -100  # the label of a token that is not trained
ELSEWHERE = -(2**30)  # of a token whose label another slice of the vocabulary holds
