"""Downloads that are cut, wrong, doubled or too big: resumed, refused, never half a model."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import get_session, http_backoff  # type: ignore[attr-defined]

from gateway.engine.hub import (
    Hub,
    HubFile,
    download,
    fetched_bytes,
    on_disk,
    require_room,
    room_needed,
)
from gateway.errors import ModelUnavailable
from gateway.registry import ModelSpec
from gateway.registry.specs import ChatSpec
from tests import fake_hub
from tests.fake_hub import COMMIT, FakeHub, sha256

MB = 1024 * 1024
WEIGHTS = 24 * MB  # more than two of the chunks in which huggingface_hub writes: cli/test_pull.py
UNIT = 64 * 1024
SMALL = 24 * UNIT  # the same, of the chunks here


@pytest.fixture(autouse=True)
def _in_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub write chunks of ten units, not of 10 MB, and never pause for a second."""
    sleep = time.sleep
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10 * UNIT)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


def write_weights(file: Path, size: int = WEIGHTS) -> bytes:
    """Write a safetensors file of one tensor, of random bytes."""
    shape = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"w": shape}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + os.urandom(size))
    return file.read_bytes()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_weights(folder / "model.safetensors", SMALL)
    return folder


@pytest.fixture
def hub(repo: Path) -> Iterator[FakeHub]:
    with FakeHub({"org/big": repo}).serving() as hub:
        yield hub


@pytest.fixture
def place(hub: FakeHub, tmp_path: Path) -> Hub:
    return Hub(endpoint=hub.url, cache=tmp_path / "cache")


@pytest.fixture
def spec() -> ModelSpec:
    entry = {"id": "mine", "kind": "chat", "source": f"hub:org/big@{COMMIT}"}
    return ChatSpec.model_validate(entry, context={"folder": Path()})


def blobs(place: Hub) -> Path:
    assert place.cache is not None
    return place.cache / "models--org--big" / "blobs"


def part(place: Hub, repo: Path) -> Path:
    """Name the file of weights that are half fetched."""
    return blobs(place) / f"{sha256(repo / 'model.safetensors')}.part"


def test_a_broken_connection_is_resumed_where_it_broke(
    hub: FakeHub, place: Hub, spec: ModelSpec, repo: Path
) -> None:
    hub.cuts = [21 * UNIT]
    folder = download(spec, place)
    assert hub.ranges == ["", f"bytes={20 * UNIT}-"]
    same = (folder / "model.safetensors").read_bytes() == (repo / "model.safetensors").read_bytes()
    assert same


def test_an_earlier_process_half_is_finished(
    hub: FakeHub, place: Hub, spec: ModelSpec, repo: Path
) -> None:
    half = (repo / "model.safetensors").read_bytes()[: 7 * UNIT]
    blobs(place).mkdir(parents=True)
    part(place, repo).write_bytes(half)
    assert fetched_bytes(spec, place) == 7 * UNIT
    assert on_disk(spec, place) is None
    download(spec, place)
    assert hub.ranges == [f"bytes={7 * UNIT}-"]
    assert on_disk(spec, place) is not None
    assert not list(blobs(place).glob("*.part"))


@pytest.mark.parametrize("size", [7 * UNIT, SMALL + 9 * UNIT])
def test_a_half_with_other_bytes_is_dropped(
    hub: FakeHub, place: Hub, spec: ModelSpec, repo: Path, size: int
) -> None:
    blobs(place).mkdir(parents=True)
    part(place, repo).write_bytes(bytes(size))
    if size < SMALL:
        with pytest.raises(ModelUnavailable, match="its hash isn't the hub's"):
            download(spec, place)
    assert on_disk(spec, place) is None
    assert (download(spec, place) / "model.safetensors").stat().st_size > SMALL
    assert hub.ranges[-1] == ""


def test_what_went_bad_on_disk_is_fetched_again(
    hub: FakeHub, place: Hub, spec: ModelSpec, repo: Path
) -> None:
    folder = download(spec, place)
    weights = folder / "model.safetensors"
    blob = weights.resolve()
    blob.write_bytes(bytes(blob.stat().st_size))
    download(spec, place)
    assert weights.read_bytes() == (repo / "model.safetensors").read_bytes()
    (folder / "config.json").resolve().write_text("{}{}{}")
    with pytest.raises(ModelUnavailable, match=r"config\.json doesn't have the hub's size of 2"):
        download(spec, place)
    download(spec, place)
    assert (folder / "config.json").read_text() == "{}"


