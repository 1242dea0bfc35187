"""Compiles a caller's grammar to matchers for sequences, or refuses it with a reason.

Each grammar is compiled in the sandbox first, because some grammars crash llguidance. Outlines'
matchers are not used, because they ignore the grammar after an error.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark
from outlines.types.dsl import Choice, to_regex

from gateway.engine.grammar.calls import is_free, with_schemas
from gateway.engine.grammar.matching import GrammarState, Matcher, TextTokens
from gateway.engine.grammar.schema_bounds import Shape, shape_schema
from gateway.engine.grammar.schemas import Node, Schema, check_draft, parse_schema, refusal
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.grammar.unenforced import (
    COMPACT,
    Held,
    check_strict,
    hold,
    read_options,
    to_llguidance,
    why,
)
from gateway.engine.sandbox_worker import TRIAL_FORCED, TRIAL_STEPS, Sandbox
from gateway.errors import BadRequest, Overloaded, Unavailable
from gateway.jobs.chat import Grammar

# Bounds of llguidance's parser, here and in the sandbox.
LIMITS: Final[Mapping[str, Any]] = {"max_lexer_states": 50_000, "verbose_errors": False}
# The number of copies of a matcher that share a lexer, whose number of states only grows.
RENEW_AFTER: Final = 256
BUSY_S: Final = 2.0
_MAX_BYTES: Final = 1 << 30  # bytes of memory in the sandbox; grammars used 0.13 GB at most
# Strings, regexes and comments. Unclosed strings and regexes match, too: otherwise the search would
# begin again at each quote inside them, and hold the GIL meanwhile.
_LARK_TEXT: Final = re.compile(
    r'(?:"(?:\\.|[^"\\\n])*(?P<text>")?|/(?!/)(?:\\.|[^/\\])*(?P<regex>/)?)|//[^\n]*|#[^\n]*'
)
_LARK_SPECIAL: Final = re.compile(
    r"<[^<>\s]+>|\btemperature\s*=|@\w+|%llguidance\b|%json\b|%lark\b"
)
_EMPTY_HEADER: Final = re.compile(r"\A%llguidance\s*\{\s*\}")  # guidance sends an empty header
_CONTROL_TOKEN: Final = re.compile(r"<[^<>\s\[\]]+>")
_GBNF: Final = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REASON: Final = re.compile(r"^error: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarBounds:
    """Bounds of the grammars that callers may send."""

    max_schema_bytes: int = 256 * 1024
    max_depth: int = 128
    max_path: int = 400  # subschemas in a chain of nested subschemas and references
    max_text_chars: int = 32 * 1024
    max_calls_chars: int = 4 * 1024 * 1024
    max_choices: int = 4096


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar for any number of sequences, each with a matcher. Threads may share it."""

    begin: Callable[[], GrammarState]
    eos_ids: Collection[int]
    begin_alone: Callable[[], GrammarState] | None = None  # makes a state with an unshared lexer
    unenforced: tuple[str, ...] = ()  # JSON pointers to keywords that were left out

    def matcher(self, tokens: Sequence[int] = ()) -> Matcher:
        """Return a matcher that has taken these tokens."""
        matcher = Matcher(self.begin, self.eos_ids, self.begin_alone)
        matcher.replay(tokens)
        return matcher


class _Uncompilable(Exception):
    """Raised, with llguidance's message, if llguidance refuses a grammar."""


