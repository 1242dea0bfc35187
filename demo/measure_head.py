"""Measure what a head gains: `python -m demo.measure_head DIR` (as demo.train_head wrote it).

Answers held-out questions one at a time, each with the head and without it in turn, without drafts
from the prompt. Prints how many of the guessed tokens were right, and the ratio of speeds.
"""

import argparse
import statistics
import time
from pathlib import Path

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from demo.data import SKILLS, held_out_cases
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.jobs import Caller
from gateway.jobs.chat import GenerateJob, Sampling

MOST_TOKENS = 80
CALLER = Caller(request_id="measure", deadline=float("inf"), allowed_s=600)


def answer(of: GenerationEngine, job: GenerateJob) -> tuple[float, int, int, int]:
    """Answer once; returns seconds of decoding, passes, drafted and accepted tokens."""
    steps, (params,) = Steps(of), of.prepare(job)
    steps.join(1, params)
    while steps.is_reading:
        steps.prefill()
    began, passes, drafted, accepted = time.perf_counter(), 0, 0, 0
    while steps.is_decoding:
        steps.change(kind="decode", drafters=("mtp_head",))
        passes += 1
        drafted += steps.size.drafted
        accepted += steps.size.accepted
    return time.perf_counter() - began, passes, drafted, accepted


def measure(folder: Path, cases: int) -> str:
    """Return a sentence on `cases` answers of each skill."""
    on = load_generation(folder, name="demo", device=Device.CPU, speculate_rows=4)
    off = load_generation(folder, name="demo", device=Device.CPU)
    if "mtp_head" not in on.facts.drafters:
        notes = "; ".join([*on.facts.notes, "python -m demo.train_head writes one that has"])
        raise SystemExit(f"{folder} has no head that fits: {notes}")
    ratios, passes, drafted, accepted = list[float](), [0, 0], 0, 0
    for number, case in enumerate(c for skill in SKILLS for c in held_out_cases(skill, cases)):
        job = GenerateJob(
            caller=CALLER,
            messages=case.prompt,
            tools=case.tools,
            sampling=Sampling(temperature=0),
            max_tokens=MOST_TOKENS,
        )
        runs = {of: answer(of, job) for of in ((on, off) if number % 2 else (off, on))}
        ratios.append(runs[off][0] / runs[on][0])
        passes = [passes[0] + runs[off][1], passes[1] + runs[on][1]]
        drafted, accepted = drafted + runs[on][2], accepted + runs[on][3]
    quarters = statistics.quantiles(ratios)
    return (
        f"{len(ratios)} answers: {accepted} of {drafted} guesses right, {passes[1]} passes for "
        f"{passes[0]}; speed with the head by that without: median {quarters[1]:.2f}, half of them "
        f"between {quarters[0]:.2f} and {quarters[2]:.2f}"
    )


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a model with a head")
    parser.add_argument("--cases", type=int, default=6, help="answers of each skill")
    given = parser.parse_args()
    print(measure(given.folder, given.cases))


if __name__ == "__main__":
    main()
