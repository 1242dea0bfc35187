"""Generators: tests that make their own cases share twenty-four seconds of a run.

`@pytest.mark.generator(weight=1)` gives a test its share, of processor seconds. Once that is spent
the test has passed with the examples it had: no run becomes longer by the generators that come in,
and none fails on a busy machine. GENERATOR_SECONDS=3600 gives them more.
"""

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis.errors import StopTest, UnsatisfiedAssumption

MARK = "generator"
SECONDS = float(os.environ.get("GENERATOR_SECONDS", "24"))
LEAST = 6  # examples that each runs, whatever they take


class Spent(BaseException):
    """Ends a test that has passed. As it is no Exception, Hypothesis looks for no smaller case."""


@dataclass
class Share:
    """The processor seconds of one test, of which `clock` tells how many this process has used."""

    seconds: float
    clock: Callable[[], float] = time.process_time
    examples: int = 0
    _has_failed: bool = False
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    @property
    def is_spent(self) -> bool:
        """Tell if no more examples are run. One that failed is, again, to be made smaller."""
        is_over = self.clock() - self._started > self.seconds
        return is_over and self.examples >= LEAST and not self._has_failed

    def run(self, example: Callable[[], object]) -> None:
        """Run an example. Raises Spent, which ends the test, in the place of one too many."""
        if self.is_spent:
            raise Spent
        self.examples += 1
        try:
            example()
        except (UnsatisfiedAssumption, StopTest):  # hypothesis takes a case back by these
            raise
        except BaseException:
            self._has_failed = True
            raise


_current: ContextVar[Share | None] = ContextVar("share", default=None)


def within_share(function: Callable[..., object]) -> Callable[..., None]:
    """Run a function for each example as long as the test that runs has any of its share left."""

    @functools.wraps(function)
    def example(*args: Any, **kwargs: Any) -> None:
        share = _current.get()
        if share is None:
            function(*args, **kwargs)
        else:
            share.run(lambda: function(*args, **kwargs))

    return example


def divide(seconds: float, weights: Iterable[float]) -> list[float]:
    """Divide seconds among tests by their weights."""
    weights = list(weights)
    total = sum(weights) or 1
    return [seconds * weight / total for weight in weights]


_SHARE_S = pytest.StashKey[float]()


def give_shares(items: Iterable[pytest.Item]) -> None:
    """Give each generator among the tests that will run its share of SECONDS."""
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker(MARK))]
    weights = [mark.kwargs.get("weight", 1) for _, mark in marked]
    for (item, _), share_s in zip(marked, divide(SECONDS, weights), strict=True):
        item.stash[_SHARE_S] = share_s
        test: Any = getattr(getattr(item, "obj", None), "hypothesis", None)
        if test is None:  # it calls `within_share` itself
            continue
        if inspect.iscoroutinefunction(test.inner_test):
            raise pytest.UsageError(f"{item.nodeid}: a generator with @given is no coroutine")
        if not hasattr(test, "has_share"):  # all parameters of a function have this one
            test.inner_test, test.has_share = within_share(test.inner_test), True


@contextmanager
def sharing(item: pytest.Item) -> Iterator[None]:
    """Let a generator use its share while entered, and note if that was not enough."""
    share_s = item.stash.get(_SHARE_S, None)
    if share_s is None:
        yield
        return
    share = Share(share_s)
    token = _current.set(share)
    try:
        yield
    except BaseException as error:
        # Hypothesis finds fault with an example that draws none if its draws are `st.data()`'s.
        if not isinstance(error, Spent) and not isinstance(error.__context__, Spent):
            raise
        item.user_properties.append((MARK, f"{item.nodeid} ended after {share.examples} examples"))
    finally:
        _current.reset(token)
