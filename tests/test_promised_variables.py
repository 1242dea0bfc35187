"""Every variable of version 0.1 keeps its meaning: the lists are of its README and its file.

A variable is only ever added here, or taken out with a line in the CHANGELOG.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.registry import HubSource, ModelSpec, load_catalog, read_models
from gateway.settings import Knob, explain, load_settings

SHIPPED = Path(__file__).parents[1] / "models.yaml"

# The text of each setting's variable, and the value as `config` prints it where that differs.
SETTINGS: dict[str, str | tuple[str, str]] = {
    "GATEWAY_MODELS": "other.yaml",
    "GATEWAY_HOST": "localhost",
    "GATEWAY_PORT": "8001",
    "GATEWAY_BIND": ("127.0.0.1:1, unix:/tmp/x.sock", "127.0.0.1:1,unix:/tmp/x.sock"),
    "GATEWAY_TLS_CERT": "cert.pem",
    "GATEWAY_TLS_KEY": "key.pem",
    "GATEWAY_KEEP_ALIVE_TIMEOUT_S": "76",
    "GATEWAY_API_KEYS": ("one,two", "**********,**********"),
    "GATEWAY_ADMIN_KEY": ("secret", "**********"),
    "GATEWAY_ALLOW_UNAUTHENTICATED": "true",
    "GATEWAY_ALLOWED_HOSTS": "a.example,b.example",
    "GATEWAY_CORS_ORIGINS": "*",
    "GATEWAY_LOG_LEVEL": ("WARNING", "warning"),
    "GATEWAY_LOG_FORMAT": "json",
    "GATEWAY_LOG_PROMPTS": ("yes", "true"),
    "GATEWAY_DEVICE": ("CPU", "cpu"),
    "GATEWAY_BLAS": "system",
    "GATEWAY_AUTO_PULL": ("0", "false"),
    "GATEWAY_HUB_ENDPOINT": "http://hub.example",
    "GATEWAY_HUB_TIMEOUT_S": "4.5",
    "GATEWAY_HUB_CACHE": "/hub",
    "GATEWAY_CACHE_MAX_MODELS": "4",
    "GATEWAY_CACHE_MAX_BYTES": "1000000",
    "GATEWAY_KV_ALLOWANCE_TOKENS": "4097",
    "GATEWAY_KV_ANSWER_TOKENS": "257",
    "GATEWAY_LOAD_WAIT_S": "21",
    "GATEWAY_MODEL_TTL_S": "60",
    "GATEWAY_READY_IN_PART": "true",
    "GATEWAY_WARM_UP": "false",
    "GATEWAY_SELF_TEST": "false",
    "GATEWAY_SELF_TEST_FOLDER": "/tests",
    "GATEWAY_GIVE_BACK_S": "16",
    "GATEWAY_RESPONSES_KEPT": "1001",
    "GATEWAY_RESPONSES_MAX_BYTES": "268435457",
    "GATEWAY_RESPONSES_TTL_S": "86401",
    "GATEWAY_MLX_CACHE_LIMIT_BYTES": "0",
    "GATEWAY_MLX_WIRED_LIMIT_BYTES": "1",
    "GATEWAY_EMBEDDING_MAX_BATCH_SIZE": "33",
    "GATEWAY_EMBEDDING_MAX_BATCH_TOKENS": "16385",
    "GATEWAY_EMBEDDING_BATCH_WINDOW_MS": "10.5",
    "GATEWAY_EMBEDDING_ADAPTIVE_WINDOW": "true",
    "GATEWAY_EMBEDDING_WINDOW_LOW_MS": "3",
    "GATEWAY_EMBEDDING_WINDOW_MEDIUM_MS": "11",
    "GATEWAY_EMBEDDING_WINDOW_HIGH_MS": "26",
    "GATEWAY_EMBEDDING_MIN_BATCH_SIZE": "2",
    "GATEWAY_EMBEDDING_BATCH_DEADLINE_MS": "101",
    "GATEWAY_EMBEDDING_CACHE_SIZE": "1",
    "GATEWAY_GENERATION_MAX_BATCH_SIZE": "33",
    "GATEWAY_PREFILL_CHUNK_TOKENS": "513",
    "GATEWAY_PREFIX_CACHE_BYTES": "0",
    "GATEWAY_SPECULATE_ROWS": "2",
    "GATEWAY_STRUCTURED_ROWS": "2",
    "GATEWAY_STRUCTURED_COMPILE_TIMEOUT_S": "11",
    "GATEWAY_STRUCTURED_CACHE_SIZE": "129",
    "GATEWAY_LANE_WEIGHT_EMBEDDING": "2",
    "GATEWAY_LANE_WEIGHT_PREFILL": "2",
    "GATEWAY_LANE_WEIGHT_DECODE": "2",
    "GATEWAY_LANE_WEIGHT_LOAD": "2",
    "GATEWAY_PASS_LIMIT_S": "0.5",
    "GATEWAY_TIER_HEAD_START_S": "6",
    "GATEWAY_QUEUE_LIMIT": "257",
    "GATEWAY_MAX_BODY_BYTES": "16777217",
    "GATEWAY_MAX_BODIES_BYTES": "268435457",
    "GATEWAY_MAX_HEADER_BYTES": "32769",
    "GATEWAY_BODY_TIMEOUT_S": "31",
    "GATEWAY_MAX_INPUT_CHARS": "1000001",
    "GATEWAY_MAX_REQUEST_CHARS": "8000001",
    "GATEWAY_MAX_JSON_DEPTH": "65",
    "GATEWAY_MAX_MESSAGES": "4097",
    "GATEWAY_MAX_SCHEMA_BYTES": "262143",
    "GATEWAY_MAX_REGEX_CHARS": "8193",
    "GATEWAY_STRICT_FIELDS": "true",
    "GATEWAY_REQUESTS_PER_MINUTE": "1",
    "GATEWAY_TOKENS_PER_MINUTE": "1",
    "GATEWAY_REQUEST_TIMEOUT_S": "601",
    "GATEWAY_STREAM_OPEN_AFTER_S": "11",
    "GATEWAY_SEND_TIMEOUT_S": "31",
    "GATEWAY_DRAIN_S": "31",
    "GATEWAY_STALL_LIMIT_S": "61",
    "GATEWAY_LOAD_STALL_LIMIT_S": "601",
    "GATEWAY_EXIT_ON_STALL": "false",
    "GATEWAY_QUEUE_MAX_TOKENS": "2000001",
}

# The end of a variable of each model, its text, and the value of the spec's key of that name.
ANY_MODEL: dict[str, tuple[str, str, Any]] = {
    "SOURCE": ("hub:a/b@c", "source", HubSource("a/b", "c")),
    "ALIASES": ("one, two", "aliases", ["one", "two"]),
    "PINNED": ("true", "pinned", True),
    "TTL_S": ("1.5", "ttl_s", 1.5),
    "DTYPE": ("bfloat16", "dtype", "bfloat16"),
    "MAX_CONTEXT": ("77", "max_context", 77),
    "QUEUE_LIMIT": ("7", "queue_limit", 7),
    "QUEUE_MAX_TOKENS": ("777", "queue_max_tokens", 777),
}
EMBEDDING: dict[str, tuple[str, str, Any]] = {
    **ANY_MODEL,
    "POOLING": ("cls", "pooling", "cls"),
    "NORMALIZE": ("false", "normalize", False),
    "MATRYOSHKA": ("256, 512", "matryoshka", (256, 512)),
    "TOKEN_IDS": ("accept", "token_ids", "accept"),
    "BATCHING_MAX_BATCH_SIZE": ("9", "batching.max_batch_size", 9),
    "BATCHING_MAX_BATCH_TOKENS": ("999", "batching.max_batch_tokens", 999),
    "BATCHING_BATCH_WINDOW_MS": ("0.5", "batching.batch_window_ms", 0.5),
    "BATCHING_ADAPTIVE_WINDOW": ("true", "batching.adaptive_window", True),
    "BATCHING_MIN_BATCH_SIZE": ("3", "batching.min_batch_size", 3),
    "BATCHING_BATCH_DEADLINE_MS": ("99", "batching.batch_deadline_ms", 99),
    "BATCHING_CACHE_SIZE": ("9", "batching.cache_size", 9),
}
EMBEDDING_WITH_PROMPTS: dict[str, tuple[str, str, Any]] = {
    **EMBEDDING,
    "PRELOAD": ("true", "preload", True),
    "OVERFLOW": ("truncate", "overflow", "truncate"),
    "PROMPTS_QUERY": ("123", "prompts", {"query": "123"}),
    "DEFAULT_PROMPT_NAME": ("query", "default_prompt_name", "query"),
}
CHAT: dict[str, tuple[str, str, Any]] = {
    **ANY_MODEL,
    "THINKING": ("false", "thinking", False),
    "CHAT_TEMPLATE": ("{{ messages }}", "chat_template", "{{ messages }}"),
    "TOOL_PARSER": ("hermes", "tool_parser", "hermes"),
    "REASONING_PARSER": ("none", "reasoning_parser", "none"),
    "SAMPLING_TEMPERATURE": ("0.25", "sampling.temperature", 0.25),
    "SAMPLING_TOP_P": ("0.5", "sampling.top_p", 0.5),
    "SAMPLING_TOP_K": ("7", "sampling.top_k", 7),
    "SAMPLING_MIN_P": ("0.125", "sampling.min_p", 0.125),
    "SAMPLING_REPETITION_PENALTY": ("1.5", "sampling.repetition_penalty", 1.5),
    "SAMPLING_MAX_TOKENS": ("77", "sampling.max_tokens", 77),
    "STRUCTURED_ROWS": ("7", "structured.rows", 7),
    "STRUCTURED_MAX_STRING_CHARS": ("77", "structured.max_string_chars", 77),
    "STRUCTURED_MAX_ARRAY_ITEMS": ("77", "structured.max_array_items", 77),
    "BATCHING_MAX_BATCH_SIZE": ("9", "batching.max_batch_size", 9),
    "BATCHING_PREFILL_CHUNK_TOKENS": ("99", "batching.prefill_chunk_tokens", 99),
    "BATCHING_PREFIX_CACHE_BYTES": ("0", "batching.prefix_cache_bytes", 0),
    "BATCHING_SPECULATE_ROWS": ("2", "batching.speculate_rows", 2),
    "BATCHING_MODE": ("off", "batching.mode", "off"),
}
FROM_THE_HUB: dict[str, tuple[str, str, Any]] = {
    **CHAT,
    "PRELOAD": ("true", "preload", True),
    "STRUCTURED_SCHEMA_IN_PROMPT": ("true", "structured.schema_in_prompt", True),
}
WITHOUT_PRELOAD = ("false", "preload", False)
SCHEMA_IN_PROMPT = ("false", "structured.schema_in_prompt", False)
MINILM = {**EMBEDDING, "PRELOAD": WITHOUT_PRELOAD, "OVERFLOW": ("error", "overflow", "error")}
SMOLLM2 = {**CHAT, "PRELOAD": WITHOUT_PRELOAD, "STRUCTURED_SCHEMA_IN_PROMPT": SCHEMA_IN_PROMPT}
MODELS: dict[str, tuple[str, dict[str, tuple[str, str, Any]]]] = {
    "GATEWAY_ALL_MINILM_L6_V2": ("all-minilm-l6-v2", MINILM),
    "GATEWAY_SMOLLM2_135M": ("smollm2-135m", SMOLLM2),
    "GATEWAY_QWEN3_EMBEDDING_0_6B": ("qwen3-embedding-0.6b", EMBEDDING_WITH_PROMPTS),
    "GATEWAY_QWEN3_EMBEDDING_4B": ("qwen3-embedding-4b", EMBEDDING_WITH_PROMPTS),
    "GATEWAY_QWEN3_4B_INSTRUCT": ("qwen3-4b-instruct", FROM_THE_HUB),
    "GATEWAY_QWEN3_0_6B": ("qwen3-0.6b", FROM_THE_HUB),
}
EACH = [
    pytest.param(f"{stem}_{end}", model, *expected, id=f"{stem}_{end}")
    for stem, (model, ends) in MODELS.items()
    for end, expected in ends.items()
]


@pytest.fixture(autouse=True)
def _empty_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder with no GATEWAY_ variable set."""
    monkeypatch.chdir(tmp_path)
    unset(monkeypatch)


