"""`models recommend`: the models that fit, added up, and by the engine's own count of KV."""

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
import yaml

from gateway.cli import main
from gateway.cli.recommend import (
    GIB,
    Fit,
    Machine,
    fit,
    fits,
    kv_cost,
    machine_with,
    order,
    working_set,
)
from gateway.engine.models import notes
from gateway.engine.models.kv_costs import measure_kv
from gateway.registry import Facts, LayersKept, read_facts
from gateway.settings import Settings

DEFAULTS = Settings(_env_file=None)  # type: ignore[call-arg]
CATALOGUE = {name: facts for name, _, facts in read_facts()}
# Configs, in YAML, with the fields that mlx-lm's classes leave open.
CONFIGS: dict[str, tuple[str, str]] = {
    "qwen3.5-9b": (
        "qwen3_5",
        """model_type: qwen3_5
text_config: {model_type: qwen3_5_text, num_hidden_layers: 32, full_attention_interval: 4,
  hidden_size: 4096, intermediate_size: 12288, num_attention_heads: 16, num_key_value_heads: 4,
  head_dim: 256, linear_num_value_heads: 32, linear_num_key_heads: 16, linear_key_head_dim: 128,
  linear_value_head_dim: 128, linear_conv_kernel_dim: 4, vocab_size: 8}""",
    ),
    "gemma-4-e2b": ("gemma4_text", "{vocab_size: 8, vocab_size_per_layer_input: 8}"),
    "gpt-oss-20b": (
        "gpt_oss",
        """{num_hidden_layers: 24, num_local_experts: 32, vocab_size: 8, rope_scaling: {
  rope_type: yarn, factor: 32.0, original_max_position_embeddings: 4096}}""",
    ),
    "glm-4.7-flash": ("glm4_moe_lite", "{vocab_size: 8}"),
}


def mac(gib: int) -> Machine:
    return machine_with(working_set(gib * GIB))


def plain(**facts: Any) -> Facts:
    """Facts of a model whose token takes 512 bytes of KV, and a layer more as many."""
    layers = LayersKept(layers=1, kv_heads=1, head_dim=128)
    words = {"context": 8192, "kv": [layers], "read_from": ["x"], "read_on": "2026-11-26"}
    return Facts.model_validate({"architecture": "llama", **words, **facts})


@pytest.mark.parametrize("name", CONFIGS)
def test_kv_is_what_the_engine_measures_of_such_a_model(name: str) -> None:
    """The model has real shapes, with weights that are never computed."""
    module, config = CONFIGS[name]
    classes = import_module(f"mlx_lm.models.{module}")
    model = classes.Model(classes.ModelArgs.from_dict(yaml.safe_load(config)))
    model.set_dtype(mx.bfloat16)
    measured, context = measure_kv(model), CATALOGUE[name].context or 0
    counted = kv_cost(CATALOGUE[name].kv)
    for tokens in (1, 300, context):
        assert counted.of(tokens) == measured.of(tokens)


def test_a_model_fits_with_its_weights_its_kv_and_what_is_kept_of_prompts() -> None:
    found = fit("m", "chat", plain(weights_bytes=GIB), 16 * GIB, DEFAULTS)
    assert found is not None
    assert found.context == 8192
    assert found.is_whole
    assert 1024 * 8192 < found.kv_bytes < 1024 * 8192 * 2  # the chunk that is read counts too
    assert found.prefix_bytes == 4 * GIB  # a quarter
    assert found.total_bytes < 12 * GIB


def test_a_context_without_room_is_cut_and_one_too_short_does_not_fit() -> None:
    memory = 4 * GIB  # 3 GiB may be taken, and 1 is left for prompts
    small = fit("m", "chat", plain(weights_bytes=2 * GIB - 8_000_000), memory, DEFAULTS)
    assert small is not None
    assert small.context is not None
    assert 4096 <= small.context < 8192
    assert not small.is_whole
    assert small.total_bytes <= 3 * GIB
    none = fit("m", "chat", plain(weights_bytes=2 * GIB), memory, DEFAULTS)
    assert none is not None
    assert none.context is None


def test_nothing_is_said_of_a_size_that_was_not_read() -> None:
    assert fit("m", "chat", plain(), 512 * GIB, DEFAULTS) is None


def test_what_a_token_reads_is_the_share_of_the_experts_that_it_takes() -> None:
    facts = plain(weights_bytes=20 * GIB, parameters_b=40, active_b=2)
    mixture = fit("m", "chat", facts, 512 * GIB, DEFAULTS)
    dense = fit("m", "chat", plain(weights_bytes=20 * GIB), 512 * GIB, DEFAULTS)
    assert mixture is not None
    assert dense is not None
    assert (mixture.token_bytes, dense.token_bytes) == (GIB, 20 * GIB)
    large = mac(64)
    assert mixture.speed(large) == 20 * dense.speed(large) == large.bandwidth / GIB


def test_each_model_says_what_its_family_was_compared_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "_TRANSFORMERS", frozenset({"qwen3_5", "nomic_bert"}))
    monkeypatch.setattr(notes, "EQUAL", frozenset({"gpt_oss"}))
    assert run("--memory", "512", "--all") == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    verified = {row[1]: row[-1] for row in rows}
    assert (verified["qwen3.5-9b"], verified["nomic-embed-text-v1.5"]) == ("transformers",) * 2
    assert (verified["gpt-oss-20b"], verified["llama-3.2-3b"]) == ("mlx-lm", "no")


def test_more_memory_never_offers_less() -> None:
    offered: dict[str, int] = {}
    for memory in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512):
        for each in fits(working_set(memory * GIB), DEFAULTS):
            context = -1 if each.context is None else each.context
            assert offered.get(each.name, -1) <= context
            offered[each.name] = context


