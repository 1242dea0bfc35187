"""GATEWAY_<ID>_<KEY>: which key of which model a variable sets, and never two."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.registry import ChatSpec, EmbeddingSpec, Reading, read_models
from gateway.registry.specs import SPECS
from gateway.registry.variables import ModelVariables
from gateway.settings import VARIABLES

FILE = """\
version: 1
models:
  my-embedder:
    kind: embedding
    source: hub:a/b
    prompts: {s2p-query: "q: "}
  My.Chat-0.6b:
    kind: chat
    source: hub:c/d
    sampling: {top_k: 5, top_p: 0.5}
    aliases: [usual, {name: quiet, thinking: false}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def read(file: Path, variables: Mapping[str, str], text: str = FILE) -> Reading:
    file.write_text(text, encoding="utf-8")
    return read_models(file, variables)


def chat(file: Path, variables: Mapping[str, str], text: str = FILE) -> ChatSpec:
    reading = read(file, variables, text)
    assert reading.problems == ()
    spec = next(each for each in reading.catalog.specs if each.kind == "chat")
    assert isinstance(spec, ChatSpec)
    return spec


def embedder(file: Path, variables: Mapping[str, str]) -> EmbeddingSpec:
    spec = read(file, variables).catalog.resolve("my-embedder").spec
    assert isinstance(spec, EmbeddingSpec)
    return spec


def problems(file: Path, variables: Mapping[str, str], text: str = FILE) -> list[str]:
    reading = read(file, variables, text)
    return [line.replace(f"{file}:", "") for line in reading.problems]


def test_a_variable_sets_a_key_of_any_model(file: Path) -> None:
    """The key may be at any depth, in the file or not; keys beside it stay."""
    spec = chat(
        file,
        {
            "GATEWAY_MY_CHAT_0_6B_PRELOAD": "true",
            "GATEWAY_MY_CHAT_0_6B_SAMPLING_TOP_K": "7",
            "GATEWAY_MY_CHAT_0_6B_BATCHING_MAX_BATCH_SIZE": "3",
            "GATEWAY_MY_CHAT_0_6B_SOURCE": "",
            "GATEWAY_my_chat_0_6b_PINNED": "true",
        },
    )
    assert (spec.preload, spec.pinned, str(spec.source)) == (True, False, "hub:c/d")
    assert (spec.sampling.top_k, spec.sampling.top_p) == (7, 0.5)
    assert spec.batching.max_batch_size == 3


def test_where_keys_are_free_each_has_a_variable(file: Path) -> None:
    given = {"GATEWAY_MY_EMBEDDER_PROMPTS_S2P_QUERY": "7", "GATEWAY_MY_EMBEDDER_PROMPTS_DOC": "no"}
    assert embedder(file, given).prompts == {"s2p-query": "7", "doc": "no"}
    named = "GATEWAY_MY_CHAT_0_6B_CHAT_TEMPLATE_KWARGS_ENABLE_THINKING"
    assert chat(file, {named: "false"}).chat_template_kwargs == {"enable_thinking": False}


def test_names_take_the_place_of_names(file: Path) -> None:
    spec = chat(file, {"GATEWAY_MY_CHAT_0_6B_ALIASES": "one, two"})
    assert [alias.name for alias in spec.aliases] == ["quiet", "one", "two"]
    spec = chat(file, {"GATEWAY_MY_CHAT_0_6B_ALIASES": "null"})
    assert [alias.name for alias in spec.aliases] == ["quiet"]


@pytest.mark.parametrize("written", ["batching: force", "batching: {mode: force}"])
def test_a_mode_alone_is_a_section(file: Path, written: str) -> None:
    text = f"version: 1\nmodels: {{m: {{kind: chat, source: 'hub:a/b', {written}}}}}"
    own = chat(file, {"GATEWAY_M_BATCHING_MAX_BATCH_SIZE": "3"}, text).batching
    assert (own.mode, own.max_batch_size) == ("force", 3)
    both = {"GATEWAY_M_BATCHING_MAX_BATCH_SIZE": "3", "GATEWAY_M_BATCHING": "off"}
    own = chat(file, both, text).batching
    assert (own.mode, own.max_batch_size) == ("off", 3)


def test_a_budget_for_thinking_is_a_section_too(file: Path) -> None:
    """A number alone is its default; efforts are set beside it."""
    text = "version: 1\nmodels: {m: {kind: chat, source: 'hub:a/b', thinking_budget: 7}}"
    own = chat(file, {"GATEWAY_M_THINKING_BUDGET_LOW": "3"}, text).thinking_budget
    assert (own.default, own.low) == (7, 3)
    own = chat(file, {"GATEWAY_M_THINKING_BUDGET": "9"}, text).thinking_budget
    assert (own.default, own.low) == (9, None)


def test_a_wrong_value_is_told_with_its_variable(file: Path) -> None:
    given = {
        "GATEWAY_MY_CHAT_0_6B_SAMPLING_TOP_K": "-1",
        "GATEWAY_MY_CHAT_0_6B_STRUCTURED": "strict",
        "GATEWAY_MY_CHAT_0_6B_ALIASES": "a b",
    }
    [structured, top_k, aliases] = problems(file, given)
    assert structured == (
        "7: My.Chat-0.6b: `structured` should be a mapping, not 'strict' "
        "(set by GATEWAY_MY_CHAT_0_6B_STRUCTURED)"
    )
    assert top_k.startswith("10: My.Chat-0.6b: `sampling.top_k` should be greater than or equal")
    assert aliases.startswith("11: My.Chat-0.6b: `aliases.1.name` should match pattern")
    assert aliases.endswith("(set by GATEWAY_MY_CHAT_0_6B_ALIASES)")


def test_a_variable_that_the_file_asks_for_goes_where_it_is_asked(file: Path) -> None:
    text = (
        "version: 1\n"
        "models:\n"
        "  a: {kind: chat, source: 'hub:a/b', max_context: '${GATEWAY_B_MAX_CONTEXT:-99}'}\n"
        "  b: {kind: chat, source: 'hub:a/c', max_context: 88}\n"
    )
    for values, expected in (({}, [99, 88]), ({"GATEWAY_B_MAX_CONTEXT": "77"}, [77, 88])):
        reading = read(file, values, text)
        assert [spec.max_context for spec in reading.catalog.specs] == expected


def test_a_name_that_is_set_is_taken_from_the_model_that_has_it(file: Path) -> None:
    reading = read(file, {"GATEWAY_MY_EMBEDDER_ALIASES": "usual"})
    assert reading.problems == ()
    assert reading.catalog.resolve("usual").spec.id == "my-embedder"
    assert [alias.name for alias in reading.catalog.specs[1].aliases] == ["quiet"]
    (note,) = reading.notes
    assert note == (
        f"{file}:11: My.Chat-0.6b: the alias 'usual' is my-embedder's now "
        "(set by GATEWAY_MY_EMBEDDER_ALIASES)"
    )


def test_a_name_is_set_for_one_model(file: Path) -> None:
    stem = "GATEWAY_MY_EMBEDDER_ALIASES"
    (problem,) = problems(file, {stem: "x", "GATEWAY_MY_CHAT_0_6B_ALIASES": "x"})
    assert problem == (
        "11: My.Chat-0.6b: the alias 'x' is my-embedder's already, on line 3 "
        "(set by GATEWAY_MY_CHAT_0_6B_ALIASES)"
    )
    (problem,) = problems(file, {stem: "x, x"})
    assert problem.endswith(
        f"my-embedder: the alias 'x' is my-embedder's already, on line 3 (set by {stem})"
    )
    (problem,) = problems(file, {stem: "My.Chat-0.6b"})
    assert problem == (
        "3: my-embedder: the alias 'My.Chat-0.6b' is My.Chat-0.6b's already, on line 7 "
        f"(set by {stem})"
    )


def models(*entries: str) -> str:
    return "version: 1\nmodels:\n" + "".join(f"  {entry}\n" for entry in entries)


CHAT = "{kind: chat, source: 'hub:a/b'}"
EMBEDDING = "{kind: embedding, source: 'hub:a/b'}"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            (f"qwen3-0.6b: {CHAT}", f"Qwen3_0-6B: {CHAT}"),
            "4: Qwen3_0-6B: the variable GATEWAY_QWEN3_0_6B_SOURCE would be `source` here and "
            "`source` of qwen3-0.6b; choose another id for one of them",
        ),
        (
            (f"m: {EMBEDDING}", f"m-prompts: {CHAT}"),
            "4: m-prompts: the variable GATEWAY_M_PROMPTS_SOURCE would be `source` here and "
            "`prompts.source` of m; choose another id for one of them",
        ),
        (
            (f"m-prompts: {CHAT}", f"m: {EMBEDDING}"),
            "4: m: the variable GATEWAY_M_PROMPTS_SOURCE would be `prompts.source` here and "
            "`source` of m-prompts; choose another id for one of them",
        ),
        (
            (f"model: {CHAT}",),
            "3: model: the variable GATEWAY_MODEL_TTL_S is a setting of the gateway and would be "
            "`ttl_s` here too; choose another id",
        ),
        (
            ("m: {kind: embedding, source: 'hub:a/b', prompts: {a-b: x, A.B: y}}",),
            "3: m: the variable GATEWAY_M_PROMPTS_A_B would be `prompts.a-b` and `prompts.A.B`; "
            "choose another name for one of them",
        ),
    ],
)
def test_what_would_have_two_meanings_is_refused(
    file: Path, entries: tuple[str, ...], said: str
) -> None:
    """It is refused before anybody sets it: a variable's effect must not depend on the others."""
    assert problems(file, {}, models(*entries)) == [said]


