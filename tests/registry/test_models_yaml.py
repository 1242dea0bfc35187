"""models.yaml: the entries read from it, and how variables steer it."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from gateway.registry import ChatSpec, HubSource, ModelSpec, PathSource, Reading, read_models
from gateway.registry.yaml_reader import ExpansionInvalid, expand


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def read(file: Path, text: str, variables: Mapping[str, str] | None = None) -> Reading:
    file.write_text(dedent(text), encoding="utf-8")
    return read_models(file, variables or {})


def one(file: Path, body: str, variables: Mapping[str, str] | None = None) -> ModelSpec:
    text = "version: 1\nmodels:\n  m:\n" + "".join(f"    {s}\n" for s in dedent(body).split("\n"))
    reading = read(file, text, variables)
    assert reading.problems == ()
    return reading.catalog.resolve("m").spec


def test_aliases_may_be_texts_lists_and_mappings(file: Path) -> None:
    """Commas separate several, so that one variable can hold a list."""
    spec = one(
        file,
        """\
        kind: embedding
        source: hub:a/b
        prompts: {query: "q: "}
        aliases: [a, "b, c", {name: d, prompt_name: query}]""",
    )
    assert [alias.name for alias in spec.aliases] == ["a", "b", "c", "d"]
    assert [alias.prompt_name for alias in spec.aliases] == [None, None, None, "query"]


def test_nothing_written_is_nothing_said(file: Path) -> None:
    spec = one(file, "kind: chat\nsource: hub:a/b\naliases:\nbatching:\nsampling: {top_k: }")
    assert spec == one(file, "kind: chat\nsource: hub:a/b")


def test_a_path_is_relative_to_the_file(file: Path) -> None:
    (file.parent / "weights").mkdir()
    assert one(file, "kind: chat\nsource: path:weights").source == PathSource(
        file.parent.resolve() / "weights"
    )


def test_a_chat_template_may_be_a_file(file: Path) -> None:
    (file.parent / "t.jinja").write_text("{{ messages }}")
    spec = one(file, "kind: chat\nsource: hub:a/b\nchat_template: file:t.jinja")
    assert isinstance(spec, ChatSpec)
    assert spec.chat_template == "{{ messages }}"
    spec = one(file, 'kind: chat\nsource: hub:a/b\nchat_template: "{{ x }}"')
    assert isinstance(spec, ChatSpec)
    assert spec.chat_template == "{{ x }}"


def test_anchors_and_merges_share_settings(file: Path) -> None:
    reading = read(
        file,
        """\
        version: 1
        models:
          a: &a {kind: chat, source: "hub:a/b", sampling: &s {top_k: 5, top_p: 0.5}}
          b: {<<: *a, sampling: {<<: *s, top_k: 6}}
          c: {<<: *a, source: "hub:c/c"}
        """,
    )
    assert reading.problems == ()
    b = reading.catalog.resolve("b").spec
    assert isinstance(b, ChatSpec)
    assert (b.sampling.top_k, b.sampling.top_p) == (6, 0.5)
    assert str(reading.catalog.resolve("c").spec.source) == "hub:c/c"


def test_expanded_values_have_yaml_types(file: Path) -> None:
    """Unquoted, `${X:-32}` is a number; quoted, it is text; empty, it is absent."""
    spec = one(
        file,
        """\
        kind: chat
        source: ${SOURCE:-hub:a/b}
        max_context: ${CONTEXT:-512}
        preload: ${PRELOAD}
        dtype: "${DTYPE:-}"
        aliases: [a, "${MORE:-}"]
        chat_template_kwargs: {n: "${N:-1}", f: !!bool "${F:-true}", m: "$$5", day: 2024-01-01}""",
        {"CONTEXT": "1024", "PRELOAD": "true"},
    )
    assert isinstance(spec, ChatSpec)
    assert (spec.max_context, spec.preload, spec.dtype) == (1024, True, "auto")
    assert [alias.name for alias in spec.aliases] == ["a"]
    assert spec.chat_template_kwargs == {"n": "1", "f": True, "m": "$5", "day": "2024-01-01"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("plain $5 and $x", "plain $5 and $x"),
        ("$${A}", "${A}"),
        ("${A}", "1"),
        ("${EMPTY:-d}", "d"),
        ("${NONE:-}", ""),
        ("a${A}b${NONE:-c:-d}", "a1bc:-d"),
    ],
)
def test_expansion(text: str, expanded: str) -> None:
    """It works as in a shell: `:-` also replaces an empty value; `$$` writes a dollar."""
    assert expand(text, {"A": "1", "EMPTY": ""})[0] == expanded


@pytest.mark.parametrize("text", ["${", "${A", "${1}", "${A-b}", "${A:-${B}}", "${A:-{}", "${}"])
def test_broken_expansions_are_refused(text: str) -> None:
    with pytest.raises(ExpansionInvalid, match="VAR:-default"):
        expand(text, {"A": "1"})


def test_a_budget_for_thinking_is_a_number_or_one_for_each_effort(file: Path) -> None:
    """A variable may change it."""
    chat = "kind: chat\nsource: hub:a/b\nthinking_budget: "
    for written, expected in [
        ("4096", {"default": 4096}),
        ("'${NONE:-7}'", {"default": 7}),
        ("{low: 0, high: 16384}", {"low": 0, "high": 16384}),
    ]:
        spec = one(file, f"{chat}{written}")
        assert isinstance(spec, ChatSpec)
        assert spec.thinking_budget.model_dump(exclude_none=True) == expected
    for wrong in ("-1", "true", "{low: 1.5}", "{none: 0}", "[1]"):
        with pytest.raises(Exception, match=r"thinking_budget|unknown key"):
            one(file, f"{chat}{wrong}")


DRAFTED = """\
    version: 1
    models:
      large: {kind: chat, source: "hub:a/large", draft: %s}
      small: {kind: chat, source: "hub:a/small", aliases: [tiny]}
      middle: {kind: chat, source: "hub:a/middle", draft: small}
      encoder: {kind: embedding, source: "hub:a/encoder"}
      divided: {kind: chat, source: "hub:a/divided", parallel: tensor}
      adapter: {kind: chat, base: small, adapter: "hub:a/adapter"}
    """


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ("smal", "no model has the id 'smal'; did you mean 'small'?"),
        ("tiny", "no model has the id 'tiny'"),
        ("large", "a model cannot be its own draft"),
        ("middle", "middle has a draft of its own, so it cannot be one"),
        ("encoder", "encoder is of kind embedding, but a draft must be a chat model"),
        ("small, parallel: tensor", "a model with `parallel` can neither have a draft nor be one"),
        ("divided", "a model with `parallel` can neither have a draft nor be one"),
        ("adapter", "adapter is an adapter, which cannot be a draft"),
    ],
)
def test_a_draft_that_cannot_be_one_is_refused_by_name(
    file: Path, draft: str, problem: str
) -> None:
    [found] = read(file, DRAFTED % draft).problems
    assert f"models.yaml:3: large: `draft`: {problem}" in found


@pytest.mark.parametrize(
    ("kind", "keys", "wrong"),
    [
        ("chat", "parallel: pipeline", None),
        ("chat", "kv_bits: 4", None),
        ("chat", "tool_parser: hermes\nreasoning_parser: qwen3", None),
        ("chat", "parallel: data", "parallel"),
        ("chat", "parallel: tensor\nfuse_projections: true", "parallel"),
        ("chat", "kv_bits: 3", "kv_bits"),
        ("chat", "tool_parser: mistrall", "did you mean 'mistral'"),
        ("embedding", "parallel: tensor", "parallel"),
        ("embedding", "kv_bits: 8", "kv_bits"),
    ],
)
def test_some_keys_have_few_values_and_are_of_chat_models(
    file: Path, kind: str, keys: str, wrong: str | None
) -> None:
    body = f"kind: {kind}\nsource: hub:a/b\n{keys}".replace("\n", "\n    ")
    problems = read(file, f"version: 1\nmodels:\n  m:\n    {body}\n").problems
    assert len(problems) == (wrong is not None)
    assert all(str(wrong) in problem for problem in problems)


def test_a_model_is_loaded_anew_if_its_draft_is_another(file: Path) -> None:
    before = read(file, DRAFTED % "small").catalog
    all_three = ("large", "small", "middle")
    for old, new, changed in (
        ("[tiny]", "[other]", ()),
        ('"hub:a/small"', '"hub:a/small", kv_bits: 8', all_three),
        ("hub:a/small", "hub:b/small", all_three),
        ("draft: small}", "draft: null}", ("large", "middle")),
    ):
        after = read(file, (DRAFTED % "small").replace(old, new)).catalog
        assert set(after.changes_since(before).changed) - {"adapter"} == {*changed}, new


ADAPTED = """
version: 1
models:
  pirate: {kind: chat, base: %s, adapter: %s, aliases: [arr], sampling: {temperature: 0}}
  base: {kind: chat, source: "hub:a/base", draft: small}
  small: {kind: chat, source: "hub:a/small"}
  other: {kind: chat, base: base, adapter: "hub:a/other"}
  fused: {kind: chat, source: "hub:a/fused", fuse_projections: true}
  shared: {kind: chat, source: "hub:a/shared", parallel: tensor}
  encoder: {kind: embedding, source: "hub:a/encoder"}
