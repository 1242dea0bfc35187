"""What is watched and bounded: a lane that stalls, a queue of many tokens."""

from pydantic import BaseModel, Field


class WatchSettings(BaseModel):
    """Stalls, and how much may wait."""

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
