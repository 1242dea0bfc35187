"""How the next token is to be chosen: the fields that every generating endpoint shares."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator

from gateway.jobs import Sampling, Tier
from gateway.wire.reading import Request

_STOP = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": 4,
        },
    ]
}
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class SampledRequest(Request):
    """OpenAI's sampling fields, with `top_k` and `min_p` besides."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    stop: Annotated[Any, WithJsonSchema(_STOP)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    logit_bias: Annotated[
        dict[str, Bias],
        Field(
            default_factory=dict,
            json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,19}$"}},
        ),
    ]

    @field_validator("stop")
    @classmethod
    def _up_to_four(cls, given: object) -> tuple[str, ...]:
        stops = [given] if isinstance(given, str) else given
        if not isinstance(stops, list) or not 1 <= len(stops) <= 4:
            raise ValueError("it should be a string or an array of 1 to 4 strings")
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError("a stop sequence should be a string that is not empty")
        return tuple(stops)

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, given: dict[str, float]) -> dict[str, float]:
        if not all(token.isascii() and token.isdigit() and len(token) < 20 for token in given):
            raise ValueError("its keys should be token ids")
        return given

    def sampling(self, defaults: Sampling) -> Sampling:
        """Give what was asked; what was left out comes from the model's defaults."""
        return Sampling(
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=max(0, _or(self.top_k, defaults.top_k)),
            min_p=_or(self.min_p, defaults.min_p),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
        )


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


def tier(asked: str | None) -> Tier:
    """Read `service_tier`; OpenAI's other names for the default are the default."""
    names = [tier.value for tier in Tier]
    return Tier(asked) if asked in names else Tier.DEFAULT
