"""A caller's grammar → something sequences can be matched against, or a refusal that says why.

Outlines gives the types and the backends that make tokenizer and grammar; matcher and mask are ours
(matching.py), because Outlines' own continue without a grammar when one fails. Compiling takes
milliseconds and more: run it on a worker thread, never on the lane.
"""

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

from gateway.engine.grammar import schemas
from gateway.engine.grammar.calls import of_function, with_forms
from gateway.engine.grammar.matching import Matcher, State, Texts
from gateway.engine.grammar.schemas import Node, refusal
from gateway.engine.grammar.shaping import Shape, shape_schema
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.engine.grammar.trial import (
    LARK_TEXT,
    LIMITS,
    DiedCompiling,
    Sandbox,
    is_open,
    try_grammar,
    without_texts,
)
from gateway.engine.grammar.unenforced import (
    COMPACT,
    Held,
    check_strict,
    hold,
    leave_out,
    read_options,
    to_llguidance,
    warned,
    why,
)
from gateway.engine.sandboxed import TRIAL_FORCED, TRIAL_STEPS
from gateway.errors import BadRequest
from gateway.jobs import Grammar

_ROUNDS: Final = 3  # of compiling a schema, each without what the one before was refused for
RENEW_AFTER: Final = 256  # copies share a lexer whose states only grow: start another now and then
_LARK_SCHEMA: Final = re.compile(rf"{LARK_TEXT.pattern}|%json\s*")
_GBNF: Final = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_LARK_SPECIAL: Final = re.compile(r"<[^<>\s]+>|\btemperature\s*=|@\w+|%llguidance\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much a caller may ask to be compiled."""

    max_schema_bytes: int = 256 * 1024
    max_depth: int = 128
    max_path: int = 400  # subschemas, one inside the other or by `$ref`
    max_text_chars: int = 32 * 1024
    max_calls_chars: int = 4 * 1024 * 1024  # of our own making, from schemas bounded one by one
    max_choices: int = 4096


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that any number of sequences may follow, each with its own matcher. Safe on any
    thread.

    `unenforced` are JSON pointers to the keywords of its schema that it does not enforce.
    """

    begin: Callable[[], State]
    eos_ids: Collection[int]
    alone: Callable[[], State] | None = None
    unenforced: tuple[str, ...] = ()

    def matcher(self, tokens: Sequence[int] = ()) -> Matcher:
        """Return a matcher at the beginning, or where these tokens leave it."""
        matcher = Matcher(self.begin, self.eos_ids, self.alone)
        matcher.replay(tokens)
        return matcher


def compile_grammar(
    tokenizer: GrammarTokenizer,
    grammar: Grammar,
    *,
    shape: Shape | None = None,
    bounds: Bounds | None = None,
    sandbox: Sandbox | None = None,
) -> CompiledGrammar:
    """Compile with llguidance. Raises BadRequest for what it can't do.

    `shape` tightens JSON Schemas; a schema that cannot be met so is compiled as it came. Everything
    is compiled in the `sandbox` first, if there is one.
    """
    bounds, shape = bounds or Bounds(), shape or Shape()
    compiler = Compiler(tokenizer, sandbox)
    if grammar.kind == "json_schema":
        schema = read_schema(grammar.source, bounds)
        options = read_options(schema)
        held, compiled = compile_schema(compiler, hold(schema, bounds.max_path), shape, options)
        if grammar.strict:
            check_strict(held.unenforced)
        return replace(compiled, unenforced=held.unenforced)
    source = text_of(grammar, bounds)
    try:
        compiled, warnings = _compile_text(compiler, grammar, source, bounds)
    except DiedCompiling:
        raise
    except BadRequest:
        if not grammar.schemas:
            raise
        warnings = ["some function's parameters do not compile as they are"]
    if warnings:
        grammar = _hold_calls(compiler, grammar, shape, bounds)
        compiled, _ = _compile_text(compiler, grammar, grammar.source, bounds)
    return replace(compiled, unenforced=grammar.unenforced)


def compile_schema(
    compiler: "Compiler", held: Held, shape: Shape, options: Mapping[str, Any] = COMPACT
) -> tuple[Held, CompiledGrammar]:
    """Compile what can be held of a schema; return that, in its final form, and the grammar.

    What the compiler refuses is left out as well, and the rest tried again. Raises BadRequest in
    our own words when nothing compiles.
    """
    for _ in range(_ROUNDS):
        forms = [shape_schema(held.schema, shape), held.schema]
        problem = ""
        for form in forms if forms[0] != held.schema else forms[1:]:
            try:
                compiled, warnings = compiler.compile_schema(form, options)
            except DiedCompiling:
                raise
            except BadRequest as error:
                problem = error.message.removeprefix(_CANNOT)
            else:
                return replace(held.naming(warned(held, warnings)), schema=form), compiled
        smaller = leave_out(held, problem, compiler.is_broken)
        if smaller is None:
            break
        held = smaller
    raise refusal(why(held, problem))


def _compile_text(
    compiler: "Compiler", grammar: Grammar, source: str, bounds: Bounds
) -> tuple[CompiledGrammar, Sequence[str]]:
    """Compile a grammar other than a JSON Schema; `source` is its text. Return the warnings too."""
    maker, texts = compiler.tokenizer.maker, compiler.tokenizer.texts
    if grammar.kind in ("grammar", "calls"):
        if grammar.kind == "grammar":  # ours may say more than a caller's
            source = _from_gbnf(source)
            _check_lark(source, bounds)
        spec = maker.get_cfg_logits_processor(source).grammar
    else:
        spec = maker.get_regex_logits_processor(source).grammar
    if grammar.kind == "calls":  # only these may use the model's marks, which are control tokens
        texts = compiler.tokenizer.texts_and_marks
    try:
        compiled, warnings = compiler.compile(spec, "invalid_grammar", texts)
        if warnings and grammar.kind != "calls":
            raise _refusal("; ".join(warnings)[:1000])
    except DiedCompiling:
        raise
    except BadRequest as error:
        raise _refusal(_reword(grammar, error.message.removeprefix(_CANNOT))) from None
    return compiled, warnings


def _hold_calls(compiler: "Compiler", grammar: Grammar, shape: Shape, bounds: Bounds) -> Grammar:
    """Return calls with what can be held of each schema, naming the rest.

    Raises BadRequest, naming the function, for a schema that doesn't compile, and for a strict one
    that is not held whole.
    """
    forms, unenforced = dict[str, schemas.Schema](), list[str]()
    for rule in grammar.schemas:
        try:
            held = hold(read_schema(rule.schema, bounds), bounds.max_path)
            held, _ = compile_schema(compiler, held, shape)
            if rule.strict:
                check_strict(held.unenforced)
        except DiedCompiling:
            raise
        except BadRequest as error:
            raise of_function(rule.function, error) from None
        forms[rule.rule] = held.schema
        unenforced += [f"{rule.function}{pointer}" for pointer in held.unenforced]
    source = with_forms(grammar.source, forms)
    return replace(grammar, source=source, unenforced=tuple(unenforced))


_CANNOT: Final = "The grammar cannot be compiled: "
_CANNOT_GBNF: Final = "The GBNF grammar cannot be compiled: "
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_REASON: Final = re.compile(r"^error: (.+)$", re.MULTILINE)
_CALL: Final = re.compile(r'^call_(\d+): ("(?:[^"\\]|\\.)*")', re.MULTILINE)


def _reword(grammar: Grammar, problem: str) -> str:
    """Return llguidance's message on a regex, a choice, a grammar or calls in our words.

    It quotes the lines it read, which the caller wrote only if the kind is a grammar.
    """
    place = _PLACE.match(problem)
    first = _PLACE.sub("", problem.partition("\n")[0], count=1)
    reason = (match[1] if (match := _REASON.search(problem)) else first).strip().rstrip(".")[:300]
    lines = grammar.source.split("\n")
    line = lines[int(place[1]) - 1] if place and int(place[1]) <= len(lines) else ""
    if grammar.kind == "calls":
        names = dict(_CALL.findall(grammar.source))
        number = line.partition(":")[0].removeprefix("arguments_")
        if (head := names.get(number)) is None:
            return f"The tools, or the answer's form beside them, cannot be held to: {reason}."
        name = json.JSONDecoder().raw_decode(json.loads(head).removeprefix('{"name":').lstrip())[0]
        return f"The parameters of '{name}' cannot be held to: {reason}."
    if grammar.kind == "grammar" and _GBNF.search(grammar.source):
        return f"{_CANNOT_GBNF}{reason}."
    if grammar.kind == "grammar" and place:
        return f"{_CANNOT}line {place[1]}, column {place[2]}: {reason}, in `{line[:64]}`."
    return f"The {grammar.kind} cannot be compiled: {reason}."


def read_schema(source: str, bounds: Bounds) -> schemas.Schema:
    """Read a JSON Schema within bounds, checked against its draft's own schema."""
    schema = schemas.parse_schema(
        source, max_bytes=bounds.max_schema_bytes, max_depth=bounds.max_depth
    )
    schemas.check_draft(schema)
    return schema


def text_of(grammar: Grammar, bounds: Bounds) -> str:
    """Return a regex, a grammar or a choice (as the regex of its strings), within bounds."""
    limit = bounds.max_calls_chars if grammar.kind == "calls" else bounds.max_text_chars
    if len(grammar.source) > limit and grammar.kind != "choice":
        what = (
            "functions' schemas together are" if grammar.kind == "calls" else f"{grammar.kind} is"
        )
        raise _refusal(f"The {what} longer than {limit} characters.")
    if grammar.kind != "choice":
        return grammar.source
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


def _from_gbnf(source: str) -> str:
    """Return a grammar in llama.cpp's form, GBNF, in Lark's; any other as it is."""
    if not _GBNF.search(source):
        return source
    try:
        return any_to_lark(source).removeprefix("%llguidance {}")
    except Exception as error:  # a parser in Python, which raises whatever it likes
        raise _refusal(f"{_CANNOT_GBNF}{str(error)[:300]}.") from None


def _check_lark(source: str, bounds: Bounds) -> None:
    """Raise BadRequest for what the answer's text would not show, or what we would ignore."""
    if open_at := next(filter(is_open, LARK_TEXT.finditer(source)), None):
        raise _refusal(f"The grammar has a text or a regex without an end: {open_at[0][:64]}")
    if match := _LARK_SPECIAL.search(without_texts(source)):
        raise _refusal(f"The grammar uses `{match[0]}`, which is not supported.")
    at = 0
    while match := _LARK_SCHEMA.search(source, at):
        at = match.end()
        if match[0].startswith("%"):
            try:
                schema, at = json.JSONDecoder().raw_decode(source, at)
            except (ValueError, RecursionError) as error:
                raise _refusal(f"The grammar's %json is not JSON: {error}") from None
            schemas.check_depth(schema, bounds.max_depth)
            read_options(schema)
            if isinstance(schema, dict):
                schemas.reachable(schema, bounds.max_path)


@dataclass(frozen=True, slots=True)
class Compiler:
    """Compiles llguidance's own form of grammars for one model."""

    tokenizer: GrammarTokenizer
    sandbox: Sandbox | None

    def compile_schema(
        self, schema: Node, options: Mapping[str, Any]
    ) -> tuple[CompiledGrammar, Sequence[str]]:
        """Compile a JSON Schema; return the warnings too."""
        text = json.dumps(to_llguidance(schema, options))
        spec = self.tokenizer.maker.get_json_schema_logits_processor(text).grammar
        return self.compile(spec, "invalid_json_schema", self.tokenizer.texts)

    def is_broken(self, pattern: str) -> bool:
        """Return True if a pattern doesn't compile by itself."""
        try:
            self.compile_schema({"type": "string", "pattern": pattern}, COMPACT)
        except BadRequest:
            return True
        return False

    def compile(self, spec: str, code: str, texts: Texts) -> tuple[CompiledGrammar, Sequence[str]]:
        """Return the grammar's first matcher, of which every other one is a copy, and warnings."""
        if self.sandbox is not None:
            try_grammar(self.sandbox, spec, code)
        limits = LLParserLimits(**LIMITS)

        def first() -> LLMatcher:
            return LLMatcher(self.tokenizer.tokens, spec, log_level=0, limits=limits)

        matcher = first()
        copies = _Copies(first, matcher, texts)
        error = State(matcher, texts).problem()
        warnings = [] if error else matcher.get_grammar_warnings()
        if error is None:
            error = _try(Matcher(copies, self.tokenizer.eos_ids), self.tokenizer)
        if error is not None:
            raise _refusal(f"{_CANNOT}{error[:1000].strip()}", code)
        ends = self.tokenizer.eos_ids
        alone = lambda: State(first(), texts)  # noqa: E731
        return CompiledGrammar(copies, ends, alone=alone), warnings


def _try(trial: Matcher, tokenizer: GrammarTokenizer) -> str | None:
    """Take a few tokens, quotes for choice since they end strings; return the error met.

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

    def __init__(self, make: Callable[[], LLMatcher], matcher: LLMatcher, texts: Texts) -> None:
        self._make = make
        self._matcher = matcher
        self._texts = texts
        self._count = itertools.count(1)

    def __call__(self) -> State:
        if next(self._count) % RENEW_AFTER == 0:
            self._matcher = self._make()
        return State(self._matcher.deep_copy(), self._texts)
