"""`mlx-gateway config`: every setting and variable in force, and where it came from."""

import sys
from collections.abc import Iterator

from gateway.cli._options import Host, ModelsFile, Port
from gateway.cli._table import show
from gateway.registry import Reading, read_models
from gateway.settings import VARIABLES, explain, load_settings, origin, strays, variables

_SECRET = frozenset({"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASS", "CREDENTIAL"})
"""Words of a variable's name that hide its value, in the plural too but for TOKENS, a number."""
_CHOICES = frozenset({"accept", "reject"})
"""What a model's key `token_ids` may be, which is no secret."""


def config(
    models: ModelsFile = None,
    host: Host = None,
    port: Port = None,
) -> None:
    """Print every setting with its value and where it comes from."""
    flags = {"models": models, "host": host, "port": port}
    settings = load_settings(flags)
    rows = [(knob.env, knob.value, knob.source) for knob in explain(settings, flags)]
    reading = read_models(settings.models, variables())
    show(("Setting", "Value", "Source"), [*rows, *_of_models(reading)])
    for note in strays(reading.variables):
        print(f"note: {note}", file=sys.stderr)


def _of_models(reading: Reading) -> Iterator[tuple[str, str, str]]:
    """Yield the variables of models.yaml that are set: those of models' keys, and any ${…}."""
    for name in sorted(reading.variables & variables().keys() - VARIABLES):
        value, source = origin(name)
        if value is not None:
            is_choice = name.endswith("_TOKEN_IDS") and value in _CHOICES
            is_secret = not is_choice and any(map(_is_secret, name.upper().split("_")))
            yield name, "**********" if is_secret else value, source


def _is_secret(word: str) -> bool:
    return word in _SECRET or (word != "TOKENS" and word.removesuffix("S") in _SECRET)
