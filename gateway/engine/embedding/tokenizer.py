"""Texts to token ids for embedding models, exactly as sentence-transformers does it.

The tokenizer is set up once, at load. Changing it while another thread encodes is what
says "Already borrowed", and no call here changes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer, normalizers

from gateway.engine.checkpoint import Checkpoint

CHARS_A_TOKEN: Final = 16  # so many are more than enough but for texts that are mostly spaces
WORDS: Final = 3


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A tokenizer for whole texts.

    Safe to call from several threads at once: encoding only reads, releases the GIL, and
    spreads a batch over cores.
    """

    _tokenizer: Tokenizer
    _before: int
    _after: int
    _eos: tuple[int, ...]
    _cut_left: bool
    _splits_words: bool = False

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's ids with its special tokens, never truncated, never padded."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [[*one.ids, *self._eos] for one in encoded]

    def encode_start(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Return ids as `encode` does or, of a long text, as many as `truncate` needs of them.

        What `truncate` keeps is the same. A text is cut before it is encoded only where that is
        sure: words are encoded one by one, and three of them stand between the last token that is
        kept and the cut, which changes no more than the word and the spaces before it.
        """
        if self._cut_left or not self._splits_words:
            return self.encode(texts)
        rows: dict[int, list[int]] = {}
        waiting, chars = list(range(len(texts))), CHARS_A_TOKEN * limit
        while waiting:
            cut = [i for i in waiting if len(texts[i]) > chars]
            whole = [i for i in waiting if len(texts[i]) <= chars]
            rows |= zip(whole, self.encode([texts[i] for i in whole]), strict=True)
            heads = [texts[i][:chars] for i in cut]
            encoded = self._tokenizer.encode_batch(heads, add_special_tokens=True)
            waiting = []
            for i, head, one in zip(cut, heads, encoded, strict=True):
                enough = len(one.ids) - self._after > limit
                if enough and _words(head[one.offsets[limit - 1][1] :]) > WORDS:
                    rows[i] = [*one.ids, *self._eos]
                else:
                    waiting.append(i)
            chars *= 8
        return [rows[i] for i in range(len(texts))]

    def truncate(self, ids: Sequence[int], limit: int) -> list[int]:
        """Cut to `limit` tokens, special tokens included: both ends' specials stay."""
        if len(ids) <= limit:
            return list(ids)
        end = len(ids) - self._after
        body = ids[self._before : end]
        keep = max(0, limit - self._before - self._after)
        body = body[len(body) - keep :] if self._cut_left else body[:keep]
        return [*ids[: self._before], *body, *ids[end:]]


def load_text_tokenizer(checkpoint: Checkpoint, *, lower_case: bool) -> TextTokenizer:
    """Load tokenizer.json. `lower_case` is do_lower_case of sentence_bert_config.json."""
    path = checkpoint.folder / "tokenizer.json"
    if not path.is_file():
        raise checkpoint.failed("its folder has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise checkpoint.failed(f"tokenizer.json cannot be read: {error}") from error
    # MiniLM's file itself truncates and pads to 128.
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
    )


def _words(text: str) -> int:
    """Count what stands between spaces and has a letter or digit."""
    return sum(any(map(str.isalnum, word)) for word in text.split(" "))


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Return True if what stands between spaces is encoded by itself, but for the space."""
    if tokenizer.pre_tokenizer is None:
        return False
    one, two = (len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) for text in ("ab", "ab cd"))
    added = tokenizer.get_added_tokens_decoder().values()
    return one == 1 and two > 1 and all(token.content.count(" ") < WORDS for token in added)


def _follow_bert_settings(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Apply tokenizer_config.json over tokenizer.json's normaliser, as BertTokenizer does."""
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
    """Return True if the normaliser already lower-cases, in a sequence too."""
    rules = repr(tokenizer.normalizer)
    return "lowercase=True" in rules or "Lowercase()" in rules


def _lower_first(tokenizer: Tokenizer) -> None:
    rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


def _special_ends(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, int, int | None]:
    """Count the special tokens before and after a text, and give the last of those after."""
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
    """Return the end token that tokenizer_config.json asks for and tokenizer.json does not add."""
    if not config.get("add_eos_token"):
        return ()
    token = config.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    eos = tokenizer.token_to_id(content) if isinstance(content, str) else None
    if eos is None:
        raise checkpoint.failed(
            "tokenizer_config.json asks for add_eos_token, but its eos_token is no known token"
        )
    return () if last == eos else (eos,)
