"""The board: the registry of plugins, and sessions that call their hooks.

In the order in which a plugin meets them: ``registry`` finds it, ``registration`` examines it,
``plugin_options`` reads its options, ``overrides`` lets settings decide in its place, ``session``
calls its hooks within a ``deadline`` and checks its ``answers``.
"""

from fuseboard.board.registration import PluginState
from fuseboard.board.registry import Board, board, register, unregister
from fuseboard.board.session import Session

__all__ = ["Board", "PluginState", "Session", "board", "register", "unregister"]