"""


def test_an_adapter_is_served_by_name_with_its_bases_weights(file: Path) -> None:
    """Its own files are its source; the base is as the file has it, draft and all."""
    reading = read(file, ADAPTED % ("base", '"hub:a/pirate@v2"'))
    assert not reading.problems
    pirate = reading.catalog.resolve("arr").spec
    assert isinstance(pirate, ChatSpec)
    assert pirate.source == pirate.adapter == HubSource("a/pirate", "v2")
    assert pirate.base_spec is reading.catalog.by_id("base")
    assert pirate.base_spec is not None
    assert pirate.base_spec.draft_spec is not None


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("bas", "no model has the id 'bas'; did you mean 'base'?"),
        ("pirate", "a model cannot be its own base"),
        ("other", "other has a base of its own, so it cannot be one"),
        ("fused", "fused has `fuse_projections`, which adapters do not fit"),
        ("shared", "shared has `parallel`, but adapters cannot be divided"),
        ("encoder", "encoder is of kind embedding, but a base must be a chat model"),
    ],
)
def test_a_base_that_cannot_be_one_is_refused_by_name(file: Path, base: str, problem: str) -> None:
    [found] = read(file, ADAPTED % (base, '"hub:a/pirate"')).problems
    assert f"models.yaml:4: pirate: `base`: {problem}" in found


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ('base: b, adapter: "hub:../x"', "'hub:../x' should read hub:org/name"),
        ("base: b, adapter: owner/name", "`adapter`: 'owner/name' is no source"),
        ('base: b, adapter: "path:x.gguf"', "must be a folder as mlx-lm writes it, not GGUF"),
        ('base: b, adapter: "path:nowhere"', "there is no folder"),
        ("base: b", "`base` needs `adapter` beside it"),
        ('adapter: "hub:a/x"', "`adapter` needs `base` beside it"),
        (
            'base: b, adapter: "hub:a/x", source: "hub:a/y"',
            "an adapter uses its base's weights, and has no `source`",
        ),
        ('base: b, adapter: "hub:a/x", dtype: float16', "`dtype` can only be set for the base"),
        ('base: b, adapter: "hub:a/x", batching: off', "`batching` can only be set for the base"),
        ('base: b, adapter: "hub:a/x", kv_bits: 8', "`kv_bits` can only be set for the base"),
        ('base: b, adapter: "hub:a/x", draft: b', "`draft` can only be set for the base"),
        (
            'base: b, adapter: "hub:a/x", adaptor: 1',
            "unknown key 'adaptor'; did you mean 'adapter'?",
        ),
    ],
)
def test_what_is_wrong_with_an_adapters_entry_is_one_problem(
    file: Path, entry: str, problem: str
) -> None:
    text = "version: 1\nmodels:\n  b: {kind: chat, source: 'hub:a/b'}\n"
    [found] = read(file, f"{text}  a: {{kind: chat, {entry}}}\n").problems
    assert problem in found
    assert ":4: a: " in found


def test_an_adapter_is_loaded_anew_if_its_base_is_another(file: Path) -> None:
    text = ADAPTED % ("base", '"hub:a/pirate"')
    first = read(file, text).catalog
    for old, new, changed in (
        ("hub:a/base", "hub:a/base2", ("pirate", "base", "other")),
        ("hub:a/pirate", "hub:a/pirate2", ("pirate",)),
        ("temperature: 0", "temperature: 1", ()),
    ):
        assert read(file, text.replace(old, new)).catalog.changes_since(first).changed == changed
