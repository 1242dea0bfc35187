"""Reads settings from flags, the environment and .env into one frozen object.

settings   every setting, with its type, bounds, default and description
sources    finds where values come from, describes wrong values, and lists all settings

"""

from gateway.settings.settings import (
    PREFIX,
    PrefixBytes,
    Settings,
    default_models_file,
    is_local,
    shipped_models_file,
    variable,
    with_port,
)
from gateway.settings.sources import (
    ENV_FILE,
    VARIABLES,
    Knob,
    SettingsInvalid,
    explain,
    exports_traces,
    load_settings,
    origin,
    strays,
    variables,
)

__all__ = [
    "ENV_FILE",
    "PREFIX",
    "VARIABLES",
    "Knob",
    "PrefixBytes",
    "Settings",
    "SettingsInvalid",
    "default_models_file",
    "explain",
    "exports_traces",
    "is_local",
    "load_settings",
    "origin",
    "shipped_models_file",
    "strays",
    "variable",
    "variables",
    "with_port",
]
