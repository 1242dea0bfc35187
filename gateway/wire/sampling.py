"""How the next token is to be chosen: the fields that every generating endpoint shares."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator

from gateway.jobs import Sampling, Tier
from gateway.wire.bounds import FAST, NAME_CHARS
from gateway.wire.reading import Request

MAX_STOPS = 64  # OpenAI takes 4; agents of other servers send more
_TEXT = {"type": "string", "maxLength": NAME_CHARS}
_STOP = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOPS}]}


def _whole(given: object) -> object:
    """Read 12.0 as 12, as JSON has it, and -1 as no bound, as other servers have it."""
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    return None if type(given) is int and given == -1 else given


MaxTokens = Annotated[
    Annotated[int, Field(ge=1)] | None,
    BeforeValidator(_whole),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"enum": [-1, None]}]}),
]
MaxTokensOrZero = Annotated[  # to score a prompt, and write nothing
    Annotated[int, Field(ge=0)] | None,
    BeforeValidator(_whole),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"enum": [-1, None]}]}),
]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"]
MOST_BIASED = 1024  # tokens: OpenAI takes 300
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class SampledRequest(Request):
    """OpenAI's sampling fields, with vLLM's besides."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]],
        FAST,
        Field(default_factory=list, max_length=256),
    ]
    stop: Annotated[Any, WithJsonSchema(_STOP)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[
        dict[str, Bias],
        Field(
            default_factory=dict,
            json_schema_extra={
                "propertyNames": {"pattern": "^[0-9]{1,19}$"},
                "maxProperties": MOST_BIASED,
            },
        ),
    ]

    @field_validator("stop")
    @classmethod
    def _not_too_much(cls, given: object) -> tuple[str, ...]:
        stops = [given] if isinstance(given, str) else given
        if not isinstance(stops, list) or len(stops) > MAX_STOPS:
            raise ValueError(f"it should be a string or an array of at most {MAX_STOPS} strings")
        if not all(isinstance(stop, str) and len(stop) <= NAME_CHARS for stop in stops):
            raise ValueError(
                f"a stop sequence should be a string of at most {NAME_CHARS} characters"
            )
        return tuple(stop for stop in stops if stop)  # an empty one asks for nothing

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _not_too_many(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > MOST_BIASED:
            raise ValueError(f"it should name at most {MOST_BIASED} tokens, but names {len(given)}")
        return given

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, given: dict[str, float]) -> dict[str, float]:
        if not all(token.isascii() and token.isdigit() and len(token) < 20 for token in given):
            raise ValueError("its keys should be token ids")
        return given

    def sampling(self, defaults: Sampling) -> Sampling:
        """Give what was asked; what was left out comes from the model's defaults."""
        fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        asked = {name: value for name in fields if (value := getattr(self, name)) is not None}
        if self.top_k == -1:  # vLLM's way to ask for all
            asked["top_k"] = 0
        return replace(
            defaults,
            **asked,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=frozenset(self.stop_token_ids),
            unset=defaults.unset - asked.keys(),
        )


def tier(asked: str) -> Tier:
    """Read `service_tier`; OpenAI's other names for the default are the default."""
    names = [tier.value for tier in Tier]
    return Tier(asked) if asked in names else Tier.DEFAULT
