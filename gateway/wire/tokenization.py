"""/tokenize, /detokenize and /tokenizer_info, as vLLM defines them."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import TypedDict

from gateway.errors import BadRequest
from gateway.errors import Part as ErrorPart
from gateway.jobs import Caller
from gateway.jobs.chat import GenerateJob, Sampling
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label, at_most
from gateway.wire.images import REFUSING, ImageReader
from gateway.wire.messages import Message, is_continuation, to_template
from gateway.wire.tools import ChatTools, Selection, ToolParam, read_tools, unserved_tools
from gateway.wire.validation import Request, check_length

MAX_TOKENS = 1_000_000  # the most ids to detokenize, since the event loop writes the answer
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TokenizeRequest(Request):
    """A request to tokenize a prompt or a conversation."""

    params: ClassVar = {"template_args": "chat_template_kwargs"}
    example: ClassVar = {"prompt": "Hello!"}

    model: Annotated[Label, Field(min_length=1)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FAIL_FAST, ITEM_LIMIT, Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: ChatTools
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="after")
    def _check_form(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("Send either 'prompt' or 'messages'.", param="prompt")
        return self

    def unserved_tools(self) -> Sequence[str]:
        return unserved_tools(self.tools)

    def param_of(self, part: ErrorPart) -> str:
        if part == "prompt" and self.prompt is None:
            return "messages"
        return super().param_of(part)


def to_job(
    request: TokenizeRequest, caller: Caller, *, max_chars: int, images: ImageReader = REFUSING
) -> GenerateJob:
    """Return a job whose prompt is tokenized, and which never runs."""
    if request.prompt is not None:
        if len(request.prompt) > max_chars:
            raise BadRequest(f"'prompt' is longer than {max_chars} characters.", param="prompt")
        return GenerateJob(caller=caller, prompt=request.prompt, sampling=Sampling())
    messages = request.messages or []
    turns = to_template(messages, images)
    check_length(turns, max_chars, param="messages")
    check_length(request.tools, max_chars, param="tools")
    functions = [tool.function if isinstance(tool, ToolParam) else tool for tool in request.tools]
    tools, _ = read_tools(functions, Selection())
    return GenerateJob(
        caller=caller,
        messages=turns,
        sampling=Sampling(),
        tools=tools,
        template_args=request.chat_template_kwargs,
        continues=is_continuation(messages, requested=request.continue_final_message),
        images=images.decode(),
    )


class DetokenizeRequest(Request):
    """A request to turn token ids into text."""

    example: ClassVar = {"tokens": [1, 2]}

    model: Annotated[Label, Field(min_length=1)] | None = None
    tokens: Annotated[
        list[TokenId],
        FAIL_FAST,
        at_most(MAX_TOKENS),
        Field(json_schema_extra={"maxItems": MAX_TOKENS}),
    ]


class Tokenized(TypedDict):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # the tokens as the vocabulary writes them


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


class TokenizerInfo(TypedDict):
    """A model's special tokens and chat template."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None