def test_ids_that_only_begin_alike_are_fine(file: Path) -> None:
    names = ("qwen3", "qwen3-0.6b", "qwen3-batching", "embedding", "queue", "structured")
    given = {
        "GATEWAY_QWEN3_0_6B_TTL_S": "1",
        "GATEWAY_QWEN3_BATCHING_TTL_S": "2",
        "GATEWAY_QWEN3_BATCHING_MODE": "off",
        "GATEWAY_QUEUE_LIMIT": "3",
        "GATEWAY_QUEUE_QUEUE_LIMIT": "4",
        "GATEWAY_EMBEDDING_MAX_BATCH_SIZE": "5",
        "GATEWAY_EMBEDDING_BATCHING_MAX_BATCH_SIZE": "6",
    }
    reading = read(file, given, models(*(f"{name}: {CHAT}" for name in names)))
    assert reading.problems == ()
    specs = {spec.id: spec for spec in reading.catalog.specs if isinstance(spec, ChatSpec)}
    assert [specs[name].ttl_s for name in names] == [None, 1, 2, None, None, None]
    assert (specs["qwen3"].batching.mode, specs["qwen3-batching"].batching.mode) == ("off", "auto")
    assert (specs["queue"].queue_limit, specs["embedding"].batching.max_batch_size) == (4, 6)


WORDS = ["m", "model", "prompts", "chat-template-kwargs", "batching", "queue", "limit", "ttl", "s"]
IDS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("-".join)
KINDS = st.sampled_from(sorted(SPECS))


@settings(deadline=None)
@given(st.dictionaries(IDS, KINDS, min_size=1, max_size=5))
def test_no_variable_has_two_meanings(kinds: dict[str, str]) -> None:
    known = [ModelVariables(name, {"kind": kind}, {}) for name, kind in kinds.items()]
    if any(list(each.clashes(known[:place])) for place, each in enumerate(known)):
        return
    for each in known:
        for variable in (*each.paths, *VARIABLES, *(f"{name}_X" for name in each.paths)):
            meanings = [other for other in known if other.path(variable)]
            assert len(meanings) + (variable in VARIABLES) <= 1
