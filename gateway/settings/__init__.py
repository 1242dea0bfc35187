"""Settings: flags, the environment and .env → one frozen object.

settings   every setting, with its type, bounds, default and words
sources    where values come from, messages about wrong ones, and lists of all of them

Settings end at app: below it, plain arguments. The registry takes from here how a model's keys that
override settings are declared.
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
