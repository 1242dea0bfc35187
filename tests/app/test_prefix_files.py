"""Kept prefixes outlive a restart, whatever happens to their files."""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

from gateway.app.gateway import Gateway
from gateway.app.prefix_files import PrefixFolder
from gateway.jobs.steps import PrefixPiece
from gateway.settings import SettingsInvalid
from tests.checkpoints import HYBRID, SLIDING, write_adapter, write_chat
from tests.cpu_engines import cpu_engines
from tests.serving_app import catalog, ready, served, served_app, settings

pytestmark = pytest.mark.anyio

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sliding": SLIDING, "hybrid": HYBRID}
ADMIN = {"authorization": "Bearer sesame"}
SEA = "tell me of the sea and of the old man and his boat " * 12
GIVEN: dict[str, Any] = {"admin_key": "sesame", "prefix_folder_bytes": 1 << 26}


async def ask(client: httpx2.AsyncClient, prompt: str, model: str = "m", key: str = "") -> Any:
    """Return the answer, and the number of the prompt's tokens that were cached."""
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = (await client.post("/v1/completions", json=body, headers=headers)).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached


async def save(client: httpx2.AsyncClient) -> httpx2.Response:
    return await client.post("/admin/prefixes/save", headers=ADMIN)


def gateway(folder: Path, **given: Any) -> Any:
    """Serve the model `m` of a folder, and an adapter of it if there is one."""
    models: dict[str, Any] = {"m": {"kind": "chat", "source": "path:m", **given.pop("entry", {})}}
    if (folder / "lora").exists():
        models["lora"] = {"kind": "chat", "adapter": "path:lora", "base": "m"}
    engines = cpu_engines(prefix_cache_bytes=given.pop("prefix_cache_bytes", 1 << 26))
    given = {**GIVEN, "prefix_folder": folder / "kept", **given}
    return served(catalog(folder, models), engines, **given)


async def saved(folder: Path, prompt: str = SEA, **given: Any) -> list[Path]:
    """Have a gateway read a prompt and save it; return its files."""
    async with gateway(folder, **given) as client:
        await ask(client, prompt, key=given.get("api_keys", [""])[0])
        told = await save(client)
        assert told.status_code == 200, told.text
    return sorted((folder / "kept").glob("*.kv"))


@pytest.mark.parametrize("kind", KINDS)
async def test_after_a_restart_a_prompt_goes_on_as_it_would_have(tmp_path: Path, kind: str) -> None:
    write_chat(tmp_path / "m", **KINDS[kind])
    names = ["m"]
    if kind == "plain":
        write_adapter(tmp_path / "lora", tmp_path / "m")
        names.append("lora")
    prompts = [SEA + "and what he caught", SEA + "and why"]
    async with gateway(tmp_path) as client:
        for model in names:
            await ask(client, prompts[0], model)
        told = (await save(client)).json()
        assert told == {"object": "prefixes", "files": len(list((tmp_path / "kept").glob("*.kv")))}
        expected = [await ask(client, prompt, model) for model in names for prompt in prompts]
    async with gateway(tmp_path) as client:
        again = [await ask(client, prompt, model) for model in names for prompt in prompts]
        assert again == expected
        assert min(cached for _, cached in again) > 100


async def test_a_drain_saves_when_all_requests_have_ended(tmp_path: Path) -> None:
    write_chat(tmp_path / "m")
    models = catalog(tmp_path, {"m": {"kind": "chat", "source": "path:m"}})
    given = settings(prefix_folder=tmp_path / "kept")
    kept = Gateway(given, models, cpu_engines(prefix_cache_bytes=1 << 26))
    async with served_app(kept.asgi, given) as client:
        await ready(client)
        await ask(client, SEA)
        assert (await save(client)).status_code == 404, "there is no admin key"
        await kept.drain()
    names = os.listdir(tmp_path / "kept")
    assert len(names) > 1
    modes = {stat.S_IMODE((tmp_path / "kept" / name).stat().st_mode) for name in names}
    assert (modes, stat.S_IMODE((tmp_path / "kept").stat().st_mode)) == ({0o600}, 0o700)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


