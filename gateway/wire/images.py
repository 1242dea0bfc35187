"""Images in requests for text: left out of earlier turns, or refused."""

from collections.abc import Sequence
from typing import Any, TypeVar

from gateway.errors import BadRequest
from gateway.wire.validation import Part, part_fields

P = TypeVar("P", bound=Part)

LEFT_OUT = "[image left out: this model reads text]"
# A setting of a program holds for each turn, so that none of its images is from an earlier one.
_KEPT = frozenset({"system", "developer"})


def leave_images_out(turns: Sequence[P]) -> tuple[list[P], int]:
    """Return a conversation's messages or items with a text in the place of each image of an
    earlier turn or of a tool's result, and the number of those images.

    Images of the newest message of the user and of system messages stay, to be refused.
    """
    newest = _newest(turns)
    replaced = [
        (turn, 0)
        if getattr(turn, "role", None) in _KEPT
        else _without_images(turn, results_only=i == newest)
        for i, turn in enumerate(turns)
    ]
    return [turn for turn, _ in replaced], sum(count for _, count in replaced)


def _newest(turns: Sequence[Part]) -> int | None:
    """Return the place of the user's message that is to be answered; None if a tool's result is."""
    # Messages of the assistant at the end begin the answer. Of several messages of the user in a
    # row the last one is new: those before it had no answer, as one whose image was refused.
    for i in range(len(turns) - 1, -1, -1):
        role = getattr(turns[i], "role", None)
        if role == "user":
            return i
        if role not in _KEPT and role != "assistant":
            return None
    return None


def _without_images(part: P, *, results_only: bool) -> tuple[P, int]:
    """Return a part, and its inner parts, with texts for images, or for those of tools' results."""
    if part.is_image:
        if results_only:
            return part, 0
        return type(part).model_validate({"type": "text", "text": LEFT_OUT}), 1
    results_only = results_only and getattr(part, "type", None) != "tool_result"
    changes: dict[str, Any] = {}
    total = 0
    for name, _ in part_fields(type(part)):
        value = getattr(part, name)
        values, count = list(value) if isinstance(value, list) else [value], 0
        for i, inner in enumerate(values):
            if isinstance(inner, Part):
                values[i], more = _without_images(inner, results_only=results_only)
                count += more
        if count:
            changes[name] = values if isinstance(value, list) else values[0]
            total += count
    return (part.model_copy(update=changes) if changes else part), total


def image_refused(place: str, param: str) -> BadRequest:
    # "Could not process image" are the words of Anthropic's own API, at which Claude Code takes the
    # image out of its session and asks again.
    return BadRequest(
        f"Invalid '{place}': Could not process image: this model reads text. Send text, or ask a "
        "model that reads images. In a session, go on with another message: with the header "
        "x-gateway-leave-out-images: true, or GATEWAY_LEAVE_OUT_IMAGES=true, images of earlier "
        "turns and of tools' results are left out.",
        param=param,
    )
