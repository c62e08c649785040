"""Ahead of time: a model as one file, which another process loads and calls without compiling."""
