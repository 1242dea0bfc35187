"""An agent's turns, at default settings: how much of each prompt is cached, and how long it takes.

A gateway serves a model of random weights whose KV has the size of a real one's, here 144 KiB a
token, as of Qwen3-4B. The first prompt, of a recorded agent, takes more than 1 GiB of it; each of
the others is the one before, its answer and what a tool has printed.

With --restart, the first prompt is asked of a gateway, and again of a new one once that has ended:
without a folder for kept prompts, and with one.

With --thoughts, smaller models think and call in each turn, and their thoughts are sent back or
left out. Cached is then a share of all tokens that had been read or written in the turn before.

    python -m benchmarks.agent_turns
    python -m benchmarks.agent_turns --restart --tokens 1500
    python -m benchmarks.agent_turns --thoughts --tokens 2000
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.conversations import COMMON, FAMILIES, write_model
from gateway.cli.gateways import started
from gateway.settings import load_settings

RECORDED: Final = Path(__file__).parents[1] / "tests" / "api" / "codex_first_request.json"
TURNS: Final = 10
THOUGHT: Final = 128  # tokens of each
# Answers are opened with a thought, and thoughts that are sent back are shown, as Qwen 3.5's are.
THINKING: Final = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
HEADS: Final = 144  # heads of 128 numbers, keys and values, in float32: 144 KiB a token
WIDE: Final[dict[str, Any]] = {
    **COMMON,
    "hidden_size": 144,
    "intermediate_size": 256,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain KV (llama)": {
        **WIDE,
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS // 2,
        "num_key_value_heads": HEADS // 2,
        "rope_theta": 10000.0,
    },
    "sliding windows (gemma3)": {
        **WIDE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "query_pre_attn_scalar": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 2,
    },
    "hybrid (qwen3_5)": {
        "model_type": "qwen3_5",
        "text_config": {
            **WIDE,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "full_attention_interval": 4,
        },
    },
}


def ask(
    url: str, messages: Sequence[dict[str, Any]], max_tokens: int, **more: Any
) -> tuple[Any, float]:
    """Return a chat's answer, and the seconds that it took."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, **more}
    began = time.perf_counter()
    answer = post(f"{url}/v1/chat/completions", body)
    return answer, time.perf_counter() - began


