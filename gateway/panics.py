"""Turns panics of native code into ordinary errors.

Rust libraries (tokenizers, llguidance, jsonschema-rs, outlines-core, safetensors, pydantic-core)
raise panics through PyO3 as BaseExceptions, which `except Exception` does not catch. A panic is
caused by the input (a file or a request), so it should be handled like any other error.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class NativeError(Exception):
    """Native code panicked on its input. The message is that of the panic."""


def as_exception(error: BaseException) -> Exception:
    """Return an error that `except Exception` catches and a future can hold.

    A panic becomes a NativeError, and StopIteration a RuntimeError; other Exceptions are returned
    as they are. Raises any other BaseException, such as SystemExit.
    """
    # The name is compared, since each library has its own PanicException. tokenizers raises errors
    # other than panics as bare Exceptions.
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
    """Decorate a function whose native code may panic: errors are raised as from `as_exception`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raise as_exception(error)  # noqa: B904  # as_exception sets the cause

    return call
