"""README and docs are true: tables are the code's, and links lead somewhere."""

import ast
import errno
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.doctor.machine import bind_problem
from gateway.errors import GatewayError
from gateway.registry import ChatSpec, EmbeddingSpec
from gateway.registry.specs import ChatBatching, EmbeddingBatching, Sampling, Structured
from tests.docs_links import broken_links
from tests.docs_tables import TABLES, generated

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "deploy", "demo", "benchmarks", "tests", "compat_tests")
PAGES = sorted(
    page
    for pages in (ROOT.glob("*.md"), *((ROOT / folder).rglob("*.md") for folder in FOLDERS))
    for page in pages
    if not {"node_modules", ".pytest_cache"} & {*page.parts}
)


@pytest.mark.parametrize("name", TABLES)
def test_a_generated_table_is_that_of_the_code(name: str) -> None:
    page, written, new = generated(name)
    assert written == new, page


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_readme_begins_with_what_it_is_and_how_to_start_it() -> None:
    """The first screen says what it is for; the second, how to have it."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    first, second = "\n".join(lines[:23]), "\n".join(lines[:32])
    for said in ("OpenAI-compatible", "Continuous batching", "Tool calling", "For whoever"):
        assert said in first
    for said in ("git clone", "make serve", "make test", ".venv/bin:$PATH"):
        assert said in second


def test_every_link_leads_to_a_page_and_a_heading_that_exist() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "docs/api.md", "deploy/README.md"} <= names
    assert broken_links(ROOT, PAGES) == []


def test_every_page_is_linked_from_the_readme_or_from_the_list_of_all_pages() -> None:
    """Those of devices are linked from the table of them."""
    readme, index, devices = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("README.md", "docs/README.md", "docs/devices/README.md")
    )
    assert "](docs/README.md)" in readme
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        if name.startswith("docs/devices/") and page.name != "README.md":
            assert f"]({page.name})" in devices, name
        else:
            target = os.path.relpath(page, ROOT / "docs")
            assert f"]({name})" in readme or f"]({target})" in index, name


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("continuous batching", "how-it-works.md"),
        ("prefix caching", "how-it-works.md"),
        ("prompt caching", "how-it-works.md"),
        ("speculative decoding", "how-it-works.md"),
        ("tool calling", "tools.md"),
        ("function calling", "tools.md"),
        ("JSON mode", "structured-output.md"),
        ("quickstart", "tutorial.md"),
        ("RAG", "rag.md"),
        ("keep-alive", "faq.md"),
        ("multimodal", "images.md"),
        ("quantization", "models-yaml.md"),
    ],
)
def test_a_word_of_the_field_finds_the_page_about_it(word: str, page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert re.search(rf"\b{word}\b", text, re.IGNORECASE)


def test_the_versions_that_go_together_are_those_of_the_pins() -> None:
    page = (ROOT / "docs" / "versioning.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", page, flags=re.M)
    pins = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
    assert {"mlx", "mlx-lm"} <= {name for name, _ in told}
    assert {*told} <= {*re.findall(r"^([\w-]+)==([\d.]+)", pins, flags=re.M)}


def test_every_model_key_is_explained() -> None:
    page = (ROOT / "docs" / "models-yaml.md").read_text(encoding="utf-8")
    table = page.partition("| Key | Kinds | Meaning |")[2].partition("\n\n")[0]
    for key in {*EmbeddingSpec.model_fields, *ChatSpec.model_fields} - {"id"}:
        assert f"`{key}`" in table, key
    batching = page.partition("\n## batching\n")[2].partition("\n## ")[0]
    for key in {*EmbeddingBatching.model_fields, *ChatBatching.model_fields}:
        assert f"`{key}`" in batching, key
    structured = page.partition("\n## structured\n")[2].partition("\n## ")[0]
    assert not [key for key in Structured.model_fields if f"`{key}`" not in structured]
    assert not [key for key in Sampling.model_fields if f"`{key}`" not in table]


def test_every_error_is_explained() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", page, flags=re.M)
    explained = {
        (int(status), code) for status, codes in rows for code in re.findall("`(.*?)`", codes)
    }
    raised = {(kind.status, kind.code) for kind in every(GatewayError) if kind.code is not None}
    assert raised
    assert raised <= explained


def every(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    """Yield a kind of error and all that are kinds of it."""
    yield kind
    for each in kind.__subclasses__():
        yield from every(each)


def test_nothing_in_the_repository_is_a_link() -> None:
    """One to a path of somebody's machine leads nowhere on another."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a clone: what is tracked is not known")
    assert [line for line in listed.stdout.splitlines() if line.startswith("120000")] == []


def test_every_message_of_troubleshooting_is_one_of_the_gateways() -> None:
    """Users search for a message: each is in the code, or in the section of other programs."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    own = page.partition("\n## It does not install")[2].partition("\n## Messages of other")[0]
    constants = (
        node.value
        for path in (ROOT / "gateway").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    states = (f"{part}_{state}" for part in ("lane", "loop") for state in ("stalled", "dead"))
    in_use = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    known = "\n".join((*constants, *states, bind_problem("127.0.0.1:8000", in_use)))
    cells = [line[2:].split(" | ")[0] for line in own.splitlines() if line.startswith("| ")]
    messages = [each for cell in cells for _, each in re.findall(r"(`+)(.+?)\1(?!`)", cell)]
    pieces = {piece.strip(" `") for message in messages for piece in message.split("…")}
    assert len(pieces) > 60
    assert [piece for piece in pieces if piece not in known] == []
