"""The package index's page: links that hold there, of a repository that is known, or none."""

import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import gateway

ROOT = Path(__file__).parents[2]
# A project in little: the hook, and what it reads.
PARTS = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "gateway/__init__.py")
HOOK = "deploy/release/metadata.py"
HOME = "https://github.com/someone/something"
TAG = f"v{gateway.__version__}"
ELSEWHERE = re.compile(r"https?:|#")


def tree(folder: Path) -> Path:
    for name in (*PARTS, HOOK):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def built(folder: Path, **variables: str) -> Message:
    """Return the metadata that hatchling writes for a wheel of the folder."""
    kept = {name: value for name, value in os.environ.items() if "REPOSITORY" not in name}
    code = "from hatchling.build import *; prepare_metadata_for_build_wheel('.')"
    command = (sys.executable, "-c", code)
    run = subprocess.run(
        command, cwd=folder, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    [information] = folder.glob("*.dist-info")
    text = (information / "METADATA").read_text(encoding="utf-8")
    shutil.rmtree(information)
    (folder / "PKG-INFO").write_text(text, encoding="utf-8")  # an sdist has this file
    return Parser().parsestr(text)


def links(metadata: Message) -> set[str]:
    return {*re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))}


def test_links_lead_to_the_tag_where_the_repository_is_known(tmp_path: Path) -> None:
    """They stay in a wheel that is made from the sdist, whoever makes it."""
    folder = tree(tmp_path)
    said = built(folder, GITHUB_REPOSITORY="someone/something")
    assert [each for each in links(said) if not ELSEWHERE.match(each)] == []
    assert f"{HOME}/blob/{TAG}/docs/api.md" in links(said)
    picture = f"https://raw.githubusercontent.com/someone/something/{TAG}/docs/dashboard-light.png"
    assert picture in links(said)
    assert f"git clone {HOME}.git mlx-gateway" in str(said.get_payload())
    assert f"Issues, {HOME}/issues" in said.get_all("Project-URL", [])
    again = built(folder, MLX_GATEWAY_REPOSITORY="another/one")
    assert again.get_all("Project-URL") == said.get_all("Project-URL")
    assert links(again) == links(said)


def test_no_link_is_invented_where_the_repository_is_unknown(tmp_path: Path) -> None:
    said = built(tree(tmp_path))
    assert said.get_all("Project-URL") is None
    assert "docs/api.md" in links(said)
    assert said["Author"] == "The mlx-gateway authors"


@pytest.mark.parametrize("name", ["no-owner", "https://github.com/a/b", "a/b/c"])
def test_what_is_no_repository_fails_the_build(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match="a repository is owner/name"):
        built(tree(tmp_path), MLX_GATEWAY_REPOSITORY=name)
