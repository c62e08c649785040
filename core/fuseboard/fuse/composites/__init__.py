"""Composites: what models compute by many ops and backends by one kernel, found under a name.

One module for each subject. It has readers, which tell an op as a composite, and ways of writing
one out, which are patterns.
"""
