"""Every setting of the gateway, with its type, bounds, default and description."""

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

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

PREFIX = "GATEWAY_"


def is_local(bind: str) -> bool:
    """Return True if only this machine can reach an address of Hypercorn's."""
    if bind.startswith("unix:"):
        return True
    host = with_port(bind, 0).rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name or an inherited socket may be open to everyone


def _is_socket(bind: str) -> bool:
    return bind.startswith(("unix:", "fd://"))


def with_port(bind: str, port: int) -> str:
    """Add a port to an address that has none; a socket's address stays as it is."""
    if _is_socket(bind) or (bind.startswith("[") and "]:" in bind) or bind.count(":") == 1:
        return bind
    host = bind.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _split(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\*|(\*\.)?[^*/:@?#\s\[\]]+|\[[0-9a-f:]+\])(:(?P<port>\d+|\*))?"
)
_USUAL_PORTS = {"http": "80", "https": "443"}  # ports that browsers leave out of an origin


def _read_origin(value: str) -> str:
    """Check an origin, whose port, host or subdomains may be `*`."""
    if value in ("*", "null"):
        return value
    match = _ORIGIN.fullmatch(value.lower())
    if match is None:
        raise ValueError(
            f"{value!r} matches no origin: write `scheme://host` or `scheme://host:port`; the "
            "port, the host, or the names before a domain may be `*`"
        )
    if match["port"] is not None and match["port"] == _USUAL_PORTS.get(match["scheme"]):
        raise ValueError(f"{value!r} matches no origin: browsers leave out :{match['port']} there")
    return value.lower()


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _library(value: str) -> str:
    value = value.strip()
    if value.lower() in ("wheel", "system"):
        return value.lower()
    if not os.path.isfile(os.path.expanduser(value)):
        raise ValueError("should be wheel, system, or the path of a library that is there")
    return value


def _expand_home(path: Path) -> Path:
    """Expand `~`, but leave the `~name` of an unknown user, for which Path.expanduser fails."""
    return Path(os.path.expanduser(path))


HomePath = Annotated[Path, AfterValidator(_expand_home)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_read_origin)], ...], NoDecode, BeforeValidator(_split)
]
Patterns = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[\w.*-]+/[\w.*-]+$")], ...],
    NoDecode,
    BeforeValidator(_split),
]
PrefixBytes: TypeAlias = Literal["auto"] | Annotated[int, Field(ge=0)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]


def variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def default_models_file() -> Path:
    """Return the models.yaml of the current folder, or else the shipped one."""
    own = Path("models.yaml")
    if own.is_file():
        return own
    return shipped_models_file()


def shipped_models_file() -> Path:
    """Return the models.yaml of the wheel, or else of the checkout."""
    package = Path(__file__).parents[1]
    in_wheel = package / "models.yaml"
    if in_wheel.is_file():
        return in_wheel
    return package.parent / "models.yaml"


