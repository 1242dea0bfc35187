"""The package's imports are those of pyproject.toml: nothing comes by accident."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    requirements = [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]
    return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


def imported() -> set[str]:
    """Name the packages that gateway/ imports, wherever in a module."""
    names = set()
    for file in (ROOT / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - {"gateway"} - sys.stdlib_module_names


def test_a_package_that_is_imported_is_declared() -> None:
    owners, known = packages_distributions(), declared()
    strangers = [
        package
        for package in sorted(imported())
        if not known & {normal(name) for name in owners.get(package, ())}
    ]
    assert not strangers, "of none that pyproject.toml declares"
