"""Make transformers' fast tokenizer from a GGUF file's metadata.

`gpt2` is byte-level BPE with a list of merges and a named pre-tokenizer. `llama` is SentencePiece's
BPE, which merges the pair with the best score first. Keys are those of ggml's docs/gguf.md, details
those of llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, TypeVar

from mlx_lm.tokenizer_utils import TokenizerWrapper, _infer_tool_parser
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gateway.engine.models.gguf.checkpoint import GgufCheckpoint
from gateway.panics import as_exception


@dataclass(frozen=True, slots=True)
class Splitting:
    """The patterns of a pre-tokenizer, and other rules that its name implies."""

    patterns: tuple[str, ...]  # each cuts the pieces that earlier patterns left
    keeps_words: bool = False  # a word that is a token stays whole
    adds_bos: bool = False  # the default of `add_bos_token`
    composes: bool = False  # normalizes text to NFC

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        spelling = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, spelling])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """Return tiktoken's cl100k_base pattern with another pattern for digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# Tekken's own patterns: llama.cpp's differ for combining marks and non-ASCII capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_PLAIN = Splitting((_GPT2,))
_DIGITS = Splitting((r"\p{N}", _GPT2))
_LLAMA3 = Splitting((_cl100k(r"\p{N}{1,3}"),), keeps_words=True, adds_bos=True)
_QWEN2 = Splitting((_cl100k(r"\p{N}"),))

SPLITTINGS: Final[Mapping[str, Splitting]] = MappingProxyType(
    {
        # llama.cpp's choice for files without the key, which are older than May 2024.
        "default": Splitting((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}")),
        **dict.fromkeys(("gpt-2", "a.x-4.0", "mellum", "trillion"), _PLAIN),
        **dict.fromkeys(("smollm", "starcoder", "refact", "minerva-7b"), _DIGITS),
        **dict.fromkeys(
            ("llama-bpe", "llama-v3", "llama3", "falcon3", "midm-2.0", "pixtral"), _LLAMA3
        ),
        # transformers normalizes text to NFC (tokenization_qwen2.py), llama.cpp doesn't.
        "qwen2": Splitting(_QWEN2.patterns, composes=True),
        "deepseek-r1-qwen": _QWEN2,
        "megrez": _QWEN2,
        "tekken": Splitting((_TEKKEN,), keeps_words=True, adds_bos=True),
        "deepseek-coder": Splitting(
            (
                r"[\r\n]",
                r"\s?\p{L}+",
                r"\s?\p{P}+",
                "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
                r"\p{N}",
            )
        ),
    }
)


T = TypeVar("T")

_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# Bounds for malicious files; the largest vocabularies have 2^18 tokens.
_MOST_TOKENS: Final = 1 << 20
_MOST_MERGES: Final = 1 << 20
_MOST_ADDED_CHARS: Final = 1 << 20  # each takes about 100 bytes of memory
_MOST_WORK: Final = 100_000_000  # squares of token lengths; Mistral's add up to a million

# Tokens that are EOS tokens by their text alone, as in llama.cpp. `</s>` is left out, because some
# vocabularies have it as a word of HTML.
_ENDS: Final = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<｜end▁of▁sentence｜>",
    }
)
# gpt-oss and Solar Open have these tokens. Their `<|end|>` ends a message, not the answer.
_ENDS_BESIDE_MESSAGES: Final = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})


class TokenType(IntEnum):
    """The kind of a token in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)


def read_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a GGUF file's metadata describe, with its chat templates.

    Raises ValueError for a key that is missing, wrong or unknown.
    """
    try:
        return _tokenizer(metadata)
    except (ValueError, MemoryError):
        raise
    except BaseException as error:
        reason = as_exception(error)
        raise ValueError(f"the tokenizer in its metadata cannot be made: {reason}") from error


