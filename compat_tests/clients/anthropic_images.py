"""Anthropic's Python SDK, unchanged: images for the model `seeing` at the address that is given.

The model's weights are random: its words mean nothing, and other images give other words.
"""

import base64
import sys
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

MODEL = "seeing"


def image(file: Path) -> Any:
    source = {"type": "base64", "media_type": "image/png"}
    data = base64.standard_b64encode(file.read_bytes()).decode()
    return {"type": "image", "source": {**source, "data": data}}


def ask(client: Anthropic, *content: Any) -> Any:
    asked: Any = [{"role": "user", "content": [{"type": "text", "text": "Look:"}, *content]}]
    counted = client.messages.count_tokens(model=MODEL, messages=asked).input_tokens
    message = client.messages.create(
        model=MODEL, max_tokens=12, messages=asked, extra_body={"temperature": 0}
    )
    assert length_of(message) == counted
    return message.content[0].text, counted


def length_of(message: Any) -> int:
    """Count the tokens of a prompt: those read, those from the cache and those kept in it."""
    usage = message.usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    return sum(parts)


def main(url: str, *files: str) -> None:
    first, second = (image(Path(file)) for file in files)
    with Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        text, length = ask(client, first)
        other, _ = ask(client, second)
        assert text != other
        assert ask(client, first)[0] == text
        assert ask(client, first, second)[1] > length > ask(client)[1]

        turns: Any = [
            {"role": "user", "content": "Take a screenshot."},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "t1", "name": "screenshot", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [first]},
            ]},
        ]  # fmt: skip
        with client.messages.stream(model=MODEL, max_tokens=12, messages=turns) as stream:
            with_image = length_of(stream.get_final_message())
        turns[-1]["content"][0]["content"] = "a file"
        assert with_image > client.messages.count_tokens(model=MODEL, messages=turns).input_tokens

        address: Any = {"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}}
        with pytest.raises(anthropic.BadRequestError, match="address"):
            ask(client, address)
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