class Settings(BaseSettings):
    """Every setting, read from the variable GATEWAY_ and the field's name in capitals."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",  # other variables may set keys of models.yaml
        frozen=True,
        hide_input_in_errors=True,
        validate_default=False,
    )

    # ── Addresses, callers, logs ──────────────────────────────────────────────────────────────────

    models: HomePath = Field(default_factory=default_models_file)
    """The file that lists the models."""
    serve: Texts = ()
    """Models to serve by name: `hub:org/name`, a folder, a GGUF file, or an id of the models file.
    Unless that file is set too, no other models are served.
    """
    discover: Texts = ()
    """Where to look for models on this machine, which are then served: `huggingface` (its cache),
    `lmstudio`, or folders.
    """

    # Addresses
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    bind: Texts = ()
    """Addresses to listen on in place of the host: `[::1]:80`, `unix:/run/gw.sock`."""
    tls_cert: FilePath | None = None
    """Certificate chain in PEM; needs the private key too."""
    tls_key: FilePath | None = None
    """Private key in PEM, without a password."""
    keep_alive_timeout_s: float = Field(default=75, gt=0, le=3600)
    """How long an idle connection is kept."""

    # Callers
    api_keys: Secrets = ()
    """Keys that callers send as a bearer token or in x-api-key; when unset, no key is needed."""
    shared_prefixes: bool = False
    """Callers with different keys share kept prompts and embeddings. That is faster, but each can
    find out what others have asked.
    """
    admin_key: SecretStr | None = None
    """Bearer key for /admin; if unset, /admin is off (404)."""
    allow_unauthenticated: bool = False
    """Allow listening beyond loopback without keys."""
    allowed_hosts: Texts = ()
    """`Host` headers allowed while there are no keys, besides this machine's."""
    cors_origins: Origins = ()
    """Origins of web pages that may call, besides desktop apps; `http://localhost:*` is any port,
    `*` any origin.
    """

    dashboard: bool = True
    """Serve /dashboard; without API keys, only while listening on loopback alone."""

    # Logs
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = (
        "info"
    )
    """The least serious event that is logged."""
    log_format: Annotated[Literal["auto", "json", "console"], BeforeValidator(_lower)] = "auto"
    """Form of log lines; auto is console on a terminal, else JSON."""
    log_prompts: bool = False
    """Log all requests in full, with the size of each image, and of other base64, in its place."""

    # ── Models: the device, the hub, memory ───────────────────────────────────────────────────────

    device: Annotated[Literal["auto", "cpu", "gpu"], BeforeValidator(_lower)] = "auto"
    """Where MLX computes; auto is the GPU where there is one."""
    blas: Annotated[str, AfterValidator(_library)] = "wheel"
    """The library that multiplies matrices on Linux: `wheel` is OpenBLAS of the package
    scipy-openblas32 or, without that, the system's; `system` is the system's; or a library's path.
    """
    auto_pull: bool = True
    """Download a hub model at its first request."""
    any_model: Patterns = ()
    """Hub models outside the models file that a request may name, such as `mlx-community/*`. They
    are downloaded then. Needs API keys, or listening on loopback alone.
    """
    disk_reserve_bytes: int = Field(default=10 * 1024**3, ge=0)
    """Bytes of the disk that must stay free when a model outside models.yaml is downloaded."""
    hub_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    """Another model hub, such as a mirror."""
    hub_timeout_s: float = Field(default=4, gt=0, le=600)
    """How long the hub may take to answer; then 503."""
    hub_cache: HomePath | None = None
    """Folder of downloaded models; when unset, Hugging Face's cache."""
    cache_max_models: int = Field(default=3, ge=1, le=64)
    """Most models loaded at once; for another one, the least recently used idle model is evicted.
    """
    cache_max_bytes: int | None = Field(default=None, ge=1)
    """Memory that loaded models and answers under way may take."""
    kv_allowance_tokens: int = Field(default=4096, ge=0, le=16_777_216)
    """Tokens whose KV is added to a chat model's size when memory is reserved for its load."""
    kv_answer_tokens: int = Field(default=256, ge=1, le=16_777_216)
    """An answer begins once there is memory for this many of its tokens. If memory runs out later,
    the youngest answer waits and goes on afterwards.
    """
    load_wait_s: float = Field(default=20, ge=0, le=3600)
    """How long a request waits for its model to load, and an answer for memory that other models
    hold; then 503.
    """
    model_ttl_s: float | None = Field(default=None, gt=0)
    """Seconds without a request after which a model is unloaded."""
    ready_in_part: bool = False
    """Answer 200 on /ready though some (not all) preloaded models failed to load."""
    warm_up: bool = True
    """Run a model once at load, so that the first request is as fast as later ones."""
    self_test: bool = True
    """Compare a chat model's answers in a batch with its answers alone: at load for at most two
    seconds, then while it is idle. If they differ, it answers one request at a time.
    """
    self_test_folder: HomePath | None = None
    """Folder for the results of self-tests; when unset, mlx-gateway/self-tests in the user's cache.
    """
    give_back_s: float = Field(default=15, gt=0, le=86_400)
    """How often freed memory is given back to the system."""
    responses_kept: int = Field(default=1000, ge=0, le=1_000_000)
    """Responses kept in memory for `previous_response_id`, item references and `GET
    /v1/responses/{id}`, in even shares for the API keys; 0 keeps none.
    """
    responses_max_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Bytes that kept responses may take, in even shares for the API keys."""
    responses_ttl_s: float = Field(default=86_400, gt=0)
    """How long a response is kept."""
    mlx_cache_limit_bytes: int | None = Field(default=None, ge=0)
    """Freed memory that MLX keeps for reuse; when unset, a quarter of Metal's working set, or 32
    MiB on a CPU.
    """
    mlx_wired_limit_bytes: int | None = Field(default=None, ge=0)
    """Memory that Metal keeps resident (wired); none when unset, because wired memory has made
    macOS's kernel panic under such loads (mlx issue 3186).
    """

    # ── Batches, grammars, shares of the device, queues ───────────────────────────────────────────

    embedding_max_batch_size: int = Field(default=32, ge=1, le=4096)
    """Texts in one pass; 1 turns batching off."""
    embedding_max_batch_tokens: int = Field(default=16_384, ge=1, le=4_194_304)
    """Tokens in one pass, with padding."""
    embedding_batch_window_ms: float = Field(default=10, ge=0, le=1000)
    """How long an idle device waits for more texts."""
    embedding_adaptive_window: bool = False
    """Let the load choose the wait for more texts."""
    embedding_window_low_ms: float = Field(default=2, ge=0, le=1000)
    """Adaptive wait while the load is under a quarter of a batch."""
    embedding_window_medium_ms: float = Field(default=10, ge=0, le=1000)
    """Adaptive wait while the load is at least a quarter of a batch."""
    embedding_window_high_ms: float = Field(default=25, ge=0, le=1000)
    """Adaptive wait while the load is a batch or more."""
    embedding_min_batch_size: int = Field(default=1, ge=1, le=4096)
    """If fewer texts than this are waiting, they wait for more even while no request arrives."""
    embedding_batch_deadline_ms: float = Field(default=100, ge=0, le=10_000)
    """The longest time that a text waits for more texts."""
    embedding_cache_size: int = Field(default=0, ge=0, le=10_000_000)
    """Vectors of earlier texts that are kept, per model; 0 keeps none."""
    generation_max_batch_size: int = Field(default=32, ge=1, le=1024)
    """Answers written together; 1 turns batching off."""
    prefill_chunk_tokens: int = Field(default=512, ge=16, le=65_536)
    """Prompt tokens read in one pass: the number of prompts times the longest piece of one. The
    rest of a prompt is read with the piece before it if it is at most a quarter of a piece.
    """
    prefix_cache_bytes: PrefixBytes = "auto"
    """Bytes of KV of earlier prompts that are kept for prompts that begin alike. `auto` is up to a
    quarter of the device's memory for all chat models together, less if models and a row of 32,768
    tokens need it. A number is for each chat model; 0 keeps none.
    """
    prefix_folder: HomePath | None = None
    """Folder in which kept prompts outlive a restart, unencrypted. No other gateway may use it.
    When unset, none are stored.
    """
    prefix_folder_bytes: int = Field(default=20 * 1024**3, ge=1)
    """Bytes of the files in the prefix folder; the least recently used are deleted first."""
    speculate_rows: int = Field(default=8, ge=0, le=8)
    """While at most this many answers decode, tokens are read ahead: those for which a grammar
    leaves no choice, and guesses from the prompt, from a draft model or from the model's own
    head. 0 is never.
    """
    structured_rows: int = Field(default=1, ge=1, le=1024)
    """Structured answers decoded together, per model."""
    structured_compile_timeout_s: float = Field(default=2, gt=0, le=600)
    """Processor time that a grammar may take to compile; beyond it, 400. A request waits up to
    fifteen times as long for its grammar; then 503.
    """
    structured_cache_size: int = Field(default=128, ge=1, le=65_536)
    """Compiled grammars kept, per model."""
    lane_weight_embedding: float = Field(default=1, gt=0, le=1000)
    """Share of the device for embeddings and reranking, while other work waits."""
    lane_weight_prefill: float = Field(default=1, gt=0, le=1000)
    """Share of the device for reading prompts."""
    lane_weight_decode: float = Field(default=1, gt=0, le=1000)
    """Share of the device for writing answers."""
    lane_weight_load: float = Field(default=1, gt=0, le=1000)
    """Share of the device for loading models."""
    pass_limit_s: float = Field(default=0.25, gt=0, le=60)
    """How long one pass of embeddings or prompts may take, judged by earlier passes. Longer work is
    divided, and other work has its turn in between.
    """
    tier_head_start_s: float = Field(default=5, ge=0, le=3600)
    """Effect of `service_tier`: a request counts as arriving this much earlier with priority, and
    this much later with flex.
    """
    queue_limit: int = Field(default=256, ge=1)
    """Most requests that a model may have at once, waiting or running, and most choices; beyond it,
    429.
    """
    queue_max_tokens: int = Field(default=2_000_000, ge=1)
    """Most tokens that a model's requests may have together, waiting or running (a single request
    may have more); beyond it, 429.
    """

    # ── Limits of requests, deadlines, stalls ─────────────────────────────────────────────────────

    # Parsing a body of this size holds up all other requests for 0.06 to 1 second on a slow core.
    # The default has room for a base64 image, a million escaped characters, or OpenAI's largest
    # embeddings request.
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, le=2**31)
    """Largest request body; beyond it, 413."""
    max_bodies_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Bytes of all request bodies under way and all answers that clients have not read yet, without
    the first 64 KiB of each; beyond it, 503.
    """
    max_header_bytes: int = Field(default=32 * 1024, ge=1024, le=1024 * 1024)
    """Largest request head: path, query and headers; beyond it, 431."""
    body_timeout_s: float = Field(default=30, gt=0, le=3600)
    """Time a body may take to arrive; then 408."""
    max_input_chars: int = Field(default=1_000_000, ge=1)
    """Longest text that is tokenized; beyond it, 400."""
    max_request_chars: int = Field(default=8_000_000, ge=1)
    """Characters of a request's texts together; beyond it, 400."""
    max_images: int = Field(default=64, ge=1, le=4096)
    """Images of one conversation; beyond it, 400."""
    max_image_bytes: int = Field(default=20 * 1024 * 1024, ge=1, le=2**31)
    """Largest image, as a file; beyond it, 400."""
    max_json_depth: int = Field(default=64, ge=8, le=200)
    """How deep JSON may be nested; beyond it, 400."""
    max_messages: int = Field(default=4096, ge=1, le=1_000_000)
    """Messages of one chat; beyond it, 400."""
    max_schema_bytes: int = Field(default=256 * 1024, ge=64, le=256 * 1024)
    """Largest JSON Schema, grammar or list of choices; beyond it, 400."""
    max_regex_chars: int = Field(default=8192, ge=1, le=32_768)
    """Longest regular expression; beyond it, 400."""
    strict_fields: bool = False
    """Answer 400 to unknown request fields."""
    leave_out_images: bool = False
    """If a model reads only text, leave out images of earlier turns and of tool results; an image
    in the newest message is still a 400. The header `x-gateway-leave-out-images` takes precedence.
    """
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests a key may make in a minute; then 429. No limit when unset."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens a key may have read and written in a minute; then 429. No limit when unset."""

    request_timeout_s: float = Field(default=600, gt=0, le=86_400)
    """Longest time for one request; then 504."""
    stream_open_after_s: float = Field(default=10, gt=0, le=600)
    """How long a stream's status 200 waits for the first token; then it is sent without one."""
    send_timeout_s: float = Field(default=30, gt=0, le=3600)
    """How long a client may leave its answer unread; after that it must read 128 KiB a second on
    average.
    """
    drain_s: float = Field(default=30, ge=0, le=3600)
    """How long answers may take to finish after SIGTERM or Ctrl-C."""

    stall_limit_s: float = Field(default=60, gt=0, le=86_400)
    """How long one call may keep the device, unless four times the longest similar call is longer;
    then it counts as stuck, and /health is 503.
    """
    load_stall_limit_s: float = Field(default=600, gt=0, le=86_400)
    """The stall limit for a step of loading, and for a call without earlier similar ones."""
    exit_on_stall: bool = True
    """End the process with status 70 when a call is stuck or the device has failed for good, so
    that a supervisor can start it again.
    """

    @field_validator("bind")
    @classmethod
    def _ports_are_numbers(cls, binds: tuple[str, ...]) -> tuple[str, ...]:
        for bind in binds:
            port = with_port(bind, 0).rpartition(":")[2]
            if not _is_socket(bind) and not (port.isdecimal() and int(port) <= 65535):
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
        if self.api_keys or not open_binds:
            return self
        if not self.allow_unauthenticated:
            raise ValueError(
                f"{', '.join(open_binds)} is beyond loopback and there are no keys: set "
                "GATEWAY_API_KEYS, or GATEWAY_ALLOW_UNAUTHENTICATED=true to let anyone in"
            )
        if self.any_model:
            raise ValueError(
                "GATEWAY_ANY_MODEL lets callers fill this disk: set GATEWAY_API_KEYS, or listen on "
                "loopback alone"
            )
        return self

    @property
    def models_file(self) -> Path | None:
        """Return the file whose models are served; None if only the models in `serve` are."""
        if self.serve and "models" not in self.model_fields_set:
            return None
        return self.models

    @property
    def binds(self) -> tuple[str, ...]:
        return tuple(with_port(bind, self.port) for bind in self.bind or (self.host,))

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"

    @property
    def has_dashboard(self) -> bool:
        return self.dashboard and (bool(self.api_keys) or all(map(is_local, self.binds)))

    @property
    def read_header_bytes(self) -> int:
        """Return Hypercorn's own limit, above the gateway's because Hypercorn's 431 has no JSON."""
        return 4 * self.max_header_bytes
