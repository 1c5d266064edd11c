"""Errors, logging, text, files, processes, hardware and the terminal. Importing them imports no torch."""
