"""Random mixtures of an engine's work on sequences, each answer held to its model alone.

A mixture is made of a kind of model and a seed: `python -m tests.engine.generation.mixtures KIND
SEED` makes one again. An answer is right if each of its tokens could be drawn, but for ties, from
the logits of its prompt and the tokens before, read alone in one pass, and if all its deltas agree
with these tokens.
"""

import json
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.steps import Steps
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.engine.models.adapters import read_adapter
from gateway.errors import BadRequest
from gateway.jobs.chat import (
    Adapter,
    Calling,
    Compiled,
    Delta,
    Function,
    GenerateJob,
    Grammar,
    Question,
    Sampling,
)
from gateway.jobs.steps import SequenceParams
from tests.checkpoints import (
    AFTER_LAST,
    GEMMA4,
    HEADED,
    HYBRID,
    SLIDING,
    STATEFUL,
    add_head,
    merge_adapter,
    teach_thinking,
    write_adapter,
    write_assistant,
    write_chat,
)
from tests.engine.generation.alone import Alone, Told
from tests.engine.generation.harness import join, open_engine
from tests.engine.generation.ties import ROUNDING
from tests.fakes import caller

# More than demo-chat's tokens, and than the window that a nucleus is first looked for in; the last
# two are marks of thinking.
VOCABULARY: Final = 1400
# Heads of 32 numbers, which `kv_bits` needs; no experts, which a rounding may choose otherwise.
BASE: Final[dict[str, Any]] = {"head_dim": 32, "vocab_size": VOCABULARY}
DEEP: Final[dict[str, Any]] = {"num_hidden_layers": 3}  # two that are no plain KV, about one
KINDS: Final[dict[str, dict[str, Any]]] = {
    "plain": BASE,
    "sliding": {**SLIDING, **BASE, **DEEP, "sliding_window": 48},
    "hybrid": {**HYBRID, **BASE, **DEEP, "num_experts": 0},
    "states": {
        **STATEFUL, **BASE, **DEEP, "full_attn_idxs": [1], "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "head": {**HEADED, **BASE, **DEEP},
    "later": {**AFTER_LAST, **BASE},
    "assistant": {**GEMMA4, **BASE, "global_head_dim": 64},
}  # fmt: skip
# Its stranger is a drafter of Gemma 4.
ASSISTANT: Final = "assistant"
HEADS: Final = ("head", "later")
# What `kv_bits: 8` makes of a number is one of 256: a rounding may make it the next one.
PACKED_ROUNDING: Final = 0.05
ADAPTERS: Final[dict[str, dict[str, Any]]] = {
    "small": {"seed": 1, "rank": 2},
    "large": {"seed": 2, "rank": 9, "scale": 1.0},
    "queries": {"seed": 3, "rank": 2, "scale": 4.0, "only": "q_proj"},
}
STEPS: Final = 60  # steps of one mixture before it is brought to its end
REMEMBERED: Final = 40  # last operations, for the report of a failure
LONGEST: Final = 500  # tokens of a prompt that continues an earlier one

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 20},
        "b": {"enum": ["one", "two"]},
        "c": {"type": "string", "maxLength": 12},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
GRAMMARS: Final = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"[ab] is the answer to this question, and so is [ab], which comes after it"),
    Grammar("choice", json.dumps(["yes", "no", "yes, but only if it rains", "maybe"])),
    Grammar("regex", r"([0-9]{3} ){1,30}"),
)
PARAMETERS: Final = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
CALLS: Final = Calling(functions=[Function("look", PARAMETERS)])
QUESTIONS: Final = (
    Question(0, "Is it?", ["yes", "no", "yes and no"]),
    Question(1, "Which?", ["a", "ab", "b"]),
)
WORDS: Final = (
    *("one two three ", "alpha beta ", "2 + 2? ", "日本語の ", "🙂 ", "The cat sat on the mat. "),
    *('{"a": 1} ', "\n\n", "x", "Answer: ", "<think>"),
)
STOPS: Final = (" t", "the", "\n", "ab", "�", "on", "ing", "er", "a b")