def post(url: str, body: dict[str, Any]) -> Any:
    """Return the answer of a gateway's only model."""
    content = json.dumps({"model": "agent", **body}).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def begin(url: str, tokens: int) -> list[dict[str, str]]:
    """Return the first messages of a recorded agent, of about this number of tokens."""
    recorded = RECORDED.read_text(encoding="utf-8")
    probe, _ = ask(url, [{"role": "system", "content": recorded[:4000]}], 1)
    chars = 4000 * tokens // probe["usage"]["prompt_tokens"]
    first = (recorded * (1 + chars // len(recorded)))[-chars:]
    return [{"role": "system", "content": first}, {"role": "user", "content": "List the files"}]


def converse(url: str, tokens: int, answer_tokens: int) -> list[tuple[int, int, float]]:
    """Return of each turn the prompt's tokens, those cached, and the seconds."""
    messages, turns = begin(url, tokens), []
    for turn in range(TURNS):
        answer, seconds = ask(url, messages, answer_tokens)
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append((usage["prompt_tokens"], cached, seconds))
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )
        messages.append({"role": "user", "content": f"exit {turn}"})
    return turns


def find_word(url: str) -> int:
    """Return a token whose repetition is read as the same tokens again."""
    for letter in "0123456789;,.!":
        tokens = post(f"{url}/v1/tokenize", {"prompt": 8 * letter, "add_special_tokens": False})
        if len(set(tokens["tokens"])) == 1 and tokens["count"] == 8:
            return int(tokens["tokens"][0])
    raise LookupError("every letter joins others of its kind")


def think(url: str, tokens: int, answer_tokens: int, *, sends_back: bool) -> list[float]:
    """Return each turn's cached share of the tokens that were read and written before it.

    The first turn has none. Each answer is a thought and a text, behind which the client writes a
    call.
    """
    messages: list[dict[str, Any]] = [*begin(url, tokens)]
    bias, known, shares = {str(find_word(url)): 100}, 0, []
    for turn in range(TURNS):
        budget = {"thinking_token_budget": THOUGHT, "logit_bias": bias}
        answer, _ = ask(url, messages, THOUGHT + answer_tokens, **budget)
        usage, said = answer["usage"], answer["choices"][0]["message"]
        if turn:
            shares.append(usage["prompt_tokens_details"]["cached_tokens"] / known)
        known = usage["total_tokens"]
        function = {"name": "run", "arguments": json.dumps({"command": f"step {turn}"})}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        thought = {"reasoning_content": said["reasoning_content"]} if sends_back else {}
        messages += [
            {"role": "assistant", "content": said["content"], "tool_calls": [call], **thought},
            {"role": "tool", "tool_call_id": call["id"], "content": f"exit {turn}"},
        ]
    return shares


def restart(models: Path, root: Path, tokens: int) -> list[str]:
    """Return the time of a prompt to its first token: cold, and after a restart.

    The restart is tried without and with a folder for kept prefixes.
    """
    spent: list[float] = []
    messages: list[dict[str, str]] = []
    for folder in (None, root / "kept"):
        os.environ.pop("GATEWAY_PREFIX_FOLDER", None)
        if folder is not None:
            os.environ["GATEWAY_PREFIX_FOLDER"] = str(folder)
        for _ in range(2):
            with started(load_settings({"models": models})) as gateway:
                ask(gateway.url, [{"role": "user", "content": "Hi"}], 1)  # loads the model
                # Once: reading what measures it would push out what was kept of the prompt.
                messages = messages or begin(gateway.url, tokens)
                answer, seconds = ask(gateway.url, messages, 1)
            spent.append(seconds)
    nbytes = sum(file.stat().st_size for file in (root / "kept").iterdir())
    cold, without, _, kept = spent
    ratios = [f"{after:.2f} s, {after / cold:.3f}" for after in (without, kept)]
    prompt = answer["usage"]["prompt_tokens"]
    return [f"{prompt:,} tokens, {cold:.1f} s", *ratios, f"{nbytes >> 20:,} MiB"]


def main(arguments: Sequence[str]) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="An agent's turns.")
    parser.add_argument("--tokens", type=int, default=7_900, help="of the first prompt, about")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--restart", action="store_true", help="ask again after a restart")
    parser.add_argument("--thoughts", action="store_true", help="think and call in each turn")
    given = parser.parse_args(arguments)
    head: tuple[str, ...] = (
        "Model",
        "first prompt",
        f"turns 2 to {TURNS}: cached",
        "of what had been read",
        "seconds",
    )
    if given.thoughts:
        head = ("Model", f"turns 2 to {TURNS}: cached, thoughts sent back", "left out")
    elif given.restart:
        head = (
            "Model",
            "first prompt, cold",
            "after a restart, ÷ cold",
            "with a folder, ÷ cold",
            "on disk",
        )
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for name, config in (FAMILIES if given.thoughts else KINDS).items():
        with tempfile.TemporaryDirectory() as root:
            write_model(Path(root) / "agent", config)
            models = Path(root) / "models.yaml"
            models.write_text("version: 1\nmodels: {agent: {kind: chat, source: 'path:agent'}}\n")
            if given.thoughts:
                (Path(root) / "agent" / "chat_template.jinja").write_text(THINKING)
                cells = []
                for sends_back in (True, False):
                    with started(load_settings({"models": models})) as gateway:
                        shares = think(
                            gateway.url, given.tokens, given.answer, sends_back=sends_back
                        )
                    cells.append(f"{min(shares):.1%} to {max(shares):.1%}")
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
                continue
            if given.restart:
                cells = restart(models, Path(root), given.tokens)
                print(f"| {name} | {' | '.join(cells)} |", flush=True)
                continue
            with started(load_settings({"models": models})) as gateway:
                turns = converse(gateway.url, given.tokens, given.answer)
        shares = [cached / prompt for prompt, cached, _ in turns[1:]]
        again = [after[1] / before[0] for before, after in pairwise(turns)]
        spent = [seconds for _, _, seconds in turns[1:]]
        cells = [
            f"{turns[0][0]:,} tokens, {turns[0][2]:.0f} s",
            f"{min(shares):.1%} to {max(shares):.1%}",
            f"{min(again):.1%} at least",
            f"{statistics.median(spent):.2g} ({min(spent):.2g}–{max(spent):.2g})",
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
