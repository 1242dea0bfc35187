"""What is watched and bounded: time, a lane that stalls, a queue of many tokens."""

from pydantic import BaseModel, Field


class WatchSettings(BaseModel):
    """Deadlines, stalls, and how much may wait."""

    request_timeout_s: float = Field(
        default=600, gt=0, le=86_400, description="Longest time for one request; then 504."
    )
    stream_open_after_s: float = Field(
        default=10,
        gt=0,
        le=600,
        description="How long an accepted stream's 200 is held for its first token.",
    )
    send_timeout_s: float = Field(
        default=30, gt=0, le=3600, description="How long a client may leave its answer unread."
    )
    drain_s: float = Field(
        default=30, ge=0, le=3600, description="How long answers may take to finish at shutdown."
    )

    stall_limit_s: float = Field(
        default=60,
        gt=0,
        le=86_400,
        description="How long one call may keep the device, or four times as long as its like "
        "did before; then it counts as stuck, and /health is 503.",
    )
    load_stall_limit_s: float = Field(
        default=600,
        gt=0,
        le=86_400,
        description="The same, for a step of loading and the first call of a shape.",
    )
    exit_on_stall: bool = Field(
        default=True,
        description="End the process, with status 70, when a call is stuck: its supervisor starts "
        "it again.",
    )
    queue_max_tokens: int = Field(
        default=2_000_000,
        ge=1,
        description="Tokens that may wait per model, but for one request alone; beyond it, 429.",
    )
