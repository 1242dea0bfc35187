"""One small pass at load, on the lane: no request is the first, and broken weights show at once."""

from gateway.errors import EngineFailed, ModelLoadFailed
from gateway.jobs import RowJob, Sampling
from gateway.serving.ports import EmbeddingEngine, GenerationEngine

_ROW = RowJob(prompt=[0], max_tokens=2, sampling=Sampling(temperature=0), is_bare=True)


def warm_embedder(name: str, engine: EmbeddingEngine) -> None:
    """Embed a word. Raises ModelLoadFailed for what the engine says of it."""
    try:
        engine.embed(engine.encode(["Hello"]))
    except EngineFailed as error:
        raise ModelLoadFailed(name, error.reason) from error


def warm_writer(name: str, engine: GenerationEngine) -> None:
    """Read a token and write two. Raises ModelLoadFailed for what the engine says of it."""
    row = engine.join(_ROW)
    deltas = []
    try:
        while engine.is_prefilling or engine.is_decoding:  # a fault has the row read again
            deltas += engine.prefill(16)
            deltas += engine.decode()
    finally:
        engine.leave(row)
    for delta in deltas:
        if delta.error is not None:
            raise ModelLoadFailed(name, delta.error)
