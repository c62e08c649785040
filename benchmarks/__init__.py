"""Measures fuseboard against eager and Inductor, side by side. ``python -m benchmarks --help``.

The parent process never imports torch: what it measures runs in fresh worker processes.
"""
