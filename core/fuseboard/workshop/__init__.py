"""Beside the calls: a graph's life, the process that tries candidates, what goes there and back."""
