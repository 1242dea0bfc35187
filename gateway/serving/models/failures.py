"""Loads that failed: told again for a while without another try, and shown until one succeeds."""

from gateway import metrics
from gateway.errors import GatewayError, InsufficientMemory, ModelLoadFailed, ModelUnavailable

UNAVAILABLE_S = 30.0  # a dead network is not asked again by every request
BROKEN_S = 5.0  # nor a broken file read, which somebody may be mending


class Failures:
    """The last failure of each model."""

    def __init__(self) -> None:
        self._errors: dict[str, GatewayError] = {}
        self._until: dict[str, float] = {}

    def remember(self, model: str, error: GatewayError) -> None:
        """Keep a failure of a model itself; one of the moment, shutdown or no room, is let pass."""
        match error:
            case ModelUnavailable():
                seconds = UNAVAILABLE_S
            case ModelLoadFailed() | InsufficientMemory():
                seconds = BROKEN_S
            case _:
                return
        # A traceback's frames hold what was read of the model: only the facts are kept.
        self._errors[model] = fresh(error)
        self._until[model] = metrics.now() + seconds

    def forget(self, model: str) -> None:
        """Know nothing of a model any more: it is loaded, or to be tried afresh."""
        self._errors.pop(model, None)

    def clear(self) -> None:
        """Know nothing of any model."""
        self._errors.clear()

    def check(self, model: str) -> None:
        """Raise what a recent load of this model raised."""
        if (error := self._errors.get(model)) is not None and metrics.now() < self._until[model]:
            raise fresh(error) from None

    def of(self, model: str) -> GatewayError | None:
        """Give the model's last failure, however long ago, if no load succeeded since."""
        return self._errors.get(model)

    def models(self) -> tuple[str, ...]:
        """List the models whose last load failed."""
        return tuple(self._errors)


def fresh(error: GatewayError) -> GatewayError:
    """Copy an error that many are told: one object would gather the frames of every raise."""
    copy = type(error).__new__(type(error), *error.args)
    vars(copy).update(vars(error))
    return copy
