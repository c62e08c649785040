"""Kernels written by hand, each module with its reference in plain torch beside it.

A kernel's function takes tensors and returns new ones. It launches on the current device, writes
to none of its inputs, and accumulates in float32.
"""
