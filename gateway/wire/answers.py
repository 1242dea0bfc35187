"""What answers look like, as shapes: for /openapi.json, and tests that hold answers to them.

Answers themselves are written from plain dictionaries: checking each would cost, and prove nothing.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """What a client is sent. A field that may be missing has a default; one may be added."""

    model_config = ConfigDict(title=None)


class ErrorDetails(Answer):
    """What went wrong, all four keys always."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """OpenAI's error envelope."""

    error: ErrorDetails


class EmbeddingUsage(Answer):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Answer):
    """The vector of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """A vector for every input, in order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class PromptDetails(Answer):
    """Of the prompt's tokens, those whose KV was at hand."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Of the answer's tokens, those of the model's thinking."""

    reasoning_tokens: int


class Usage(Answer):
    """Tokens read and written, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Answer):
    """A token that might have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer and the likeliest of its place."""

    top_logprobs: list[TopLogprob]


class Logprobs(Answer):
    """Every token of a text."""

    content: list[TokenLogprob]
    refusal: None


class CalledFunction(Answer):
    """A function's name, and its arguments as JSON inside a string; in a stream, a piece of it."""

    name: str | None = None
    arguments: str


class Call(Answer):
    """A call of a function; in a stream `index` says which, and id and name come once."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class ChatMessage(Answer):
    """What the model said; of a chunk, what is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    function_call: CalledFunction | None = None


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatChoice(Answer):
    """One answer of several."""

    index: int
    message: ChatMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(Answer):
    """What is new in one answer of several."""

    index: int
    delta: ChatMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(Answer):
    """An answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Verdict(Answer):
    """What of its schema no grammar held an answer to, and whether it fits; null if unknown."""

    unenforced: list[str]
    schema_valid: bool | None


class ChatCompletionChunk(Answer):
    """An event of a stream; the one with usage has no choices, and comes last, before `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None
    gateway: Verdict | None = None


class TextLogprobs(Answer):
    """Every token of a text, in four lists of one length.

    An echoed prompt's first token follows nothing: its logprobs are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    """One continuation; of a chunk, what is new in it."""

    text: str
    index: int
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class Completion(Answer):
    """Continuations of prompts; in a stream, an event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None


class OutputItem(Answer):
    """A message, a call, or reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(Answer):
    """Tokens read and written."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class Response(Answer):
    """An answer of the Responses API, and what it was asked with."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    gateway: Verdict | None = None


class InputItem(Answer):
    """A piece of the conversation that a response answers, as it was sent."""

    id: str
    type: Literal["message", "function_call", "function_call_output", "reasoning"]


class InputItems(Answer):
    """A page of them, newest first unless asked otherwise."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Answer):
    """How long a prompt is."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(Answer):
    """What was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(Answer):
    """An event of a Responses stream, whose type is the frame's name too."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: OutputItem | None = None


class Batching(Answer):
    """How a loaded chat model runs its answers."""

    rows: Literal["together", "one at a time"]
    self_test: Literal["passed", "failed", "unfinished", "off"]
    problem: str | None = Field(description="What the self-test found wrong.")


class Model(Answer):
    """A model by one of its names; `root` is its id."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    kind: Literal["chat", "embedding"]
    state: Literal["unloaded", "loading", "loaded", "failed"]
    bytes: int | None = Field(description="What it holds of the memory budget.")
    last_used: float | None = Field(description="Unix time.")
    error: str | None = Field(description="Why it failed.")
    batching: Batching | None = Field(description="Of a chat model that is loaded.")


class Models(Answer):
    """Every name of every model."""

    object: Literal["list"]
    data: list[Model]


class Reload(Answer):
    """What another reading of models.yaml changed, by id."""

    object: Literal["reload"]
    added: list[str]
    changed: list[str]
    removed: list[str]


class Health(Answer):
    """Whether the gateway's engine moves."""

    status: str


class Ready(Answer):
    """Whether requests are welcome, and how each model stands, for those who may list them."""

    status: str
    models: dict[str, str] | None = None
