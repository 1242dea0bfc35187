"""Tokenization of texts for embedding models, exactly as in sentence-transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer, normalizers

from gateway.engine.control_tokens import ControlTokens
from gateway.engine.models.checkpoint import Checkpoint, reading_tokenizer
from gateway.engine.tokenizer_parts import check_growth, has_patterns

# More characters than tokens have on average, unless a text is mostly spaces.
CHARS_A_TOKEN: Final = 16
WORDS: Final = 3


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer for whole texts. Safe on any thread.

    No method may change the tokenizer: another thread's encoding would raise "Already borrowed".
    """

    _tokenizer: Tokenizer
    _before: int
    _after: int
    _eos: tuple[int, ...]
    _cut_left: bool
    _splits_words: bool = False
    has_patterns: bool = False

    @property
    def controls(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    def encode_query(self, texts: Sequence[str]) -> list[list[int]]:
        return self.encode(texts)

    def attended(self, ids: Sequence[int]) -> int:
        return len(ids)

    def token_id(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text)

    def encode(self, texts: Sequence[str], *, with_specials: bool = True) -> list[list[int]]:
        """Return each text's ids, not truncated, by default with special tokens."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=with_specials)
        if not with_specials:
            return [one.ids for one in encoded]
        return [[*one.ids, *self._eos] for one in encoded]

    def encode_start(
        self, texts: Sequence[str], limit: int, *, with_specials: bool = True
    ) -> list[list[int]]:
        """Return ids as `encode` does, but of a long text only as many as `truncate` needs."""
        # A cut may change the word that it divides and the spaces before that word, so more than
        # WORDS words must follow the last kept token.
        if self._cut_left or not self._splits_words:
            return self.encode(texts, with_specials=with_specials)
        after, eos = (self._after, self._eos) if with_specials else (0, ())
        rows: dict[int, list[int]] = {}
        waiting, chars = list(range(len(texts))), CHARS_A_TOKEN * limit
        while waiting:
            cut = [i for i in waiting if len(texts[i]) > chars]
            whole = [i for i in waiting if len(texts[i]) <= chars]
            encoded = self.encode([texts[i] for i in whole], with_specials=with_specials)
            rows |= zip(whole, encoded, strict=True)
            heads = [texts[i][:chars] for i in cut]
            starts = self._tokenizer.encode_batch(heads, add_special_tokens=with_specials)
            waiting = []
            for i, head, one in zip(cut, heads, starts, strict=True):
                enough = len(one.ids) - after > limit
                if enough and _words(head[one.offsets[limit - 1][1] :]) > WORDS:
                    rows[i] = [*one.ids, *eos]
                else:
                    waiting.append(i)
            chars *= 8
        return [rows[i] for i in range(len(texts))]

    def truncate(self, ids: Sequence[int], limit: int) -> list[int]:
        if len(ids) <= limit:
            return list(ids)
        end = len(ids) - self._after
        body = self.cut(ids[self._before : end], max(0, limit - self._before - self._after))
        return [*ids[: self._before], *body, *ids[end:]]

    def cut(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """Cut ids without special tokens on the side that the model cuts."""
        if self._cut_left:
            return ids[max(0, len(ids) - keep) :]
        return ids[:keep]


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The special tokens around and between two texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    # Token type 1 begins this many tokens before the second text; None without type 1.
    lead: int | None

    @property
    def specials(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Join the ids of two texts; return the row and the second text's index."""
        start = [*self.before, *first, *self.between]
        return [*start, *second, *self.after], len(start)


def load_text_tokenizer(checkpoint: Checkpoint, *, lower_case: bool) -> TextTokenizer:
    """Load tokenizer.json. Raises ModelLoadFailed."""
    path = checkpoint.folder / "tokenizer.json"
    if not path.is_file():
        raise checkpoint.failed("its folder has no tokenizer.json")
    with reading_tokenizer(checkpoint):
        tokenizer = Tokenizer.from_file(str(path))
        check_growth(tokenizer)
        # MiniLM's tokenizer.json sets truncation and padding to 128 tokens.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = checkpoint.read_object("tokenizer_config.json")
        _follow_bert_settings(tokenizer, config)
        if lower_case and not _lowers(tokenizer):
            _lower_first(tokenizer)
        before, after, last = _special_ends(checkpoint, tokenizer)
        eos = _missing_eos(checkpoint, tokenizer, config, last)
        return TextTokenizer(
            tokenizer,
            before,
            after + len(eos),
            eos,
            config.get("truncation_side") == "left",
            _splits_words(tokenizer),
            has_patterns(tokenizer),
        )


def read_pair_template(checkpoint: Checkpoint, tokenizer: TextTokenizer) -> PairTemplate:
    """Encode a pair to find a tokenizer's special tokens and token types.

    Source: transformers, tokenization_utils_tokenizers.py.
    """
    with reading_tokenizer(checkpoint):
        probe = tokenizer._tokenizer.encode("a", "a")
    first, second = ([i for i, s in enumerate(probe.sequence_ids) if s == n] for n in (0, 1))
    typed = [i for i, kind in enumerate(probe.type_ids) if kind]
    if not first or not second or first[-1] > second[0]:
        raise checkpoint.failed("its tokenizer does not join two texts in their order")
    if probe.type_ids != sorted(probe.type_ids) or not set(probe.type_ids) <= {0, 1}:
        raise checkpoint.failed(f"its tokenizer gives a pair token types {probe.type_ids}")
    # BERT's default for model_input_names includes token types.
    names = checkpoint.read_object("tokenizer_config.json").get("model_input_names")
    is_typed = bool(typed) and (names is None or "token_type_ids" in names)
    if is_typed and not first[-1] < typed[0] <= second[0]:
        raise checkpoint.failed(f"its tokenizer gives a pair token types {probe.type_ids}")
    return PairTemplate(
        before=tuple(probe.ids[: first[0]]),
        between=tuple(probe.ids[first[-1] + 1 : second[0]]),
        after=(*probe.ids[second[-1] + 1 :], *tokenizer._eos),
        lead=second[0] - typed[0] if is_typed else None,
    )


def _words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split(" "))


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Return True if each word is encoded by itself, with the space before it."""
    if tokenizer.pre_tokenizer is None:
        return False
    one, two = (len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) for text in ("ab", "ab cd"))
    added = tokenizer.get_added_tokens_decoder().values()
    return one == 1 and two > 1 and all(token.content.count(" ") < WORDS for token in added)


def _follow_bert_settings(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Let tokenizer_config.json override the normalizer, as BertTokenizer does."""
    normalizer = tokenizer.normalizer
    if not isinstance(normalizer, normalizers.BertNormalizer):
        return
    for key, attribute in (
        ("do_lower_case", "lowercase"),
        ("strip_accents", "strip_accents"),
        ("tokenize_chinese_chars", "handle_chinese_chars"),
    ):
        if key in config and getattr(normalizer, attribute) != config[key]:
            setattr(normalizer, attribute, config[key])
    tokenizer.normalizer = normalizer


def _lowers(tokenizer: Tokenizer) -> bool:
    rules = repr(tokenizer.normalizer)
    return "lowercase=True" in rules or "Lowercase()" in rules


def _lower_first(tokenizer: Tokenizer) -> None:
    steps = [normalizers.Lowercase()]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    tokenizer.normalizer = normalizers.Sequence(steps)


def _special_ends(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, int, int | None]:
    """Return the numbers of special tokens before and after a text, and the last token's id."""
    probe = tokenizer.encode("a")
    body = [i for i, special in enumerate(probe.special_tokens_mask) if not special]
    if not body:
        raise checkpoint.failed("its tokenizer makes no token of the letter a")
    after = len(probe.ids) - 1 - body[-1]
    return body[0], after, probe.ids[-1] if after else None


def _missing_eos(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    last: int | None,
) -> tuple[int, ...]:
    """Return the EOS token that tokenizer_config.json asks for, unless tokenizer.json adds it."""
    if not config.get("add_eos_token"):
        return ()
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    eos = tokenizer.token_to_id(content) if isinstance(content, str) else None
    if eos is None:
        raise checkpoint.failed(
            "tokenizer_config.json asks for add_eos_token, but its eos_token is no known token"
        )
    if last == eos:
        return ()
    return (eos,)
