"""Chat messages: OpenAI's many forms → the plain ones that chat templates read."""

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.errors import BadRequest
from gateway.wire.bounds import FAST, FEW, Label, parse
from gateway.wire.reading import Part, missing

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class ContentPart(Part):
    """A piece of a message's content. Only text is served."""

    harmless = frozenset({"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"})

    type: Label = Field(json_schema_extra={"enum": ["text", "refusal"]})
    text: str | None = None
    refusal: str | None = None


class Function(Part):
    """A function's name and its arguments, which are JSON inside a string."""

    name: Label
    arguments: str = ""


class ToolCall(Part):
    """A call that the assistant made in an earlier turn."""

    harmless = frozenset({"index"})

    id: Label | None = None
    type: Label = "function"
    function: Function


class Message(Part):
    """One turn of a conversation, as a client sends it: an answer's message, say, as it came."""

    harmless = frozenset({"annotations", "reasoning", "reasoning_content", "refusal"})

    role: Role
    content: str | Annotated[list[ContentPart], FAST, FEW] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[ToolCall], FAST, FEW] | None = None
    tool_call_id: Label | None = None
    prefix: bool | None = None


def continued(messages: Sequence[Message], *, asked: bool) -> bool:
    """Return True if the last message is the beginning of the answer, as `asked` or by its
    `prefix`, which is Mistral's and DeepSeek's way.

    Raises BadRequest where it cannot be.
    """
    *earlier, last = messages
    for i, message in enumerate(earlier):
        if message.prefix:
            place = f"messages[{i}].prefix"
            raise BadRequest(
                f"Invalid '{place}': only the last message can begin the answer.", param=place
            )
    if not (asked or last.prefix):
        return False
    place = f"messages[{len(earlier)}]"
    if last.role != "assistant" or last.tool_calls or not _text(last.content, place):
        raise BadRequest(
            f"Invalid '{place}': an answer is continued from an assistant's message that has text "
            "and no 'tool_calls'.",
            param=place,
        )
    return True


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Give the turns as templates expect them.

    `developer` is `system`; all system turns become one, first; user turns that follow one
    another become one: many templates refuse anything else. There is always a turn, if only an
    empty one. Raises BadRequest for content that is not text.
    """
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    merged: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    others = (turn for turn in turns if turn["role"] != "system")
    for role, together in groupby(others, key=itemgetter("role")):
        if role != "user":
            merged += together
            continue
        first, *rest = together
        if rest:
            first["content"] = "\n\n".join(turn["content"] for turn in (first, *rest))
        merged.append(first)
    return merged or [{"role": "system", "content": ""}]


def _turn(message: Message, place: str) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    if message.role == "user" and message.content is None:
        raise missing(f"{place}.content")
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, place)}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": _function(call.function, place),
            }
            for call in message.tool_calls
        ]
    return turn


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise BadRequest(
                f"Invalid '{place}.content': a part of type '{part.type}' is not served; "
                "this gateway reads text.",
                param=f"{place}.content",
            )
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise missing(f"{place}.content[{i}].{part.type}")
        texts.append(text)
    return "".join(texts)


def _function(function: Function, place: str) -> dict[str, Any]:
    """Templates write arguments out themselves, so they want the value, not its JSON."""
    try:
        arguments = parse((function.arguments or "{}").encode())
    except ValueError:
        raise BadRequest(
            f"Invalid '{place}.tool_calls': the arguments of '{function.name}' are not JSON.",
            param=f"{place}.tool_calls",
        ) from None
    return {"name": function.name, "arguments": arguments}
