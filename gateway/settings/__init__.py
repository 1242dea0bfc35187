"""Settings: the environment, .env and flags → one frozen object.

    binds     what is listened on
    values    how a variable's text becomes a list, a path, a secret or a word
    fields    every knob, gathered from: listening, memory (models and theirs), batching,
              limits (of a request, and of a caller in a minute), watch (time, stalls)
    reading   where values come from, and what is said of a wrong one
    knobs     the settings as lists: for `config`, and for docs/settings.md

Config stops at app.py: below it, plain arguments.
"""

from gateway.settings.binds import is_local
from gateway.settings.fields import PREFIX, Settings
from gateway.settings.knobs import (
    VARIABLES,
    Knob,
    environment_table,
    explain,
    strays,
    variable,
)
from gateway.settings.listening import default_models_file
from gateway.settings.reading import ENV_FILE, SettingsInvalid, load_settings, origin, variables

__all__ = [
    "ENV_FILE",
    "PREFIX",
    "VARIABLES",
    "Knob",
    "Settings",
    "SettingsInvalid",
    "default_models_file",
    "environment_table",
    "explain",
    "is_local",
    "load_settings",
    "origin",
    "strays",
    "variable",
    "variables",
]
