"""A caller's grammar → something rows can be matched against, or a refusal that says why.

Outlines gives the types and the backends that make tokenizer and grammar; matcher and mask are
ours (matching.py), because Outlines' own go on without a grammar when one fails. Compiling takes
milliseconds and more: on a worker thread, never on the lane.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import jsonschema  # type: ignore[import-untyped]
import llguidance
import llguidance.hf
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from outlines.backends.llguidance import LLGuidanceBackend
from outlines.types import JsonSchema
from outlines.types.dsl import Choice, to_regex

from gateway.engine.grammar import schemas
from gateway.engine.grammar.matching import LLState, Matcher, State, Texts, words
from gateway.engine.grammar.shaping import Shape, shaped
from gateway.errors import BadRequest
from gateway.jobs import Grammar

Backend: TypeAlias = Literal["llguidance", "outlines_core"]
RENEW_AFTER: Final = 256  # copies share a lexer whose states only grow: start another now and then
_OPTIONS: Final = frozenset(
    {"whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"}
)
_TRIAL_STEPS: Final = 8
_TRIAL_FORCED: Final = 64  # tokens at a step
_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
_LARK_TEXT: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_LARK_SPECIAL: Final = re.compile(r"<[^<>\s]+>|\btemperature\s*=|@\w+|%llguidance\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a caller may ask to be compiled."""

    max_schema_bytes: int = 256 * 1024
    max_depth: int = 128
    max_text_chars: int = 32 * 1024
    max_calls_chars: int = 4 * 1024 * 1024  # of our own making, from schemas bounded one by one
    max_choices: int = 4096


class GrammarTokenizer:
    """What grammars need to know of a model's tokens. Slow to build, and holds the GIL: at load.

    `tokenizer` is the transformers one. `vocab_size` is the length of the model's logits, which
    may exceed the tokenizer's: ids beyond it are never allowed. Special and added tokens are
    never text, but for `marks` in calls. Raises ValueError for one that cannot serve grammars.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        eos_ids: Collection[int],
        marks: Collection[int] = (),
        backend: Backend = "llguidance",
    ) -> None:
        size = max(vocab_size, 1 + max(tokenizer.get_vocab().values()))
        self.backend: Backend = backend
        self.eos_ids = tuple(sorted(token for token in eos_ids if 0 <= token < vocab_size))
        if not self.eos_ids:
            raise ValueError("the model has no end-of-sequence token")
        self.vocab_size = vocab_size
        self.maker = _Maker(tokenizer, size, self.eos_ids)
        self.tokens: LLTokenizer = self.maker.llg_tokenizer
        self.texts = self._texts()
        self.texts_and_marks = self.texts.beside(marks)

    @property
    def words(self) -> int:
        """Count the words of a row's mask."""
        return words(self.tokens.vocab_size)

    def _texts(self) -> Texts:
        found: dict[bytes, list[int]] = {}
        others = np.full(self.words, 0xFFFFFFFF, dtype=np.uint32)
        for token in range(self.vocab_size):
            if token in self.eos_ids or self.tokens.is_special_token(token):
                continue
            text = self.tokens.decode_bytes([token])
            found.setdefault(text, []).append(token)
            others[token // 32] &= ~np.uint32(1 << (token % 32))
        return Texts(found, others)


class _Maker(LLGuidanceBackend):
    """Outlines' backend, told the size of the logits and every end of sequence."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.llg = llguidance
        self.tensor_library_name = "numpy"  # its processors are made, never run
        self.llg_tokenizer = llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids)
        )


class CompiledGrammar:
    """A grammar any number of rows may follow, each from its own matcher. Safe on any thread."""

    def __init__(
        self,
        begin: Callable[[], State],
        eos_ids: Collection[int],
        alone: Callable[[], State] | None = None,
    ) -> None:
        self._begin = begin
        self._eos_ids = eos_ids
        self._alone = alone

    def matcher(self, said: Sequence[int] = ()) -> Matcher:
        """Begin a row, or begin it again where `said` leaves it."""
        matcher = Matcher(self._begin, self._eos_ids, self._alone)
        matcher.replay(said)
        return matcher


def compile_grammar(
    tokenizer: GrammarTokenizer,
    grammar: Grammar,
    *,
    shape: Shape | None = None,
    bounds: Bounds | None = None,
) -> CompiledGrammar:
    """Compile with llguidance. Raises BadRequest for what it can't do, or would only half do.

    `shape` tightens JSON Schemas; a schema that cannot be met so is compiled as it came.
    """
    bounds = bounds or Bounds()
    if grammar.kind == "json_schema":
        schema = read_schema(grammar.source, bounds)
        options = _options(schema)
        tight = shaped(schema, shape or Shape())
        if tight != schema:
            try:
                return _json(tokenizer, tight, options)
            except BadRequest:
                pass
        return _json(tokenizer, schema, options)
    source = text_of(grammar, bounds)
    if grammar.kind in ("grammar", "calls"):
        if grammar.kind == "grammar":  # ours may say more than a caller's
            _check_lark(source)
        spec = tokenizer.maker.get_cfg_logits_processor(source).grammar
    else:
        spec = tokenizer.maker.get_regex_logits_processor(source).grammar
    # Only a call of our own making may use the model's marks, which are control tokens.
    texts = tokenizer.texts_and_marks if grammar.kind == "calls" else tokenizer.texts
    return _compiled(tokenizer, spec, "invalid_grammar", texts)


def read_schema(source: str, bounds: Bounds) -> schemas.Schema:
    """Read a JSON Schema, check it against its draft's own schema, and bring it up to date."""
    schema = schemas.parse_schema(
        source, max_bytes=bounds.max_schema_bytes, max_depth=bounds.max_depth
    )
    try:
        JsonSchema(json.dumps(schema))
    except jsonschema.SchemaError as error:
        at = "/".join(["#", *map(str, error.absolute_path)])
        raise schemas.refused(f"The JSON Schema is not valid at {at}: {error.message}") from error
    except RecursionError as error:
        raise schemas.refused("The JSON Schema is nested too deep.") from error
    schema = schemas.modern(schema if isinstance(schema, dict) else {} if schema else False)
    schemas.check(schema)
    return schema


def text_of(grammar: Grammar, bounds: Bounds) -> str:
    """Give a regex, a grammar or a choice (as the regex of its strings), within bounds."""
    limit = bounds.max_calls_chars if grammar.kind == "calls" else bounds.max_text_chars
    if len(grammar.source) > limit and grammar.kind != "choice":
        what = (
            "functions' schemas together are" if grammar.kind == "calls" else f"{grammar.kind} is"
        )
        raise _refused(f"The {what} longer than {limit} characters.")
    if grammar.kind != "choice":
        return grammar.source
    try:
        choices = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise _refused(f"The choice is not a JSON array of strings: {error}") from error
    is_strings = isinstance(choices, list) and all(isinstance(item, str) for item in choices)
    if not is_strings or not any(choices):
        raise _refused("The choice is a JSON array of strings, not all of them empty.")
    if len(choices) > bounds.max_choices or sum(map(len, choices)) > bounds.max_schema_bytes:
        raise _refused(f"There are more than {bounds.max_choices} choices, or they are too long.")
    return str(to_regex(Choice(choices)))


def _refused(message: str, code: str = "invalid_grammar") -> BadRequest:
    return BadRequest(message, param="response_format", code=code)


def _options(schema: schemas.Schema) -> dict[str, Any]:
    """Read llguidance's own options from the schema: those of form, none that loosen it."""
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict) or not options.keys() <= _OPTIONS:
        raise schemas.refused(
            f"The JSON Schema keyword `x-guidance` may have {', '.join(sorted(_OPTIONS))} only."
        )
    return {"whitespace_flexible": False, **options}  # or a model may write spaces for ever


