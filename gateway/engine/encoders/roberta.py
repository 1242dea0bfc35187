"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions start after the padding id.

Source: transformers, models/roberta/modeling_roberta.py,
create_position_ids_from_input_ids: a real token's position is its rank among the row's
non-padding tokens plus the padding id; a padding token's position is the padding id.
"""

import mlx.core as mx

from .bert import Bert, Config


class Roberta(Bert):
    """The encoder: (rows, tokens) ids to (rows, tokens, dimensions) hidden states."""

    prefix = "roberta."

    def _position_vectors(self, tokens: mx.array) -> mx.array:
        return self._positions[position_ids(tokens, self.padding_id)]

    @staticmethod
    def _max_tokens(config: Config) -> int:
        return config.positions - config.padding_id - 1


def position_ids(tokens: mx.array, padding_id: int) -> mx.array:
    """Number the real tokens of each row from padding_id + 1; padding stays at padding_id.

    Counted from the ids, not from the mask: a padding token written inside a text is
    skipped too, as transformers does.
    """
    real = (tokens != padding_id).astype(mx.int32)
    return mx.cumsum(real, axis=1) * real + padding_id
