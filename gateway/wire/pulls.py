"""The request that pulls a model, and the progress of the pull."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.wire.bounds import Label
from gateway.wire.validation import Request


class PullRequest(Request):
    """A model of models.yaml, or of the hub: `org/name`, perhaps after `hub:`."""

    example: ClassVar = {"stream": False}

    model: Annotated[Label, Field(min_length=1)]
    stream: bool = True  # Ollama's default


class PullProgress(TypedDict):
    """A pull under way, or at its end."""

    object: Literal["pull"]
    model: str
    status: Literal["waiting", "downloading", "success"]
    completed: Annotated[int, Field(description="Bytes on disk, of whole and part files.")]
    total: Annotated[int | None, Field(description="Bytes of all its files, once they are known.")]
    path: Annotated[str | None, Field(description="Path of the files, at the end.")]
