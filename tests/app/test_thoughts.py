"""Thoughts that clients send back, over both vendors' SDKs and a template that shows them:
the same conversation is the same prompt.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from httpx2 import AsyncClient
from openai import AsyncOpenAI

from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
    "c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED: Any = {"role": "user", "content": "Weather?"}
THOUGHTS = "I look out of the window."
ARGUMENTS = '{"city": "Paris"}'


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    folder = write_chat(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    models = catalog(tmp_path, {"tiny": {"kind": "chat", "source": "path:tiny"}})
    async with served(models, cpu_engines()) as client:
        yield client


async def test_a_tool_loop_is_the_same_prompt_in_three_protocols(client: AsyncClient) -> None:
    """The prompt has the loop's thoughts, which make it longer."""
    from anthropic import AsyncAnthropic  # late: it takes seconds of each process

    openai = AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="unused", http_client=client)
    anthropic = AsyncAnthropic(base_url=str(client.base_url), api_key="unused", http_client=client)

    async def chat(**thoughts: Any) -> int:
        function = {"name": "look", "arguments": ARGUMENTS}
        call = {"id": "c1", "type": "function", "function": function}
        said: Any = {"role": "assistant", "content": None, "tool_calls": [call], **thoughts}
        result: Any = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
        answer = await openai.chat.completions.create(
            model="tiny", max_tokens=1, messages=[ASKED, said, result]
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": ARGUMENTS}
    thought: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    thought["content"] = [{"type": "reasoning_text", "text": THOUGHTS}]
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    items: Any = [ASKED, thought, call, output]
    response = await openai.responses.create(model="tiny", max_output_tokens=1, input=items)
    counted = await openai.responses.input_tokens.count(model="tiny", input=items)
    thinking = {"type": "thinking", "thinking": THOUGHTS, "signature": ""}
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}
    blocks: Any = [
        ASKED,
        {"role": "assistant", "content": [thinking, use]},
        {"role": "user", "content": [result]},
    ]
    message = await anthropic.messages.create(model="tiny", max_tokens=1, messages=blocks)
    used, read = message.usage, response.usage
    assert read is not None
    length = await chat(reasoning_content=THOUGHTS)
    assert length == await chat(reasoning=THOUGHTS) > await chat()
    assert length == read.input_tokens == counted.input_tokens
    assert length == sum(
        each or 0
        for each in (
            *(used.input_tokens, used.cache_read_input_tokens),
            used.cache_creation_input_tokens,
        )
    )
