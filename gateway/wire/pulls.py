"""The request to download a model, and the progress of the download."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.wire.bounds import Label
from gateway.wire.validation import Request


class PullRequest(Request):
    """A request to download a model of models.yaml or the hub (`org/name`, `hub:org/name`)."""

    example: ClassVar = {"stream": False}

    model: Annotated[Label, Field(min_length=1)]
    stream: bool = True  # Ollama's default


class PullProgress(TypedDict):
    """The progress of a download."""

    object: Literal["pull"]
    model: str
    status: Literal["waiting", "downloading", "success"]
    completed: Annotated[int, Field(description="Bytes on disk, incomplete files included.")]
    total: Annotated[int | None, Field(description="Bytes of all files; null while unknown.")]
    path: Annotated[str | None, Field(description="Path of the files; null before `success`.")]
