"""Unfollowed settings of a model's files, and the comparison of its family.

Both are in the log, in /v1/models and in doctor.
"""

from pathlib import Path
from typing import Any

import pytest
import structlog

from benchmarks.loading import load_generation
from gateway.doctor.trial import _check_files
from gateway.engine.device import Device
from gateway.engine.models import notes
from gateway.engine.models.notes import list_notes, verified_by
from tests.checkpoints import HEADED, add_head, write_chat
from tests.cpu_engines import cpu_engines
from tests.engine.embedding.harness import tiny
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio
# mlx-lm's class of the family lets each token see all before it.
WINDOWED: dict[str, Any] = {"model_type": "mistral", "sliding_window": 64}
ENDS = (
    "beyond 64 tokens, `sliding_window` of config.json is ignored: "
    "the context ends there, unless `max_context:` raises it"
)
RAISED = (
    "beyond 64 tokens, `sliding_window` of config.json is ignored, "
    "and `max_context:` allows 200: longer answers differ"
)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of families that no other comparison changes."""
    monkeypatch.setattr(notes, "_TRANSFORMERS", frozenset({"llama", "bert", "gemma3_text"}))
    monkeypatch.setattr(notes, "EQUAL", frozenset({"llama", "qwen3", "gemma3"}))


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize(
    ("config", "verified"),
    [
        ({"model_type": "llama"}, "transformers"),
        ({"model_type": "qwen3"}, "mlx-lm"),
        ({"model_type": "nobody"}, "no"),
        ({}, "no"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "transformers"),
        ({"model_type": "gemma3", "text_config": {"model_type": "nobody"}}, "mlx-lm"),
        ({"model_type": "bert", "text_config": {}}, "transformers"),
    ],
)
def test_a_family_is_verified_by_its_name_or_its_language_models(
    config: dict[str, Any], verified: str
) -> None:
    assert verified_by(config) == verified


@pytest.mark.usefixtures("compared")
async def test_a_window_that_nothing_follows_lowers_the_context_until_models_yaml_raises_it(
    tmp_path: Path,
) -> None:
    write_chat(tmp_path / "windowed", **WINDOWED)
    write_chat(tmp_path / "plain")
    chat = {"kind": "chat", "preload": True}
    models = {
        "windowed": {**chat, "source": "path:windowed"},
        "raised": {**chat, "source": "path:windowed", "max_context": 200},
        "plain": {**chat, "source": "path:plain"},
    }
    with structlog.testing.capture_logs() as logged:
        async with served(catalog(tmp_path, models), cpu_engines()) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            long = {"messages": [{"role": "user", "content": "a " * 80}], "max_tokens": 1}
            codes = {
                model: (
                    await client.post("/v1/chat/completions", json={"model": model, **long})
                ).status_code
                for model in ("windowed", "raised")
            }
    said = {each["id"]: (each["max_context"], each["notes"], each["verified"]) for each in listed}
    assert said == {
        "windowed": (64, [ENDS], "no"),
        "raised": (200, [RAISED], "no"),
        "plain": (4096, [], "transformers"),
    }
    assert codes == {"windowed": 400, "raised": 200}
    lines = [(e["model"], e["what"]) for e in logged if e["event"] == "files_not_followed"]
    assert sorted(lines) == [("raised", RAISED), ("windowed", ENDS)]


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        (None, "beyond 4,096 tokens, `long_factor` of config.json is ignored: the context ends "),
        (8192, "`max_context:` allows 8,192 tokens: texts of up to 4,096 are not rotated by "),
    ],
)
def test_a_raised_longrope_names_the_texts_that_differ(asked: int | None, note: str) -> None:
    """Its long factors are right for long texts, and all texts are rotated by one kind."""
    scaling = {"type": "longrope", "long_factor": [2.0], "short_factor": [1.0]}
    lengths = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = {"model_type": "phi3", "rope_scaling": scaling, **lengths}
    assert [each[: len(note)] for each in list_notes(config, asked)] == [note]
    assert list_notes(config, 4096) == []


@pytest.mark.usefixtures("compared")
async def test_every_kind_of_model_on_disk_is_verified_before_a_load(tmp_path: Path) -> None:
    write_chat(tmp_path / "plain")
    models = {
        "plain": {"kind": "chat", "source": "path:plain"},
        "vectors": {"kind": "embedding", "source": f"path:{tiny(tmp_path, 'bert')}"},
        "scores": {"kind": "rerank", "source": f"path:{tiny(tmp_path, 'modernbert-cls-reranker')}"},
        "far": {"kind": "chat", "source": "hub:org/far"},
    }
    async with served(catalog(tmp_path, models), cpu_engines()) as client:
        listed = (await client.get("/v1/models")).json()["data"]
    assert {each["id"]: each["verified"] for each in listed} == {
        "plain": "transformers",
        "vectors": "transformers",
        "scores": "no",
        "far": None,
    }


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize(
    ("config", "state", "message"),
    [
        (WINDOWED, "warn", f"{ENDS}; answers of its family were not compared with any library."),
        ({}, "ok", "answers of its family equal those of transformers, for each config key."),
    ],
)
async def test_doctor_warns_of_files_that_are_not_followed(
    tmp_path: Path, config: dict[str, Any], state: str, message: str
) -> None:
    engine = load_generation(write_chat(tmp_path, **config), name="m", device=Device.CPU)
    found = await _check_files(engine.facts)
    assert (found.check, found.state, found.message) == ("files", state, message)


async def test_doctor_names_what_guesses_tokens(tmp_path: Path) -> None:
    folder = add_head(write_chat(tmp_path, **HEADED))
    engine = load_generation(folder, name="m", device=Device.CPU, speculate_rows=4)
    found = await _check_files(engine.facts)
    assert found.message.endswith("; tokens are guessed by prompt_lookup and mtp_head.")
