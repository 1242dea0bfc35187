"""A caller's grammar → matchers of sequences, or a refusal with its reason.

Outlines gives the types and the backends that make tokenizer and grammar; matcher and mask are ours
(matching.py), because Outlines' own continue without a grammar when one fails. Compiling takes
milliseconds and more: run it on a worker thread, never on the lane. Everything is compiled in the
sandbox first: a grammar that ends a process there never reaches this one.
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
# Copies share a lexer whose states only grow: another is started after this number.
RENEW_AFTER: Final = 256
BUSY_S: Final = 2.0
# The most growth within llguidance's limits was 0.13 GB.
_MAX_BYTES: Final = 1 << 30
# Texts, regexes, which may go over lines, and comments. An unclosed one matches up to its line's or
# the source's end: a search that failed would begin again at each quote in it, and hold the GIL all
# that time.
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
    """Bounds of the grammars that a caller may have compiled."""

    max_schema_bytes: int = 256 * 1024
    max_depth: int = 128
    max_path: int = 400  # the most subschemas, one inside the other or by `$ref`
    max_text_chars: int = 32 * 1024
    # Grammars made here, from schemas that are bounded one by one.
    max_calls_chars: int = 4 * 1024 * 1024
    max_choices: int = 4096


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that any number of sequences may follow, each with its own matcher. Safe on any
    thread.

    `unenforced` are JSON pointers to the keywords of its schema that it does not enforce.
    """

    begin: Callable[[], GrammarState]
    eos_ids: Collection[int]
    # A state that shares no lexer with others: an error that others may have caused is tried again
    # with it.
    begin_alone: Callable[[], GrammarState] | None = None
    unenforced: tuple[str, ...] = ()

    def matcher(self, tokens: Sequence[int] = ()) -> Matcher:
        """Return a matcher at the beginning, or behind these tokens."""
        matcher = Matcher(self.begin, self.eos_ids, self.begin_alone)
        matcher.replay(tokens)
        return matcher


class _Uncompilable(Exception):
    """llguidance refuses a grammar: the reason in its words."""


def compile_grammar(
    tokenizer: GrammarTokenizer,
    grammar: Grammar,
    *,
    shape: Shape | None = None,
    bounds: GrammarBounds | None = None,
    sandbox: Sandbox | None = None,
) -> CompiledGrammar:
    """Compile with llguidance. Raises BadRequest for a grammar that it can't compile.

    `shape` tightens JSON Schemas; a schema that no value fits then is compiled unchanged.
    Everything is compiled in the `sandbox` first, if there is one.
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
    """Compile calls with the part of each schema that a grammar can hold, naming the rest.

    Raises BadRequest, naming the function, for a schema that doesn't compile, and for a strict one
    that the grammar does not hold whole.
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
                f"The tools, or the answer's form beside them, cannot be held to: {reason}."
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
    """Add to a refusal the name of the function whose parameters it is about, if there is one."""
    if not function:
        return error
    message = f"The parameters of '{function}': {error.message}"
    return BadRequest(message, part="tools", code=error.code)


def _reword(grammar: Grammar, problem: str) -> str:
    """Return llguidance's message on a regex, a choice or a grammar in our words."""
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
    """Return a regex, or one made of a choice's strings, within bounds."""
    if grammar.kind == "regex":
        return _within(grammar, bounds.max_text_chars)
    try:
        choices = json.loads(grammar.source)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"The choice is not a JSON array of strings: {error}") from error
    is_strings = isinstance(choices, list) and all(isinstance(item, str) for item in choices)
    if not is_strings or not any(choices):
        raise _refusal("The choice is a JSON array of strings, not all of them empty.")
    if len(choices) > bounds.max_choices or sum(map(len, choices)) > bounds.max_schema_bytes:
        raise _refusal(f"There are more than {bounds.max_choices} choices, or they are too long.")
    return str(to_regex(Choice(choices)))


def _refusal(message: str, code: str = "invalid_grammar") -> BadRequest:
    return BadRequest(message, part="answer_form", code=code)


