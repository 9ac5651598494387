"""
The settings of a server. Every default is in config.yaml.

    sections.py   the frozen `Settings` tree: what each value may be
    patterns.py   which regular expressions an operator's rule may have: they must not take long on any text
    reading.py    files and overrides -> `Settings`, or an error that names the key path
"""

from kvshare.settings.reading import default_config_path, load_settings
from kvshare.settings.sections import (
    AuthSettings,
    ControlSettings,
    CostSettings,
    EngineSettings,
    IndexSettings,
    KeySettings,
    LoggingSettings,
    ModelSettings,
    RepairSettings,
    ReplicaSettings,
    RuleSettings,
    ServerSettings,
    Settings,
    SharingSettings,
    StoreSettings,
    VllmSettings,
)

__all__ = [
    "AuthSettings",
    "ControlSettings",
    "CostSettings",
    "EngineSettings",
    "IndexSettings",
    "KeySettings",
    "LoggingSettings",
    "ModelSettings",
    "RepairSettings",
    "ReplicaSettings",
    "RuleSettings",
    "ServerSettings",
    "Settings",
    "SharingSettings",
    "StoreSettings",
    "VllmSettings",
    "default_config_path",
    "load_settings",
]
