"""A panic of native code is an error like any other, wherever it comes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.app.daemon_threads import run_in_daemon_thread
from gateway.engine import device_faults
from gateway.engine.answers.detokenizer import Detokenizer, Vocabulary
from gateway.engine.models.checkpoint import Checkpoint, reading_tokenizer
from gateway.errors import ModelLoadFailed
from gateway.panics import NativeError, as_exception, raise_panics
from gateway.serving.faults import DeviceHealth
from gateway.serving.lane import Lane
from gateway.serving.tokenize import ThreadPools
from tests.spoilt_tokenizers import LETTERS, spoilt, strip

pytestmark = pytest.mark.anyio


def panic() -> object:
    """Tokenize with a part that panics at any text."""
    return spoilt(pre_tokenizer={"type": "FixedLength", "length": 0}).encode("abc")


def refuse() -> object:
    """Tokenize a text that the tokenizer has no token for: it raises a bare Exception."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    return spoilt(model=model, decoder=None).encode("b")


def stop() -> object:
    return next(iter(()))


def leave() -> object:
    raise SystemExit(3)


@pytest.mark.parametrize(("call", "words"), [(panic, "chunk size"), (refuse, "UNK")])
def test_an_error_of_native_code_keeps_its_words_and_its_cause(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(NativeError, match=words) as raised:
        raise_panics(call)()
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_a_program_still_ends_it(error: BaseException) -> None:
    with pytest.raises(type(error)):
        as_exception(error)


def test_other_errors_stay_what_they_are() -> None:
    error = ValueError("x")
    assert as_exception(error) is error
    assert isinstance(as_exception(StopIteration(3)), RuntimeError)


async def on_the_lane(call: Callable[[], object]) -> object:
    async with Lane() as lane, lane.turn("test") as run:
        try:
            return await run(call)
        finally:
            assert lane.is_alive
            assert await run(int, "3") == 3
            assert lane.health.lost is None


async def in_a_pool(call: Callable[[], object]) -> object:
    with ThreadPools() as pool:
        return await pool.run(call)


@pytest.mark.parametrize("run", [on_the_lane, in_a_pool, run_in_daemon_thread])
@pytest.mark.parametrize(
    ("call", "kind"), [(panic, NativeError), (refuse, NativeError), (stop, RuntimeError)]
)
async def test_whoever_waits_for_a_thread_is_told(
    run: Callable[..., Any], call: Callable[[], object], kind: type[Exception]
) -> None:
    """None waits for ever, and nothing else ends."""
    with pytest.raises(kind):
        await run(call)


async def test_a_thread_of_its_own_ends_alone() -> None:
    """The thread's waiter gets the error, and goes on."""
    with pytest.raises(RuntimeError, match="SystemExit"):
        await run_in_daemon_thread(leave)


@pytest.mark.parametrize("error", [NativeError("x"), OverflowError("2**70"), ValueError("shape")])
def test_neither_a_panic_nor_a_bad_number_is_a_fault_of_the_device(error: Exception) -> None:
    health = DeviceHealth(device_faults.classify)

    def probe() -> None:
        raise AssertionError("the device is not in doubt")

    for _ in range(5):
        health.note(health.classify(health.see(error)), str(error), probe)
    assert health.lost is None


def test_a_token_that_panics_is_an_error_of_its_sequence() -> None:
    decoder = Detokenizer(Vocabulary(spoilt(decoder=strip("q"))))
    assert decoder.push(LETTERS["a"]) == "a"
    with pytest.raises(NativeError, match="slice index"):
        decoder.push(LETTERS["q"])


def test_a_tokenizer_that_panics_at_load_is_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelLoadFailed, match=r"`mine` failed to load: tokenizer\.json cannot be"),
        reading_tokenizer(Checkpoint("mine", tmp_path)),
    ):
        Vocabulary(spoilt(decoder=strip("a")))
