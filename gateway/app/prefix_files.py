"""Saves prefix caches in files, so that they outlive a restart.

A drain or an admin's request writes files, and a model's load reads them. A file's name has hashes
of the model, the KV's format, the prompt's owner and the prompt. Each file begins with an HMAC, so
that a changed file is not used.

Only one gateway at a time uses a folder.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, Final

from gateway import clock, logs
from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.errors import GatewayError, Unavailable
from gateway.jobs.steps import PrefixPiece, StepPlan
from gateway.serving.generation.batcher import GenerationBatcher
from gateway.serving.lane import Lane
from gateway.serving.ports import PrefixCache
from gateway.settings import Settings, SettingsInvalid

log = logs.get("kept_prefixes")

SUFFIX, PART, SECRET, LOCK = ".kv", ".part-", "secret", "lock"
HASH_BYTES: Final = 32
MOST_BYTES: Final = 1 << 30  # most bytes of one file
ROUNDS: Final = 10_000  # rounds of hashing an API key: 5 ms, to slow down guessing
READ_S: Final = 10.0  # most seconds that reading files adds to a load
DRAIN_S: Final = 2.0  # least seconds to save files after a drain; supervisors wait 45 s in all


def lock(file: Path) -> int:
    """Lock a file, created if necessary, until the returned descriptor is closed.

    Raises OSError, and BlockingIOError if the file is locked.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)  # NFS locks only writable files
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def folder_secret(settings: Settings) -> bytes | None:
    """Return the prefix folder's secret; None if there is no folder.

    Image ids depend on it, so that they stay the same after a restart.
    """
    if settings.prefix_folder is None:
        return None
    with contextlib.suppress(OSError):
        return (settings.prefix_folder / SECRET).read_bytes()
    return None


