"""The README says what is: its table is the settings', its links lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.readme_tables import written

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_generated_tables_are_those_of_the_code() -> None:
    """`make docs` writes them."""
    assert written(README) == README


def test_links_into_the_repository_lead_somewhere() -> None:
    """A newcomer follows them."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_model_key_is_explained() -> None:
    """In the table of models.yaml."""
    from gateway.registry import ChatSpec, EmbeddingSpec

    table = README.partition("## models.yaml")[2].partition("## Settings")[0]
    for key in {*EmbeddingSpec.model_fields, *ChatSpec.model_fields} - {"id"}:
        assert f"`{key}`" in table, key


def test_nothing_in_the_repository_is_a_link() -> None:
    """One to a path of somebody's machine leads nowhere on another."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a clone: what is tracked is not known")
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []
