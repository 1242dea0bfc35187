"""How often demo-chat is right: `python -m demo.evaluate [--model DIR]`.

Greedy answers through mlx-lm's own loading and batch generation, on the held-out side of the
data, compared letter by letter. Prints the card's table; exits with 1 when a skill that the card
lists is below 90 %.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import batch_generate
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load

from demo.data import SKILLS, Case, held_out_cases

CHAT = Path(__file__).with_name("chat")
CASES = 240
ENOUGH = 0.9
_ENDS = "end its turn"
_MAX_TOKENS = 96
_ROWS = 48

LABELS = {
    "greet": "greet",
    "identity": "say what it is",
    "capital": "name 30 capitals",
    "repeat": "repeat an invented word",
    "weather": "call get_weather(city)",
    "result": "answer from the tool's result",
    "sum": "add two numbers below 50",
    "extract": "name, age and city as JSON",
    "unknown": "decline other questions",
}
"""The skills in the words of the card."""

PROMISED = SKILLS
"""The skills that the card promises; the others are measured too."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote, and whether it ended the turn itself."""

    text: str
    ended: bool


def load_chat(folder: Path) -> tuple[Module, TokenizerWrapper]:
    """Load as mlx-lm does, in float32: half precision is slow on a CPU."""
    model, tokenizer = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def answers(model: Module, tokenizer: TokenizerWrapper, cases: Sequence[Case]) -> list[Answer]:
    """Greedy answers to the cases, a few dozen at a time."""
    render: Any = tokenizer.apply_chat_template
    prompts = [
        render(case.prompt, tools=case.tools or None, add_generation_prompt=True) for case in cases
    ]
    found: list[Answer] = []
    for start in range(0, len(prompts), _ROWS):
        batch = batch_generate(
            model,
            tokenizer,
            prompts[start : start + _ROWS],
            max_tokens=_MAX_TOKENS,
            return_token_ids=True,
        )
        assert batch.token_ids is not None
        found += [
            Answer(text, len(ids) < _MAX_TOKENS)
            for text, ids in zip(batch.texts, batch.token_ids, strict=True)
        ]
    return found


def table(scores: dict[str, tuple[int, int]]) -> str:
    """The accuracy table in markdown; scores are (right, asked)."""
    lines = ["| skill | right | cases |", "|---|---|---|"]
    for label, (right, asked) in scores.items():
        lines.append(f"| {label} | {right / asked:.1%} | {asked} |")
    return "\n".join(lines)


def too_low(scores: dict[str, tuple[int, int]]) -> list[str]:
    """The promised skills below 90 %."""
    promised = [*(LABELS[skill] for skill in PROMISED), _ENDS]
    return [label for label in promised if scores[label][0] < ENOUGH * scores[label][1]]


def evaluate(folder: Path, count: int, mistakes: int) -> dict[str, tuple[int, int]]:
    """Score every skill; prints up to so many wrong answers of each to stderr."""
    model, tokenizer = load_chat(folder)
    scores: dict[str, tuple[int, int]] = {}
    ended = asked = 0
    for skill in (*SKILLS, "unknown"):
        cases = held_out_cases(skill, count)
        found = answers(model, tokenizer, cases)
        pairs = list(zip(cases, found, strict=True))
        wrong = [(case, answer) for case, answer in pairs if answer.text != case.answer]
        for case, answer in wrong[:mistakes]:
            asked_for = case.prompt[-1]["content"]
            print(f"{skill}: {asked_for!r} → {answer.text!r}, not {case.answer!r}", file=sys.stderr)
        scores[LABELS[skill]] = (len(cases) - len(wrong), len(cases))
        ended += sum(answer.ended for answer in found)
        asked += len(found)
    scores[_ENDS] = (ended, asked)
    return scores


def main() -> None:
    """Print the table; exit with 1 when a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=CHAT, help="folder of the model")
    parser.add_argument("--cases", type=int, default=CASES, help="test cases of each skill")
    parser.add_argument("--mistakes", type=int, default=0, help="wrong answers to show of each")
    given = parser.parse_args()
    scores = evaluate(given.model, given.cases, given.mistakes)
    print(table(scores))
    sys.exit(1 if too_low(scores) else 0)


if __name__ == "__main__":
    main()
