"""Where it listens, who may ask, and what it says."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    FilePath,
    SecretStr,
    field_validator,
    model_validator,
)

from gateway.settings.binds import is_local, is_socket, with_port
from gateway.settings.values import HomePath, Secrets, Texts, lower


def default_models_file() -> Path:
    """Choose models.yaml here, else the one in the wheel, else the checkout's."""
    package = Path(__file__).parents[1]
    for candidate in (Path("models.yaml"), package / "models.yaml", package.parent / "models.yaml"):
        if candidate.is_file():
            return candidate
    return Path("models.yaml")


class ListeningSettings(BaseModel):
    """The door: binds, keys, hosts and origins; and the log."""

    models: HomePath = Field(
        default_factory=default_models_file,
        description="The file that says which models there are.",
        json_schema_extra={"default_text": "`models.yaml` here, else the packaged one"},
    )

    # Where it listens
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one."
    )
    bind: Texts = Field(
        default=(),
        description="Hypercorn binds (`unix:/run/gw.sock`, `[::1]:80`) in place of the host.",
    )
    tls_cert: FilePath | None = Field(
        default=None, description="Certificate chain, PEM; needs the key."
    )
    tls_key: FilePath | None = Field(
        default=None, description="The certificate's private key, PEM."
    )
    keep_alive_timeout_s: float = Field(
        default=75, gt=0, le=3600, description="How long an idle connection is kept."
    )

    # Who may ask
    api_keys: Secrets = Field(default=(), description="Bearer keys; none leaves the gateway open.")
    admin_key: SecretStr | None = Field(
        default=None, description="Bearer key of the /admin routes; without one there are none."
    )
    allow_unauthenticated: bool = Field(
        default=False, description="Allow listening beyond loopback without keys."
    )
    allowed_hosts: Texts = Field(
        default=(), description="Host headers allowed, beside loopback, while there are no keys."
    )
    cors_origins: Texts = Field(
        default=(), description="Browser origins that may call; `*` is all."
    )

    # What it says
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)] = (
        Field(default="info", description="Least serious event that is logged.")
    )
    log_format: Annotated[Literal["auto", "json", "console"], BeforeValidator(lower)] = Field(
        default="auto", description="auto is console on a terminal and JSON elsewhere."
    )
    log_prompts: bool = Field(default=False, description="Log what callers ask, in full.")

    @field_validator("bind")
    @classmethod
    def _ports_are_numbers(cls, binds: tuple[str, ...]) -> tuple[str, ...]:
        for bind in binds:
            port = with_port(bind, 0).rpartition(":")[2]
            if not is_socket(bind) and not (port.isdecimal() and int(port) <= 65535):
                raise ValueError(f"{bind!r} should end in a port between 0 and 65535")
        return binds

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "ListeningSettings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("GATEWAY_TLS_CERT and GATEWAY_TLS_KEY go together: set both or none")
        return self

    @model_validator(mode="after")
    def _not_open_to_the_world(self) -> "ListeningSettings":
        open_binds = [bind for bind in self.binds if not is_local(bind)]
        if open_binds and not self.api_keys and not self.allow_unauthenticated:
            raise ValueError(
                f"{', '.join(open_binds)} is beyond loopback and there are no keys: set "
                "GATEWAY_API_KEYS, or GATEWAY_ALLOW_UNAUTHENTICATED=true to let anyone in"
            )
        return self

    @property
    def binds(self) -> tuple[str, ...]:
        """What Hypercorn listens on: `bind`, else host; a bind without a port has `port`."""
        return tuple(with_port(bind, self.port) for bind in self.bind or (self.host,))
