"""docs/extending.md: five recipes, whose files and names in them exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
RECIPES = PAGE.split("\n## ")[1:]
# A file or a folder of the repository, perhaps with a name in it.
PLACE = re.compile(r"`((?:gateway|tests|docs)/[\w./-]*|[A-Z]+\.md)(?:::(\w+))?`")
STEP = re.compile(r"^\d\. .*(?:\n   .*)*", re.MULTILINE)


def names_of(file: Path) -> set[str]:
    """Return the names that a module gives to classes, functions and values."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("place", sorted(set(PLACE.findall(PAGE))), ids="::".join)
def test_every_file_and_name_of_a_recipe_exists(place: tuple[str, str]) -> None:
    path, name = place
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file()
    assert not name or name in names_of(ROOT / path)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.splitlines()[0])
def test_every_step_of_a_recipe_names_a_place(recipe: str) -> None:
    steps = STEP.findall(recipe)
    assert "\n".join(steps) == recipe.partition("\n\n")[2].strip()
    assert [step for step in steps if not PLACE.search(step)] == []


def test_no_path_is_written_in_a_way_that_is_not_followed() -> None:
    written = re.findall(r"`[^`\n]*[/.][^`\n]*`", PAGE)
    assert [each for each in written if not PLACE.fullmatch(each)] == ["`/openapi.json`"]


def test_the_recipes_are_read_in_one_sitting() -> None:
    assert len(RECIPES) == 5
    assert len(PAGE.splitlines()) <= 60
