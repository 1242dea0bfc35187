"""The examples of README and docs, pasted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def examples(page: str) -> list[tuple[str, str]]:
    """List the blocks of a page that ask the gateway: each one's language and code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", text, flags=re.M | re.S)
    return [(language, code) for language, code in blocks if "127.0.0.1:8000/v1" in code]


README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = examples("README.md")
(_, RAG), *HYBRID = examples("docs/rag.md")  # the others are run by test_hybrid_search.py
[(_, RANKING)] = examples("docs/api.md")
[(_, CALL)] = examples("docs/tools.md")
STRUCTURED = [code for _, code in examples("docs/structured-output.md")]
RUN_HERE = {"docs/api.md", "docs/rag.md", "docs/structured-output.md", "docs/tools.md"}


def test_there_are_examples() -> None:
    """One for curl, one for the SDK; and no page has one that nothing runs: those of the tutorial
    are run by tests/test_tutorial.py.
    """
    assert [language for language, _ in EXAMPLES] == ["sh", "python"]
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")]
    with_examples = {page for page in pages if examples(page)}
    assert with_examples == {*RUN_HERE, "docs/tutorial.md"}


def printed(url: str, language: str, code: str) -> str:
    """Run an example as pasted, but for the port, which is the test's own."""
    code = code.replace("http://127.0.0.1:8000", url)
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-ec", code]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize(("language", "code"), EXAMPLES)
def test_an_example_works_as_pasted(shipped_url: str, language: str, code: str) -> None:
    text = printed(shipped_url, language, code)
    assert "error" not in text
    words = ("Paris",) if language == "python" else ('"embedding"', "[DONE]")
    assert all(word in text for word in words)


def test_the_readmes_question_about_a_picture_is_answered() -> None:
    [line] = re.findall(r"^GATEWAY_PORT=0 (mlx-gateway run .*)$", README, flags=re.M)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", line],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "GATEWAY_PORT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.decode() == "purple\n", done.stderr.decode()


def test_the_structured_examples_answer_in_their_form(shipped_url: str) -> None:
    person, choice = (
        json.loads(printed(shipped_url, "sh", code))["choices"][0]["message"]["content"]
        for code in STRUCTURED
    )
    assert {name: type(value) for name, value in json.loads(person).items()} == {
        "name": str,
        "age": int,
    }
    assert choice in ("yes", "no")


def test_the_example_of_tool_calling_is_answered_with_the_call(shipped_url: str) -> None:
    [choice] = json.loads(printed(shipped_url, "sh", CALL))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert list(json.loads(call["function"]["arguments"])) == ["city"]


def test_the_example_of_retrieval_finds_and_answers(shipped_url: str) -> None:
    found, answer = printed(shipped_url, "python", RAG).splitlines()
    assert found == "Found: Books may be kept for four weeks and renewed twice."
    assert answer.startswith("Answer: ")
    assert "four weeks" in answer


def test_the_example_of_reranking_returns_the_best_document(shipped_url: str) -> None:
    [best] = json.loads(printed(shipped_url, "sh", RANKING))["results"]
    assert best["index"] == 1
    assert best["document"] == {"text": "Goethe wrote Faust."}
    assert 0.5 < best["relevance_score"] < 1
