"""Two turns with openai-agents: a tool's call and result, then on from the response by its id."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI

ASKED: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    ASKED.append(city)
    return f"{city}: sunny"


async def main(url: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="unused", max_retries=0)
    agent = Agent(
        name="assistant", model=OpenAIResponsesModel("demo-chat", client), tools=[get_weather]
    )
    first = await Runner.run(agent, "What is the weather in Paris?", auto_previous_response_id=True)
    assert ASKED == ["Paris"], ASKED
    assert first.last_response_id is not None
    second = await Runner.run(
        agent, "What is the capital of France?", previous_response_id=first.last_response_id
    )
    assert "Paris" in second.final_output, second.final_output
    items = await client.responses.input_items.list(second.last_response_id or "", order="asc")
    kinds = [item.type async for item in items]
    assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
    streamed = Runner.run_streamed(
        agent, "What is the capital of France?", previous_response_id=second.last_response_id
    )
    async for _ in streamed.stream_events():
        pass
    assert "Paris" in streamed.final_output, streamed.final_output


asyncio.run(main(sys.argv[1]))
