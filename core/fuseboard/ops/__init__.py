"""Facts about single ops, for all stages: cost, effects, draws, views; and the board's own op."""

from fuseboard.ops import attention as attention
