"""Models whose rows may not run together: the self-test finds them, and they answer as alone."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from benchmarks.loading import load_generation
from benchmarks.steps import Steps
from benchmarks.tiny_models import tiny_config, tiny_model
from gateway.engine import compiled_code
from gateway.engine.device import Device
from gateway.engine.generation.engine import GenerationEngine
from gateway.engine.generation.self_test import BatchSelfTest
from gateway.engine.generation.sequence import FAULTS, Faults
from gateway.engine.kv.prefix_cache import BLOCK
from gateway.errors import Fault, PassFault
from gateway.jobs.steps import Verdict
from tests.checkpoints import ABSOLUTE, DEMO, SLIDING, STATEFUL, write_chat
from tests.engine.generation.harness import MAMBA, Rows, bare, watch

VOCABULARY = json.loads((DEMO / "config.json").read_text())["vocab_size"]
MIXTURE = {
    "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 4096,
}  # fmt: skip
UNFIT: dict[str, dict[str, Any]] = {
    "gemma2": {"model_type": "gemma2", "head_dim": 16},
    # This has as many heads of keys as the test has rows: nothing is thrown there.
    "gemma2 of three": {
        "model_type": "gemma2", "hidden_size": 96, "head_dim": 16, "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "mamba": MAMBA,
    "bailing_moe_linear": {
        "model_type": "bailing_moe_linear", "moe_intermediate_size": 32, "num_experts": 4,
        "num_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
        "layer_group_size": 2, "group_norm_size": 2, "topk_group": 1, **MIXTURE,
    },
    "longcat_flash_ngram": {
        "model_type": "longcat_flash_ngram", "ffn_hidden_size": 96, "moe_topk": 2,
        "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "zero_expert_num": 1, "num_layers": 2,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "routed_scaling_factor": 1.0, "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3,
        "emb_split_num": 2,
    },
    "afm7": {
        "model_type": "afm7", "hidden_dim": 64, "num_layers": 3, "num_kv_reuse_layers": 1,
        "num_heads": 4, "num_kv_heads": 2,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text", "vocab_size": VOCABULARY, "attention_bias": False,
            "attention_chunk_size": 48, "hidden_size": 64, "interleave_moe_layer_step": 1,
            "intermediate_size": 32, "intermediate_size_mlp": 96, "num_attention_heads": 4,
            "num_hidden_layers": 4, "num_local_experts": 4, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 10000.0, "use_qk_norm": True, **MIXTURE,
            "num_experts_per_tok": 1,
        },
    },
}  # fmt: skip
FIT: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma3": SLIDING,
    "lfm2": STATEFUL,
    "gpt2": ABSOLUTE,
    "gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": None, **MIXTURE,
    },
}  # fmt: skip
MOST = 6  # tokens of an answer
PROMPTS = [[7, 8, 9, 10], [*range(20, 110)], [*range(5, 38)], [*range(300, 311)]]


def a_few(cases: Iterable[Any], *shown: Any) -> list[Any]:
    """Mark those as slow that are not shown."""
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)),
            marks=() if each in shown else pytest.mark.slow,
        )
        for each in cases
    ]


def opened(folder: Path) -> GenerationEngine:
    engine = load_generation(folder, name="m", device=Device.CPU, prefix_cache_bytes=1 << 24)
    engine.tokens.answers.eos_ids = frozenset()
    return engine


def verdict_of(engine: GenerationEngine) -> Verdict:
    *_, verdict = engine.self_test()
    return verdict


def alone(folder: Path, prompts: list[list[int]], max_tokens: int = MOST) -> list[list[int]]:
    """Ask mlx-lm itself."""
    loaded: Any = load(str(folder))
    return [
        [int(token) for token, _ in generate_step(mx.array(p), loaded[0], max_tokens=max_tokens)]
        for p in prompts
    ]


def joined(engine: GenerationEngine) -> list[int]:
    """Let all rows join, and read their prompts."""
    run = Rows(engine)
    rows = [row for prompt in PROMPTS for row in run.add(bare(prompt))]
    while run.is_reading:
        run.prefill(512)
    return rows


@dataclass
class Told:
    """The rows' tokens and errors, the most rows decoded in a pass, and all passes' faults."""

    tokens: list[list[int]]
    errors: list[str | None]
    most_rows: int
    faults: list[PassFault]


def answers(engine: GenerationEngine, prompts: list[list[int]], late: int = 2) -> Told:
    """Run rows, the last of them joining a little later."""
    run, waiting, most, step = Rows(engine), prompts[-late:], 0, 0
    for prompt in prompts[:-late]:
        run.add(bare(prompt, max_tokens=MOST))
    while run.is_busy or waiting:
        if step % 3 == 2 and waiting:
            run.add(bare(waiting.pop(0), max_tokens=MOST))
        run.step()
        most, step = max(most, run.size.rows), step + 1
    told = run.answers.values()
    return Told([row.ids for row in told], [row.error for row in told], most, run.faults)


def unfinished(engine: GenerationEngine) -> Verdict:
    """Return the verdict after the second step."""
    steps = engine.self_test()
    next(steps)
    verdict = next(steps)
    steps.close()
    assert not verdict.is_whole
    return verdict


@pytest.mark.parametrize("kind", a_few(UNFIT, "gemma2"))
def test_a_model_that_is_wrong_in_a_batch_answers_as_alone_once_it_is_tested_and_before(
    tmp_path: Path, kind: str
) -> None:
    """One row at a time, whoever joins when: any step of the test may be the last that there was
    time for. And twice, from the prefix cache if it is sound.
    """
    folder = write_chat(tmp_path / "m", **UNFIT[kind])
    engine, tested = opened(folder), opened(folder)
    verdict = verdict_of(tested)
    assert verdict.is_whole
    assert verdict.forbids_batches
    assert verdict.problem
    engine.apply_verdict(unfinished(opened(folder)) if kind != "llama4" else Verdict())
    tested.apply_verdict(verdict)
    assert not tested.is_batched
    expected = alone(folder, PROMPTS)
    for each in (engine, tested, tested):
        assert answers(each, PROMPTS) == Told(expected, [None] * len(PROMPTS), 1, [])


@pytest.mark.parametrize("kind", a_few(FIT, "gemma3"))
def test_a_model_that_is_right_in_a_batch_stays_batched(tmp_path: Path, kind: str) -> None:
    folder = write_chat(tmp_path / "m", **FIT[kind])
    engine = opened(folder)
    verdict = verdict_of(engine)
    assert verdict == Verdict(single=True, rows=True, prefixes=True, window=True)
    engine.apply_verdict(verdict)
    told = answers(engine, PROMPTS)
    assert told.tokens == alone(folder, PROMPTS)
    assert told.most_rows > 1


def test_rounding_is_no_mismatch(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "m", num_hidden_layers=8)
    for dtype in ("float16", "bfloat16"):
        engine = load_generation(folder, name="m", device=Device.CPU, dtype=dtype)
        assert not verdict_of(engine).problem


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in FIT), ("qwen3", {"is_fused": True}), ("qwen3", {"kv_bits": 8})],
)
def test_architectures_that_are_known_to_be_equal_are_batched_at_once(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    wide = {"head_dim": 64} if "kv_bits" in options else {}
    folder = write_chat(tmp_path / "m", **{**FIT[kind], **wide})
    engine = load_generation(folder, name="m", device=Device.CPU, **options)
    engine.apply_verdict(unfinished(engine))
    assert engine.is_batched


def broken(folder: Path, breaks: Callable[[mx.array], object]) -> GenerationEngine:
    """Return an engine whose passes fail of which something is true."""
    engine = opened(folder)

    def check(tokens: mx.array) -> None:
        if breaks(tokens):
            raise ValueError("no such shapes")

    watch(engine, check)
    return engine


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize(
    ("error", "is_lasting"),
    [
        (RuntimeError("[malloc] Unable to allocate 12 bytes."), False),
        (RuntimeError("[Compile::eval_cpu] Failed to compile function A: no"), False),
        (ValueError("no"), True),
    ],
)
def test_a_test_that_runs_out_of_memory_or_disk_says_nothing_of_the_next(
    error: Exception, is_lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_code, "FOLDER", tmp_path)  # what is broken in it is deleted

    def breaks(tokens: mx.array) -> bool:
        if tokens.shape[0] > 1:
            raise error
        return False

    engine = broken(write_chat(tmp_path / "m"), breaks)
    *_, verdict = engine.self_test()
    assert verdict.rows is False
    assert verdict.is_lasting is is_lasting


def test_batches_that_fail_though_no_row_does_are_given_up_after_a_few(tmp_path: Path) -> None:
    """Otherwise every step would read every prompt again; each fault is told once."""
    folder = write_chat(tmp_path / "m")
    engine = broken(folder, lambda tokens: tokens.shape[0] > 1)
    told = answers(engine, PROMPTS)
    assert told.tokens == alone(folder, PROMPTS)
    assert told.errors == [None] * len(PROMPTS)
    assert not engine.is_batched
    assert FAULTS <= len(told.faults) <= FAULTS + 1
    assert all("no such shapes" in fault.message for fault in told.faults)


def test_a_row_that_breaks_its_batches_is_to_blame_itself(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "m")
    engine = broken(folder, lambda tokens: bool((tokens == 999).any().item()))
    for _ in range(2 * FAULTS):
        told = answers(engine, [PROMPTS[0], [5, 999, 6], PROMPTS[2]], late=1)
        assert [error is None for error in told.errors] == [True, False, True]
    assert engine.is_batched


def test_a_row_that_leaves_proves_nothing() -> None:
    faults = Faults()
    for _ in range(2 * FAULTS):
        faults.record([1, 2], Fault.ROW, ValueError("x"))
        faults.clear_of_blame(1)
        faults.dismiss(2)
        faults.record([3], Fault.ROW, ValueError("x"))
        faults.clear_of_blame(3)
    assert not faults.is_batching_to_blame
    assert len(faults.take()) == 4 * FAULTS


def test_rows_that_run_one_at_a_time_can_leave_wherever_they_are(tmp_path: Path) -> None:
    engine = opened(write_chat(tmp_path / "m"))
    steps = Steps(engine)
    engine.apply_verdict(Verdict(rows=False))
    rows = joined(engine)
    steps.decode()
    assert steps.count == 4
    assert steps.size.rows == 1
    steps.leave(rows[2])
    steps.leave(rows[0])
    assert steps.count == 2
    assert steps.is_decoding
    ended = set()
    while steps.is_decoding:
        ended |= {delta.id for delta in steps.decode() if delta.finish_reason}
    assert ended == {rows[1], rows[3]}


@pytest.fixture
def _uncompiled() -> Iterator[None]:
    """Compiling for the CPU takes seconds a model."""
    mx.disable_compile()
    yield
    mx.enable_compile()


PADDED = [
    ("rwkv7", mx.bfloat16), ("rwkv7", mx.float32), ("rwkv7", mx.float16),
    ("recurrent_gemma", mx.bfloat16), ("baichuan_m1", mx.bfloat16),
]  # fmt: skip


def verdict_of_tiny(name: str, dtype: mx.Dtype) -> Verdict:
    config = tiny_config(name)
    model = tiny_model(config, width=1)
    model.set_dtype(dtype)
    *_, verdict = BatchSelfTest(model, config["vocab_size"], 4096, dtype).verdicts()
    return verdict


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize(("name", "dtype"), a_few(PADDED, PADDED[0]), ids=str)
def test_padding_that_gets_into_states_is_found_in_every_type(name: str, dtype: mx.Dtype) -> None:
    """The classes keep the last token of a pass, whatever it is. It fades from token to token, so
    the logits after the first ones may be within bfloat16's bound.
    """
    verdict = verdict_of_tiny(name, dtype)
    assert verdict.is_whole
    assert verdict.rows is False


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", a_few(("mamba2", "lfm2", "falcon_h1"), "lfm2"))
def test_padding_that_states_leave_out_is_no_mismatch(name: str) -> None:
    whole = Verdict(single=True, rows=True, prefixes=True, window=True)
    assert verdict_of_tiny(name, mx.bfloat16) == whole


def test_batches_that_fail_only_where_states_are_kept_are_forbidden(tmp_path: Path) -> None:
    """It is no fault of the prefix cache's alone: so prompts are read together."""
    engine = broken(
        write_chat(tmp_path / "m", **STATEFUL), lambda tokens: tokens.shape == (2, 2 * BLOCK)
    )
    verdict = verdict_of(engine)
    assert verdict.rows is False
    assert "no such shapes" in verdict.problem
