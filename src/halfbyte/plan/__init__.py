"""Memory and time of a run, predicted before it starts."""
