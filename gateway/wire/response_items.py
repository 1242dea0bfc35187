"""What a Responses request reads: its input items → chat messages."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from gateway.errors import BadRequest
from gateway.wire.bounds import FEW, parse
from gateway.wire.messages import Function, Message, ToolCall
from gateway.wire.reading import Part

KINDS = ("message", "function_call", "function_call_output", "reasoning")
TEXTS = ("input_text", "output_text", "text")


class InputPart(Part):
    """A piece of an item's content. Only text is served."""

    type: str = Field(json_schema_extra={"enum": [*TEXTS, "refusal"]})
    text: str | None = None
    refusal: str | None = None


def _as_parts(given: object) -> object:
    if given is None:
        return []
    return [{"type": "input_text", "text": given}] if isinstance(given, str) else given


Parts = Annotated[
    list[InputPart],
    BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart] | None),
]


class Item(Part):
    """A message, a call, a call's output, or the reasoning of an earlier turn."""

    type: str = Field("message", json_schema_extra={"enum": list(KINDS)})
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts = Field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts = Field(default_factory=list)

    @field_validator("type")
    @classmethod
    def _kind_is_served(cls, given: str) -> str:
        if given == "item_reference":
            raise ValueError("this gateway keeps no items, so each must be sent whole")
        if given not in KINDS:
            raise ValueError(f"items of type '{given}' are not served")
        return given


def _as_items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Items = Annotated[
    list[Item],
    FEW,
    BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    Field(min_length=1),
]


def to_messages(instructions: str | None, items: list[Item]) -> list[Message]:
    """Give the conversation as chat messages, instructions first.

    Calls join the assistant's turn they follow; earlier reasoning is left out, as templates
    leave it out. Raises BadRequest for what is missing or is not text.
    """
    messages = [Message(role="system", content=instructions)] if instructions else []
    names: dict[str, str] = {}
    for i, item in enumerate(items):
        place = f"input[{i}]"
        match item.type:
            case "message":
                role: Any = _given(item.role, f"{place}.role")
                messages.append(Message(role=role, content=_text(item.content, place)))
            case "function_call":
                call = _call(item, place)
                names[call.id or ""] = call.function.name
                _join(messages, call)
            case "function_call_output":
                call_id = _given(item.call_id, f"{place}.call_id")
                messages.append(
                    Message(
                        role="tool",
                        content=_text(item.output, place, "output"),
                        tool_call_id=call_id,
                        name=names.get(call_id, item.name),
                    )
                )
    if not messages:
        raise BadRequest("Invalid 'input': it has no messages.", param="input")
    return messages


def _call(item: Item, place: str) -> ToolCall:
    call_id = _given(item.call_id, f"{place}.call_id")
    name = _given(item.name, f"{place}.name")
    arguments = item.arguments or "{}"
    try:
        parse(arguments.encode())
    except ValueError:
        raise BadRequest(
            f"Invalid '{place}.arguments': the arguments of '{name}' are not JSON.",
            param=f"{place}.arguments",
        ) from None
    return ToolCall(id=call_id, function=Function(name=name, arguments=arguments))


def _join(messages: list[Message], call: ToolCall) -> None:
    if messages and messages[-1].role == "assistant":
        last = messages.pop()
        calls = [*(last.tool_calls or ()), call]
        messages.append(Message(role="assistant", content=last.content, tool_calls=calls))
    else:
        messages.append(Message(role="assistant", tool_calls=[call]))


def _given(value: str | None, param: str) -> str:
    if not value:
        raise BadRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    return value


def _text(parts: list[InputPart], place: str, name: str = "content") -> str:
    texts = []
    for part in parts:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*TEXTS, "refusal") or text is None:
            raise BadRequest(
                f"Invalid '{place}.{name}': a part of type '{part.type}' is not served; "
                "this gateway reads text.",
                param=f"{place}.{name}",
            )
        texts.append(text)
    return "".join(texts)
