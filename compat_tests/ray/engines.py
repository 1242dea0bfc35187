"""Scripted engines for replicas, with a fixed time a step: `--engines`."""

import os
import time
from collections.abc import Generator
from dataclasses import dataclass

from gateway.jobs.chat import Delta
from gateway.registry import ChatSpec
from gateway.serving.ports import GenerationEngine
from gateway.settings import Settings
from tests.fakes import ScriptedChat, ScriptedEngines

STEP_S = float(os.environ.get("SCRIPTED_STEP_S", "0.01"))


@dataclass
class PacedChat(ScriptedChat):
    """Echoes the last message, a character a step, and a step takes its time."""

    max_context: int = 100_000

    def decode(self) -> list[Delta]:
        time.sleep(STEP_S)
        return super().decode()


class PacedEngines(ScriptedEngines):
    """Loads a chat of its own for each model."""

    def writing(self, spec: ChatSpec) -> Generator[GenerationEngine | None, None, None]:
        yield None
        yield PacedChat()


def paced(settings: Settings) -> PacedEngines:
    return PacedEngines()