@dataclass(frozen=True, slots=True)
class Models:
    """The checkpoints of one kind: a base, another that may draft for it, adapters of the base."""

    base: Path
    stranger: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]

    @classmethod
    def write(cls, folder: Path, kind: str) -> "Models":
        base = teach_thinking(write_chat(folder / "base", **KINDS[kind]), opens=True)
        if kind in HEADS:
            add_head(base)
        if kind == ASSISTANT:
            stranger = write_assistant(folder / "stranger", base)
        else:
            stranger = write_chat(folder / "stranger", seed=5, num_hidden_layers=1, **BASE)
            teach_thinking(stranger, opens=True)
        adapters = {
            name: write_adapter(folder / name, base, **given) for name, given in ADAPTERS.items()
        }
        merged = {
            name: merge_adapter(folder / f"{name}-merged", base, adapter)
            for name, adapter in adapters.items()
        }
        return cls(base, stranger, adapters, merged)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a mixture's engine is opened with, and the most sequences that it has.

    `draft` is a field of `Models`. Few sequences read ahead, many do not.
    """

    prefix_cache_bytes: int
    speculate_rows: int
    kv_bits: int | None
    draft: str
    has_adapters: bool
    most_rows: int

    @classmethod
    def draw(cls, chance: random.Random, kind: str) -> "Settings":
        """Draw settings. A model with a head has no draft model, whose drafts would go first."""
        guesses = kind in HEADS or kind == ASSISTANT
        rows = chance.choice([4, 12, 12] if guesses else [0, 4, 12])
        drafts = [""] if kind in HEADS else ["", "base", "base", "stranger"]
        if kind == ASSISTANT:
            drafts = ["stranger"]
        return cls(
            chance.choice([0, 300_000, 1 << 30]),
            rows,
            chance.choice([None, None, 8]),
            chance.choice(drafts) if rows else "",
            has_adapters=chance.random() < 0.5,
            most_rows=chance.choice([3, 12]),
        )


@dataclass(slots=True, eq=False)
class Row:
    """A sequence of the mixture: its adapter, its params, and its deltas so far."""

    adapter: str
    params: SequenceParams
    tokens: list[int]
    told: Told = field(default_factory=Told)
    bound: int | None = None  # what it was capped at
    is_ended_early: bool = False


def draw_sampling(chance: random.Random) -> Sampling:
    def seed() -> int:
        return chance.randrange(-5, 1 << 40)

    sampling = chance.choice(
        [
            Sampling(temperature=0),
            Sampling(temperature=0),
            Sampling(temperature=chance.choice([0.3, 1, 3]), seed=seed()),
            Sampling(seed=seed(), top_k=chance.choice([1, 20, 80]), top_p=chance.choice([1, 0.8])),
            Sampling(temperature=20, seed=seed(), top_p=chance.choice([0.97, 0.5, 0.999])),
            Sampling(seed=seed(), min_p=chance.choice([0.02, 0.1, 0.5])),
            Sampling(
                temperature=chance.choice([0, 1.2]),
                seed=seed(),
                presence_penalty=chance.choice([0, 6]),
                frequency_penalty=chance.choice([0, 3, -3]),
                repetition_penalty=chance.choice([1, 1.3, 2]),
            ),
            Sampling(
                temperature=0,
                logit_bias={
                    chance.randrange(VOCABULARY): chance.choice([-100, 3, 20]) for _ in range(3)
                },
            ),
        ]
    )
    if chance.random() < 0.3:
        sampling = replace(sampling, min_tokens=chance.randrange(1, 20))
    if chance.random() < 0.1:
        sampling = replace(sampling, ignore_eos=True)
    if chance.random() < 0.15:
        ends = frozenset(chance.choices(range(VOCABULARY), k=chance.choice([4, 100])))
        sampling = replace(sampling, stop_token_ids=ends)
    return sampling


def draw_job(chance: random.Random, heads: Sequence[str], past: Sequence[list[int]]) -> GenerateJob:
    """Draw a job: some begin as others do, some go on where another ended."""
    head = chance.choice(heads)
    words = "".join(chance.choice(WORDS) for _ in range(chance.randrange(1, 20)))
    text = head[: chance.randrange(len(head) + 1)] + words
    ask = partial(GenerateJob, caller=caller(), sampling=draw_sampling(chance))
    messages = [{"role": "user", "content": text}]
    kind = chance.choice(
        ["free"] * 4 + ["bare", "next turn", "next turn", "form", "calls", "labels"]
    )
    if kind == "labels":
        return ask(messages=[{"role": "user", "content": f"{text}\n"}], questions=QUESTIONS)
    given: dict[str, Any] = {"max_tokens": chance.choice([1, 2, 8, 20, 20, 40, 80])}
    if chance.random() < 0.25:
        given["logprobs"] = chance.choice([0, 1, 5])
    if chance.random() < 0.35:
        given["stop"] = chance.sample(STOPS, chance.randrange(1, 5))
    if kind == "bare" or (kind == "next turn" and not past):
        echoes = chance.random() < 0.5
        if echoes and chance.random() < 0.3:
            given["max_tokens"] = 0
        return ask(prompt=text, echo=echoes, **given)
    if kind == "next turn":
        ids = chance.choice(past[-6:])
        edge = len(ids) // BLOCK * BLOCK + chance.choice([-1, 0, 1])
        ids = ids[
            : chance.choice([len(ids), len(ids), max(1, edge), chance.randrange(len(ids)) + 1])
        ]
        more = [chance.randrange(8, 1000) for _ in range(chance.choice([0, 1, 3, 3, 70]))]
        return ask(prompt=[*ids, *more][:LONGEST], **given)
    given["template_args"] = {"enable_thinking": chance.random() < 0.35}
    if chance.random() < 0.5:
        given["thinking_budget"] = chance.choice([0, 1, 3, 10, 30])
    if kind == "form":
        given["grammar"] = chance.choice(GRAMMARS)
    if kind == "calls":
        given["calling"] = replace(
            CALLS, forced=chance.random() < 0.6, parallel=chance.random() < 0.5
        )
    return ask(messages=messages, n=chance.choice([1, 1, 1, 2]), **given)


class Mixture:
    """The sequences of one engine, and the events in their lives."""

    def __init__(self, models: Models, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.chance = random.Random(f"{kind} {seed}")
        self.settings = Settings.draw(self.chance, kind)
        self.models = models
        self.engine = self._open(models.base)
        self.steps = Steps(self.engine)
        self.numbers: dict[str, int] = {}
        if self.settings.has_adapters:
            for name in models.adapters:
                self._add_adapter(name)
        self.rows: dict[int, Row] = {}
        self.stopped: set[int] = set()
        self.past: dict[str, list[list[int]]] = {}
        self.counts: Counter[str] = Counter()
        self.done: deque[str] = deque(maxlen=REMEMBERED)
        self._alone: dict[str, Alone] = {}
        if kind in HEADS or kind == ASSISTANT:
            self._inform(self.engine._drafts.sources[-1])
        self._compiled: dict[Grammar, Compiled] = {}
        lengths = (3, 30, 60, 90)
        self.heads = ["".join(self.chance.choices(WORDS, k=length)) for length in lengths]

    def run(self, may_go_on: Callable[[], bool]) -> int:
        """Take up to STEPS steps while allowed, then bring every answer to its end.

        Return the number of steps. An error says how to make the mixture again.
        """
        steps = 0
        try:
            while steps < STEPS and may_go_on():
                self._step()
                steps += 1
            while self.rows:
                self._resume_all()
                self._read(4096)
                self._decode()
            assert not self.steps.count
            assert not self.engine._sequences._parked
        except Exception as error:
            raise AssertionError(self._report(steps)) from error
        finally:
            self._close()
        return steps

    def _report(self, steps: int) -> str:
        return "\n".join(
            [
                f"mixture {self.kind} {self.seed} failed after {steps} steps; again by",
                f"    python -m tests.engine.generation.mixtures {self.kind} {self.seed}",
                f"{self.settings}; the last operations:",
                *self.done,
            ]
        )

    def _step(self) -> None:
        """Do one thing, most often a pass."""
        acts: list[tuple[float, Callable[[], None]]] = []
        if len(self.rows) < self.settings.most_rows:
            acts.append((0.3, self._join))
        if self.rows:
            acts += [(0.6, self._pass), (0.12, self._stop)]
            acts += [(0.03, self._leave), (0.03, self._cap), (0.01, self._clear)]
        if self.stopped:
            acts.append((0.12, self._resume))
        if self.numbers:
            acts.append((0.01, self._reload_adapter))
        weights = [weight for weight, _ in acts]
        [(_, act)] = self.chance.choices(acts, weights)
        act()

    def _pass(self) -> None:
        if self.chance.random() < 0.7:
            self._read(self.chance.choice([1, 5, 16, 64, 64, 512]))
        for _ in range(self.chance.choice([1, 1, 3, 8])):
            self._decode()
        if not self.steps.is_busy:
            self._resume_all()

    def _read(self, budget: int) -> None:
        if self.steps.is_reading:
            self.done.append(f"prefill({budget}) of {sorted(self.steps.result.reading)}")
            self._hear(self.steps.prefill(budget))

    def _decode(self) -> None:
        if self.steps.is_decoding:
            self.done.append("decode()")
            self._hear(self.steps.decode())
            size = self.steps.size
            self.counts.update(forced=size.forced, drafted=size.drafted, accepted=size.accepted)
            self.counts[size.drafter or "no drafter"] += size.accepted

    def _join(self) -> None:
        for _ in range(self.chance.choice([1, 1, 2, 4])):
            name = self.chance.choice(["", *self.numbers])
            job = draw_job(self.chance, self.heads, self.past.get(name, []))
            adapter = Adapter(self.numbers[name], name) if name else None
            try:
                prepared = self.engine.prepare(replace(job, adapter=adapter))
            except BadRequest:  # its prompt is empty, or its bounds contradict each other
                continue
            for params in prepared:
                if params.grammar is not None:
                    params = replace(params, compiled=self._compile(params.grammar))
                number = join(self.steps, params)
                sequence = self.engine._sequences._find(number)
                assert sequence is not None
                self.rows[number] = Row(name, params, sequence.tokens)
                self.done.append(f"join: {number}, of {name or 'base'}, {_describe(params)}")
                self.counts["joined"] += 1

    def _leave(self) -> None:
        self._drop(self.chance.choice(list(self.rows)))

    def _drop(self, number: int) -> None:
        self.done.append(f"leave({number})")
        self.steps.leave(number)
        row = self.rows.pop(number)
        self.stopped.discard(number)
        self._check(number, row)
        self.counts["left"] += 1

    def _stop(self) -> None:
        number, act = (
            self.chance.choice(list(self.rows)),
            self.chance.choice(["parking", "preempting"]),
        )
        if number not in self.stopped:
            self.done.append(f"{act}({number})")
            self.steps.change(**{act: [number]})
            self.stopped.add(number)
            self.counts[act] += 1

    def _resume(self) -> None:
        number = self.chance.choice(sorted(self.stopped))
        self.done.append(f"resume({number})")
        self.stopped.discard(number)
        self.steps.change(resuming=[number])

    def _resume_all(self) -> None:
        while self.stopped:
            self._resume()

    def _cap(self) -> None:
        number, bound = self.chance.choice(list(self.rows)), self.chance.randrange(1, 40)
        row = self.rows[number]
        if row.params.max_tokens == 0 or row.params.step is not None:
            return
        self.done.append(f"cap_tokens({number}, {bound})")
        deltas = self.steps.change(capped=[(number, bound)])
        row.bound = min(bound, row.bound or bound)
        row.is_ended_early = bool(deltas)
        self._hear(deltas)
        self.counts["capped"] += 1

    def _clear(self) -> None:
        self.done.append("clear_prefixes()")
        self.steps.change(clear_prefixes=True)

    def _reload_adapter(self) -> None:
        """Drop an adapter with its rows; add it again, by another number."""
        name = self.chance.choice(list(self.numbers))
        for number in [number for number, row in self.rows.items() if row.adapter == name]:
            self._drop(number)
        self.done.append(f"drop_adapter({self.numbers[name]}), {name}")
        self.engine.drop_adapter(self.numbers.pop(name))
        self._add_adapter(name)
        self.counts["reloaded"] += 1

    def _add_adapter(self, name: str) -> None:
        steps = self.engine.adapters.add_in_steps(read_adapter(name, self.models.adapters[name]))
        self.numbers[name] = next(adapter for adapter in steps if adapter is not None).number

    def _hear(self, deltas: Sequence[Delta]) -> None:
        assert not self.steps.faults, self.steps.faults
        for delta in deltas:
            self.rows[delta.id].told.add(delta)
        for number, row in list(self.rows.items()):
            if row.told.is_over:
                del self.rows[number]
                self.stopped.discard(number)
                self._check(number, row)
                self.past.setdefault(row.adapter, []).append([*row.params.prompt, *row.tokens])
                self.counts.update(
                    ended=1, cached=row.told.cached > 0, formed=row.params.grammar is not None
                )

    def _check(self, number: int, row: Row) -> None:
        self.done.append(f"is {number} right? {len(row.tokens)} tokens, {row.told.end}")
        params = row.params
        if row.bound is not None and not row.is_ended_early:
            params = replace(params, max_tokens=min(row.bound, params.max_tokens))
        alone = self._speaker(row.adapter)
        alone.check(params, row.tokens, row.told, is_ended_early=row.is_ended_early)

    def _speaker(self, name: str) -> Alone:
        if name not in self._alone:
            folder = self.models.merged[name] if name else self.models.base
            rounding = PACKED_ROUNDING if self.settings.kv_bits else ROUNDING
            engine = open_engine(folder, kv_bits=self.settings.kv_bits)
            self._alone[name] = Alone(engine, rounding)
        return self._alone[name]

    def _inform(self, source: Any) -> None:
        """Let most drafts of random weights be right, at least in part."""
        draft = source.draft

        def informed(seqs: Any, rooms: Any) -> dict[int, Sequence[int]]:
            drafts = draft(seqs, rooms)
            return {
                number: self._correct(number, list(seqs[number].context), tokens)
                for number, tokens in drafts.items()
            }

        source.draft = informed

    def _correct(self, number: int, context: list[int], tokens: Sequence[int]) -> Sequence[int]:
        if self.chance.random() < 0.2:
            return tokens
        right = self._speaker(self.rows[number].adapter).continued(context, len(tokens))
        if self.chance.random() < 0.4:
            right[-1] = self.chance.randrange(VOCABULARY)
        return right

    def _compile(self, grammar: Grammar) -> Compiled:
        if grammar not in self._compiled:
            self._compiled[grammar] = self.engine.compile(grammar)
        return self._compiled[grammar]

    def _open(self, folder: Path) -> GenerationEngine:
        draft = self.settings.draft
        return open_engine(
            folder,
            prefix_cache_bytes=self.settings.prefix_cache_bytes,
            speculate_rows=self.settings.speculate_rows,
            kv_bits=self.settings.kv_bits,
            draft=getattr(self.models, draft) if draft else None,
        )

    def _close(self) -> None:
        self.engine.close()
        for alone in self._alone.values():
            alone.engine.close()


def _describe(params: SequenceParams) -> str:
    asked = [f"{len(params.prompt)} + {params.max_tokens} tokens", str(params.sampling)]
    asked += [f"grammar {params.grammar.source[:40]}"] if params.grammar is not None else []
    asked += [f"logprobs {params.logprobs}"] if params.logprobs is not None else []
    if params.thinking_budget is not None:
        asked += [f"{params.thinking_budget} tokens of thinking"]
    asked += [f"stop {params.stop}"] if params.stop else []
    return "; ".join(asked)


if __name__ == "__main__":
    kind, seed = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        mixture = Mixture(Models.write(Path(folder), kind), kind, seed)
        print(mixture.settings, mixture.run(lambda: True), "steps", mixture.counts)
