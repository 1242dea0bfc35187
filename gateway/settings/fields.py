"""Every knob of the gateway, with its type, bound, default and one line of meaning."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FilePath,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.settings.binds import is_local, is_socket, with_port
from gateway.settings.limits import LimitSettings
from gateway.settings.memory import MemorySettings
from gateway.settings.watch import WatchSettings

PREFIX = "GATEWAY_"


def default_models_file() -> Path:
    """Choose models.yaml here, else the one in the wheel, else the checkout's."""
    package = Path(__file__).parents[1]
    for candidate in (Path("models.yaml"), package / "models.yaml", package.parent / "models.yaml"):
        if candidate.is_file():
            return candidate
    return Path("models.yaml")


def _split(value: object) -> object:
    """Read `a, b` as a list, without empty parts."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _home(path: Path) -> Path:
    """Put `~` in, which no shell does for .env; an unknown user's stays as written."""
    return Path(os.path.expanduser(path))


HomePath = Annotated[Path, AfterValidator(_home)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]


class Settings(MemorySettings, LimitSettings, WatchSettings, BaseSettings):
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
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = (
        Field(default="info", description="Least serious event that is logged.")
    )
    log_format: Annotated[Literal["auto", "json", "console"], BeforeValidator(_lower)] = Field(
        default="auto", description="auto is console on a terminal and JSON elsewhere."
    )
    log_prompts: bool = Field(default=False, description="Log what callers ask, in full.")

    # Models
    device: Annotated[Literal["auto", "cpu", "gpu"], BeforeValidator(_lower)] = Field(
        default="auto", description="Where MLX computes; auto is the GPU where there is one."
    )
    auto_pull: bool = Field(default=True, description="Download a hub model at its first request.")
    hub_endpoint: str | None = Field(
        default=None, pattern=r"^https?://", description="Another model hub, a mirror for instance."
    )
    hub_timeout_s: float = Field(
        default=4, gt=0, le=600, description="How long the hub may take to answer; then 503."
    )
    hub_cache: HomePath | None = Field(
        default=None, description="Folder of downloaded models; Hugging Face's own when unset."
    )

    # Batching; models.yaml can override these per model
    embedding_max_batch_size: int = Field(
        default=32, ge=1, le=4096, description="Inputs in one pass; 1 turns batching off."
    )
    embedding_max_batch_tokens: int = Field(
        default=16_384, ge=1, le=4_194_304, description="Padded tokens in one pass."
    )
    embedding_batch_window_ms: float = Field(
        default=10, ge=0, le=1000, description="How long an idle lane waits for a burst."
    )
    embedding_adaptive_window: bool = Field(
        default=False, description="Let the load choose the window, of these three."
    )
    embedding_window_low_ms: float = Field(
        default=2, ge=0, le=1000, description="Window below a quarter of a full batch."
    )
    embedding_window_medium_ms: float = Field(
        default=10, ge=0, le=1000, description="Window up to a full batch."
    )
    embedding_window_high_ms: float = Field(
        default=25, ge=0, le=1000, description="Window from a full batch on."
    )
    embedding_min_batch_size: int = Field(
        default=1, ge=1, le=4096, description="Fewer inputs wait the window out, come what may."
    )
    embedding_batch_deadline_ms: float = Field(
        default=100, ge=0, le=10_000, description="Longest an input waits for a burst, at any load."
    )
    embedding_cache_size: int = Field(
        default=0, ge=0, le=10_000_000, description="Vectors kept by text, per model; 0 is none."
    )
    generation_max_batch_size: int = Field(
        default=32, ge=1, le=1024, description="Answers decoded together; 1 turns batching off."
    )
    prefill_chunk_tokens: int = Field(
        default=512,
        ge=16,
        le=65_536,
        description="Prompt tokens read in one turn: rows times longest.",
    )
    prefix_cache_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=0,
        description="KV kept of prompts that others may begin with, per chat model; 0 is none.",
    )
    structured_backend: Annotated[
        Literal["llguidance", "outlines_core"], BeforeValidator(_lower)
    ] = Field(default="llguidance", description="Who compiles grammars.")
    structured_rows: int = Field(
        default=1, ge=1, le=1024, description="Grammar-bound answers decoded together, per model."
    )
    structured_compile_timeout_s: float = Field(
        default=10, gt=0, le=600, description="How long a grammar may take to compile; then 400."
    )
    structured_cache_size: int = Field(
        default=128, ge=1, le=65_536, description="Compiled grammars kept, per model."
    )
    lane_weight_embedding: float = Field(
        default=1, gt=0, le=1000, description="Share of the device, while others wait: embedding."
    )
    lane_weight_prefill: float = Field(
        default=1, gt=0, le=1000, description="The same: reading prompts."
    )
    lane_weight_decode: float = Field(
        default=1, gt=0, le=1000, description="The same: writing answers."
    )
    lane_weight_load: float = Field(
        default=1, gt=0, le=1000, description="The same: loading models."
    )
    tier_head_start_s: float = Field(
        default=5,
        ge=0,
        le=3600,
        description="What `service_tier` is worth: priority counts as come so much sooner, flex "
        "so much later.",
    )
    queue_limit: int = Field(
        default=256, ge=1, le=1_000_000, description="Jobs that may wait per model; beyond it, 429."
    )

    # Time
    request_timeout_s: float = Field(
        default=600, gt=0, le=86_400, description="Longest time for one request; then 504."
    )
    stream_open_after_s: float = Field(
        default=10, gt=0, le=600, description="How long a stream's 200 is held for its first token."
    )
    send_timeout_s: float = Field(
        default=30, gt=0, le=3600, description="How long a client may leave its answer unread."
    )
    drain_s: float = Field(
        default=30, ge=0, le=3600, description="How long answers may take to finish at shutdown."
    )

    @field_validator("bind")
    @classmethod
    def _ports_are_numbers(cls, binds: tuple[str, ...]) -> tuple[str, ...]:
        for bind in binds:
            port = with_port(bind, 0).rpartition(":")[2]
            if not is_socket(bind) and not (port.isdecimal() and int(port) <= 65535):
                raise ValueError(f"{bind!r} should end in a port between 0 and 65535")
        return binds

    @model_validator(mode="after")
    def _tls_is_whole(self) -> "Settings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("GATEWAY_TLS_CERT and GATEWAY_TLS_KEY go together: set both or none")
        return self

    @model_validator(mode="after")
    def _not_open_to_the_world(self) -> "Settings":
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
