"""The number of JSON Schemas that can be answered to, the quality of answers, and their price.

    python -m benchmarks.structured_output FILE            compile, and try the instances
    python -m benchmarks.structured_output FILE --url URL  ask a gateway for an answer to each

FILE has a line of JSON a schema: {"id", "schema", "tests": [{"data", "valid"}]}. That is
JSONSchemaBench's maskbench form (https://github.com/guidance-ai/jsonschemabench, whose folder of
such files is read as well); this repository keeps none of it. A schema is `accepted` when it
compiles, and `whole` when nothing of it was left to be checked after the answer.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema  # type: ignore[import-untyped]
from mlx_lm.tokenizer_utils import load
from referencing import Registry

from gateway.engine.generation.loading import generation_config
from gateway.engine.grammar.compiling import CompiledGrammar, compile_grammar
from gateway.engine.grammar.matching import GrammarState
from gateway.engine.grammar.schema_bounds import Shape
from gateway.engine.grammar.schemas import walk
from gateway.engine.grammar.tokenizer import GrammarTokenizer
from gateway.errors import BadRequest
from gateway.jobs.chat import Grammar

DEMO = Path(__file__).parents[1] / "demo" / "chat"
SERVED = Shape().completed(generation_config(DEMO).get("structured"))
AS_WRITTEN = Shape(complete=False, closed=False)
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, and instances known to fit it or not."""

    name: str
    schema: Any
    tests: Sequence[tuple[Any, bool]]


@dataclass(slots=True)
class Counts:
    """The outcomes of the schemas; `examples` has the first names of each outcome."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, outcome: str, name: str) -> None:
        """Count an outcome."""
        self.counts[outcome] += 1
        self.examples.setdefault(outcome, []).append(name)

    def report(self, *, examples: int = 0) -> dict[str, Any]:
        """Return the counts, the median and 95th percentile in milliseconds, and examples."""
        report: dict[str, Any] = dict(sorted(self.counts.items()))
        if len(self.seconds) > 1:
            cuts = statistics.quantiles(self.seconds, n=20, method="inclusive")
            report |= {"p50_ms": round(1000 * cuts[9], 1), "p95_ms": round(1000 * cuts[18], 1)}
        if examples:
            report["examples"] = {key: names[:examples] for key, names in self.examples.items()}
        return report


def read(path: Path, limit: int | None = None) -> Iterator[Case]:
    """Read the cases of a file of lines, or of a folder of files."""
    texts = (
        (each.read_text() for each in sorted(path.glob("*.json")))
        if path.is_dir()
        else path.read_text().splitlines()
    )
    for number, text in enumerate(texts):
        if limit is not None and number >= limit:
            return
        given = json.loads(text)
        if "schema" in given:
            tests = [(test["data"], bool(test["valid"])) for test in given.get("tests", ())]
            yield Case(str(given.get("id", number)), given["schema"], tests)


def in_process(cases: Iterator[Case], *, strict: bool) -> Counts:
    """Compile each schema as it would be for demo-chat, then try its instances as written.

    Instances are tried on the schema without a model's own limits, which would refuse long
    strings, and properties that the schema doesn't name.
    """
    tokenizer = GrammarTokenizer(load(DEMO)._tokenizer, vocab_size=1030, eos_ids=(0, 2))
    counts = Counts()
    for case in cases:
        counts.add("schemas", case.name)
        grammar = _grammar(case.schema, strict=strict)
        started = time.perf_counter()
        try:
            compiled = compile_grammar(tokenizer, grammar, shape=SERVED)
        except BadRequest as error:
            counts.add("refused", f"{case.name}: {error.message}")
            continue
        finally:
            counts.seconds.append(time.perf_counter() - started)
        unenforced: Sequence[str] = compiled.unenforced
        counts.add("accepted", case.name)
        counts.add("in part" if unenforced else "whole", f"{case.name}: {','.join(unenforced)}")
        try:
            loose = compile_grammar(tokenizer, grammar, shape=AS_WRITTEN)
        except BadRequest as error:
            counts.add("refused as written", f"{case.name}: {error.message}")
            continue
        is_whole = not loose.unenforced
        names = (name for _, node in walk(case.schema) for name in node.get("properties", ()))
        ranks = {name: rank for rank, name in enumerate(dict.fromkeys(names))}
        for value, is_valid in case.tests:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
            matcher = loose.matcher(tokenizer.tokens.tokenize_str(text))
            was_taken = matcher.may_end or Speller(loose, tokenizer, ranks).takes(value)
            word = "valid" if is_valid else "invalid"
            part = "" if is_whole or is_valid else ", schema in part"
            outcome = f"{word} instance {'taken' if was_taken else 'refused'}{part}"
            counts.add(outcome, f"{case.name}: {json.dumps(value)[:160]}")
    return counts


class Speller:
    """Says a value to a grammar, whose order of properties is the schema's: `ranks`."""

    def __init__(
        self, compiled: CompiledGrammar, tokenizer: GrammarTokenizer, ranks: Mapping[str, int]
    ) -> None:
        state = compiled.begin_alone() if compiled.begin_alone else compiled.begin()
        assert isinstance(state, GrammarState)
        self._ranks = ranks
        self._matcher = state.matcher
        self._tokens = tokenizer.tokens
        self._tries = 5000

    def takes(self, value: Any) -> bool:
        """Tell whether the grammar takes a value, in some order."""
        return self._said(value) is not None and self._matcher.is_accepting()

    def _say(self, text: str) -> int | None:
        """Say a text; return how many tokens that took, None when it is not taken."""
        self._tries -= 1
        tokens = self._tokens.tokenize_str(text)
        if self._tries < 0 or self._matcher.validate_tokens(tokens) < len(tokens):
            return None
        self._matcher.consume_tokens(tokens)
        return len(tokens)

    def _said(self, value: Any) -> int | None:
        """Say a value; take back the tokens of one that is not taken."""
        if not isinstance(value, (dict, list)) or not value:
            return self._say(json.dumps(value, ensure_ascii=False))
        total, start = 0, "{" if isinstance(value, dict) else "["
        items = value if isinstance(value, dict) else dict(enumerate(value))
        rest = list(items)
        if isinstance(value, dict):
            rest.sort(key=lambda name: self._ranks.get(name, len(self._ranks)))
        while rest:
            for name in rest if isinstance(value, dict) else rest[:1]:
                head = f"{start}{json.dumps(name, ensure_ascii=False)}:"
                opened = self._say(head if isinstance(value, dict) else start)
                if opened is None:
                    continue
                if (said := self._said(items[name])) is not None:
                    total += opened + said
                    rest.remove(name)
                    break
                self._matcher.rollback(opened)
            else:
                break
            start = ","
        closed = None if rest else self._say("}" if isinstance(value, dict) else "]")
        if closed is None:
            self._matcher.rollback(total)
            return None
        return total + closed