def read_end_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids of all EOS tokens. Raises ValueError as `read_tokenizer` does."""
    vocabulary = _vocabulary(metadata)
    named = (_token_id(metadata, f"{name}_token_id", vocabulary) for name in ("eos", "eot", "eom"))
    return named_ends(vocabulary.ids).union(token for token in named if token is not None)


def named_ends(ids: Mapping[str, int]) -> frozenset[int]:
    texts = _ENDS & ids.keys()
    if any(ends <= ids.keys() for ends in _ENDS_BESIDE_MESSAGES):
        texts -= {"<|end|>"}
    return frozenset(ids[text] for text in texts)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    types: Sequence[int]
    ids: Mapping[str, int]
    is_sentencepiece: bool


def _tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    vocabulary = _vocabulary(metadata)
    if vocabulary.is_sentencepiece:
        tokenizer, adds_bos = _sentencepiece(metadata, vocabulary), True
    else:
        tokenizer, adds_bos = _byte_level(metadata, vocabulary)
    tokenizer.add_tokens(_added(vocabulary))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _token_id(metadata, f"{key}_token_id", vocabulary) for name, key in names.items()}
    named = {
        f"{name}_token": None if token is None else vocabulary.tokens[token]
        for name, token in ids.items()
    }
    fast: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = fast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(metadata),
        add_bos_token=_adds(metadata, "bos", ids["bos"], otherwise=adds_bos),
        add_eos_token=_adds(metadata, "eos", ids["eos"], otherwise=False),
        clean_up_tokenization_spaces=False,
        **named,
    )
    return made


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = _one(metadata, f"{_GGML}pre", str) or "default"
    splitting = SPLITTINGS.get(name)
    if splitting is None:
        raise ValueError(f"its pre-tokenizer {name[:80]!r} is not known here")
    model = models.BPE(
        vocab=dict(vocabulary.ids),
        merges=_listed_merges(metadata, vocabulary),
        ignore_merges=splitting.keeps_words,
    )
    tokenizer = Tokenizer(model)
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    """Return SentencePiece's BPE, which merges by score and marks spaces.

    As in llama.cpp, a space is also put before each part that follows a special token. llguidance
    can read only this form of decoder.
    """
    missing = _BYTES - vocabulary.ids.keys()
    if missing:
        raise ValueError(f"its vocabulary lacks byte tokens, for example {min(missing)}")
    unknown = _token_id(metadata, "unknown_token_id", vocabulary)
    model = models.BPE(
        vocab=dict(vocabulary.ids),
        merges=_merges_by_score(vocabulary, _scores(metadata, vocabulary)),
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefixes = _one(metadata, f"{_GGML}add_space_prefix", bool) is not False
    marking = normalizers.Replace(" ", _SPACE)
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = marking
    if prefixes:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marking])
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that makes a third, ordered by the third's score, best first.

    SentencePiece (bpe_model.cc) merges the leftmost of pairs with equal scores. These occur in runs
    of spaces, where the longest token first has the same effect, as in transformers'
    `generate_merges`.
    """
    tokens, ids = vocabulary.tokens, vocabulary.ids
    if sum(len(token) ** 2 for token in tokens) > _MOST_WORK:
        raise ValueError("its tokens are too long")
    no_text = (*_SPECIAL, TokenType.BYTE)
    merges = (
        (-score, -len(token), ids[token[:cut]], ids[token[cut:]])
        for token, score, kind in zip(tokens, scores, vocabulary.types, strict=True)
        if kind not in no_text
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    )
    ranked = sorted(islice(merges, _MOST_MERGES + 1))
    if len(ranked) > _MOST_MERGES:
        raise ValueError(f"its tokens have more than {_MOST_MERGES:,} possible merges")
    return [(tokens[left], tokens[right]) for *_, left, right in ranked]


