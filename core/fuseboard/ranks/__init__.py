"""The ranks of a distributed job compile the same: one measures, all follow."""
