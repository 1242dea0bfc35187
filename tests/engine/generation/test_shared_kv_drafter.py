"""Drafts by Gemma 4's drafter, which reads its target's KV: never another answer."""

from pathlib import Path
from typing import Any

import pytest

from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.errors import ModelLoadFailed
from gateway.jobs.chat import Sampling
from tests.checkpoints import GEMMA4, write_assistant, write_chat
from tests.engine.generation.harness import PLENTY, answer_at_random, open_engine

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("target"), **GEMMA4)


@pytest.fixture(autouse=True)
def _without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: ())


def ask(count: int, **job: Any) -> list[tuple[str, dict[str, Any]]]:
    whole = {"sampling": GREEDY, "max_tokens": 60, **job}
    return [(f"{'ab ' * 7 * i}Question {i}", whole) for i in range(count)]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_those_without_a_drafter(
    target: Path, tmp_path: Path, rows: int, is_ordered: bool
) -> None:
    options = {"use_ordered_embeddings": is_ordered}
    drafter = write_assistant(tmp_path / "drafter", target, **options)
    expected, _ = answer_at_random(open_engine(target), ask(rows))
    engine = open_engine(target, speculate_rows=4, draft=drafter, prefix_cache_bytes=PLENTY)
    found, passes = answer_at_random(engine, ask(rows))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert sum(each.drafted for each in passes) > 0
    assert list(engine.facts.drafters) == ["prompt_lookup", "draft_model"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone_hidden_size": 32}, "backbone_hidden_size is 32, but the model has 64"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(
    target: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    drafter = write_assistant(tmp_path / "drafter", target, **changes)
    with pytest.raises(ModelLoadFailed, match=reason):
        open_engine(target, speculate_rows=4, draft=drafter)


def test_a_drafter_alone_is_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_assistant(tmp_path / "drafter", target)
    with pytest.raises(ModelLoadFailed, match="name it as that model's `draft:`"):
        open_engine(drafter)
