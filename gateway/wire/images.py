"""Images in requests for text: images of earlier turns are left out, or all are refused."""

from collections.abc import Sequence
from operator import is_not
from typing import Any

from gateway.errors import BadRequest
from gateway.wire.validation import P, Part, part_fields

LEFT_OUT = {"type": "text", "text": "[image left out: this model reads text]"}
_SYSTEM = ("system", "developer")


def leave_images_out(turns: Sequence[P]) -> tuple[list[P], int]:
    """Return a conversation's messages or items with a text in the place of each image of an
    earlier turn or of a tool's result, and the number of those images.

    Images of system messages, which hold for each turn, and of the user's newest message stay, to
    be refused. An assistant's message after that one is the beginning of the answer.
    """
    # Only the last of several user messages in a row is new: the others had no answer, perhaps
    # because an image was refused.
    roles = [getattr(turn, "role", None) for turn in turns]
    passed = (*_SYSTEM, "assistant")
    newest = max((i for i, role in enumerate(roles) if role not in passed), default=-1)
    count = 0

    def without_images(part: Any, *, stay: bool) -> Any:
        nonlocal count
        if isinstance(part, list):
            parts = [without_images(each, stay=stay) for each in part]
            return parts if any(map(is_not, parts, part)) else part
        if not isinstance(part, Part):
            return part
        if part.is_image and not stay:
            count += 1
            return type(part).model_validate(LEFT_OUT)
        stay = stay and getattr(part, "type", None) != "tool_result"
        names = [name for name, _ in part_fields(type(part)) if name in part.model_fields_set]
        fields = {name: without_images(getattr(part, name), stay=stay) for name in names}
        changed = {name: each for name, each in fields.items() if each is not getattr(part, name)}
        return part.model_copy(update=changed) if changed else part

    stays = [role in _SYSTEM or (role == "user" and i == newest) for i, role in enumerate(roles)]
    kept = [without_images(turn, stay=stay) for turn, stay in zip(turns, stays, strict=True)]
    return kept, count


def image_refused(kind: str, place: str, param: str) -> BadRequest:
    """Return the error for an image that is not left out; `place` is its place in the request."""
    # "Could not process image" are the words of Anthropic's own API: Claude Code reads them, takes
    # the image out of its session and asks again.
    return BadRequest(
        f"Invalid '{place}': Could not process image of type '{kind}': this model reads text. Send "
        "text, or ask a model that reads images. With GATEWAY_LEAVE_OUT_IMAGES=true, or in one "
        "request the header x-gateway-leave-out-images: true, images of earlier turns and of "
        "tools' results are left out: a session then goes on with the next message.",
        param=param,
    )