def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("GATEWAY_"):
            monkeypatch.delenv(name)


def explained() -> dict[str, Knob]:
    return {knob.env: knob for knob in explain(load_settings(env_file=None), env_file=None)}


@pytest.fixture(scope="module")
def defaults() -> dict[str, Knob]:
    """Give the settings' values where none is set."""
    with pytest.MonkeyPatch.context() as patched:
        unset(patched)
        return explained()


@pytest.fixture(scope="module")
def shipped() -> list[ModelSpec]:
    return list(load_catalog(SHIPPED, {}).specs)


@pytest.mark.parametrize("variable", SETTINGS)
def test_every_setting_is_set_by_its_variable(
    variable: str, defaults: dict[str, Knob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("PEM")
    text = SETTINGS[variable]
    given, shown = (text, text) if isinstance(text, str) else text
    monkeypatch.setenv(variable, given)
    if variable.startswith("GATEWAY_TLS_"):  # they go together
        monkeypatch.setenv("GATEWAY_TLS_CERT", "cert.pem")
        monkeypatch.setenv("GATEWAY_TLS_KEY", "key.pem")
    after = explained()
    assert after[variable].value == shown != defaults[variable].value
    assert after[variable].source == "environment"


def value(spec: ModelSpec, key: str) -> object:
    found: Any = spec
    for part in key.split("."):
        found = getattr(found, part)
    return [alias.name for alias in found] if key == "aliases" else found


@pytest.mark.parametrize(("variable", "model", "text", "key", "expected"), EACH)
def test_every_key_of_a_shipped_model_is_set_by_its_variable(
    shipped: list[ModelSpec], variable: str, model: str, text: str, key: str, expected: object
) -> None:
    """The spec has the new value at that key and is otherwise as before; so are the other specs."""
    reading = read_models(SHIPPED, {variable: text})
    assert reading.problems == ()
    assert variable in reading.variables
    for old, new in zip(shipped, reading.catalog.specs, strict=True):
        if new.id != model:
            assert new == old
            continue
        if key == "aliases":  # one that implies something stays
            implied = [a.name for a in old.aliases if a.model_fields_set != {"name"}]
            expected = [*implied, *(expected if isinstance(expected, list) else ())]
        assert value(new, key) == expected != value(old, key)
        top = key.partition(".")[0]
        assert new.model_dump(exclude={top}) == old.model_dump(exclude={top})


def test_all_of_the_old_list_is_here() -> None:
    """All of version 0.1's are, but for `structured_backend`: it had no effect."""
    assert len(SETTINGS) == 82
    assert len(EACH) == 151