def _to_lark(source: str) -> str:
    """Return a grammar in Lark's form, from that form or from GBNF, llama.cpp's. A header that sets
    nothing is left out.
    """
    if _GBNF.search(source):
        try:
            source = any_to_lark(source)
        except Exception as error:  # a parser in Python, which raises any error
            raise _refusal(f"The GBNF grammar cannot be compiled: {str(error)[:300]}.") from None
    return _EMPTY_HEADER.sub("", source)


def _check_lark(source: str) -> None:
    """Raise BadRequest for parts that the answer's text would not show, or that we would ignore."""
    unclosed = next(filter(_is_unclosed, _LARK_TEXT.finditer(source)), None)
    if unclosed:
        raise _refusal(f"The grammar has a text or a regex without an end: {unclosed[0][:64]}")
    special = _LARK_SPECIAL.search(_without_texts(source))
    if special:
        raise _refusal(f"The grammar uses `{special[0]}`, which is not supported.")


def _without_texts(source: str) -> str:
    """Return a grammar without its texts, regexes and comments."""
    return _LARK_TEXT.sub(lambda text: text[0] if _is_unclosed(text) else '""', source)


def _is_unclosed(text: re.Match[str]) -> bool:
    return not (text["text"] or text["regex"] or text[0].startswith(("//", "#")))


@dataclass(frozen=True, slots=True)
class _Compiler:
    """Compiles llguidance's own form of grammars for one model."""

    tokenizer: GrammarTokenizer
    sandbox: Sandbox | None
    shape: Shape
    bounds: GrammarBounds

    def read(self, source: str) -> Schema:
        """Read a JSON Schema within bounds, checked against its draft's own schema."""
        bounds = self.bounds
        schema = parse_schema(source, max_bytes=bounds.max_schema_bytes, max_depth=bounds.max_depth)
        check_draft(schema)
        return schema

    def hold(self, schema: Schema) -> Held:
        return hold(schema, self.bounds.max_path)

    def compile_held(
        self, part: Held, options: Mapping[str, Any] = COMPACT
    ) -> tuple[Node, CompiledGrammar]:
        """Compile the part of a schema that a grammar can hold; return its final form, and the
        grammar.

        Raises BadRequest in our own words when nothing compiles.
        """
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
        """Compile calls with their schemas in these forms. Return the warnings too."""
        source = with_schemas(grammar.source, forms)
        if len(source) > self.bounds.max_calls_chars:
            raise _refusal(
                "The functions' schemas together are longer than "
                f"{self.bounds.max_calls_chars} characters."
            )
        spec = self.tokenizer.maker.get_cfg_logits_processor(source).grammar
        # Only free calls may use the model's marks, which are control tokens.
        texts = self.tokenizer.texts_and_marks
        if not is_free(grammar):
            texts = replace(texts, spell=self.tokenizer.json.spell)
        return self.compile(spec, "invalid_grammar", texts)

    def compile(
        self, spec: str, code: str, texts: TextTokens
    ) -> tuple[CompiledGrammar, Sequence[str]]:
        """Return the grammar's first matcher, of which every other one is a copy, and warnings."""
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
    """Compile llguidance's own form of a grammar in the sandbox.

    Raises _Uncompilable with the fault of the grammar, BadRequest with `code` if it ended the
    process, TimeoutError if it takes too much processor time, Overloaded if other grammars leave
    none, and Unavailable if other work leaves it no processor or memory.
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
    """Make the key by which the sandbox remembers a request."""
    digests = [hashlib.sha256(part.encode(errors="surrogatepass")).digest() for part in parts]
    return hashlib.sha256(b"".join(digests)).digest()


def _follow(trial: Matcher, tokenizer: GrammarTokenizer) -> str | None:
    """Take a few tokens, quotes if possible since they end strings; return the error met.

    Some grammars are too wide to be followed and show it only then.
    """
    row = np.zeros(tokenizer.words, dtype=np.uint32)
    for _ in range(TRIAL_STEPS):
        trial.replay(trial.forced_tokens()[:TRIAL_FORCED])
        trial.allowed(row)
        tokens = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
        tokens -= {*tokenizer.eos_ids}
        if trial.error is not None or not tokens:
            break
        quotes = tokens & {*tokenizer.texts.ids.get(b'"', ())}
        trial.consume(min(quotes or tokens))
    return trial.error


class _Copies:
    """Copies of a first matcher, which is made again when its shared lexer may have grown large."""

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
