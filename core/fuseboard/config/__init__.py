"""The settings: ``model`` holds them and where each was set, ``sources`` reads them.

(Not named ``settings``: ``fuseboard.settings`` is the context manager.)
"""

from fuseboard.config.model import (
    PRESETS,
    STAGES,
    SettingRow,
    Settings,
    check,
    describe,
    resolve,
    settings,
)
from fuseboard.config.sources import RawSource

__all__ = [
    "PRESETS",
    "STAGES",
    "RawSource",
    "SettingRow",
    "Settings",
    "check",
    "describe",
    "resolve",
    "settings",
]
