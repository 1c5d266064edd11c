"""Models that a run loads in addition to the one it trains: a teacher, a reward model, a reference."""
