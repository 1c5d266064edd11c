"""Modules that tests share: models, inputs, comparisons, and programs that tests start as processes."""