def compile_grammar(
    tokenizer: GrammarTokenizer,
    grammar: Grammar,
    *,
    shape: Shape | None = None,
    bounds: GrammarBounds | None = None,
    sandbox: Sandbox | None = None,
) -> CompiledGrammar:
    """Compile a grammar with llguidance. Raises BadRequest if it cannot be compiled.

    `shape` tightens JSON Schemas, unless the tightened schema does not compile.
    """
    compiler = _Compiler(tokenizer, sandbox, shape or Shape(), bounds or GrammarBounds())
    if grammar.kind == "json_schema":
        schema = compiler.read(grammar.source)
        options = read_options(schema)
        _, compiled = compiler.compile_held(compiler.hold(schema), options)
        if grammar.strict:
            check_strict(compiled.unenforced)
        return compiled
    if grammar.kind == "calls":
        return _compile_calls(compiler, grammar)
    maker, texts = tokenizer.maker, tokenizer.texts
    if grammar.kind == "grammar":
        source = _to_lark(_within(grammar, compiler.bounds.max_text_chars))
        _check_lark(source)
        spec = maker.get_cfg_logits_processor(source).grammar
    else:
        spec = maker.get_regex_logits_processor(_regex_of(grammar, compiler.bounds)).grammar
    try:
        compiled, warnings = compiler.compile(spec, "invalid_grammar", texts)
    except _Uncompilable as error:
        raise _refusal(_reword(grammar, str(error))) from None
    if warnings:
        raise _refusal(_reword(grammar, "; ".join(warnings)))
    return compiled


def _compile_calls(compiler: "_Compiler", grammar: Grammar) -> CompiledGrammar:
    """Compile a grammar of calls with its schemas.

    Raises BadRequest for a schema that does not compile, or that is strict but not enforced.
    """
    parts: dict[str, Held] = {}
    for rule in grammar.schemas:
        try:
            parts[rule.rule] = compiler.hold(compiler.read(rule.schema))
        except BadRequest as error:
            raise _of_function(rule.function, error) from None
    forms = {rule: shape_schema(part.schema, compiler.shape) for rule, part in parts.items()}
    try:
        compiled, warnings = compiler.compile_calls(grammar, forms)
    except _Uncompilable:  # one of the schemas is at fault
        for rule in grammar.schemas:
            try:
                forms[rule.rule], _ = compiler.compile_held(parts[rule.rule])
            except BadRequest as error:
                raise _of_function(rule.function, error) from None
        try:
            compiled, warnings = compiler.compile_calls(grammar, forms)
        except _Uncompilable as error:
            reason = str(error).partition("\n")[0][:300]
            raise _refusal(
                f"No grammar can enforce these tools, or the response format beside them: {reason}."
            ) from None
    unenforced: list[str] = []
    for rule in grammar.schemas:
        pointers = parts[rule.rule].warned(warnings).unenforced
        try:
            if rule.strict:
                check_strict(pointers)
        except BadRequest as error:
            raise _of_function(rule.function, error) from None
        unenforced += [f"{rule.function}{pointer}" for pointer in pointers]
    return replace(compiled, unenforced=tuple(unenforced))


def _of_function(function: str, error: BadRequest) -> BadRequest:
    if not function:  # the schema is the response format's
        return error
    message = f"The parameters of '{function}': {error.message}"
    return BadRequest(message, part="tools", code=error.code)


def _reword(grammar: Grammar, problem: str) -> str:
    place = _PLACE.match(problem)
    match = _REASON.search(problem)
    reason = _PLACE.sub("", problem.partition("\n")[0], count=1)
    if match:
        reason = match[1]
    reason = reason.strip().rstrip(".")[:300]
    if grammar.kind == "grammar" and _GBNF.search(grammar.source):
        return f"The GBNF grammar cannot be compiled: {reason}."
    lines = grammar.source.split("\n")
    if grammar.kind == "grammar" and place and int(place[1]) <= len(lines):
        line = lines[int(place[1]) - 1][:64]
        reason = f"line {place[1]}, column {place[2]}: {reason}, in `{line}`"
    return f"The {grammar.kind} cannot be compiled: {reason}."


def _within(grammar: Grammar, max_chars: int) -> str:
    if len(grammar.source) > max_chars:
        raise _refusal(f"The {grammar.kind} is longer than {max_chars} characters.")
    return grammar.source


