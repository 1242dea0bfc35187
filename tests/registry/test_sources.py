"""Sources: how a model's place is written, and where an installed package is."""

from pathlib import Path

import pytest

from gateway.registry import HubSource, PackageSource, PathSource, package_folder, parse_source


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hub:org/name", HubSource("org/name")),
        ("hub:org/na.me-1@abc123", HubSource("org/na.me-1", "abc123")),
        ("hub:org/name@refs/pr/1", HubSource("org/name", "refs/pr/1")),
        ("path:/weights", PathSource(Path("/weights"))),
        ("path:../x", PathSource(Path("/models/x"))),
        ("package:module/a/b", PackageSource("module", "a/b")),
        ("package:module", PackageSource("module", "")),
        ("hub:org/name/x.gguf", HubSource("org/name", None, "x.gguf")),
        ("package:m/a , hub:org/n@v", HubSource("org/n", "v", package=PackageSource("m", "a"))),
        ("hub:org/name/a b/x-Q4_K_M.GGUF@v1", HubSource("org/name", "v1", "a b/x-Q4_K_M.GGUF")),
        ("hub:org/name.gguf", HubSource("org/name.gguf")),
        ("path:../x.gguf", PathSource(Path("/models/x.gguf"))),
        ("package:module/x.gguf", PackageSource("module", "x.gguf")),
    ],
)
def test_sources_are_read(text: str, source: object) -> None:
    assert parse_source(text, Path("/models/here")) == source
    assert parse_source(str(source), Path("/")) == source


@pytest.mark.parametrize(
    "text",
    [
        *("", "org/name", "https://example/x", "path:", "package:", "package:a.b/c"),
        *("package:m/../x", "package:m//x", "hub:", "hub:name", "hub:a/b/c", "hub:../x"),
        *("hub:a/b@", "hub:a/b/../x.gguf", "hub:a/b//x.gguf", "hub:a/b/.gguf/"),
    ],
)
def test_bad_sources_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"hub:org/name|path: names no folder|package:module"):
        parse_source(text, Path("/"))


def test_a_source_says_whether_it_is_one_file() -> None:
    for text in ("hub:a/b/c.gguf", "path:a.gguf", "package:m/a.gguf"):
        assert parse_source(text, Path("/")).is_gguf
    for text in ("hub:a/b", "hub:a/b.gguf", "path:a", "package:m"):
        assert not parse_source(text, Path("/")).is_gguf


def test_a_piece_of_a_model_is_refused() -> None:
    """The refusal saves a download of gigabytes; a model's only file may be called 1 of 1."""
    for scheme in ("hub:a/b", "path:b", "package:b"):
        with pytest.raises(ValueError, match="a part of a split model"):
            parse_source(f"{scheme}/x-00001-of-00003.gguf", Path("/"))
        parse_source(f"{scheme}/x-00001-of-00001.gguf", Path("/"))


def test_a_link_to_a_file_keeps_its_own_name(tmp_path: Path) -> None:
    """The hub's cache keeps files by their hashes, which say nothing of their content."""
    (tmp_path / "0123abcd").write_bytes(b"GGUF")
    (tmp_path / "x.gguf").symlink_to(tmp_path / "0123abcd")
    assert parse_source("path:./x.gguf", tmp_path) == PathSource(tmp_path / "x.gguf")


def test_a_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "explosive_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("explosive_weights") == package
    assert package_folder("no_such_package_here") is None
    assert package_folder("__main__") is None