HARMS: dict[str, Any] = {
    "a byte is another": flip,
    "it is cut off": lambda file: os.truncate(file, 1000),
    "it is empty": lambda file: os.truncate(file, 0),
    "it has another's name": lambda file: file.rename(file.with_name(file.name[:-6] + "000.kv")),
    "the model is another": lambda file: write_chat(file.parents[1] / "m", seed=7),
    "the numbers are others": lambda file: {"entry": {"dtype": "float16"}},
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
async def test_a_file_that_no_longer_fits_is_dropped_and_told(tmp_path: Path, harm: str) -> None:
    write_chat(tmp_path / "m")
    (file,) = await saved(tmp_path)
    given = HARMS[harm](file)
    given = given if isinstance(given, dict) else {}
    with structlog.testing.capture_logs() as logged:
        async with gateway(tmp_path, **given) as client:
            answer, cached = await ask(client, SEA)
            assert cached == 0
            assert (await ask(client, SEA))[1] > 100
    (told,) = [line for line in logged if line["event"] == "prefixes_read"]
    assert (told["files"], told["dropped"]) == (0, 1)
    assert file.name[:64] in told["problem"]
    assert not file.is_file()
    async with gateway(tmp_path, prefix_folder=None, **given) as client:
        assert await ask(client, SEA) == (answer, 0)


def fail_to_open(error: Exception, patched: pytest.MonkeyPatch) -> None:
    open_file = Path.open

    def fail(path: Path, *how: Any, **more: Any) -> Any:
        if path.suffix == ".kv":
            raise error
        return open_file(path, *how, **more)

    patched.setattr(Path, "open", fail)


def fail_to_put(error: Exception, patched: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise error

    patched.setattr("gateway.engine.kv.prefix_cache.PrefixCache.put_piece", fail)


FAULTS: dict[str, Any] = {
    **{
        errno.errorcode[code]: (fail_to_open, OSError(code, os.strerror(code)))
        for code in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.EACCES)
    },
    "ESTALE": (fail_to_open, OSError(errno.ESTALE, os.strerror(errno.ESTALE))),
    "ETIMEDOUT": (fail_to_open, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))),
    "no memory": (fail_to_open, MemoryError()),
    "no thread": (fail_to_open, RuntimeError("can't start new thread")),
    "the device": (fail_to_put, RuntimeError("[METAL] Command buffer execution failed")),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_file_that_the_machine_cannot_read_now_is_told_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    write_chat(tmp_path / "m")
    (file,) = await saved(tmp_path)
    content = file.read_bytes()
    fail, error = FAULTS[fault]
    with structlog.testing.capture_logs() as logged, monkeypatch.context() as patched:
        fail(error, patched)
        async with gateway(tmp_path) as client:
            assert (await ask(client, SEA[9:]))[1] == 0
    assert file.read_bytes() == content
    (told,) = [line for line in logged if line["event"] == "prefixes_read"]
    assert (told["files"], told["dropped"], told["failed"]) == (0, 0, 1)
    assert told["problem"] == f"{file.name}: {error}"
    async with gateway(tmp_path) as client:
        assert (await ask(client, SEA))[1] > 100


