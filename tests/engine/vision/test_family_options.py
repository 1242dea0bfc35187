"""Gemma's and Mistral's images beside packed KV, adapters and drafts."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.engine.generation.engine import GenerationEngine
from gateway.errors import ModelLoadFailed
from tests.checkpoints import write_adapter, write_assistant
from tests.engine.generation.harness import PLENTY, answers, ids, load_adapter
from tests.engine.vision.golden import Arrays, rewrite
from tests.engine.vision.harness import (
    CAT,
    DOG,
    WIDE,
    alone,
    open_seeing,
    see,
    sight_of,
    write_gemma,
    write_seeing,
)
from tests.engine.vision.test_sight_options import drafting

TEXT = see("Hello there, how are you?", max_tokens=20)
JOBS = [see("What is @?", CAT), TEXT, see("Is @ or @ it?", WIDE, DOG)]


@pytest.fixture(scope="module", params=["gemma3", "gemma4", "gemma4_vision", "mistral3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = write_seeing if request.param == "mistral3" else write_gemma
    return write(request.param, tmp_path_factory.mktemp("family") / request.param)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[GenerationEngine]:
    engine = open_seeing(folder)
    yield engine
    engine.close()


def write_wide(source: Path, folder: Path) -> Path:
    """Write a model with half as many heads, of 32 numbers, as 8 bits of KV need."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["text_config"].get("global_head_dim"):
        return folder  # its plain layers have them
    config["text_config"] |= {
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")

    def widen(arrays: Arrays) -> Arrays:
        norms = ("q_norm.weight", "k_norm.weight")
        return {
            name: np.tile(each, 2) if name.endswith(norms) else each
            for name, each in arrays.items()
        }

    rewrite(folder, widen)
    return folder


def test_rows_with_packed_kv_answer_in_batches_as_alone(folder: Path, tmp_path: Path) -> None:
    wide = write_wide(folder, tmp_path / "wide")
    engine, plain = open_seeing(wide, kv_bits=8, prefix_cache_bytes=PLENTY), open_seeing(wide)
    expected = [ids(alone(engine, job))[0] for job in JOBS]
    assert ids(answers(engine, JOBS, 11)) == expected
    job = see("What is @?", CAT, logprobs=1, max_tokens=1)
    [whole], [packed] = alone(plain, job), alone(engine, job)
    assert packed.ids == whole.ids
    assert packed.chosen == pytest.approx(whole.chosen, abs=0.3)
    engine.close()
    plain.close()


def test_rows_of_adapters_see_images(folder: Path, tmp_path: Path) -> None:
    engine = open_seeing(folder, prefix_cache_bytes=PLENTY)
    lora = write_adapter(tmp_path / "lora", folder, scale=4.0, only="language_model")
    file = str(lora / "adapters.safetensors")
    weights: Any = mx.load(file)
    mx.eval(weights)
    pairs = ("model.language_model", "language_model.model")
    mx.save_safetensors(file, {name.replace(*pairs): each for name, each in weights.items()})
    adapter = load_adapter(engine, "tuned", lora)
    jobs = [
        replace(see("It purrs. @", image), adapter=each)
        for each in (None, adapter)
        for image in (CAT, DOG)
    ]
    expected = [ids(alone(engine, job))[0] for job in jobs]
    assert len({tuple(each) for each in expected}) == 4
    assert ids(answers(engine, jobs)) == expected
    assert sight_of(engine).encoded == 2
    engine.close()


@pytest.mark.parametrize("errs_at", [3, 1000])
def test_drafts_change_no_answer_behind_an_image(
    folder: Path, plain: GenerationEngine, monkeypatch: pytest.MonkeyPatch, errs_at: int
) -> None:
    """The drafts are of the answers themselves; a wrong one in every `errs_at` tokens."""
    jobs = [see("Is @ or @ it?", WIDE, DOG, max_tokens=30), see("@ So?", CAT, max_tokens=30)]
    expected = [ids(alone(plain, job))[0] for job in jobs]
    prompts = [list(plain.prepare(job)[0].prompt) for job in jobs]

    def draft(self: PromptLookup, context: Sequence[int], limit: int) -> Sequence[int]:
        for prompt, answer in zip(prompts, expected, strict=True):
            if list(context[: len(prompt)]) == prompt:
                at = len(context) - len(prompt)
                right = enumerate(answer[at : at + limit], at)
                return [(token + (i % errs_at == 0)) % 256 for i, token in right]
        return ()

    monkeypatch.setattr(PromptLookup, "draft", draft)
    engine = open_seeing(folder, speculate_rows=6, prefix_cache_bytes=PLENTY)
    told, drafted, accepted = drafting(engine, jobs)
    assert told == expected
    assert 0 < accepted <= drafted
    engine.close()


def test_a_draft_model_changes_no_answer_or_is_refused_by_name(
    folder: Path, plain: GenerationEngine
) -> None:
    try:
        engine = open_seeing(folder, speculate_rows=6, draft=folder, prefix_cache_bytes=PLENTY)
    except ModelLoadFailed as error:
        refusal = str(error)
    else:
        expected = [ids(alone(plain, job))[0] for job in JOBS]
        told, drafted, accepted = drafting(engine, JOBS)
        assert told == expected
        assert 0 < accepted <= drafted  # drafts for the row of text
        engine.close()
        refusal = ""
    assert not refusal or "draft" in refusal


@pytest.mark.parametrize("name", ["gemma4", "gemma4_vision"])
def test_gemma_4s_drafter_guesses_behind_images(name: str, tmp_path: Path) -> None:
    folder = write_gemma(name, tmp_path / name)
    drafter = write_assistant(tmp_path / "drafter", folder)
    plain = open_seeing(folder)
    expected = [ids(alone(plain, job))[0] for job in JOBS]
    plain.close()
    engine = open_seeing(folder, speculate_rows=6, draft=drafter, prefix_cache_bytes=PLENTY)
    told, drafted, _ = drafting(engine, JOBS)
    assert told == expected
    assert drafted > 0
    engine.close()
