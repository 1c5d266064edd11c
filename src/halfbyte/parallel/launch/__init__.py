"""Launcher of a run's ranks, checks that they agree, bandwidth probe and failure reports."""
