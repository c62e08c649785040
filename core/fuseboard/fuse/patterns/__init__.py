"""Rewrites by pattern: pairs of small functions, what is searched for and what replaces it."""
