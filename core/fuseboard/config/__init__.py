"""The settings: ``model`` says which there are, ``layers`` which hold now, ``sources`` reads them.

(Not named ``settings``: ``fuseboard.settings`` is the context manager.)
"""

from fuseboard.config.layers import SettingRow, check, describe, resolve, settings
from fuseboard.config.model import PRESETS, STAGES, Settings
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
