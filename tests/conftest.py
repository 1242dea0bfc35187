"""Fixtures for every test."""

import contextlib
import gc
import os
import signal
from collections.abc import Generator

import hypothesis
import pytest

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)
from tests import generators

# A deadline of milliseconds an example fails on a busy machine, whatever is tested.
hypothesis.settings.register_profile("gateway", deadline=None)
hypothesis.settings.load_profile("gateway")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all that it imports
os.environ.pop("GITHUB_ACTIONS", None)  # there typer colours what it prints into a pipe, too

# What runs in the background has SIGINT ignored, and its children too, which tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# MLX hands each operation to a thread of its own, which would preempt the one that hands it over:
# two processes on two cores took 44 s for an engine's slow tests with that, and 32 without.
if hasattr(os, "SCHED_BATCH"):
    with contextlib.suppress(OSError):  # forbidden in some containers
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(trylast=True)  # deselection comes first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    generators.give_shares(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with generators.sharing(item):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the generators whose share was not enough for all examples."""
    for report in terminalreporter.getreports("passed"):
        for name, said in report.user_properties:
            if name == generators.MARK:
                terminalreporter.write_line(f"{said}: GENERATOR_SECONDS")


def pytest_collection_finish() -> None:
    """Keep all that has been imported from garbage collections.

    Walking it takes longer than many a test.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio, as the gateway does."""
    return "asyncio"
