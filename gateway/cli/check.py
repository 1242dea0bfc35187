"""`mlx-gateway check`: validate the settings and models.yaml; no weights are read."""

from gateway.cli._checks import machine_problems
from gateway.cli._options import ModelsFile
from gateway.errors import RegistryInvalid
from gateway.registry import read_models
from gateway.settings import SettingsInvalid, load_settings, strays, variables


def check(models: ModelsFile = None) -> None:
    """Check the settings and the models file, without reading weights.

    Each mistake is a line with file, line and the nearest valid name.
    """
    settings = load_settings({"models": models})
    if problems := machine_problems(settings):
        raise SettingsInvalid(problems)
    reading = read_models(settings.models, variables())
    for note in (*reading.notes, *strays(reading.variables)):
        print(f"note: {note}")
    if reading.problems:
        raise RegistryInvalid(list(reading.problems))
    preloaded, max_models = reading.catalog.preloaded(), settings.cache_max_models
    if len(preloaded) > max_models:
        print(
            f"note: {settings.models} preloads {len(preloaded)} models, and "
            f"GATEWAY_CACHE_MAX_MODELS is {max_models}: only the last {max_models} stay loaded"
        )
    names = len(reading.catalog.names())
    print(f"{settings.models}: {len(reading.catalog)} models by {names} names, no problems")
