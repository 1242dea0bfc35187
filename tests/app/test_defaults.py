"""A model has one set of defaults, whatever way it was named."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.app.engines import MlxEngines
from gateway.app.limits import generation_limits
from gateway.app.named import load_served
from gateway.registry import ChatSpec, load_catalog, read_short_names
from gateway.settings import load_settings
from tests.checkpoints import write_chat
from tests.fake_hub import FakeHub

REPO = "mlx-community/Qwen3-0.6B-4bit"
SHORT = "qwen3-0.6b"
KNOWN: dict[str, Any] = dict(read_short_names()[SHORT])
SHIPPED = Path(__file__).parents[2] / "models.yaml"
WAYS = ["short name", "hub", "folder", "cached", "discover", "any model"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Be where a catalogue's model and another lie in a folder, in a cache and on a hub."""
    monkeypatch.chdir(tmp_path)
    for name in (REPO, "org/other"):
        write_chat(tmp_path / "models" / name, num_hidden_layers=1)
        cached = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        write_chat(cached / "snapshots" / ("0" * 40), num_hidden_layers=1)
    repositories = {name: tmp_path / "models" / name for name in (REPO, "org/other")}
    monkeypatch.setenv("GATEWAY_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GATEWAY_HUB_TIMEOUT_S", "60")
    with FakeHub(repositories).serving() as hub:
        monkeypatch.setenv("GATEWAY_HUB_ENDPOINT", hub.url)
        yield hub


def spec_of(way: str, name: str) -> ChatSpec:
    """Name a model in one of the ways; return its spec."""
    serve: dict[str, Any] = {
        "short name": {"serve": (SHORT,)},
        "hub": {"serve": (f"hub:{name}",)},
        "folder": {"serve": (f"./models/{name}",)},
        "cached": {"discover": ("huggingface",)},
        "discover": {"discover": ("./models",)},
        "any model": {},
    }[way]
    Path("models.yaml").write_text("version: 1\nmodels: {}\n")
    settings = load_settings({"device": "cpu", "models": Path("models.yaml"), **serve})
    if way == "any model":
        offered = asyncio.run(MlxEngines(settings).offer(name, is_pull=False)).spec
        assert isinstance(offered, ChatSpec)
        return offered
    ids = {"short name": SHORT, "folder": name.rpartition("/")[2]}
    spec = load_served(settings).by_id(ids.get(way, name))
    assert isinstance(spec, ChatSpec)
    return spec


def rows(spec: ChatSpec) -> int:
    return generation_limits(load_settings({}), spec).structured_rows


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_the_catalogue_gets_its_entry(hub: FakeHub, way: str) -> None:
    spec = spec_of(way, REPO)
    sampling = spec.sampling.model_dump(exclude_none=True)
    assert sampling == KNOWN["sampling"]
    assert rows(spec) == 8


@pytest.mark.parametrize("way", [way for way in WAYS if way != "short name"])
def test_any_other_gets_what_shipped_entries_have(hub: FakeHub, way: str) -> None:
    spec = spec_of(way, "org/other")
    assert not spec.sampling.model_dump(exclude_none=True)  # the checkpoint's own
    assert rows(spec) == 8


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_still_runs_them_one_by_one(
    hub: FakeHub, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_STRUCTURED_ROWS", "1")
    assert rows(spec_of(way, REPO)) == 1
    monkeypatch.setenv("GATEWAY_MLX_COMMUNITY_QWEN3_0_6B_4BIT_STRUCTURED_ROWS", "3")
    monkeypatch.setenv("GATEWAY_QWEN3_0_6B_4BIT_STRUCTURED_ROWS", "3")
    monkeypatch.setenv("GATEWAY_QWEN3_0_6B_STRUCTURED_ROWS", "3")
    assert rows(spec_of(way, REPO)) == 3


def test_a_persons_own_entry_is_what_it_says(tmp_path: Path) -> None:
    """Structured answers run one by one, as the setting has it."""
    models = {"mine": {"kind": "chat", "source": f"hub:{REPO}"}}
    (tmp_path / "models.yaml").write_text(json.dumps({"version": 1, "models": models}))
    spec: Any = load_catalog(tmp_path / "models.yaml", {}).by_id("mine")
    assert rows(spec) == 1


def test_shipped_entries_are_those_of_the_catalogue() -> None:
    """One model of both files has the same sampling, thinking, structure and context."""
    checked = 0
    for spec in load_catalog(SHIPPED, {}).specs:
        entry = read_short_names().get(spec.id)
        if entry is None or not isinstance(spec, ChatSpec):
            continue
        known = ChatSpec.model_validate({**entry, "id": spec.id}, context={"folder": Path()})
        for key in ("sampling", "thinking", "structured", "max_context"):
            assert getattr(spec, key) == getattr(known, key), (spec.id, key)
        checked += 1
    assert checked > 1
