"""The programs of the conformance suite, one module for each kind.

Names begin with the family. To add one, write what eager promises about it and nothing more: the
suite passes on eager itself, and its results in float64 are close to eager's (both are tested).
"""

from fuseboard.testing.program import Program
from fuseboard.testing.programs import elementwise, indexing, layers, reductions, state

PROGRAMS: tuple[Program, ...] = (
    *elementwise.PROGRAMS,
    *reductions.PROGRAMS,
    *layers.PROGRAMS,
    *indexing.PROGRAMS,
    *state.PROGRAMS,
)
