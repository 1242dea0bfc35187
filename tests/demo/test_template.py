"""The folder of the demo model is as clients and mlx-lm expect it."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load

from demo.batches import learned
from demo.data import conversations
from demo.tokens import ASSISTANT, END, Template

CHAT = Path(__file__).parents[2] / "demo" / "chat"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = {"name": "get_weather", "arguments": {"city": "Paris"}}
CALL = f"<tool_call>{json.dumps(ASKED)}</tool_call>"


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load(CHAT)


def _render(tokenizer: TokenizerWrapper, messages: list[dict[str, Any]], **options: Any) -> str:
    render: Any = tokenizer.apply_chat_template
    text: str = render(messages, tokenize=False, **options)
    return text


def test_every_role_has_its_turn(tokenizer: TokenizerWrapper) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": ASKED}]},
        {"role": "tool", "content": "18 degrees, sunny"},
    ]
    assert _render(tokenizer, messages, tools=[WEATHER], add_generation_prompt=True) == (
        "<|begin|><|tools|>get_weather(city): Get the weather<|end|><|system|>Be brief.<|end|>"
        f"<|user|>Weather in Paris?<|end|><|assistant|>{CALL}<|end|>"
        "<|tool|>18 degrees, sunny<|end|><|assistant|>"
    )


def test_content_parts_are_joined(tokenizer: TokenizerWrapper) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    assert _render(tokenizer, [{"role": "user", "content": parts}]) == (
        "<|begin|><|user|>Hello there<|end|>"
    )


def test_mlx_lm_recognizes_the_tool_calls(tokenizer: TokenizerWrapper) -> None:
    """mlx-lm infers the json_tools parser, and each marker is one token."""
    assert tokenizer.tool_call_start == "<tool_call>"
    assert len(tokenizer.encode("<tool_call></tool_call>")) == 2
    inner = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert tokenizer.tool_parser(inner) == ASKED


def test_training_renders_what_transformers_renders(tokenizer: TokenizerWrapper) -> None:
    template = Template()
    for case in islice(conversations(5), 100):
        saved = _render(tokenizer, case.messages, tools=case.tools or None)
        assert template.render(case.messages, case.tools) == saved


@pytest.mark.parametrize(
    "text", ["two  spaces ", "Grüße, 世界 👋🏽", "a\tb\r\nc", "don't , stop .", "12345 x 0.5", ""]
)
def test_text_round_trips(tokenizer: TokenizerWrapper, text: str) -> None:
    """Any text comes back as it went in, white space included; so does a stream of it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_the_end_of_turn_ends_generation(tokenizer: TokenizerWrapper) -> None:
    end = tokenizer.convert_tokens_to_ids(END)
    assert tokenizer.eos_token_ids == {end}
    for name in ("config.json", "generation_config.json"):
        assert json.loads((CHAT / name).read_text("utf-8"))["eos_token_id"] == end


def test_only_the_assistant_is_learned(tokenizer: TokenizerWrapper) -> None:
    text = f"<|begin|><|user|>Hi<|end|>{ASSISTANT}Hello!{END}<|user|>Bye{END}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    marks = learned(ids, *tokenizer.convert_tokens_to_ids([ASSISTANT, END]))
    said = [token for token, mark in zip(ids, marks, strict=True) if mark]
    assert tokenizer.decode(said) == f"Hello!{END}"


def test_the_folder_is_small_and_the_context_long() -> None:
    assert sum(file.stat().st_size for file in CHAT.iterdir()) <= 8 * 2**20
    assert json.loads((CHAT / "config.json").read_text("utf-8"))["max_position_embeddings"] >= 16384
