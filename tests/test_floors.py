"""The picture in gateway/__init__.py is true: imports go down, never up, never across."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

GATEWAY = Path(__file__).parents[1] / "gateway"
GROUND = {"jobs", "errors", "metrics", "logs"}
ALLOWED: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {"bench", "doctor", "app", "engine", "registry", "settings", *GROUND},
    "bench": {"app", "api", "serving", "wire", "engine", "registry", "settings", *GROUND},
    "doctor": {"bench", "app", "api", "serving", "engine", "registry", "settings", *GROUND},
    "app": {"api", "serving", "engine", "registry", "settings", *GROUND},
    "api": {"serving", "wire", "registry", *GROUND},
    "serving": {"registry", *GROUND},
    "wire": {"jobs", "errors"},
    "engine": {"registry", "jobs", "errors"},
    "registry": {"errors"},
    "settings": {"errors"},
    **{room: set() for room in GROUND},
}
OUTSIDE: dict[str, set[str]] = {
    "mlx": {"engine"},
    "mlx_lm": {"engine"},
    "outlines": {"engine"},
    "tokenizers": {"engine"},
    "huggingface_hub": {"engine", "cli"},
    "starlette": {"app", "api"},
    "hypercorn": {"cli"},
    "aiohttp": {"bench"},
    "typer": {"cli"},
    "rich": {"cli", "bench"},
    "prometheus_client": {"metrics", "api"},
    "pydantic_settings": {"settings"},
    "yaml": {"registry"},
}
FILES = sorted(GATEWAY.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """List the modules a file imports, whole names."""
    package = ("gateway", *file.relative_to(GATEWAY).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            yield from (f"{name}.{alias.name}" for alias in node.names)


def room(file: Path) -> str:
    """Name the top-level room a file is in."""
    return file.relative_to(GATEWAY).parts[0].removesuffix(".py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(GATEWAY)))
def test_imports_go_down(file: Path) -> None:
    """Of our own rooms, only those below; of others' libraries, only where they belong."""
    here = room(file)
    if here == "__init__":
        return
    for name in imports(file):
        first, *rest = name.split(".")
        if first == "gateway" and rest and rest[0] != here:
            below = ALLOWED[here] | {"__version__"}
            assert rest[0] in below, f"{here} may not import gateway.{rest[0]}"
        elif first in OUTSIDE:
            assert here in OUTSIDE[first], f"{here} may not import {first}"


def test_every_room_is_in_the_picture() -> None:
    """A new top-level module must be given its floor."""
    rooms = {room(file) for file in FILES} - {"__init__"}
    assert rooms <= ALLOWED.keys()


@pytest.mark.parametrize("name", ["models", "embedding", "generation"])
def test_the_rooms_of_serving_are_strangers(name: str) -> None:
    """They stand on what serving has outside of them, which knows none of them."""
    serving = GATEWAY / "serving"
    others = [file for file in serving.rglob("*.py") if serving / name not in file.parents]
    known = {each for file in others for each in imports(file)}
    assert not [each for each in known if f"{each}.".startswith(f"gateway.serving.{name}.")]


def test_no_module_is_two_things() -> None:
    """Past five hundred lines there is a second noun to be found."""
    for file in FILES:
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 500, file
