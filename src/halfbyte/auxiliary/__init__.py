"""Models that a run loads in addition to the one it trains, and the teacher of a distillation."""
