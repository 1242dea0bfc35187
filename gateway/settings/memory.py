"""Where models come from, which are in memory, for how long, and how much of it they may have."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from gateway.settings.values import HomePath, library, lower


class MemorySettings(BaseModel):
    """Models: the device, the hub, memory."""

    device: Annotated[Literal["auto", "cpu", "gpu"], BeforeValidator(lower)] = Field(
        default="auto", description="Where MLX computes; auto is the GPU where there is one."
    )
    blas: Annotated[str, AfterValidator(library)] = Field(
        default="wheel",
        description="What multiplies matrices on Linux: OpenBLAS of the package scipy-openblas32 "
        "(`wheel`; where it can't be used, the system's), the system's (`system`), or the path of "
        "one.",
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
        default=256,
        ge=1,
        le=16_777_216,
        description="Answer tokens whose KV must be free for a request to join; a longer answer "
        "grows, and when memory ends the youngest is read again later.",
    )
    load_wait_s: float = Field(
        default=20,
        ge=0,
        le=3600,
        description="How long a request waits for its model, a model for room (twice as long after "
        "each refusal in a row), and answers for memory that other models hold; then 503.",
    )
    model_ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="Idle seconds after which a model is unloaded; never when unset.",
    )
    warm_up: bool = Field(
        default=True, description="Run one small pass at load, so that no request is the first."
    )
    self_test: bool = Field(
        default=True,
        description="At load, compare a chat model's answers in a batch with those alone, for two "
        "seconds at most; where they differ, its rows run one at a time.",
    )
    self_test_folder: HomePath | None = Field(
        default=None,
        description="Where outcomes are kept; unset, mlx-gateway/self-tests in the user's cache.",
    )
    give_back_s: float = Field(
        default=15,
        gt=0,
        le=86_400,
        description="How often freed memory is given back to the system.",
    )
    responses_kept: int = Field(
        default=1000,
        ge=0,
        le=1_000_000,
        description="Responses kept in memory for `previous_response_id`, item references and "
        "`GET /v1/responses/{id}`, shared evenly by the API keys; 0 keeps none.",
    )
    responses_max_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024,
        description="JSON that kept responses may hold, shared evenly by the API keys.",
    )
    responses_ttl_s: float = Field(default=86_400, gt=0, description="How long a response is kept.")
    mlx_cache_limit_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Freed memory MLX keeps for reuse; when unset a quarter of Metal's working "
        "set, 32 MiB on a CPU.",
    )
    mlx_wired_limit_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Memory Metal keeps resident; none when unset: wired memory was seen to panic "
        "macOS's kernel under loads like this one's (mlx issue 3186).",
    )
