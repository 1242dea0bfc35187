"""Tokenizers that grammars can be held over, and those they cannot."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.grammar.tokenizer import MOST_ADDED, MOST_CHARS, GrammarTokenizer
from gateway.errors import BadRequest
from gateway.jobs.chat import GenerateJob, Grammar, Sampling
from tests.checkpoints import write_chat
from tests.engine.generation.harness import join
from tests.fakes import caller
from tests.spoilt_tokenizers import spoilt

SCHEMA = '{"type":"object","properties":{"a":{"enum":["b a","ab"]}},"required":["a"]}'
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz"{}:,'
WORDS = ["<unk>", "<s>", "</s>", "▁", *CHARACTERS, *(f"<0x{byte:02X}>" for byte in range(256))]


def unigram() -> Tokenizer:
    pieces = [(word, -float(place)) for place, word in enumerate(WORDS)]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("▁the", -2.5)], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def bpe() -> Tokenizer:
    words = [word for word in WORDS if not word.startswith("<0x")]
    vocabulary = {word: place for place, word in enumerate([*words, "▁a", '{"'])}
    merges = [("▁", "a"), ("{", '"')]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def wordy() -> Tokenizer:
    """Its decoder shows a byte's token as it is written, and llguidance takes it for the byte."""
    tokenizer = unigram()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def bare() -> Tokenizer:
    """Nothing says how its tokens become text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def misspelt() -> Tokenizer:
    """A token looks like a byte and is none: llguidance 1.9.1 panics."""
    vocabulary = {word: place for place, word in enumerate([*WORDS, "<0xZZ>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def open_engine(folder: Path, tokenizer: Tokenizer) -> GenerationEngine:
    write_chat(folder, eos_token_id=2)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config = {**kind, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_generation(folder, name="m", device=Device.CPU)


def written(engine: GenerationEngine, grammar: Grammar | None) -> str:
    """Ask for an answer; give its text."""
    steps = Steps(engine)
    job = GenerateJob(
        caller=caller(),
        messages=[{"role": "user", "content": "a b"}],
        sampling=Sampling(temperature=0),
        max_tokens=40,
        grammar=grammar,
    )
    (row,) = engine.prepare(job)
    join(steps, replace(row, compiled=engine.compile(grammar) if grammar else None))
    text = ""
    while steps.is_reading or steps.is_decoding:
        for delta in [*steps.prefill(512), *steps.decode()]:
            assert delta.error is None
            text += delta.text
    return text


@pytest.mark.parametrize("make", [unigram, bpe])
def test_marked_spaces_are_no_hindrance_to_grammars(
    tmp_path: Path, make: Callable[[], Tokenizer]
) -> None:
    """SentencePiece's decoder is rewritten to one that llguidance reads."""
    engine = open_engine(tmp_path / "m", make())
    text = written(engine, Grammar("json_schema", SCHEMA))
    assert json.loads(text)["a"] in ("b a", "ab")
    assert written(engine, Grammar("choice", '["a b"]')) == "a b"


@pytest.mark.parametrize("make", [bare, wordy, misspelt])
def test_a_tokenizer_that_grammars_cannot_read_leaves_plain_chat(
    tmp_path: Path, make: Callable[[], Tokenizer]
) -> None:
    engine = open_engine(tmp_path / "m", make())
    assert written(engine, None) is not None
    with pytest.raises(BadRequest, match="its tokenizer cannot be used with grammars") as caught:
        engine.compile(Grammar("json_schema", SCHEMA))
    assert caught.value.code == "grammar_not_supported"


@pytest.fixture
def gaps() -> Iterator[list[float]]:
    """Measure, on a thread beside, for how long it does not run."""
    found: list[float] = []
    is_over, has_begun = threading.Event(), threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            found.append(now - last)
            last = now
            has_begun.set()

    beside = threading.Thread(target=tick)
    beside.start()
    has_begun.wait()
    yield found
    is_over.set()
    beside.join()


def test_others_run_between_the_parts_of_the_making(gaps: list[float]) -> None:
    """Native code holds the GIL; no part of it is nearly the whole."""
    vocabulary = {f"t{i}x{i * 7919 % 104_729}": i for i in range(60_000)}
    vocabulary |= {"</s>": 60_000, "▁": 60_001}
    model = models.BPE(vocabulary, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    fast: Any = PreTrainedTokenizerFast  # untyped
    whole = fast(tokenizer_object=tokenizer, eos_token="</s>")
    gaps.clear()
    started = time.perf_counter()
    GrammarTokenizer(whole, vocab_size=60_002, eos_ids=[60_000])
    took = time.perf_counter() - started
    assert max(gaps) < 0.7 * took


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (
            [f"<{i}>" for i in range(MOST_ADDED + 1)],
            "it has 16,385 added tokens, and 16,384 are allowed",
        ),
        (["x" * (MOST_CHARS + 1)], "its longest added token has 1,025 characters"),
        ([f"{i:<1000}x" for i in range(1050)], "1,001 characters, and all together have 1,051,050"),
    ],
)
def test_added_tokens_that_would_take_minutes_are_refused_before_they_are_read(
    added: list[str], why: str
) -> None:
    """The GIL would be held all the while."""
    backend = spoilt()
    backend.add_special_tokens(added)
    tokenizer = SimpleNamespace(backend_tokenizer=backend, get_vocab=backend.get_vocab)
    with pytest.raises(ValueError, match=why):
        GrammarTokenizer(tokenizer, vocab_size=30_000, eos_ids=[1])