class PrefixFolder:
    """The folder of one gateway's prefix files.

    Call its methods off the event loop, since the disk may be slow.
    """

    def __init__(self, folder: Path, limit: int, keys: Sequence[str]) -> None:
        """Open a folder, and lock it until `close`.

        Raises SettingsInvalid if others may access the folder, and BlockingIOError if it is locked.
        """
        self._folder, self._limit = folder, limit
        self._unread = set[str]()  # names of unreadable files, which the next save writes again
        try:
            with contextlib.ExitStack() as stack:
                self._check()
                stack.callback(os.close, lock(folder / LOCK))
                self._secret = self._open()
                found = [(file.name, file.stat()) for file in folder.glob(f"*{SUFFIX}")]
                self._held = stack.pop_all()
        except BlockingIOError:
            raise
        except OSError as error:
            raise SettingsInvalid([f"GATEWAY_PREFIX_FOLDER: {error}"]) from None
        # Each file's time of last use, in nanoseconds, and its bytes, by name.
        self.files = {name: (about.st_mtime_ns, about.st_size) for name, about in found}
        # A hash of each owner, by cache salt. Hashes stay the same if keys are reordered, but salts
        # change. All keys together own the empty salt.
        self._owners = {"": self._hash_slowly("\0".join(sorted(keys)))}
        self._owners |= {f"key-{i}": self._hash_slowly(key) for i, key in enumerate(keys, 1)}

    def close(self) -> None:
        self._held.close()

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in tuple(self.files.values()))

    def _check(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or found.st_mode & 0o077:
            raise self._invalid("must be a folder that you own and only you can access (mode 700)")

    def _open(self) -> bytes:
        if not (self._folder / SECRET).exists():
            self._write(SECRET, secrets.token_bytes(HASH_BYTES), time.time_ns())
        secret = (self._folder / SECRET).read_bytes()
        if len(secret) != HASH_BYTES:
            raise self._invalid(f"has a broken file `{SECRET}`: empty the folder")
        for part in self._folder.glob(f"{PART}*"):  # left by a process that was killed
            part.unlink()
        return secret

    def _invalid(self, problem: str) -> SettingsInvalid:
        return SettingsInvalid([f"GATEWAY_PREFIX_FOLDER={self._folder} {problem}"])

    def name(self, key: str, piece: PrefixPiece) -> str:
        digest = self._hash(str((len(piece.own), piece.tokens)).encode())
        return f"{key}-{self._owners[piece.salt]}-{digest.hex()[:32]}{SUFFIX}"

    def names(self, key: str) -> dict[str, str | None]:
        """Return the names of a model's files, most recently used first, with their owners' salts.

        The salt is None for a file that cannot be used any more.
        """
        # The first salt wins if several owners have the same hash.
        salts = {f"{key}-{owner}": salt for salt, owner in reversed(self._owners.items())}
        model = key.partition("-")[0]
        newest = sorted(self.files.items(), key=itemgetter(1), reverse=True)
        names = [name for name, _ in newest if name.startswith(f"{model}-")]
        return {name: salts.get(name.rpartition("-")[0]) for name in names}

    def read(self, name: str) -> bytes:
        """Return a file's content. Raises OSError, and ValueError if its HMAC is wrong."""
        self._unread.add(name)
        with (self._folder / name).open("rb") as file:
            digest, content = file.read(HASH_BYTES), file.read(MOST_BYTES)
        self._unread.discard(name)
        if not hmac.compare_digest(self._hash(name.encode() + content), digest):
            raise ValueError("it was changed, or not written by this gateway")
        return content

    def touch(self, name: str, at: int) -> bool:
        """Set a file's time of last use, in nanoseconds; return False if it must be written."""
        if name in self._unread:
            return False
        with contextlib.suppress(KeyError, FileNotFoundError):  # the file may have been deleted
            _, size = self.files.pop(name)
            os.utime(self._folder / name, ns=(at, at))
            self.files[name] = at, size
            return True
        return False

    def write(self, name: str, content: bytes, at: int, since: int) -> None:
        """Write a file, and delete the least recently used files to make room.

        Files used after `since` are kept. Raises OSError, also if there is not enough room.
        """
        size = HASH_BYTES + len(content)
        while self.nbytes + size > self._limit:
            rest = [("", (since, 0)), *self.files.items()]
            oldest, (used, _) = min(rest, key=itemgetter(1))
            if used >= since:
                raise OSError("GATEWAY_PREFIX_FOLDER_BYTES is too small for the cached prompts")
            self.drop(oldest)
        self._write(name, self._hash(name.encode() + content) + content, at)
        self._unread.discard(name)
        self.files[name] = at, size

    def drop(self, name: str) -> None:
        self.files.pop(name, None)
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()

    def _hash(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, "sha256")

    def _hash_slowly(self, text: str) -> str:
        return hashlib.pbkdf2_hmac("sha256", text.encode(), self._secret, ROUNDS).hex()

    def _write(self, name: str, content: bytes, at: int) -> None:
        with replacing(self._folder / name, PART) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.utime(file.fileno(), ns=(at, at))


@contextlib.contextmanager
def replacing(path: Path, prefix: str) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` at exit, unless there is an error. Raises OSError.

    Readers never see a half-written file, and other users cannot read it.
    """
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=prefix)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


class PrefixFiles:
    """Reads and saves prefix caches. Raises SettingsInvalid for an unusable folder."""

    def __init__(self, settings: Settings, lane: Lane) -> None:
        self.folder: PrefixFolder | None = None
        self._lack = "GATEWAY_PREFIX_FOLDER is not set."
        if (folder := settings.prefix_folder) is not None:
            keys = [key.get_secret_value() for key in settings.api_keys]
            try:
                self.folder = PrefixFolder(folder, settings.prefix_folder_bytes, keys)
            except BlockingIOError:
                self._lack = "Another gateway has GATEWAY_PREFIX_FOLDER: this one saves no files."
                log.warning("prefix_folder_taken", folder=str(folder), hint=self._lack)
        self._lane = lane
        self._keys: dict[tuple[GenerationBatcher, int], str] = {}
        self._saving = asyncio.Lock()

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    async def key(self, model: str, files: Path, digest: Callable[[], Awaitable[str]]) -> str:
        """Return the beginning of the names of a model's files; "" without a folder.

        Call it before the model is loaded, since the files may change later.
        """
        if self.folder is None:
            return ""
        stamp = await run_in_daemon_thread(_stamp, files)
        parts = [model, f"{await digest()} {stamp}"]
        return "-".join(hashlib.sha256(part.encode()).hexdigest()[:16] for part in parts)

    async def key_of(self, batcher: GenerationBatcher) -> str:
        return self._keys.get((batcher, 0), "")

    @contextlib.asynccontextmanager
    async def of(
        self, model: str, batcher: GenerationBatcher, key: str, adapter: int = 0
    ) -> AsyncIterator[None]:
        """Read a model's files, and let `save` write them during the `with` block."""
        if self.folder is None:
            yield
            return
        await self._read(model, batcher, key, adapter)
        self._keys[batcher, adapter] = key
        try:
            yield
        finally:
            del self._keys[batcher, adapter]

    async def _read(self, model: str, batcher: GenerationBatcher, key: str, adapter: int) -> None:
        """Read files into the prefix cache, and delete invalid ones. Unreadable files stay."""
        folder, engine, prefixes = self.folder, batcher.engine, batcher.engine.prefixes
        if folder is None or prefixes is None:
            return
        started, read, dropped, problems = clock.now(), 0, 0, list[str]()
        if not adapter:  # the base's steps set the limit of an adapter
            async with self._lane.turn("load") as run:
                await run(engine.step, StepPlan(prefix_limit=batcher.memory.limit_prefixes()))
        names = await run_in_daemon_thread(folder.names, key)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                for name, salt in names.items():
                    try:
                        if salt is None:
                            raise ValueError("saved with other weights, settings, versions or keys")
                        content = await run_in_daemon_thread(folder.read, name)
                        async with self._lane.turn("load") as run:
                            has_room = await run(prefixes.put_piece, adapter, salt, content)
                    except GatewayError:
                        raise
                    except Exception as error:
                        problems.append(f"{name}: {error}")
                        if isinstance(error, ValueError | FileNotFoundError):
                            dropped += 1
                            await run_in_daemon_thread(folder.drop, name)
                        continue
                    batcher.memory.note_prefixes(prefixes.pool_bytes)
                    if not has_room:
                        break
                    read += 1
        if names:
            counts = {"files": read, "dropped": dropped, "failed": len(problems) - dropped}
            seconds, problem = round(clock.now() - started, 3), "".join(problems[:1])
            log.info("prefixes_read", model=model, **counts, problem=problem, seconds=seconds)

    async def save(self, seconds: float | None = None) -> int:
        """Save the prefix caches, and return the number of files. Raises Unavailable if any is not
        saved.
        """
        folder, started, problem = self.folder, clock.now(), ""
        if folder is None:
            raise Unavailable(self._lack)
        try:
            async with asyncio.timeout(seconds), self._saving:
                used = [used for used, _ in tuple(folder.files.values())]
                # `since` must be later than the times of all files, even if the clock was set back.
                since = max([time.time_ns(), *used]) + 1
                for (batcher, adapter), key in tuple(self._keys.items()):
                    if batcher.engine.prefixes is not None:
                        await self._save(folder, batcher.engine.prefixes, adapter, key, since)
        except Exception as error:
            problem = str(error) or "there was not enough time"
        counts = {"files": len(folder.files), "bytes": folder.nbytes, "problem": problem}
        log.info("prefixes_saved", **counts, seconds=round(clock.now() - started, 3))
        if problem:
            raise Unavailable(f"Not all cached prompts were saved: {problem}.")
        return len(folder.files)

    async def _save(
        self, folder: PrefixFolder, prefixes: PrefixCache, adapter: int, key: str, since: int
    ) -> None:
        async with self._lane.turn("load") as run:
            pieces = await run(prefixes.pieces, adapter)
        for i, piece in enumerate(pieces):
            name = await run_in_daemon_thread(folder.name, key, piece)
            at = since + 1000 * (len(pieces) - i)  # the most recently used piece is deleted last
            if await run_in_daemon_thread(folder.touch, name, at):
                continue
            async with self._lane.turn("load") as run:
                content = await run(prefixes.copy_piece, adapter, piece)
            if content is not None:
                await run_in_daemon_thread(folder.write, name, content, at, since)


def _stamp(files: Path) -> list[tuple[str, int, int, int]]:
    paths = sorted(files.iterdir()) if files.is_dir() else [files]
    found = [(path.name, path.stat()) for path in paths if path.is_file()]
    return [(name, about.st_size, about.st_mtime_ns, about.st_ctime_ns) for name, about in found]
