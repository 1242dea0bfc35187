"""The architectures of mlx-lm that run here as in mlx-lm, with tiny random checkpoints.

    python -m benchmarks.architectures               try each; write the table and the list
    python -m benchmarks.architectures mamba gemma2  try some, and print the findings

They are tried in a process apart, with bounds on time and memory, that is begun again when it dies:
some of mlx-lm's models segfault, some need Metal. The reference is mlx-lm's own generate_step on
the same files, with a class's faults corrected as they are here; greedy tokens are compared, and a
difference where it has a tie itself is none.
"""

import argparse
import contextlib
import json
import os
import queue
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import gateway
from benchmarks.steps import Steps
from benchmarks.tiny_models import names, tiny_config, tiny_model
from gateway.jobs.steps import Drafter

REPOSITORY: Final = Path(__file__).parents[1]
DOCUMENT: Final = REPOSITORY / "docs" / "architectures.md"
EQUAL: Final = Path(gateway.__file__).parent / "engine/models/equal_to_mlx_lm.txt"
START: Final = "<!-- architectures: written by `make architectures` -->"
END: Final = "<!-- end of architectures -->"
TIMEOUT_S: Final = 240
MEMORY_BYTES: Final = 12 << 30  # address space, which MLX and its threads reserve freely
TIE: Final = 1e-3  # difference in log-probability
SAID: Final = 12


def try_out(name: str) -> dict[str, str]:
    """Make a checkpoint and compare. Raises the errors of either."""
    import mlx.core as mx  # not before the limits of this process are set
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    from gateway.engine.models.corrections import correct
    from gateway.engine.models.counts import text_config

    config = {**tiny_config(name), "eos_token_id": 0}
    weights: Any = dict(tree_flatten(tiny_model(config).parameters()))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(place / "model.safetensors"), weights)
        model, config = load_model(place)
        correct(model, text_config(config), {}, None)  # the faults that are corrected here
        reference = Reference(model)
        return compare(place, reference, _vocabulary(config))


def _vocabulary(config: Mapping[str, Any]) -> int:
    inner: Mapping[str, Any] = config.get("text_config") or config
    return int(inner.get("vocab_size") or inner["num_vocab"])


class Reference:
    """mlx-lm's own generation of a model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], list[tuple[int, Any]]] = {}

    def say(self, prompts: Iterable[Sequence[int]]) -> None:
        """Answer prompts with mlx-lm's functions, before a decoder of ours puts others there."""
        from benchmarks.cpu_decoders import use_mlx_lms

        use_mlx_lms(self._model)
        for prompt in prompts:
            self._said(prompt)

    def differs(self, prompt: Sequence[int], tokens: Sequence[int]) -> str:
        """Return where tokens begin to differ; nothing where they do not, or but for a tie."""
        for at, ((expected, logprobs), token) in enumerate(
            zip(self._said(prompt), tokens, strict=True)
        ):
            if expected != token:
                gap = float((logprobs[expected] - logprobs[token]).item())
                return "" if gap < TIE else f"token {at}, by {gap:.2g}"
        return ""

    def tokens(self, prompt: Sequence[int]) -> list[int]:
        """Return its answer to a prompt, as tokens."""
        return [token for token, _ in self._said(prompt)]

    def _said(self, prompt: Sequence[int]) -> list[tuple[int, Any]]:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        if (key := tuple(prompt)) not in self._known:
            steps = generate_step(mx.array(list(prompt)), self._model, max_tokens=SAID)
            self._known[key] = [(int(token), logprobs) for token, logprobs in steps]
        return self._known[key]


