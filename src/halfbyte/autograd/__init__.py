"""What is saved and what is recomputed: hand-derived backward passes around dispatched ops."""
