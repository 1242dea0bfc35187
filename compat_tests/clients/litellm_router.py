"""LiteLLM's router by deploy/balancer/litellm.yaml: python litellm_router.py FILE MODEL URL URL."""

import asyncio
import sys
from pathlib import Path

import litellm
import yaml

file, model, *urls = sys.argv[1:]
config = yaml.safe_load(Path(file).read_text())
for entry, url in zip(config["model_list"], urls, strict=True):
    entry["litellm_params"] |= {"api_base": f"{url}/v1", "model": f"openai/{model}"}
    entry["model_name"] = model
router = litellm.Router(model_list=config["model_list"], **config["router_settings"])


async def ask(number: int) -> str:
    """Ask, and return the answer's text."""
    answer = await router.acompletion(
        model=model, messages=[{"role": "user", "content": f"Hello {number}"}], max_tokens=4
    )
    return answer.choices[0].message.content


async def main() -> None:
    """Ask in twos, as often as both are chosen."""
    for number in range(0, 12, 2):
        print(await asyncio.gather(ask(number), ask(number + 1)))


asyncio.run(main())