def compare(folder: Path, reference: Reference, vocab_size: int) -> dict[str, str]:
    """Run rows alone, together and from the prefix cache; return the differences of each."""
    from gateway.engine.device import Device
    from gateway.engine.generation.engine import GenerationEngine
    from gateway.engine.generation.prepare import ChatSetup
    from gateway.engine.grammar.schema_bounds import Shape
    from gateway.engine.grammar.structured import StructuredOutput
    from gateway.engine.kv.prefix_cache import PrefixPool
    from gateway.engine.models.checkpoint import Checkpoint
    from gateway.engine.models.decoders import open_decoder
    from gateway.engine.prompting.chat_tokenizer import (
        ChatFormats,
        chat_tokenizer,
        wrap_folder_tokenizer,
    )

    demo = REPOSITORY / "demo" / "chat"
    wrapper = wrap_folder_tokenizer(demo, name="demo", eos_ids=[0])
    chat = chat_tokenizer(wrapper, ChatFormats(), name="demo", model_type="llama")
    chat.answers.eos_ids = frozenset()
    drawn = random.Random(1)
    prompts = [[drawn.randrange(1, vocab_size) for _ in range(n)] for n in (4, 9, 33, 70, 17)]
    longer = [*prompts[3], *prompts[2]]
    reference.say([*prompts, longer])

    def opened(prefix_cache_bytes: int = 0, speculate_rows: int = 0) -> GenerationEngine:
        checkpoint = Checkpoint("tiny", folder)
        model, _ = open_decoder(checkpoint, device=Device.CPU, dtype=None)
        structured = StructuredOutput(None, Shape(), None, problem="not needed")
        setup = ChatSetup(checkpoint, chat, structured, 4096, vocab_size, {})
        pool = PrefixPool(prefix_cache_bytes)
        return GenerationEngine(model, setup, prefixes=pool, speculate_rows=speculate_rows)

    def judged(told: Sequence[Sequence[int]], asked: Sequence[Sequence[int]]) -> str:
        found = (reference.differs(*each) for each in zip(asked, told, strict=True))
        return next(filter(None, found), "")

    engine = opened()
    result = {}
    for column, budget in (("alone", 512), ("chunks", 32)):
        told = [answers(engine, [[prompt]], budget)[0] for prompt in prompts]
        result[column] = judged(told, prompts)
    order = [*prompts[:2], *prompts[2:]]
    result["together"] = judged(
        answers(engine, [order[:2], [order[2]], [order[3], order[4]]], 512), order
    )
    if not engine.is_batched:
        result["together"] = "throws" if engine._faults.take() else "cannot be tried"
    engine.close()
    engine = opened(1 << 26)
    kept = [prompts[3], longer, longer, prompts[3]]
    result["prefix"] = judged([answers(engine, [[each]], 512)[0] for each in kept], kept)
    beside = [longer, prompts[3], prompts[0]]
    again = judged(answers(engine, [beside[:2], beside[2:]], 512), beside)
    result["together"] = result["together"] or again
    *_, verdict = engine.self_test()
    result["self-test"] = verdict.problem
    engine.apply_verdict(verdict)
    result["as served"] = judged(
        answers(engine, [order[:2], [order[2]], [order[3], order[4]]], 512), order
    )
    again = judged(answers(engine, [beside[:2], beside[2:]], 512), beside)
    result["as served"] = result["as served"] or again
    engine.close()
    engine = opened(1 << 26, speculate_rows=4)
    engine.apply_verdict(verdict)
    engine._drafts.sources = [Guesses(reference, beside)]
    told = answers(engine, [beside[:2], beside[2:]], 512)
    result["ahead"] = judged(told, beside)
    engine.close()
    return result


class Guesses:
    """Drafts of the reference's own tokens, every third of which is another one."""

    name: Drafter = "prompt_lookup"
    reads_images = False
    nbytes = prefix_bytes = 0

    def __init__(self, reference: Reference, prompts: Sequence[Sequence[int]]) -> None:
        self._wholes = [[*prompt, *reference.tokens(prompt)] for prompt in prompts]

    def is_due(self, *_: Any) -> bool:
        """Return True: there is always a guess."""
        return True

    def draft(self, rows: Mapping[int, Any], rooms: Mapping[int, int]) -> dict[int, list[int]]:
        """Return at most this number of tokens for each row."""
        return {n: self._guess(row.context, max(0, rooms[n])) for n, row in rows.items()}

    def note(self, *_: Any) -> bool:
        """Return True: there is no other drafter."""
        return True

    def keep(self, *_: Any) -> None:
        """Do nothing: nothing is held of a row."""

    clear_prefixes = keep

    def _guess(self, context: Sequence[int], room: int) -> list[int]:
        size = len(context)
        for whole in self._wholes:
            if whole[:size] == list(context):
                rest = whole[size : size + room]
                return [
                    token ^ 1 if (size + at) % 3 == 2 else token for at, token in enumerate(rest)
                ]
        return []


def answers(engine: Any, groups: Iterable[Sequence[Sequence[int]]], budget: int) -> list[list[int]]:
    """Run rows, each group joining two steps after the one before; return their tokens."""
    from gateway.jobs.chat import Sampling
    from gateway.jobs.steps import SequenceParams

    rows: list[Any] = []
    steps = Steps(engine)

    def step() -> None:
        for delta in [*steps.prefill(budget), *steps.decode()]:
            if delta.error is not None:
                raise RuntimeError(delta.error)

    for group in groups:
        for prompt in group:
            steps.join(
                len(rows),
                SequenceParams(
                    prompt=list(prompt),
                    max_tokens=SAID,
                    sampling=Sampling(temperature=0),
                    is_bare=True,
                ),
            )
            rows.append(engine._sequences._prefill._line[-1])
        step()
        step()
    while steps.is_busy:
        step()
    return [row.tokens for row in rows]