def _regex_of(grammar: Grammar, bounds: GrammarBounds) -> str:
    if grammar.kind == "regex":
        return _within(grammar, bounds.max_text_chars)
    try:
        choices = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"The choice is not a JSON array of strings: {error}") from error
    is_strings = isinstance(choices, list) and all(isinstance(item, str) for item in choices)
    if not is_strings or not any(choices):
        raise _refusal("The choice must be a JSON array of strings, not all of them empty.")
    if len(choices) > bounds.max_choices or sum(map(len, choices)) > bounds.max_schema_bytes:
        raise _refusal(f"There are more than {bounds.max_choices} choices, or they are too long.")
    return str(to_regex(Choice(choices)))


def _refusal(message: str, code: str = "invalid_grammar") -> BadRequest:
    return BadRequest(message, part="answer_form", code=code)


def _to_lark(source: str) -> str:
    if _GBNF.search(source):
        try:
            source = any_to_lark(source)
        except Exception as error:  # its parser may raise any error
            raise _refusal(f"The GBNF grammar cannot be compiled: {str(error)[:300]}.") from None
    return _EMPTY_HEADER.sub("", source)


def _check_lark(source: str) -> None:
    # Some features would have no effect, or allow tokens that the answer's text does not show.
    unclosed = next(filter(_is_unclosed, _LARK_TEXT.finditer(source)), None)
    if unclosed:
        raise _refusal(f"The grammar has a string or a regex without an end: {unclosed[0][:64]}")
    special = _LARK_SPECIAL.search(_without_texts(source))
    if special:
        raise _refusal(f"The grammar uses `{special[0]}`, which is not supported.")


def _without_texts(source: str) -> str:
    return _LARK_TEXT.sub(lambda text: text[0] if _is_unclosed(text) else '""', source)


def _is_unclosed(text: re.Match[str]) -> bool:
    return not (text["text"] or text["regex"] or text[0].startswith(("//", "#")))


@dataclass(frozen=True, slots=True)
class _Compiler:
    tokenizer: GrammarTokenizer
    sandbox: Sandbox | None
    shape: Shape
    bounds: GrammarBounds

    def read(self, source: str) -> Schema:
        bounds = self.bounds
        schema = parse_schema(source, max_bytes=bounds.max_schema_bytes, max_depth=bounds.max_depth)
        check_draft(schema)
        return schema

    def hold(self, schema: Schema) -> Held:
        return hold(schema, self.bounds.max_path)

    def compile_held(
        self, part: Held, options: Mapping[str, Any] = COMPACT
    ) -> tuple[Node, CompiledGrammar]:
        """Compile a schema, tightened if possible, and return the compiled schema, too."""
        problem = ""
        shaped = shape_schema(part.schema, self.shape)
        forms = [shaped]
        if shaped != part.schema:
            forms.append(part.schema)
        for form in forms:
            text = json.dumps(to_llguidance(form, options))
            spec = self.tokenizer.maker.get_json_schema_logits_processor(text).grammar
            try:
                compiled, warnings = self.compile(spec, "invalid_json_schema", self.tokenizer.json)
            except _Uncompilable as error:
                problem = str(error)
            else:
                return form, replace(compiled, unenforced=part.warned(warnings).unenforced)
        raise refusal(why(part, problem))

    def compile_calls(
        self, grammar: Grammar, forms: Mapping[str, Schema]
    ) -> tuple[CompiledGrammar, Sequence[str]]:
        source = with_schemas(grammar.source, forms)
        if len(source) > self.bounds.max_calls_chars:
            raise _refusal(
                "The functions' schemas together are longer than "
                f"{self.bounds.max_calls_chars} characters."
            )
        spec = self.tokenizer.maker.get_cfg_logits_processor(source).grammar
        # Only free calls may contain the model's marks, which are control tokens.
        texts = self.tokenizer.texts_and_marks
        if not is_free(grammar):
            texts = replace(texts, spell=self.tokenizer.json.spell)
        return self.compile(spec, "invalid_grammar", texts)

    def compile(
        self, spec: str, code: str, texts: TextTokens
    ) -> tuple[CompiledGrammar, Sequence[str]]:
        """Return the compiled grammar and llguidance's warnings. Raises _Uncompilable."""
        if self.sandbox is not None:
            try_grammar(self.sandbox, spec, code)
        limits = LLParserLimits(**LIMITS)

        def first() -> LLMatcher:
            return LLMatcher(self.tokenizer.tokens, spec, log_level=0, limits=limits)

        matcher = first()
        copies = _Copies(first, matcher, texts)
        error = GrammarState(matcher, texts).problem()
        warnings: Sequence[str] = []
        if error is None:
            warnings = matcher.get_grammar_warnings()
            error = _follow(Matcher(copies, self.tokenizer.eos_ids), self.tokenizer)
        if error is not None:
            raise _Uncompilable(error[:1000].strip())

        def begin_alone() -> GrammarState:
            return GrammarState(first(), texts)

        return CompiledGrammar(copies, self.tokenizer.eos_ids, begin_alone), warnings


