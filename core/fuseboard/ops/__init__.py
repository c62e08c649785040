"""Facts about single ops, for all stages: cost, effects, draws, views."""