class Process:
    """A process of a module that tries one thing after another; one that dies is begun again."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._inside: subprocess.Popen[str] | None = None

    def tried(self, name: str) -> dict[str, Any]:
        """Try the architecture that a line names, within bounds of time and memory."""
        if self._inside is None:
            self._inside = subprocess.Popen(
                [sys.executable, "-m", self._module, "--inside"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        inside = self._inside
        assert inside.stdin is not None
        assert inside.stdout is not None
        too_long = threading.Timer(TIMEOUT_S, inside.kill)
        too_long.start()
        try:
            print(name, file=inside.stdin, flush=True)
            said = inside.stdout.readline()
        except BrokenPipeError:
            said = ""
        finally:
            too_long.cancel()
        if said:
            found: dict[str, Any] = json.loads(said)
            return found
        self.end()
        if inside.returncode == -signal.SIGKILL:
            return {"error": f"not done within {TIMEOUT_S} seconds, or too little memory"}
        return {"error": f"the process died of signal {-inside.returncode}"}

    def end(self) -> None:
        """End the process, if there is one."""
        if self._inside is not None:
            with self._inside as inside, contextlib.suppress(BrokenPipeError):
                inside.communicate()  # nothing more to read: it ends
            self._inside = None


def inside(tried: Callable[[str], Mapping[str, Any]]) -> None:
    """Try the names on the input, a line each, within a bound of memory; print the findings."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers_to, sys.stdout = sys.stdout, sys.stderr  # models print, too
    for line in sys.stdin:
        try:
            found = tried(line.strip())
        except BaseException as error:  # SystemExit too: some modules exit for want of a package
            found = {"error": f"{type(error).__name__}: {str(error)[:160]}"}
        print(json.dumps(found), file=answers_to, flush=True)


def each_tried(
    wanted: Sequence[str], jobs: int, module: str = "benchmarks.architectures"
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Try lines in `jobs` processes of a module at once; give each result in its line's order."""
    idle: queue.SimpleQueue[Process] = queue.SimpleQueue()
    for _ in range(jobs):
        idle.put(Process(module))

    def tried(name: str) -> dict[str, Any]:
        process = idle.get()
        try:
            return process.tried(name)
        finally:
            idle.put(process)

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(wanted, pool.map(tried, wanted), strict=True)
    for _ in range(jobs):
        idle.get().end()


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Write the findings as Markdown: equal architectures in one row, the others each in one."""
    columns = ("alone", "together", "prefix", "self-test", "as served", "ahead")
    made = {name: each for name, each in results.items() if "error" not in each}
    equal = equal_in_all(results)
    lines = [
        f"mlx-lm {version('mlx-lm')}, mlx {version('mlx')}, CPU, float32. "
        f"{len(results)} architectures: {len(made)} could be made, {len(equal)} are equal in all.",
        "",
        "| Architecture | Alone, and in chunks of 32 | Joined late, beside others | "
        "From the prefix cache | Self-test | As served | Reading ahead |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {', '.join(equal)} | equal | equal | equal | passed | equal | equal |",
    ]
    for name, each in made.items():
        if name in equal:
            continue
        cells = []
        for column in columns:
            related = [column, "chunks"] if column == "alone" else [column]
            said = next(filter(None, (each.get(one) for one in related)), "")
            good = "passed" if column == "self-test" else "equal"
            cells.append(_cell(said) if said else good)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    failed = {name: each["error"] for name, each in results.items() if "error" in each}
    if failed:
        lines += ["", "Not compared:", ""]
        lines += [f"- {name}: {_cell(error)}" for name, error in failed.items()]
    return "\n".join(lines)


def equal_in_all(results: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names of those in which nothing was found to differ."""
    return [name for name, each in results.items() if not any(each.values())]


def _cell(said: str) -> str:
    return said.replace("|", "/").replace("\n", " ").strip()


def write(text: str) -> None:
    """Put the table between its marks in the document."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = document.partition(START)
    _, _, after = rest.partition(END)
    DOCUMENT.write_text(f"{before}{START}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Try architectures; write the table, or print it where only some were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    given = parser.parse_args(arguments)
    if given.inside:
        inside(try_out)
        return
    results: dict[str, dict[str, str]] = {}
    for name, found in each_tried(given.names or names(), given.jobs):
        results[name] = found
        print(name, json.dumps({key: each for key, each in found.items() if each}), flush=True)
    if given.names:
        print(table(results))
    else:
        write(table(results))
        EQUAL.write_text("\n".join([*equal_in_all(results), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
