"""
The settings of a server. Every default is in config.yaml.

    sections.py   the frozen `Settings` tree: what each value may be; section.py: what all its sections are
    shared_tier.py  of it a store in which several servers keep KV
    auth.py       of it API keys and tenants, which may also be in a file of their own
    patterns.py   which regular expressions an operator's rule may have: they must not take long on any text
    reading.py    files, environment and options -> `Settings` and the origin of each value, or an error that
                  names the key path
"""

from kvshare.settings.auth import Access, AuthSettings, KeySettings, TenantSettings
from kvshare.settings.reading import (
    SettingsSource,
    access_of,
    default_config_path,
    flattened,
    load_settings,
    validated,
)
from kvshare.settings.sections import (
    ControlSettings,
    CostSettings,
    EngineSettings,
    IndexSettings,
    LoggingSettings,
    ModelSettings,
    RepairSettings,
    ReplicaSettings,
    RuleSettings,
    ServerSettings,
    Settings,
    SharingSettings,
    StoreSettings,
    TracingSettings,
    VllmSettings,
)
from kvshare.settings.shared_tier import SharedTierSettings

__all__ = [
    "Access",
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
    "SettingsSource",
    "SharedTierSettings",
    "SharingSettings",
    "StoreSettings",
    "TenantSettings",
    "TracingSettings",
    "VllmSettings",
    "access_of",
    "default_config_path",
    "flattened",
    "load_settings",
    "validated",
]