def _listed_merges(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    listed = _many(metadata, f"{_GGML}merges", str)
    if listed is None:
        raise ValueError(f"it has no {_GGML}merges")
    _check_count(listed, _MOST_MERGES, "merges")
    merges: dict[tuple[str, str], None] = {}
    ids = vocabulary.ids
    for merge in listed:
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise ValueError(f"its merge {merge[:80]!r} does not join two tokens into a third")
        merges.setdefault((left, right))
    return list(merges)


def _added(vocabulary: _Vocabulary) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is cut into words."""
    # Some files give EOS tokens the wrong type.
    is_special = {
        token: kind in _SPECIAL or token in _ENDS
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (*_SPECIAL, TokenType.USER_DEFINED) or token in _ENDS
    }
    if sum(map(len, is_special)) > _MOST_ADDED_CHARS:
        raise ValueError("its control and user-defined tokens are too long")
    return [AddedToken(token, normalized=False, special=is_special[token]) for token in is_special]


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    model = _one(metadata, f"{_GGML}model", str)
    if model not in ("gpt2", "llama"):
        what = "names no tokenizer" if model is None else f"names the tokenizer {model[:80]!r}"
        raise ValueError(f"it {what}; gpt2 and llama are known here")
    listed = _many(metadata, f"{_GGML}tokens", str)
    if not listed:
        raise ValueError(f"it has no {_GGML}tokens")
    _check_count(listed, _MOST_TOKENS, "tokens")
    tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(listed)]
    types = _many(metadata, f"{_GGML}token_type", int)
    if types is None:
        types = [TokenType.NORMAL] * len(tokens)
    _check_length(types, tokens, "token_type")
    unknown = set(types) - set(TokenType)
    if unknown:
        raise ValueError(f"its {_GGML}token_type holds {min(unknown)}, which is no type")
    ids = {token: place for place, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for place, token in enumerate(tokens) if ids[token] != place)
        raise ValueError(f"its vocabulary has the token {twice[:80]!r} twice")
    return _Vocabulary(tokens, types, ids, is_sentencepiece=model == "llama")


def _scores(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Sequence[float]:
    scores = _many(metadata, f"{_GGML}scores", float)
    if scores is None:
        raise ValueError(f"it has no {_GGML}scores")
    _check_length(scores, vocabulary.tokens, "scores")
    if any(score != score for score in scores):
        raise ValueError(f"its {_GGML}scores are not all numbers")
    return scores


def _token_id(metadata: Mapping[str, Any], name: str, vocabulary: _Vocabulary) -> int | None:
    """Return a special token's id. SentencePiece files may rely on the trainer's default ids."""
    defaults = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    token = _one(metadata, _GGML + name, int)
    size = len(vocabulary.tokens)
    if token is None:
        if vocabulary.is_sentencepiece and defaults.get(name, size) < size:
            return defaults[name]
        return None
    if name == "padding_token_id" and token >= size:  # many files of 2023 have such an id
        return None
    if not 0 <= token < size:
        raise ValueError(f"its {_GGML}{name} is {token}, outside its vocabulary of {size} tokens")
    return token


def _adds(metadata: Mapping[str, Any], name: str, token: int | None, *, otherwise: bool) -> bool:
    flag = _one(metadata, f"{_GGML}add_{name}_token", bool)
    if flag and token is None:
        raise ValueError(f"its {_GGML}add_{name}_token is set, and {_GGML}{name}_token_id is not")
    if flag is None:
        return otherwise and token is not None
    return flag


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    main = _one(metadata, _TEMPLATE, str)
    names = {
        key.removeprefix(f"{_TEMPLATE}.") for key in metadata if key.startswith(f"{_TEMPLATE}.")
    }
    for name in _many(metadata, f"{_TEMPLATE}s", str) or ():
        if name not in names and not (name == "default" and main is not None):
            raise ValueError(f"its {_TEMPLATE}s name {name[:80]!r}, but no template has that name")
    if not names:
        return main
    named = {name: _one(metadata, f"{_TEMPLATE}.{name}", str) or "" for name in sorted(names)}
    if main is not None:
        named = {"default": main, **named}
    return named


def _one(metadata: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    value = metadata.get(key)
    if value is not None and type(value) is not kind:
        raise ValueError(f"its {key} is of type {type(value).__name__}, not {kind.__name__}")
    return value


def _many(metadata: Mapping[str, Any], key: str, kind: type[T]) -> Sequence[T] | None:
    values = metadata.get(key)
    if values is None:
        return None
    kinds = {kind, int} if kind is float else {kind}  # floats may be stored as integers
    if not isinstance(values, list) or not set(map(type, values)) <= kinds:
        raise ValueError(f"its {key} is no list of {kind.__name__}")
    return values


def _check_length(values: Sequence[Any], tokens: Sequence[str], name: str) -> None:
    if len(values) != len(tokens):
        raise ValueError(f"its {_GGML}{name} has {len(values)} entries for {len(tokens)} tokens")


def _check_count(values: Sequence[Any], limit: int, name: str) -> None:
    if len(values) > limit:
        raise ValueError(f"its {_GGML}{name} has {len(values):,} entries; {limit:,} are allowed")


# The file's keys, by the names of generation_config.json.
_SAMPLING: Final = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def wrap_tokenizer(checkpoint: GgufCheckpoint) -> TokenizerWrapper:
    """Return the file's tokenizer, wrapped as in mlx-lm. Raises ModelLoadFailed."""
    metadata, rows = checkpoint.header.metadata, checkpoint.config()["vocab_size"]
    with checkpoint.blame():
        tokenizer = read_tokenizer(metadata)
        if len(tokenizer) > rows:  # MLX reads beyond an array's end without an error
            raise ValueError(f"it has {len(tokenizer):,} tokens, but only {rows:,} embeddings")
        declared = _infer_tool_parser(tokenizer)  # type: ignore[no-untyped-call]
        if declared is not None:
            tokenizer.init_kwargs["tool_parser_type"] = declared
        return TokenizerWrapper(tokenizer, eos_token_ids=read_end_ids(metadata))


def read_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the makers' recommended sampling settings, by generation_config.json's names.

    https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
    """
    return {name: metadata[key] for name, key in _SAMPLING.items() if key in metadata}
