"""The workflows of CI: each runs commands that anybody can run, with the least rights."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import gateway
from tests.docs_links import broken_links

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
# The commands of each file's targets.
COMMANDS = {
    f"{make} {target}"
    for make, file in (
        ("make", "Makefile"),
        ("make -C deploy/release", "deploy/release/release.mk"),
    )
    for target in re.findall(
        r"^([a-z-]+):", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
}
WORKFLOWS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted(GITHUB.glob("workflows/*.yml"))
}
JOBS = {
    f"{name}/{job}": said
    for name, workflow in WORKFLOWS.items()
    for job, said in workflow["jobs"].items()
}


@pytest.mark.parametrize("job", JOBS)
def test_each_shell_step_is_one_target_of_a_makefile(job: str) -> None:
    assert {step["run"] for step in JOBS[job]["steps"] if "run" in step} <= COMMANDS


@pytest.mark.parametrize("job", JOBS)
def test_an_action_is_pinned_by_its_commit_and_keeps_no_credentials(job: str) -> None:
    for step in JOBS[job]["steps"]:
        action = step.get("uses", "make")
        assert action == "make" or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)
        if action.startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_a_workflow_has_no_rights_and_only_a_release_writes() -> None:
    assert {name: workflow["permissions"] for name, workflow in WORKFLOWS.items()} == {
        "ci": {},
        "nightly": {},
        "release": {},
    }
    writing = {job for job, said in JOBS.items() if "write" in said["permissions"].values()}
    assert {job.partition("/")[0] for job in writing} == {"release"}


def test_nothing_is_published_before_every_test_has_passed() -> None:
    release = WORKFLOWS["release"]["jobs"]
    for job in ("index", "image"):
        assert {"linux", "metal", "build"} <= {*release[job]["needs"]}
    assert release["images"]["needs"] == "image"
    assert {"index", "images"} <= {*release["page"]["needs"]}


def test_dependabot_knows_each_folder_of_a_package_json() -> None:
    dependabot = yaml.safe_load((GITHUB / "dependabot.yml").read_text(encoding="utf-8"))
    folders = [
        folder
        for update in dependabot["updates"]
        for folder in update.get("directories", [update.get("directory")])
    ]
    assert all((ROOT / folder[1:]).is_dir() for folder in folders)
    packages = {f"/{path.parent.relative_to(ROOT)}" for path in ROOT.glob("*/*/package.json")}
    assert packages <= {*folders}


def test_a_command_of_a_release_runs_in_the_root() -> None:
    command = ("make", "-C", "deploy/release", "--silent", "-n", "sbom", "VENV=/nowhere")
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "/nowhere/bin/python -m deploy.release.sbom" in lines
    listed = subprocess.run(
        ("make", "-C", "deploy/release", "--silent"), cwd=ROOT, capture_output=True, check=True
    )
    assert b"make -C deploy/release dist " in listed.stdout


def test_links_of_the_repositorys_pages_hold() -> None:
    assert broken_links(ROOT, sorted(GITHUB.rglob("*.md"))) == []


def test_a_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == gateway.__version__


def test_forms_ask_for_the_command_that_troubleshooting_names() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    forms = [
        yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / name).read_text(encoding="utf-8"))
        for name in ("bug.yml", "model.yml", "speed.yml")
    ]
    labels = {field["attributes"].get("label", "") for form in forms for field in form["body"]}
    asked = {label for label in labels if label.startswith("mlx-gateway ")}
    assert len(asked) == 1
    assert f"`{asked.pop()}`" in page
