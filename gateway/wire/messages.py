"""Chat messages: OpenAI's many forms → the plain ones that chat templates read."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.errors import BadRequest
from gateway.wire.bounds import parse
from gateway.wire.reading import Part

Role = Literal["developer", "system", "user", "assistant", "tool", "function"]


class ContentPart(Part):
    """A piece of a message's content. Only text is served."""

    type: str = Field(json_schema_extra={"enum": ["text", "refusal"]})
    text: str | None = None
    refusal: str | None = None


class Function(Part):
    """A function's name and its arguments, which are JSON inside a string."""

    name: str
    arguments: str = ""


class ToolCall(Part):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: str = "function"
    function: Function


class Message(Part):
    """One turn of a conversation, as a client sends it."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(min_length=1)] = None
    tool_call_id: str | None = None


def to_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Give the turns as templates expect them.

    `developer` is `system`; all system turns become one, first; user turns that follow one
    another become one: many templates refuse anything else. There is always a turn, if only an
    empty one. Raises BadRequest for content that is not text.
    """
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    merged: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        if turn["role"] == "system":
            continue
        if merged and turn["role"] == merged[-1]["role"] == "user":
            merged[-1]["content"] += "\n\n" + turn["content"]
        else:
            merged.append(turn)
    return merged or [{"role": "system", "content": ""}]


def _turn(message: Message, place: str) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
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
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            raise BadRequest(
                f"Invalid '{place}.content': a part of type '{part.type}' is not served; "
                "this gateway reads text.",
                param=f"{place}.content",
            )
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
