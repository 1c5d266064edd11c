"""Evaluating saved models: loss on held-out data, and the tasks of lm-evaluation-harness."""
