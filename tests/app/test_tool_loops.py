"""Agents' loops of up to fifteen turns over OpenAI's SDK and Anthropic's, on real MLX: the model
writes files that hold the marks of every family, and each comes to the client as it was written.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from itertools import chain
from typing import Any

import httpx2
import mlx.core as mx
import pytest
from openai import AsyncOpenAI

from gateway.engine.prompting.chat_tokenizer import ChatTokenizer
from tests.checkpoints import write_chat
from tests.cpu_engines import CpuEngines, cpu_settings
from tests.engine.answers.test_round_trips import ids
from tests.engine.answers.written_calls import DIVIDER, FORMS, MARKS, Form
from tests.engine.chat_formats import family
from tests.engine.generation.harness import watch
from tests.serving_app import catalog, served

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TURNS = 15
END, EOS = "<|end|>", 2
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A call of an earlier turn, as the templates of the forms write it.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "glm45": "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
}
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}


class Speaking(CpuEngines):
    """Engines whose model is urged to say a script, and whose prompts are kept."""

    def __init__(self) -> None:
        super().__init__(cpu_settings())
        self.script: Iterator[int] = iter(())
        self.prompt: list[int] = []

    async def generation(self, *given: Any) -> Generator[Any]:
        return self._watched(await super().generation(*given))

    def _watched(self, steps: Generator[Any]) -> Generator[Any]:
        for engine in steps:
            if engine is not None:
                watch(engine, after=self._urge)
            yield engine

    def _urge(self, logits: mx.array, tokens: mx.array, _: Any) -> mx.array:
        if tokens.shape[1] == 1:  # a step, not a prompt
            logits[:, :, next(self.script, EOS)] += 1000
        else:
            self.prompt += tokens[0].tolist()  # type: ignore[arg-type]
        return logits


def content(form: Form, turn: int) -> str:
    """Write a file; those of fifteen turns hold every mark, and some a whole call."""
    marks = " or ".join(MARKS[turn::TURNS])
    text = f'# "{turn}" \\ it\'s é🙂\n\n\t{marks}\n{form.quoted if turn % 5 == 0 else ""}\n'
    assert form.can_write(text)
    return text


Turn = Callable[[list[Any], bool], Awaitable[tuple[str, dict[str, Any]]]]


def openai_turn(client: httpx2.AsyncClient) -> Turn:
    """Return a function that asks for a turn over OpenAI's SDK, appends it and returns the call."""
    sdk = AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="unused", http_client=client)
    function = {"name": "write", "parameters": SCHEMA}

    async def ask(messages: list[Any], is_streamed: bool) -> tuple[str, dict[str, Any]]:
        asked: Any = {
            "model": "tiny", "messages": messages,
            "tools": [{"type": "function", "function": function}],
        }  # fmt: skip
        text, call_id, name, arguments = "", "", "", ""
        if is_streamed:
            async for chunk in await sdk.chat.completions.create(**asked, stream=True):
                text += chunk.choices[0].delta.content or ""
                for each in chunk.choices[0].delta.tool_calls or ():
                    assert each.index == 0
                    call_id += each.id or ""
                    name += each.function.name or ""
                    arguments += each.function.arguments or ""
        else:
            message = (await sdk.chat.completions.create(**asked)).choices[0].message
            text = message.content or ""
            [call] = message.tool_calls
            call_id, name, arguments = call.id, call.function.name, call.function.arguments
        called = {"name": name, "arguments": arguments}
        messages += [
            {
                "role": "assistant", "content": text,
                "tool_calls": [{"id": call_id, "type": "function", "function": called}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "written"},
        ]  # fmt: skip
        assert name == "write"
        return text, json.loads(arguments)

    return ask


def anthropic_turn(client: httpx2.AsyncClient) -> Turn:
    """Return a function that asks for a turn by Anthropic's SDK, appends it, gives the call."""
    from anthropic import AsyncAnthropic  # late: it takes seconds of each process

    sdk = AsyncAnthropic(base_url=str(client.base_url), api_key="unused", http_client=client)

    async def ask(messages: list[Any], is_streamed: bool) -> tuple[str, dict[str, Any]]:
        asked: Any = {
            "model": "tiny", "messages": messages, "max_tokens": 2000,
            "tools": [{"name": "write", "input_schema": SCHEMA}],
        }  # fmt: skip
        if is_streamed:
            async with sdk.messages.stream(**asked) as stream:
                message = await stream.get_final_message()
        else:
            message = await sdk.messages.create(**asked)
        assert message.stop_reason == "tool_use"
        text = "".join(block.text for block in message.content if block.type == "text")
        [call] = [block for block in message.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "written"}
        messages += [
            {"role": "assistant", "content": [each.to_dict() for each in message.content]},
            {"role": "user", "content": [result]},
        ]
        assert call.name == "write"
        return text, dict(call.input)

    return ask


Gateway = tuple[Form, ChatTokenizer, Speaking, httpx2.AsyncClient]


@pytest.fixture(scope="module", params=WRITTEN)
async def gateway(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Gateway]:
    """Serve a tiny model whose tokenizer has a token for each mark, but for its own end."""
    folder = tmp_path_factory.mktemp("served")
    form = FORMS[request.param]
    added = [mark for mark in MARKS if mark[0] in "<[" and mark != END]
    write_chat(folder / "tiny", vocab_size=1400, max_position_embeddings=16384, num_hidden_layers=1)
    named = {"tool_parser": form.format, "reasoning_parser": "none"}
    chat = family(
        folder / "tiny", added=added, template=TEMPLATE.replace("CALL", WRITTEN[request.param])
    )
    engines = Speaking()
    models = catalog(folder, {"tiny": {"kind": "chat", "source": "path:tiny", **named}})
    async with served(models, engines) as client:
        yield form, chat, engines, client


@pytest.mark.parametrize(
    ("over", "turns"),
    [
        (openai_turn, range(0, TURNS, 3)),
        (anthropic_turn, range(1, TURNS, 3)),
        pytest.param(openai_turn, range(TURNS), marks=pytest.mark.soak),
        pytest.param(anthropic_turn, range(TURNS), marks=pytest.mark.soak),
    ],
)
async def test_files_are_written_as_the_model_wrote_them(
    gateway: Gateway, over: Callable[[httpx2.AsyncClient], Turn], turns: range
) -> None:
    """Every other turn is streamed, and the last prompt holds all of the calls."""
    form, chat, engines, client = gateway
    ask, messages = over(client), [{"role": "user", "content": "Write them."}]
    said = []
    for turn in turns:
        arguments = {"path": f"{turn}.md", "content": content(form, turn)}
        written = form.write([{"name": "write", "arguments": arguments}])
        said.append(written)
        # Its end token would end the answer: a model that means the letters writes those.
        spelt = ids(chat, f"Now {turn}.\n{written}".replace(END, f"<{DIVIDER}|end|>"))
        engines.script, engines.prompt = chain(spelt, [EOS]), []
        text, called = await ask(messages, turn % 2 == 0)
        assert called == arguments
        assert text.strip() == f"Now {turn}."
    prompt = chat.backend.decode(engines.prompt, skip_special_tokens=False)
    at = 0
    for each in said[:-1]:
        at = prompt.index(each, at) + len(each)
