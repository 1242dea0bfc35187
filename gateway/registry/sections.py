"""The parts a spec is made of: names, and sections that override settings."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\s,]+$")]


class Section(BaseModel):
    """A mapping of models.yaml: unknown keys are errors, an empty value is an absent one."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, data: object) -> object:
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if value is not None}
        return data


class Alias(Section):
    """A further name for a model, with what asking by that name implies."""

    name: Name = Field(description="The name that clients send.")
    prompt_name: str | None = Field(
        default=None, description="The prompt put before every text asked for by this name."
    )
    thinking: bool | None = Field(
        default=None, description="Whether the model thinks aloud when asked by this name."
    )


class EmbeddingBatching(Section):
    """How waiting inputs share a forward pass; each falls back to the setting of its name."""

    max_batch_size: int | None = Field(
        default=None, ge=1, le=4096, description="Inputs in one pass; 1 turns batching off."
    )
    max_batch_tokens: int | None = Field(
        default=None, ge=1, le=4_194_304, description="Padded tokens in one pass."
    )
    batch_window_ms: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="How long an idle lane waits for a burst, milliseconds.",
    )
    adaptive_window: bool | None = Field(
        default=None, description="Let the load choose the window."
    )
    min_batch_size: int | None = Field(
        default=None, ge=1, le=4096, description="Fewer inputs wait the window out."
    )
    batch_deadline_ms: float | None = Field(
        default=None, ge=0, le=10_000, description="Longest an input waits for a burst."
    )
    cache_size: int | None = Field(
        default=None, ge=0, le=10_000_000, description="Vectors kept by text; 0 is none."
    )


BatchingMode = Literal["auto", "force", "off"]
Modes = BatchingMode | bool


def batching_mode(value: object) -> object:
    """Read YAML's false, which an unquoted `off` is, as a mode."""
    return {True: "auto", False: "off"}[value] if isinstance(value, bool) else value


class ChatBatching(Section):
    """How answers share decoding steps; each falls back to the setting of its name."""

    max_batch_size: int | None = Field(
        default=None, ge=1, le=1024, description="Answers decoded together; 1 turns batching off."
    )
    prefill_chunk_tokens: int | None = Field(
        default=None, ge=16, le=65_536, description="Prompt tokens read in one turn."
    )
    prefix_cache_bytes: int | None = Field(
        default=None, ge=0, description="KV kept of prompts that others may begin with; 0 is none."
    )
    mode: Annotated[BatchingMode, BeforeValidator(batching_mode, json_schema_input_type=Modes)] = (
        Field(
            default="auto",
            description="Whether answers are decoded together: as a self-test allows, always, or "
            "one at a time.",
        )
    )


class Structured(Section):
    """How answers are held to a grammar; what is absent falls back to the settings."""

    backend: Literal["llguidance", "outlines_core"] | None = Field(
        default=None,
        description="Has no effect any more: llguidance compiles every grammar.",
        json_schema_extra={"deprecated": True},
    )
    rows: int | None = Field(
        default=None, ge=1, le=1024, description="Grammar-bound answers decoded together."
    )
    max_string_chars: int | None = Field(
        default=None, ge=1, description="Longest string where a schema sets no bound."
    )
    max_array_items: int | None = Field(
        default=None, ge=1, description="Longest array where a schema sets no bound."
    )
    schema_in_prompt: bool = Field(
        default=False,
        description="Hold a json_object answer to a JSON Schema that ends the last message.",
    )


class Sampling(Section):
    """Defaults for what a request leaves out; absent, the checkpoint's generation_config.json."""

    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus probability.")
    top_k: int | None = Field(default=None, ge=0, description="Best tokens kept; 0 keeps all.")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Floor relative to the best token."
    )
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=10, description="Above 1, what was read or said is said less."
    )
    max_tokens: int | None = Field(default=None, ge=1, description="Longest answer, tokens.")