def try_grammar(sandbox: Sandbox, spec: str, code: str) -> None:
    """Compile a grammar in the sandbox.

    Raises _Uncompilable if llguidance refuses the grammar, BadRequest if the grammar crashed the
    sandbox's process, TimeoutError if it took too much processor time, Overloaded if the sandbox is
    busy, and Unavailable if its process was killed or got no processor time.
    """
    specials = tuple(sorted(set(_CONTROL_TOKEN.findall(_without_texts(spec)))))
    request: dict[str, Any] = {"spec": spec, "specials": specials, "limits": dict(LIMITS)}
    request |= {"kind": "grammar", "max_bytes": _MAX_BYTES}
    outcome, value = sandbox(request, key_of("grammar", spec))
    if outcome in ("died", "large"):
        noun = {"invalid_json_schema": "JSON Schema"}.get(code, "grammar")
        raise _refusal(f"The {noun} cannot be compiled: {value}.", code)
    if outcome == "wrong":
        raise _Uncompilable(str(value).partition("\n<")[0][:1000].strip())
    if outcome == "late":
        raise TimeoutError
    if outcome in ("killed", "slow"):
        raise Unavailable(f"The grammar was not compiled: {value}.", retry_after_s=BUSY_S)
    if outcome == "busy":
        raise Overloaded("Other grammars are being compiled; ask again.", retry_after_s=BUSY_S)


def key_of(*parts: str) -> bytes:
    """Return the key by which the sandbox remembers a request."""
    digests = [hashlib.sha256(part.encode(errors="surrogatepass")).digest() for part in parts]
    return hashlib.sha256(b"".join(digests)).digest()


def _follow(trial: Matcher, tokenizer: GrammarTokenizer) -> str | None:
    """Match a few allowed tokens, and return the error of a grammar that exceeds the limits."""
    row = np.zeros(tokenizer.words, dtype=np.uint32)
    for _ in range(TRIAL_STEPS):
        trial.replay(trial.forced_tokens()[:TRIAL_FORCED])
        trial.allowed(row)
        tokens = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        tokens -= {*tokenizer.eos_ids}
        if trial.error is not None or not tokens:
            break
        # A quote may end a string.
        quotes = tokens & {*tokenizer.texts.ids.get(b'"', ())}
        trial.consume(min(quotes or tokens))
    return trial.error


class _Copies:
    def __init__(
        self, make: Callable[[], LLMatcher], matcher: LLMatcher, texts: TextTokens
    ) -> None:
        self._make = make
        self._matcher = matcher
        self._texts = texts
        self._count = itertools.count(1)

    def __call__(self) -> GrammarState:
        if next(self._count) % RENEW_AFTER == 0:
            self._matcher = self._make()
        return GrammarState(self._matcher.deep_copy(), self._texts)
