"""Where models come from, which are in memory, for how long, and how much of it they may have."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gateway.settings.values import HomePath, lower


class MemorySettings(BaseModel):
    """Models: the device, the hub, memory."""

    device: Annotated[Literal["auto", "cpu", "gpu"], BeforeValidator(lower)] = Field(
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
    cache_max_models: int = Field(
        default=3,
        ge=1,
        le=64,
        description="Models loaded at once; the least recently used idle one leaves.",
    )
    cache_max_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Memory that loaded models and their rows may hold.",
        json_schema_extra={"default_text": "three quarters of what the device offers"},
    )
    kv_allowance_tokens: int = Field(
        default=4096,
        ge=0,
        le=16_777_216,
        description="Tokens whose KV is counted to a chat model's size before it is loaded.",
    )
    kv_answer_tokens: int = Field(
        default=4096,
        ge=1,
        le=16_777_216,
        description="Answer tokens whose KV a request without max_tokens is sure of; it goes on "
        "while there is memory, and ends there.",
    )
    load_wait_s: float = Field(
        default=20,
        ge=0,
        le=3600,
        description="How long a request waits for its model, a model for room, and answers for "
        "memory that other models hold; then 503.",
    )
    model_ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="Idle seconds after which a model is unloaded; never when unset.",
    )
    warm_up: bool = Field(
        default=True, description="Run one small pass at load, so that no request is the first."
    )
    give_back_s: float = Field(
        default=15,
        gt=0,
        le=86_400,
        description="How often freed memory is given back to the system, on a CPU.",
    )
    mlx_cache_limit_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Freed memory MLX keeps for reuse; when unset all of a GPU's, 32 MiB on a CPU.",
    )
    mlx_wired_limit_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Memory Metal keeps resident; the device's recommended working set when unset.",
    )