def _json(
    tokenizer: GrammarTokenizer, schema: schemas.Schema, options: dict[str, Any]
) -> CompiledGrammar:
    text = json.dumps({**schema, "x-guidance": options})
    spec = tokenizer.maker.get_json_schema_logits_processor(text).grammar
    return _compiled(tokenizer, spec, "invalid_json_schema", tokenizer.texts)


def _check_lark(source: str) -> None:
    """Refuse what the grammar could say and the answer's text would not, or we would ignore."""
    found = _LARK_SPECIAL.search(_LARK_TEXT.sub('""', source))
    if found:
        raise _refused(f"The grammar uses `{found[0]}`, which is not supported.")


def _compiled(tokenizer: GrammarTokenizer, spec: str, code: str, texts: Texts) -> CompiledGrammar:
    """Make the grammar's first matcher; every row's is a copy."""

    def first() -> LLMatcher:
        return LLMatcher(tokenizer.tokens, spec, log_level=0, limits=_LIMITS)

    matcher = first()
    noun = "JSON Schema" if code == "invalid_json_schema" else "grammar"
    copies = _Copies(first, matcher, texts)
    error = LLState(matcher, texts).problem()
    if error is None and (warnings := matcher.get_grammar_warnings()):
        error = "; ".join(warnings)
    if error is None:
        error = _try(Matcher(copies, tokenizer.eos_ids), tokenizer)
    if error is not None:
        raise _refused(f"The {noun} cannot be compiled: {error[:1000].strip()}", code)
    return CompiledGrammar(copies, tokenizer.eos_ids, alone=lambda: LLState(first(), texts))


def _try(trial: Matcher, tokenizer: GrammarTokenizer) -> str | None:
    """Say a few tokens, quotes for choice since they lead out of strings; give the error met.

    Some grammars are too wide to be followed and show it only then.
    """
    row = np.zeros(tokenizer.words, dtype=np.uint32)
    for _ in range(_TRIAL_STEPS):
        trial.replay(trial.forced_tokens()[:_TRIAL_FORCED])
        trial.allowed(row)
        tokens = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        tokens -= {*tokenizer.eos_ids}
        if trial.error is not None or not tokens:
            break
        quotes = tokens & {*tokenizer.texts.ids.get(b'"', ())}
        trial.consume(min(quotes or tokens))
    return trial.error


class _Copies:
    """Copies of a first matcher, itself made again when its shared lexer may have grown large."""

    def __init__(self, make: Callable[[], LLMatcher], matcher: LLMatcher, texts: Texts) -> None:
        self._make = make
        self._matcher = matcher
        self._texts = texts
        self._count = itertools.count(1)

    def __call__(self) -> State:
        if next(self._count) % RENEW_AFTER == 0:
            self._matcher = self._make()
        return LLState(self._matcher.deep_copy(), self._texts)
