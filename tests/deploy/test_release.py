"""The parts of a release: notes of its version, a formula of its sdist, a table of wheels."""

import hashlib
from pathlib import Path

import pytest

import gateway
from deploy.release import notes as release_notes
from deploy.release import wheels
from deploy.release.formula import write
from deploy.release.notes import notes
from deploy.release.wheels import blamed, names, without

ROOT = Path(__file__).parents[2]
VERSION = gateway.__version__
CHANGELOG = """# Changelog

## [Unreleased]

### Added

- What is to come.

## [0.2.0] - 2027-01-02

### Added

- A [page](docs/api.md).

## [0.1.0] - 2026-12-01

- The first.
"""
PINS = """mlx==0.32.4 ; sys_platform == 'linux' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
mlx-lm==0.32.2 \\
    --hash=sha256:cc
"""


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLX_GATEWAY_REPOSITORY", "GITHUB_REPOSITORY", "GITHUB_REF_TYPE"):
        monkeypatch.delenv(name, raising=False)


def test_notes_are_the_changelogs_section_and_no_more() -> None:
    assert notes(CHANGELOG, "0.2.0") == "### Added\n\n- A [page](docs/api.md)."
    assert notes(CHANGELOG, "0.1.0") == "- The first."
    assert notes(CHANGELOG, "0.3.0") is None
    assert notes(CHANGELOG, "0.1") is None


def test_a_version_without_notes_or_with_anothers_tag_is_not_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    monkeypatch.setattr(release_notes, "CHANGELOG", changelog)
    changelog.write_text("# Changelog\n\n## [Unreleased]\n\n- All.\n")
    with pytest.raises(SystemExit, match=f"CHANGELOG.md has no section of {VERSION}"):
        release_notes.main()
    changelog.write_text(f"## [{VERSION}] - 2026-12-01\n\n- A [page](docs/api.md).\n")
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/something")
    page = f"https://github.com/someone/something/blob/v{VERSION}/docs/api.md"
    assert release_notes.main() == f"- A [page]({page})."
    monkeypatch.setenv("GITHUB_REF_TYPE", "tag")
    monkeypatch.setenv("GITHUB_REF_NAME", "v99")
    with pytest.raises(SystemExit, match="the tag is v99"):
        release_notes.main()


def test_the_changelog_has_notes_for_what_comes_next() -> None:
    """They are the version's from the commit on that is tagged, and nothing is to come then."""
    text = release_notes.CHANGELOG.read_text(encoding="utf-8")
    assert notes(text, "Unreleased") or notes(text, VERSION)


def test_a_formula_names_the_sdist_by_the_hash_of_its_bytes(tmp_path: Path) -> None:
    sdist = tmp_path / f"mlx_gateway-{VERSION}.tar.gz"
    sdist.write_bytes(b"all of it")
    formula = write(sdist, "someone/something")
    address = f"https://github.com/someone/something/releases/download/v{VERSION}/{sdist.name}"
    assert f'url "{address}"' in formula
    assert f'sha256 "{hashlib.sha256(b"all of it").hexdigest()}"' in formula
    assert "--require-hashes" in formula
    assert "$" not in formula


def test_every_pin_that_somebody_installs_to_serve_is_looked_for() -> None:
    """Pins are installed by make, pip's extras, the image or the formula."""
    looked = {
        name
        for file in (*wheels.PINS, *wheels.CUDA)
        for name in names((ROOT / file).read_text(encoding="utf-8"))
    }
    for pins in ("runtime", "bench", "otel", "models", "cuda", "cuda13"):
        text = (ROOT / "requirements" / f"{pins}.txt").read_text(encoding="utf-8")
        assert {*names(text)} <= looked, pins


def test_a_pin_that_has_no_wheel_is_named_and_the_others_are_tried() -> None:
    assert names(PINS) == ["mlx", "mlx-lm"]
    assert without(PINS, ["mlx"]) == PINS[PINS.index("mlx-lm") :]
    because = "Because mlx{sys_platform == 'linux'}==0.32.4 has no wheels with a matching"
    assert blamed(names(PINS), because) == "mlx"
    assert blamed(names(PINS), "Because mlx-lm==0.32.2 has no usable wheels and you") == "mlx-lm"
    with pytest.raises(SystemExit, match="no internet"):
        blamed(names(PINS), "no internet")
