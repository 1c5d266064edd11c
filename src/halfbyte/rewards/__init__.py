"""Rewards of sampled answers: TRL's reward functions, run so that none of them can crash or hang a run."""
