"""Settings: the environment, .env and flags → one frozen object.

    binds     what is listened on
    memory    the knobs of models in memory
    limits    the knobs of what a request, and a caller in a minute, may cost
    watch     the knobs of stalls and of what may wait
    fields    every knob: type, bound, default, one line of meaning
    reading   where values come from, and what is said of a wrong one
    knobs     the settings as lists: for `config`, and for the README's table

Config stops at app.py: below it, plain arguments.
"""

from gateway.settings.binds import is_local
from gateway.settings.fields import PREFIX, Settings, default_models_file
from gateway.settings.knobs import Knob, environment_table, explain, strays, variable
from gateway.settings.reading import ENV_FILE, SettingsInvalid, load_settings, origin, variables

__all__ = [
    "ENV_FILE",
    "PREFIX",
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