def test_weights_that_the_hub_has_in_half_are_named(
    place: Hub, spec: ModelSpec, repo: Path
) -> None:
    """Their hash is right and their header says more."""
    file = repo / "model.safetensors"
    file.write_bytes(file.read_bytes()[: 2 * UNIT])
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors is not a whole safetensors"):
        download(spec, place)


def test_two_downloads_at_once_fetch_once(hub: FakeHub, place: Hub, spec: ModelSpec) -> None:
    """This happens when `pull` runs beside the gateway."""
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: download(spec, place), range(2))
    assert first == second
    assert hub.ranges == [""]


def test_a_model_without_room_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """The bytes that are already there are not needed again."""
    big = HubFile("a.safetensors", 2**60, sha256="a")
    (tmp_path / "a.part").write_bytes(bytes(100))
    needed = room_needed([big, HubFile("config.json", 2**60)], tmp_path)
    assert needed == 2**60 - 100
    with pytest.raises(OSError, match=f"{needed:,} bytes are to be fetched") as refused:
        require_room(needed, tmp_path / "not" / "yet")
    assert refused.value.errno == errno.ENOSPC


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk that the weights just fit on."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={SMALL + 6 * UNIT}", "tmpfs", str(folder))
    if not shutil.which("mount") or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("only root may mount a small disk, on Linux")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_meanwhile_is_told_and_given_back(
    hub: FakeHub, spec: ModelSpec, small_disk: Path
) -> None:
    """No half is left on it; once there is room, the model is fetched."""
    place = Hub(endpoint=hub.url, cache=small_disk / "cache")
    hub.gate.clear()
    failed: list[str] = []

    def fetch() -> None:
        with pytest.raises(ModelUnavailable) as caught:
            download(spec, place)
        failed.append(caught.value.reason)

    fetching = threading.Thread(target=fetch)
    fetching.start()
    assert hub.half_sent.wait(30)
    other = small_disk / "other"
    other.write_bytes(bytes(18 * UNIT))
    hub.gate.set()
    fetching.join(30)
    assert failed == [
        "org/big could not be stored: No space left on device. Make room, or set GATEWAY_HUB_CACHE "
        "to a folder on another disk."
    ]
    assert fetched_bytes(spec, place) == 0
    assert on_disk(spec, place) is None
    with pytest.raises(ModelUnavailable, match=r"bytes are to be fetched, and .* has room for"):
        download(spec, place)
    other.unlink()
    assert on_disk(spec, place) is None
    assert download(spec, place).is_dir()


def test_a_hub_that_fails_in_the_middle_is_told_by_its_status(
    hub: FakeHub, place: Hub, spec: ModelSpec
) -> None:
    hub.status, hub.status_only = 500, "/resolve/"
    with pytest.raises(ModelUnavailable, match=r"org/big could not be fetched from the hub.*500"):
        download(spec, place)
    assert on_disk(spec, place) is None


def test_a_refusal_names_the_key_that_is_missing(hub: FakeHub, place: Hub, spec: ModelSpec) -> None:
    hub.status = 401
    with pytest.raises(ModelUnavailable, match="HF_TOKEN"):
        download(spec, place)


def test_a_hub_whose_commits_never_agree_is_left(hub: FakeHub, place: Hub, spec: ModelSpec) -> None:
    """A branch that moves is asked again, and no more than a few times."""
    hub.says["org/big"] = {"sha": "f" * 40}
    with pytest.raises(ModelUnavailable, match="names another commit of org/big each time"):
        download(spec, place)


def test_a_hub_that_is_gone_does_not_disturb_another() -> None:
    """All threads share a client, which one that cannot connect would close."""
    client = get_session()
    with pytest.raises(Exception, match="refused"):
        http_backoff("GET", "http://127.0.0.1:9/x")
    assert not client.is_closed
    assert get_session() is client


def test_listing_and_fetching_import_no_mlx() -> None:
    """`pull` works where mlx doesn't."""
    code = "import sys, gateway.engine.hub; print('mlx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_small_file_far_longer_than_listed_is_not_fetched_whole(
    hub: FakeHub, place: Hub, spec: ModelSpec, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.engine.hub.SPARE_BYTES", 1000)
    siblings: Any = fake_hub._info("org/big", repo)["siblings"]
    hub.says["org/big"] = {"siblings": siblings}
    (repo / "config.json").write_bytes(b" " * 100_000)
    with pytest.raises(ModelUnavailable, match="small files are longer than the hub says"):
        download(spec, place)
    assert not [file for file in blobs(place).iterdir() if file.stat().st_size == 100_000]
    (repo / "config.json").write_text("{}")
    assert download(spec, place)
