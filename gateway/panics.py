"""Panics of native code: libraries in Rust (tokenizers, llguidance, jsonschema-rs, outlines-core,
safetensors, pydantic-core) raise them through PyO3 as BaseExceptions, past `except Exception`.

A panic is caused by its input, a file or a request: code that may panic turns it into an error
like any other.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class NativeError(Exception):
    """Native code failed on its input; the message is its own."""


def as_exception(error: BaseException) -> Exception:
    """Return an error that `except Exception` catches and a future can hold: a panic becomes a
    NativeError, StopIteration a RuntimeError. Raises all others, such as SystemExit.
    """
    # Each library has a class of its own for panics, under the same name. Other errors of
    # tokenizers are bare Exceptions.
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
    """Decorate a function whose native code may panic: it raises the errors of `as_exception`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raise as_exception(error)  # noqa: B904  # it has its cause

    return call