async def test_a_file_that_could_not_be_read_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may never give it back."""
    write_chat(tmp_path / "m")
    (file,) = await saved(tmp_path)
    before = file.stat().st_ino
    with monkeypatch.context() as patched:
        fail_to_open(OSError(errno.EIO, "Input/output error"), patched)
        async with gateway(tmp_path) as client:
            await ask(client, SEA)
            assert (await save(client)).json()["files"] == 1
            after = file.stat().st_ino
            assert after != before
            assert (await save(client)).json()["files"] == 1
            assert file.stat().st_ino == after, "it is as saved as any"


async def test_a_folder_in_a_files_place_is_told_and_stays(tmp_path: Path) -> None:
    write_chat(tmp_path / "m")
    (file,) = await saved(tmp_path)
    file.unlink()
    file.mkdir()
    with structlog.testing.capture_logs() as logged:
        async with gateway(tmp_path) as client:
            assert (await ask(client, SEA))[1] == 0
            told = await save(client)
    assert told.status_code == 503
    assert "directory" in told.json()["error"]["message"]
    assert file.is_dir()
    (line,) = [line for line in logged if line["event"] == "prefixes_read"]
    assert (line["dropped"], line["failed"]) == (0, 1)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}


async def test_a_second_gateway_serves_without_the_folder_and_leaves_it_alone(
    tmp_path: Path,
) -> None:
    """Its keys do not matter; once the first one has ended, the next start has the folder."""
    write_chat(tmp_path / "m")
    kept = tmp_path / "kept"
    async with gateway(tmp_path, api_keys=["a-key"]) as first:
        await ask(first, SEA, key="a-key")
        assert (await save(first)).status_code == 200
        before = contents(kept)
        with structlog.testing.capture_logs() as logged:
            async with gateway(tmp_path, api_keys=["other-key"]) as second:
                assert (await ask(second, SEA, key="other-key"))[1] == 0
                told = await save(second)
        assert contents(kept) == before
        assert told.status_code == 503
        assert "Another gateway has GATEWAY_PREFIX_FOLDER" in told.json()["error"]["message"]
        (line,) = [line for line in logged if line["event"] == "prefix_folder_taken"]
        assert (line["log_level"], line["folder"]) == ("warning", str(kept))
        assert (await save(first)).status_code == 200
    async with gateway(tmp_path, api_keys=["a-key"]) as client:
        assert (await ask(client, SEA, key="a-key"))[1] > 100


async def test_only_its_own_key_goes_on_from_a_prompt(tmp_path: Path) -> None:
    """The key's present place among the keys does not matter.

    No file has a key in it, or belongs to a key that is no longer set.
    """
    write_chat(tmp_path / "m")
    files = await saved(tmp_path, api_keys=["one-key", "other-key"])
    assert not [file for file in files if b"one-key" in file.read_bytes()]
    for keys, found in ((["other-key", "one-key"], [0, 1]), (["one-key"], [1]),
                        (["one-key", "one-key"], [1, 1]),
                        (["new-key", "other-key"], [0, 0]), (["one-key"], [0])):  # fmt: skip
        async with gateway(tmp_path, api_keys=keys) as client:
            cached = [(await ask(client, SEA, key=key))[1] > 0 for key in keys]
            assert cached == [bool(each) for each in found]
    assert not list((tmp_path / "kept").glob("*.kv"))


async def test_the_disk_and_the_room_in_memory_are_bounded(tmp_path: Path) -> None:
    """The prefix used longest ago goes first; one that is used again stays."""
    write_chat(tmp_path / "m")
    (first,) = await saved(tmp_path)
    most = 5 * first.stat().st_size // 2
    (second,) = set(await saved(tmp_path, SEA[5:])) - {first}
    async with gateway(tmp_path, prefix_folder_bytes=most, prefix_cache_bytes=1 << 20) as client:
        await ask(client, SEA)
        await ask(client, SEA[9:])
        assert (await save(client)).status_code == 503
    assert len(list((tmp_path / "kept").glob("*.kv"))) == 2
    assert first.exists()
    assert not second.exists()


async def test_no_file_is_read_after_the_first_without_room(tmp_path: Path) -> None:
    write_chat(tmp_path / "m")
    for prompt in (SEA, SEA[5:], SEA[9:]):
        await saved(tmp_path, prompt)
    with structlog.testing.capture_logs() as logged:
        async with gateway(tmp_path, entry={"batching": {"prefix_cache_bytes": 1}}) as client:
            await ask(client, "Hello")
    (told,) = [line for line in logged if line["event"] == "prefixes_read"]
    assert (told["files"], told["dropped"], told["failed"]) == (0, 0, 0)


async def test_a_full_disk_is_told_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chat(tmp_path / "m")
    async with gateway(tmp_path) as client:
        await ask(client, SEA)

        def fail(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            told = await save(client)
        assert told.status_code == 503
        assert "No space left" in told.json()["error"]["message"]
        assert sorted(os.listdir(tmp_path / "kept")) == ["lock", "secret"]
        assert (await save(client)).json()["files"] == 1


async def test_files_that_were_deleted_by_hand_are_written_again(tmp_path: Path) -> None:
    write_chat(tmp_path / "m")
    async with gateway(tmp_path) as client:
        await ask(client, SEA)
        await save(client)
        (file,) = (tmp_path / "kept").glob("*.kv")
        file.unlink()
        assert (await save(client)).json()["files"] == 1
        assert file.exists()


async def test_files_of_the_future_make_room_too(tmp_path: Path) -> None:
    """A clock that was wrong may leave such files."""
    write_chat(tmp_path / "m")
    (first,) = await saved(tmp_path)
    os.utime(first, (9e9, 9e9))
    most = first.stat().st_size + 1000
    assert await saved(tmp_path, api_keys=["a-key"], prefix_folder_bytes=most) != [first]


async def test_a_disk_that_stands_still_does_not_hold_up_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chat(tmp_path / "m")
    (file,) = await saved(tmp_path)
    file.unlink()
    os.mkfifo(file)  # opening it waits for a writer
    monkeypatch.setattr("gateway.app.prefix_files.READ_S", 0.05)
    async with gateway(tmp_path) as client:
        assert (await ask(client, SEA))[1] == 0
        os.close(os.open(file, os.O_RDWR))


async def test_two_save_at_once_beside_requests(tmp_path: Path) -> None:
    write_chat(tmp_path / "m")
    async with gateway(tmp_path) as client:
        answer, _ = await ask(client, SEA)
        told = await asyncio.gather(
            save(client), ask(client, SEA[3:]), save(client), ask(client, SEA)
        )
        assert [each.status_code for each in (told[0], told[2])] == [200, 200]
        assert told[3] == (answer, told[3][1])
        # One more is of a prompt that had been read in part when it was saved.
        assert (await save(client)).json()["files"] in (2, 3)
    async with gateway(tmp_path) as client:
        assert min([(await ask(client, prompt))[1] for prompt in (SEA, SEA[3:])]) > 100


async def test_a_disk_that_stands_still_does_not_hold_up_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_chat(tmp_path / "m")
    models = catalog(tmp_path, {"m": {"kind": "chat", "source": "path:m"}})
    given = settings(prefix_folder=tmp_path / "kept", drain_s=0)
    kept = Gateway(given, models, cpu_engines(prefix_cache_bytes=1 << 26))
    is_over = threading.Event()
    monkeypatch.setattr("gateway.app.gateway.DRAIN_S", 0.05)
    async with served_app(kept.asgi, given) as client:
        await ready(client)
        await ask(client, SEA)
        monkeypatch.setattr(os, "fsync", lambda _: is_over.wait())
        with structlog.testing.capture_logs() as logged:
            await kept.drain()
        is_over.set()
    (told,) = [line for line in logged if line["event"] == "prefixes_saved"]
    assert "not enough time" in told["problem"]


KILLED = """
import os, sys
from pathlib import Path
from gateway.app.prefix_files import PrefixFolder
folder = PrefixFolder(Path(sys.argv[1]), 1 << 20, [])
folder.write("a-a-a.kv", b"whole", 1, 1)
os.fsync = lambda _: os.kill(os.getpid(), 9)
folder.write("a-a-b.kv", b"half", 2, 2)
"""


def test_a_kill_in_the_middle_of_writing_loses_that_file_alone(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "kept")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "kept").glob(".part-*"))) == 1
    folder = PrefixFolder(tmp_path / "kept", 1 << 20, [])
    assert sorted(os.listdir(tmp_path / "kept")) == ["a-a-a.kv", "lock", "secret"]
    assert folder.read("a-a-a.kv") == b"whole"
    folder.close()


HOLDER = """
import os, subprocess, sys
from pathlib import Path
from gateway.app.prefix_files import PrefixFolder
folder = PrefixFolder(Path(sys.argv[1]), 1 << 20, [])
helper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print(helper.pid, flush=True)
input()
"""


def test_a_process_has_its_folder_until_it_is_killed_and_its_helpers_do_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "kept")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        helper = int(holder.stdout.readline())
        try:
            with pytest.raises(BlockingIOError):
                PrefixFolder(tmp_path / "kept", 1 << 20, [])
            holder.kill()
            holder.wait()
            PrefixFolder(tmp_path / "kept", 1 << 20, []).close()
        finally:
            os.kill(helper, signal.SIGKILL)  # it is alive: else this raises


def test_those_that_open_a_new_folder_at_once_have_it_in_turn_and_one_secret(
    tmp_path: Path,
) -> None:
    folder, all_are_here = tmp_path / "kept", threading.Barrier(20)

    def open_it(_: int) -> str:
        all_are_here.wait()
        while True:
            with contextlib.suppress(BlockingIOError):
                opened = PrefixFolder(folder, 1 << 20, [])
                name = opened.name("a-a", PrefixPiece("", [1]))
                opened.close()
                return name

    with ThreadPoolExecutor(20) as pool:
        names = set(pool.map(open_it, range(20)))
    assert len(names) == 1
    last = PrefixFolder(folder, 1 << 20, [])
    assert names == {last.name("a-a", PrefixPiece("", [1]))}
    last.close()
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    assert modes == {"lock": 0o600, "secret": 0o600}


def test_a_folder_whose_secret_is_broken_is_locked_by_nobody(tmp_path: Path) -> None:
    PrefixFolder(tmp_path / "kept", 1 << 20, []).close()
    secret = (tmp_path / "kept" / "secret").read_bytes()
    (tmp_path / "kept" / "secret").write_bytes(b"")
    with pytest.raises(SettingsInvalid, match="broken"):
        PrefixFolder(tmp_path / "kept", 1 << 20, [])
    (tmp_path / "kept" / "secret").write_bytes(secret)
    PrefixFolder(tmp_path / "kept", 1 << 20, []).close()


def test_a_disk_without_locks_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(SettingsInvalid, match=r"GATEWAY_PREFIX_FOLDER.*No locks available"):
        PrefixFolder(tmp_path / "kept", 1 << 20, [])


FOLDERS: dict[str, Any] = {
    "a link": lambda folder: (folder.with_name("real").mkdir(), folder.symlink_to("real")),
    "a file": lambda folder: folder.touch(),
    "others may write to it": lambda folder: (folder.mkdir(), folder.chmod(0o770)),
    "others may look into it": lambda folder: (folder.mkdir(), folder.chmod(0o755)),
    "its secret is empty": lambda folder: (folder.mkdir(0o700), (folder / "secret").touch()),
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_not_ours_alone_is_refused_by_name(tmp_path: Path, folder: str) -> None:
    FOLDERS[folder](tmp_path / "kept")
    with pytest.raises(SettingsInvalid, match=r"GATEWAY_PREFIX_FOLDER.*kept"):
        PrefixFolder(tmp_path / "kept", 1 << 20, [])


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SettingsInvalid, match=str(tmp_path)):
        PrefixFolder(tmp_path, 1 << 20, [])