TWO_CORES = machine_with(24 * GIB, cores=2)


@pytest.mark.parametrize(
    ("machine", "chat", "embedding"),
    [
        (mac(8), "llama-3.2-3b", "qwen3-embedding-0.6b"),  # none has room for 32k
        (mac(16), "qwen3.5-9b", "qwen3-embedding-0.6b"),
        (mac(24), "qwen3.5-9b", "qwen3-embedding-0.6b"),
        (mac(32), "gpt-oss-20b", "qwen3-embedding-0.6b"),
        (mac(64), "qwen3.6-35b-a3b", "qwen3-embedding-4b"),
        (mac(128), "gpt-oss-120b", "qwen3-embedding-4b"),
        (TWO_CORES, "qwen3-0.6b", "nomic-embed-text-v1.5"),  # 27B in 4 bits would fit
    ],
)
def test_the_first_of_a_kind_is_the_one_to_take(
    machine: Machine, chat: str, embedding: str
) -> None:
    found = order(fits(machine.memory_bytes, DEFAULTS), machine)
    firsts = {each.kind: each.name for each in reversed(found)}
    assert (firsts["chat"], firsts["embedding"]) == (chat, embedding)
    assert len(found) == sum(
        each.context is not None for each in fits(machine.memory_bytes, DEFAULTS)
    )


def rows(machine: Machine, *models: tuple[str, int, int]) -> list[str]:
    """Give the names of chat models, by context and GB of weights, in their order."""
    found = [
        Fit(name, "chat", gb * 10**9, context, True, 0, 0, gb * 10**9, "no", None)
        for name, context, gb in models
    ]
    return [each.name for each in order(found, machine)]


def test_room_comes_before_speed_and_speed_before_size() -> None:
    machine = Machine(64 * GIB, 150e9)  # 15 tokens per second of 10 GB
    models = [("slow", 32_768, 11), ("fast", 32_768, 10), ("small", 32_768, 1)]
    assert rows(machine, *models, ("short", 32_767, 2)) == ["fast", "small", "slow", "short"]
    assert rows(machine, ("agent", 8192, 1), ("tiny", 8191, 9)) == ["agent", "tiny"]
    assert rows(Machine(64 * GIB, 10e9), *models) == ["small", "fast", "slow"]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(("models", "recommend", *arguments))
    return int(ended.value.code or 0)


def test_another_mac_is_asked_about_by_its_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's own limit is not its."""
    monkeypatch.setenv("GATEWAY_CACHE_MAX_BYTES", "1")
    assert run("--memory", "64") == 0
    printed = capsys.readouterr()
    assert "\n\tqwen3.5-9b\tchat\t262,144\t" in printed.out
    assert "glm-4.7\t" not in printed.out
    assert printed.err.endswith("note: models may take 36.0 GiB\n")


def test_this_machine_is_asked_about_by_the_budget_that_serve_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_CACHE_MAX_BYTES", str(GIB))
    assert run() == 0
    printed = capsys.readouterr()
    assert "models may take 1.0 GiB" in printed.err
    assert "\tchat\t" not in printed.out
    first, second, *_ = printed.err.splitlines()
    assert first.startswith("For chat: mlx-gateway serve org/name  # none of the catalogue fits: ")
    assert second.startswith("For embedding: mlx-gateway serve ")


def test_one_chat_model_and_one_for_embeddings_are_marked_and_come_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The parts of a sum, and notes that name models, are for those who ask for all."""
    assert run("--memory", "16") == 0
    printed = capsys.readouterr()
    lines = [line.split("\t") for line in printed.out.splitlines()]
    taken = [line[1] for line in lines if line[0] == "take"]
    assert taken == ["qwen3.5-9b", "qwen3-embedding-0.6b"]
    assert lines[0] == [*("take", taken[0], "chat", "37,888 (cut)", "8.0 GiB", "17.1"), "yes"]
    assert printed.err.splitlines() == [
        "For chat: mlx-gateway serve qwen3.5-9b",
        "For embedding: mlx-gateway serve qwen3-embedding-0.6b",
        "note: models may take 8.0 GiB",
    ]
    assert run("--memory", "16", "--all") == 0
    printed = capsys.readouterr()
    first = "\t".join([*lines[0], "5.5 GiB", "1.4 GiB", "1.0 GiB", "transformers"])
    assert printed.out.startswith(f"{first}\n")
    assert "\nnote: sizes unknown: gemma-3-1b, " in printed.err


def test_a_coder_is_listed_and_not_the_one_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--memory", "96") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("take\tqwen3.6-35b-a3b\t")
    assert "\n\tqwen3-coder-next\tchat\t262,144\t" in printed.out
    assert printed.err.endswith("note: models may take 54.0 GiB\n")


def test_a_machine_without_room_for_an_agent_is_said_to_have_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--memory", "8") == 0
    said = "note: models may take 4.0 GiB; no chat model has room for 32,768 tokens\n"
    assert capsys.readouterr().err.endswith(said)


def test_a_short_name_stands_where_the_command_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`models NAME` lists the models that it would serve."""
    monkeypatch.setenv("GATEWAY_HUB_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as ended:
        main(("models", "qwen3.5-9b"))
    assert not ended.value.code
    line = "qwen3.5-9b\tchat\tqwen3.5-9b-no-think\thub:mlx-community/Qwen3.5-9B-4bit\tno\t\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize("memory", ["", "0", "much", "64TB", "-1", "9" * 9])
def test_what_is_no_memory_is_wrong_usage(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--memory", memory) == 2
    assert "64GB" in capsys.readouterr().err
