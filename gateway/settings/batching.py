"""How requests share passes and steps, and the device's time; models.yaml can override most."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field

from gateway.settings.values import lower


class BatchingSettings(BaseModel):
    """Batches, grammars, shares and queues."""

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
        Literal["llguidance", "outlines_core"], BeforeValidator(lower)
    ] = Field(
        default="llguidance",
        description="Has no effect any more: llguidance compiles every grammar.",
        json_schema_extra={"deprecated": True},
    )
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
    pass_limit_s: float = Field(
        default=0.25,
        gt=0,
        le=60,
        description="How long one pass of embeddings or of prompts may keep the device, as "
        "measured; what takes longer is cut, and others have their turn between.",
    )
    tier_head_start_s: float = Field(
        default=5,
        ge=0,
        le=3600,
        description="What `service_tier` is worth: priority counts as come so much sooner, flex "
        "so much later.",
    )
    queue_limit: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Requests inside, per model, and their choices; beyond it, 429.",
    )
