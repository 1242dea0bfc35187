"""Every knob of the gateway, with its type, bound, default and one line of meaning."""

from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.settings.batching import BatchingSettings
from gateway.settings.limits import LimitSettings
from gateway.settings.listening import ListeningSettings
from gateway.settings.memory import MemorySettings
from gateway.settings.watch import WatchSettings

PREFIX = "GATEWAY_"


# The last is listed first: so pydantic collects fields.
class Settings(
    WatchSettings,
    LimitSettings,
    BatchingSettings,
    MemorySettings,
    ListeningSettings,
    BaseSettings,
):
    """Every knob of the gateway; a field's variable is GATEWAY_ and its name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",  # models.yaml has variables of its own
        frozen=True,
        hide_input_in_errors=True,
        validate_default=False,
    )
