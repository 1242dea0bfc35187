"""Drafts by Gemma 4's drafter, which reads its target's KV: never another answer."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from gateway.engine.drafts.prompt_lookup import PromptLookup
from gateway.engine.drafts.shared_kv_drafter import SharedKvDrafter
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.loading import read_chat_setup, read_draft_setup
from gateway.engine.kv.quantized import PackedKVCache
from gateway.engine.models.decoders import Numbers
from gateway.errors import ModelLoadFailed
from gateway.jobs.chat import Sampling
from tests.checkpoints import GEMMA4, write_assistant, write_chat
from tests.engine.generation.half_right import assert_likeliest, let_drafts_be_half_right
from tests.engine.generation.harness import PLENTY, Batch, answer_at_random, open_engine

pytestmark = pytest.mark.slow

WINDOW = GEMMA4["sliding_window"]
GREEDY = Sampling(temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("target"), **GEMMA4)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a model, and a drafter that guesses nearly all of its tokens."""
    folder = tmp_path_factory.mktemp("right")
    model = write_chat(folder / "target", **GEMMA4)
    return model, write_assistant(folder / "drafter", model, is_right=True)


@pytest.fixture(autouse=True)
def _without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptLookup, "draft", lambda *_: ())


def ask(count: int, **job: Any) -> list[tuple[str, dict[str, Any]]]:
    whole = {"sampling": GREEDY, "max_tokens": 60, **job}
    return [(f"{'ab ' * 20 * i}Question {i}", whole) for i in range(count)]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_that_is_right_saves_passes(right: tuple[Path, Path], rows: int) -> None:
    model, drafter = right
    expected, passes = answer_at_random(open_engine(model), ask(rows))
    engine = open_engine(model, speculate_rows=4, draft=drafter)
    found, fewer = answer_at_random(engine, ask(rows))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    accepted, drafted = (sum(getattr(p, k) for p in fewer) for k in ("accepted", "drafted"))
    assert accepted > 0.7 * drafted
    assert len(fewer) < len(passes) / (2 if rows < 4 else 1.5)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_a_draft_is_made_of_the_states_and_the_kv_of_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_bits: int | None
) -> None:
    """It is so within and beyond the window, in a crowd, and after a draft was right in part."""
    model = write_chat(tmp_path / "target", **GEMMA4, vocab_size=1400)
    drafter = write_assistant(tmp_path / "drafter", model)
    engine = open_engine(
        model, prefix_cache_bytes=PLENTY, speculate_rows=4, draft=drafter, kv_bits=kv_bits
    )
    alone = Alone(engine, 1e-3 if kv_bits is None else 0.1)
    lengths = let_drafts_be_half_right(monkeypatch, SharedKvDrafter, engine._model, alone.check)
    expected, _ = answer_at_random(open_engine(model, kv_bits=kv_bits), ask(3))
    found, passes = answer_at_random(engine, ask(3))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert sum(0 < one.accepted < one.drafted for one in passes) > 10
    assert min(lengths) < WINDOW < max(lengths) - 20


class Alone:
    """A model and its drafter, for one sequence that is read anew for each draft."""

    def __init__(self, engine: GenerationEngine, rounding: float) -> None:
        self.target, self.rounding = engine._model, rounding
        [self.drafter] = [e for e in engine._drafts.sources if isinstance(e, SharedKvDrafter)]

    def check(self, context: list[int], tokens: Sequence[int]) -> None:
        """Assert that each token is the likeliest one after those before, but for rounding."""
        cache, text, model = make_prompt_cache(self.target), self.target.model, self.drafter._model
        self.target(mx.array([context[:-1]]), cache=cache)
        *_, states = cache
        hidden, last, kv = states[0], context[-1], {}
        for kind, place in (("sliding_attention", 0), ("full_attention", 1)):
            kv[kind] = (*unpacked(cache[place]), None)
        for token in tokens:
            embedded = text.embed_tokens(mx.array([[last]])) * text.embed_scale
            guessed = model(mx.concatenate([embedded, hidden], axis=-1), kv, len(context) - 1)
            logits = model.score(guessed)[0, 0]
            assert_likeliest(logits, token, self.rounding)
            hidden, last = model.post_projection(guessed), token


def unpacked(cache: Any) -> tuple[mx.array, mx.array]:
    """Return the keys and values that the last token of a sequence is to look at."""
    if isinstance(cache, PackedKVCache):
        return cache.floating()
    keys, values, end = cache.keys, cache.values, cache.offset
    if isinstance(cache, RotatingKVCache):
        in_order: Any = cache._temporal_order  # untyped in mlx-lm
        return in_order(keys)[..., -WINDOW:, :], in_order(values)[..., -WINDOW:, :]
    return keys[..., :end, :], values[..., :end, :]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_those_without_a_random_drafter(
    target: Path, tmp_path: Path, rows: int, is_ordered: bool
) -> None:
    options = {"use_ordered_embeddings": is_ordered}
    drafter = write_assistant(tmp_path / "drafter", target, **options)
    expected, _ = answer_at_random(open_engine(target), ask(rows))
    found, passes = answer_at_random(
        open_engine(target, speculate_rows=4, draft=drafter), ask(rows)
    )
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert 0 < sum(each.drafted for each in passes) < 60