def _grammar(schema: Any, *, strict: bool) -> Grammar:
    return Grammar("json_schema", json.dumps(schema), strict=strict)


async def over_http(
    cases: Iterator[Case], url: str, *, model: str, max_tokens: int, strict: bool
) -> Counts:
    """Ask for an answer to each schema, some at a time, and check the answers."""
    counts = Counts()
    timeout = aiohttp.ClientTimeout(total=300)

    async def work(session: aiohttp.ClientSession) -> None:
        for case in cases:
            counts.add("schemas", case.name)
            started = time.perf_counter()
            try:
                outcome, detail = await _asked(session, url, case, model, max_tokens, strict=strict)
            except TimeoutError:
                outcome, detail = "no answer", ""
            counts.seconds.append(time.perf_counter() - started)
            counts.add(outcome, f"{case.name}: {detail}")

    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(work(session) for _ in range(AT_ONCE)))
    return counts


async def _asked(
    session: aiohttp.ClientSession,
    url: str,
    case: Case,
    model: str,
    max_tokens: int,
    *,
    strict: bool,
) -> tuple[str, str]:
    schema: dict[str, Any] = {"name": "case", "schema": case.schema}
    if strict:
        schema["strict"] = True
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Answer in JSON."}],
        "max_tokens": max_tokens,
        "seed": 7,
        "temperature": 0.8,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            return f"status {response.status}", answer["error"]["message"]
        unenforced = response.headers.get("x-gateway-unenforced", "")
    (choice,) = answer["choices"]
    text = choice["message"]["content"]
    if choice["finish_reason"] != "stop":
        return "cut", text[-80:]
    fault = _fault(case.schema, text)
    part = " (in part)" if unenforced else ""
    return f"{'valid' if fault is None else 'invalid'}{part}", f"{unenforced} {fault or ''}"


def _fault(schema: Any, text: str) -> str | None:
    """Check an answer against the schema as it came, by its own draft."""
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        draft(schema, registry=Registry()).validate(json.loads(text))
    except jsonschema.ValidationError as error:
        return f"{error.json_path}: {error.message[:120]} in {text[:120]}"
    except Exception as error:  # a schema that cannot be judged by, which is a finding too
        return f"{type(error).__name__}: {error}"[:200]
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, and print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", help="of a gateway; without it nothing is generated")
    parser.add_argument("--model", default="demo-chat")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--limit", type=int, help="take no more schemas than this")
    parser.add_argument("--strict", action="store_true", help="ask with `strict: true`")
    parser.add_argument("--examples", type=int, default=0, help="name so many of each outcome")
    asked = parser.parse_args(arguments)
    cases = read(asked.file, asked.limit)
    if asked.url:
        work = over_http(
            cases, asked.url, model=asked.model, max_tokens=asked.max_tokens, strict=asked.strict
        )
        counts = asyncio.run(work)
    else:
        counts = in_process(cases, strict=asked.strict)
    json.dump(counts.report(examples=asked.examples), sys.stdout, indent=1, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
