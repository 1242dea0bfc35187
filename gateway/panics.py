"""Turns panics of native code into ordinary errors.

Rust libraries such as tokenizers raise panics as BaseExceptions, which `except Exception` does not
catch.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class NativeError(Exception):
    """Native code panicked on its input."""


def as_exception(error: BaseException) -> Exception:
    """Return an error as an Exception that a future can hold.

    A panic becomes a NativeError, and StopIteration a RuntimeError. Raises other BaseExceptions,
    such as SystemExit.
    """
    # Each library has its own PanicException. tokenizers raises its other errors as bare
    # Exceptions.
    if type(error).__name__ == "PanicException" or type(error) is Exception:
        failure = NativeError(str(error))
        failure.__cause__ = error
        return failure
    if isinstance(error, StopIteration):
        return RuntimeError(f"a call raised {error!r}")
    if isinstance(error, Exception):
        return error
    raise error


def raise_panics(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it raises the errors that `as_exception` returns."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raise as_exception(error)  # noqa: B904  # as_exception sets the cause

    return call
