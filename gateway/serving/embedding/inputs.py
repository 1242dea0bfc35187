"""A job's inputs → rows of token ids that its model can read."""

from collections.abc import Sequence

from gateway.errors import BadRequest, ContextLengthExceeded
from gateway.jobs import EmbedJob, TokenIds
from gateway.serving.ports import EmbeddingEngine


def prompted(engine: EmbeddingEngine, model: str, job: EmbedJob) -> list[str]:
    """Put the prompt that the job names, or the model's own, before each text.

    Raises BadRequest for one that the model does not have.
    """
    name = job.prompt_name or engine.default_prompt_name
    if not job.texts or name is None:
        return list(job.texts)
    if name not in engine.prompts:
        known = ", ".join(sorted(engine.prompts)) or "none"
        raise BadRequest(
            f"The model `{model}` has no prompt `{name}`; it has: {known}.", param="prompt_name"
        )
    return [engine.prompts[name] + text for text in job.texts]


def known_ids(engine: EmbeddingEngine, model: str, rows: Sequence[TokenIds]) -> list[TokenIds]:
    """Refuse ids outside the vocabulary: MLX would read past its table unasked."""
    size = engine.vocab_size
    for row in rows:
        if not all(0 <= token < size for token in row):
            raise BadRequest(
                f"Token ids of the model `{model}` are 0 to {size - 1}.", param="input"
            )
    return list(rows)


def fitted(
    engine: EmbeddingEngine, rows: list[TokenIds], *, truncate: bool
) -> tuple[list[TokenIds], set[int]]:
    """Cut what is over-long, if it may be, and tell which rows were.

    Raises ContextLengthExceeded where it may not.
    """
    limit = engine.max_tokens
    over = [index for index, row in enumerate(rows) if len(row) > limit]
    if over and not truncate:
        raise ContextLengthExceeded(limit, len(rows[over[0]]), param="input", noun="input")
    for index in over:
        rows[index] = engine.truncate(rows[index])
    return rows, set(over)
