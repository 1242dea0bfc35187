"""How often demo-vision is right: `python -m demo.seeing.evaluate [--model DIR]`.

Asks a gateway over HTTP about pictures of seeds that training never draws, and prints the card's
table: alone, eight at once, from a kept prefix, as JPEG and as WEBP, and alone by a gateway whose
positions have no rows and columns. Exits with 1 when a way but the last is below 95 %.
"""

import argparse
import base64
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

from PIL import Image

from demo.seeing.drawing import paint
from demo.seeing.questions import TASKS, Question, scene_for

VISION: Final = Path(__file__).parents[1] / "vision"
CASES: Final = 100
ENOUGH: Final = 0.95
_SEED: Final = 1 << 40  # training's seeds are small
_BLOCK: Final = 64  # tokens, the shortest prefix that the gateway keeps
_EARLIER: Final = 6
_FORMATS: Final = {"JPEG": {"quality": 80}, "WEBP": {"quality": 80}, "PNG": {}}
_NORMAL: Final = "from gateway.cli import main; main()"
_FLAT: Final = """
from gateway import engine
from gateway.engine.vision import reading
whole = reading.lay_out
def flat(*args):
    found = whole(*args)
    found.points[:, 1:] = found.points[:, :1]
    return found
reading.lay_out = flat
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A picture's file, earlier questions about it, and one whose answer counts."""

    url: str
    earlier: tuple[Question, ...]
    asked: Question

    def messages(self) -> list[dict[str, Any]]:
        *earlier, (last, _) = [(each.text, each.answer) for each in (*self.earlier, self.asked)]
        turns: list[dict[str, Any]] = []
        for text, answer in earlier:
            turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        turns.append({"role": "user", "content": last})
        picture = {"type": "image_url", "image_url": {"url": self.url}}
        turns[0]["content"] = [picture, {"type": "text", "text": turns[0]["content"]}]
        return turns


def cases(task: str, count: int, seed: int, form: str = "PNG", earlier: int = 0) -> list[Case]:
    """Return questions of a task about pictures of a file format."""
    rng = random.Random(f"{_SEED} {seed} {task}")
    found: list[Case] = []
    hidden = ("colour", "shape") if task in ("colour", "shape") else (task,)
    while len(found) < count:
        scene, questions = scene_for(task, rng)
        kept = [listed for name, listed in questions.items() if name not in hidden]
        pool = [each for listed in kept for each in listed]  # none tells the answer
        if earlier and not pool:
            continue
        file = io.BytesIO()
        Image.fromarray(paint(scene, rng)).save(file, form, **_FORMATS[form])
        content = base64.b64encode(file.getvalue()).decode()
        before = tuple(rng.choice(pool) for _ in range(earlier))
        url = f"data:image/{form.lower()};base64,{content}"
        found.append(Case(url, before, rng.choice(questions[task])))
    return found


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that serves one model."""

    url: str
    model: str

    def ask(self, messages: list[dict[str, Any]], max_tokens: int = 4) -> tuple[str, int]:
        """Return a greedy answer, and the number of tokens from a kept prefix."""
        body = {"model": self.model, "messages": messages, "temperature": 0}
        content = json.dumps({**body, "max_tokens": max_tokens}).encode()
        asked = Request(f"{self.url}/v1/chat/completions", content)
        with urlopen(asked, timeout=120) as answer:
            read = json.load(answer)
        details = read["usage"].get("prompt_tokens_details") or {}
        return read["choices"][0]["message"]["content"], details.get("cached_tokens", 0)


@contextmanager
def serving(folder: Path, *, is_flat: bool = False) -> Iterator[Gateway]:
    """Serve a model's folder with a gateway of its own; flat positions have no rows and columns."""
    with tempfile.TemporaryDirectory() as place:
        models, log = Path(place) / "models.yaml", Path(place) / "log"
        entry = f"{{kind: chat, source: 'path:{folder.resolve()}', preload: true}}"
        models.write_text(f"version: 1\nmodels:\n  demo-vision: {entry}\n", "utf-8")
        clean = {key: each for key, each in os.environ.items() if not key.startswith("GATEWAY_")}
        given = {"GATEWAY_PORT": "0", "GATEWAY_LOG_FORMAT": "json", "GATEWAY_MODELS": str(models)}
        program = (_FLAT if is_flat else "") + _NORMAL
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", program, "serve"], env={**clean, **given}, stderr=output
            )
        try:
            while '"event":"ready"' not in log.read_text("utf-8"):
                if process.poll() is not None or '"not_ready"' in log.read_text("utf-8"):
                    raise SystemExit(log.read_text("utf-8"))
                time.sleep(0.05)
            found = re.search(r'"url":"([^"]+)"', log.read_text("utf-8"))
            assert found
            yield Gateway(found[1], "demo-vision")
        finally:
            process.terminate()
            process.wait(30)


def answers(gateway: Gateway, asked: Sequence[Case], at_once: int) -> list[str]:
    """Return the answers to questions, so many at once; a kept prefix is read before it counts."""

    def answer(case: Case) -> str:
        if case.earlier:
            gateway.ask(case.messages(), 1)
        text, cached = gateway.ask(case.messages())
        if case.earlier and cached < _BLOCK:
            raise SystemExit("no prefix was kept")
        return text

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, asked))


WAYS: Final[dict[str, dict[str, Any]]] = {
    "alone": {},
    "eight at once": {"at_once": 8},
    "kept prefix": {"earlier": _EARLIER},
    "JPEG": {"form": "JPEG"},
    "WEBP": {"form": "WEBP"},
}
FLAT: Final = "without rows and columns"


def score(
    gateway: Gateway, count: int, seed: int, mistakes: int, at_once: int = 1, **way: Any
) -> dict[str, float]:
    """Return the share of right answers by task; prints up to so many mistakes to stderr."""
    shares = {}
    for task in TASKS:
        asked = cases(task, count, seed, **way)
        told = answers(gateway, asked, at_once)
        wrong = [pair for pair in zip(asked, told, strict=True) if pair[1] != pair[0].asked.answer]
        for case, text in wrong[:mistakes]:
            print(f"{case.asked.text} → {text!r}, not {case.asked.answer!r}", file=sys.stderr)
        shares[task] = 1 - len(wrong) / count
    return shares


def table(scores: dict[str, dict[str, float]]) -> str:
    """The accuracy table in markdown."""
    lines = ["| | " + " | ".join((*TASKS, "all")) + " |", "|---" * (len(TASKS) + 2) + "|"]
    for name, shares in scores.items():
        values = [*shares.values(), sum(shares.values()) / len(shares)]
        lines.append(f"| {name} | " + " | ".join(f"{value:.1%}" for value in values) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table; exit with 1 when the model is worse than it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=VISION, help="folder of the model")
    parser.add_argument("--cases", type=int, default=CASES, help="pictures of each task")
    parser.add_argument("--mistakes", type=int, default=0, help="wrong answers to show of each")
    given = parser.parse_args()
    scores = {}
    with serving(given.model) as gateway:
        for seed, (name, way) in enumerate(WAYS.items()):
            scores[name] = score(gateway, given.cases, seed, given.mistakes, **way)
    means = [sum(shares.values()) / len(shares) for shares in scores.values()]
    with serving(given.model, is_flat=True) as gateway:
        scores[FLAT] = score(gateway, given.cases, 0, 0)
    print(table(scores))
    sys.exit(1 if min(means) < ENOUGH else 0)


if __name__ == "__main__":
    main()