def test_a_quantized_drafter_guesses(right: tuple[Path, Path], tmp_path: Path) -> None:
    model, whole = right
    packed = shutil.copytree(whole, tmp_path / "packed")
    weights: Any = mx.load(str(whole / "model.safetensors"))
    for name in [name for name, each in weights.items() if each.ndim == 2]:
        codes, scales, biases = mx.quantize(weights[name], group_size=32, bits=8)
        module = name.removesuffix(".weight")
        weights |= {name: codes, f"{module}.scales": scales, f"{module}.biases": biases}
    mx.save_safetensors(str(packed / "model.safetensors"), weights)
    config = json.loads((whole / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (packed / "config.json").write_text(json.dumps(config))
    engine = open_engine(model, speculate_rows=4, draft=packed)
    expected, _ = answer_at_random(open_engine(model), ask(2))
    found, passes = answer_at_random(engine, ask(2))
    assert all(other.says_as(one) for one, other in zip(expected, found, strict=True))
    assert sum(one.accepted for one in passes) > 0.7 * sum(one.drafted for one in passes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backbone_hidden_size": 32}, "backbone_hidden_size is 32, but the model has 64"),
        ({"vocab_size": 1400}, r"vocab_size is 1400, but the model has \d+"),
        ({"global_head_dim": 64}, "head_dim of full_attention is 64, but the model has 32"),
        ({"head_dim": 8}, "head_dim of sliding_attention is 8, but the model has 16"),
        ({"num_key_value_heads": 1}, "num_key_value_heads of .* is 1, but the model has 2"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(
    target: Path, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    drafter = write_assistant(tmp_path / "drafter", target, **changes)
    with pytest.raises(ModelLoadFailed, match=f"its draft 'drafter' does not fit it: {reason}"):
        open_engine(target, speculate_rows=4, draft=drafter)


def test_a_drafter_of_a_layer_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    whole = write_chat(tmp_path / "whole", **GEMMA4)
    drafter = write_assistant(tmp_path / "drafter", whole)
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    alike = {**GEMMA4, "layer_types": ["full_attention"] * 4, "rope_parameters": rope}
    with pytest.raises(ModelLoadFailed, match="it has no KV of sliding_attention"):
        open_engine(write_chat(tmp_path / "other", **alike), speculate_rows=4, draft=drafter)


def test_a_drafter_of_another_family_is_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_assistant(tmp_path / "drafter", target)
    with pytest.raises(ModelLoadFailed, match="it is not a model of Gemma 4"):
        open_engine(write_chat(tmp_path / "llama"), speculate_rows=4, draft=drafter)


def test_kv_bits_of_a_drafter_are_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_assistant(tmp_path / "drafter", target)
    numbers = Numbers(dtype=None, is_packed=False, kv_bits=8)
    setup = read_chat_setup(target, name="model", max_context=None)
    with pytest.raises(ModelLoadFailed, match="its draft 'small' has `kv_bits`, but no KV"):
        read_draft_setup(drafter, name="small", target=setup, numbers=numbers)


def test_a_drafter_alone_is_refused(target: Path, tmp_path: Path) -> None:
    drafter = write_assistant(tmp_path / "drafter", target)
    with pytest.raises(ModelLoadFailed, match="name it as that model's `draft:`"):
        open_engine(drafter)


@pytest.mark.parametrize(
    "change",
    [
        lambda order: order + 1,
        lambda order: order - 1,
        lambda order: order + 1_000_000,
        lambda order: order.astype(mx.float32),
    ],
)
def test_an_order_of_what_are_no_tokens_is_refused(
    target: Path, tmp_path: Path, change: Callable[[mx.array], mx.array]
) -> None:
    """MLX would write beyond the logits' end, which may end the process."""
    drafter = write_assistant(tmp_path / "drafter", target, use_ordered_embeddings=True)
    file, name = drafter / "model.safetensors", "masked_embedding.token_ordering"
    weights: Any = mx.load(str(file))
    rewrite(file, {**weights, name: change(weights[name])})
    with pytest.raises(ModelLoadFailed, match="token_ordering names what are no tokens"):
        open_engine(target, speculate_rows=4, draft=drafter)


@pytest.mark.parametrize("parts", [["weight"], ["weight", "scales", "biases"]])
def test_a_copy_of_the_tied_embedding_is_left_out(
    right: tuple[Path, Path], tmp_path: Path, parts: list[str]
) -> None:
    model, whole = right
    folder = shutil.copytree(whole, tmp_path / "copied")
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    copied = {f"lm_head.{part}": weights["model.embed_tokens.weight"] for part in parts}
    rewrite(file, {**weights, **copied})
    engine = open_engine(model, speculate_rows=4, draft=folder)
    _, passes = answer_at_random(engine, ask(1))
    assert sum(one.accepted for one in passes) > 0.7 * sum(one.drafted for one in passes)


def test_a_drafter_of_nan_is_named_and_asked_no_more(target: Path, tmp_path: Path) -> None:
    drafter = write_assistant(tmp_path / "drafter", target)
    file, name = drafter / "model.safetensors", "model.norm.weight"
    weights: Any = mx.load(str(file))
    rewrite(file, {**weights, name: weights[name] * mx.nan})
    batch = Batch(open_engine(target, speculate_rows=4, draft=drafter))
    row = batch.ask(*ask(1)[0])
    batch.finish()
    [fault] = batch.faults
    assert fault.message == "draft model, off now: ValueError: its guesses are not finite numbers"
    [expected], _ = answer_at_random(open_engine(target), ask(1))
    assert batch.answers[row].says_as(expected)


def rewrite(file: Path, weights: dict[str, mx.array]) -> None:
    mx.eval(weights)  # they may be in the file
    mx.save_safetensors(str(file), weights)
