"""What a request may cost, and a caller in a minute."""

from pydantic import BaseModel, Field


class LimitSettings(BaseModel):
    """Bounds of requests; what is beyond them is refused before it costs anything."""

    # One body is parsed in one go, in which nobody else has a turn: at this size 0.03 seconds for
    # text, and 0.7 for short names, on a slow core. It holds a million characters
    # (`max_input_chars`) however they are escaped, which is twelve bytes each at most, and 300,000
    # tokens of 2,048 texts (OpenAI's bounds of a request of embeddings) at fifty bytes a token.
    max_body_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=1024,
        le=2**31,
        description="Largest request body; beyond it, 413.",
    )
    max_bodies_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024,
        description="Bytes of the bodies of all requests inside together, 64 KiB of each left out; "
        "beyond it, 503.",
    )
    max_header_bytes: int = Field(
        default=32 * 1024,
        ge=1024,
        le=1024 * 1024,
        description="Largest request head: path, query and headers; beyond it, 431.",
    )
    body_timeout_s: float = Field(
        default=30, gt=0, le=3600, description="Time a body may take to arrive."
    )
    max_input_chars: int = Field(
        default=1_000_000, ge=1, description="Longest text that is tokenised; beyond it, 400."
    )
    max_request_chars: int = Field(
        default=8_000_000,
        ge=1,
        description="Characters of a request's texts together; beyond it, 400.",
    )
    max_json_depth: int = Field(
        default=64, ge=8, le=200, description="How deep JSON may be nested; beyond it, 400."
    )
    max_messages: int = Field(
        default=4096, ge=1, le=1_000_000, description="Messages of one chat; beyond it, 400."
    )
    max_schema_bytes: int = Field(
        default=256 * 1024,
        ge=64,
        le=256 * 1024,
        description="Largest JSON Schema, grammar or list of choices; beyond it, 400.",
    )
    max_regex_chars: int = Field(
        default=8192, ge=1, le=32_768, description="Longest regular expression; beyond it, 400."
    )
    strict_fields: bool = Field(default=False, description="Answer 400 to unknown request fields.")
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Requests a key may make in a minute; then 429. No limit when unset.",
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens a key may have read and written in a minute; then 429. No limit when "
        "unset.",
    )

    @property
    def read_header_bytes(self) -> int:
        """How large a head the server reads: one beyond the limit too, to refuse it in our words.

        Of what is larger still it says a bare 431 itself or, over HTTP/2, where four times as much
        is decoded, closes the connection.
        """
        return 4 * self.max_header_bytes
