"""models.yaml: what is read from it and how variables steer it."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from gateway.registry import (
    ChatSpec,
    HubSource,
    ModelSpec,
    PathSource,
    Reading,
    read_models,
)
from gateway.registry.yaml_lines import ExpansionInvalid, expand


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
    """`aliases:` and `batching:` with nothing after them are as if they weren't there."""
    spec = one(file, "kind: chat\nsource: hub:a/b\naliases:\nbatching:\nsampling: {top_k: }")
    assert spec == one(file, "kind: chat\nsource: hub:a/b")


def test_a_path_is_relative_to_the_file(file: Path) -> None:
    """Wherever the gateway is started from."""
    (file.parent / "weights").mkdir()
    assert one(file, "kind: chat\nsource: path:weights").source == PathSource(
        file.parent.resolve() / "weights"
    )


def test_a_chat_template_may_be_a_file(file: Path) -> None:
    """The spec carries the template's text either way."""
    (file.parent / "t.jinja").write_text("{{ messages }}")
    spec = one(file, "kind: chat\nsource: hub:a/b\nchat_template: file:t.jinja")
    assert isinstance(spec, ChatSpec)
    assert spec.chat_template == "{{ messages }}"
    spec = one(file, 'kind: chat\nsource: hub:a/b\nchat_template: "{{ x }}"')
    assert isinstance(spec, ChatSpec)
    assert spec.chat_template == "{{ x }}"


def test_anchors_and_merges_share_settings(file: Path) -> None:
    """YAML's own way of saying a thing once; an own key beats a merged one."""
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
        chat_template_kwargs: {n: "${N:-1}", f: !!bool "${F:-true}", m: "$$5"}""",
        {"CONTEXT": "1024", "PRELOAD": "true"},
    )
    assert isinstance(spec, ChatSpec)
    assert (spec.max_context, spec.preload, spec.dtype) == (1024, True, "auto")
    assert [alias.name for alias in spec.aliases] == ["a"]
    assert spec.chat_template_kwargs == {"n": "1", "f": True, "m": "$5"}


def test_the_variables_asked_for_are_known(file: Path) -> None:
    """`config` and the hints about strays need their names, set or not."""
    reading = read(file, "version: 1\nmodels: {m: {kind: '${A:-chat}', source: '${B:-hub:a/b}'}}")
    keys = {name for name in reading.variables if name.startswith("GATEWAY_M_")}
    assert "GATEWAY_M_MAX_CONTEXT" in keys
    assert reading.variables == {"A", "B"} | keys


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
    """As in a shell: `:-` also replaces an empty value; `$$` writes a dollar."""
    assert expand(text, {"A": "1", "EMPTY": ""})[0] == expanded


@pytest.mark.parametrize("text", ["${", "${A", "${1}", "${A-b}", "${A:-${B}}", "${A:-{}", "${}"])
def test_broken_expansions_are_refused(text: str) -> None:
    """What looks like a variable and isn't one is never passed on."""
    with pytest.raises(ExpansionInvalid, match="VAR:-default"):
        expand(text, {"A": "1"})


NAMED = """\
version: 1
models:
  shipped:
    kind: chat
    source: hub:a/b
    aliases: ${SHIPPED:-usual, own}
  other:
    kind: chat
    source: hub:a/c
    aliases: ${OTHER:-}
"""


def test_a_name_that_two_have_is_a_problem(file: Path) -> None:
    """Nor may a model have one twice, or its own id."""
    for variables in ({"SHIPPED": "x", "OTHER": "x"}, {"SHIPPED": "x, x"}):
        [problem] = read(file, NAMED, variables).problems
        assert "the alias 'x' is shipped's already, on line 6" in problem
    [problem] = read(file, NAMED.replace("own", "shipped")).problems
    assert "shipped: the alias 'shipped' is shipped's already, on line 3" in problem


def test_dates_are_text(file: Path) -> None:
    """A template's argument that looks like a date stays as written."""
    spec = one(file, "kind: chat\nsource: hub:a/b\nchat_template_kwargs: {today: 2024-01-01}")
    assert isinstance(spec, ChatSpec)
    assert spec.chat_template_kwargs == {"today": "2024-01-01"}


def test_formats_of_calls_and_thinking_are_named(file: Path) -> None:
    """By vLLM's names, each with its nearest where it is mistaken."""
    spec = one(
        file,
        "kind: chat\nsource: hub:a/b\ntool_parser: hermes\nreasoning_parser: qwen3\n"
        "split_special_tokens: true",
    )
    assert isinstance(spec, ChatSpec)
    assert (spec.tool_parser, spec.reasoning_parser) == ("hermes", "qwen3")
    assert spec.split_special_tokens
    with pytest.raises(Exception, match="mistral"):
        one(file, "kind: chat\nsource: hub:a/b\ntool_parser: mistrall")


def test_a_budget_for_thinking_is_a_number_or_one_for_each_effort(file: Path) -> None:
    """Which a variable may change."""
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
    """


@pytest.mark.parametrize(
    ("draft", "problem"),
    [
        ("smal", "no model has the id 'smal'; did you mean 'small'?"),
        ("tiny", "no model has the id 'tiny'"),
        ("large", "a model cannot be its own draft"),
        ("middle", "middle has a draft of its own, and cannot be one"),
        ("encoder", "encoder is of kind embedding, and a draft is a chat model"),
    ],
)
def test_a_draft_that_cannot_be_one_is_refused_by_name(
    file: Path, draft: str, problem: str
) -> None:
    [found] = read(file, DRAFTED % draft).problems
    assert f"models.yaml:3: large: `draft`: {problem}" in found


@pytest.mark.parametrize("divided", ["hub:a/large", "hub:a/small"])
def test_a_divided_model_neither_has_a_draft_nor_is_one(file: Path, divided: str) -> None:
    text = (DRAFTED % "small").replace(f'"{divided}"', f'"{divided}", parallel: tensor')
    found, *_ = read(file, text).problems
    assert "large: `draft`: a model with `parallel` neither has a draft nor is one" in found


def test_parallel_is_tensor_or_pipeline_of_a_chat_model_that_is_not_fused(file: Path) -> None:
    spec = one(file, "kind: chat\nsource: hub:a/b\nparallel: pipeline")
    assert isinstance(spec, ChatSpec)
    assert spec.parallel == "pipeline"
    for entry in (
        "kind: chat\nsource: hub:a/b\nparallel: data",
        "kind: embedding\nsource: hub:a/b\nparallel: tensor",
        "kind: chat\nsource: hub:a/b\nparallel: tensor\nfuse_projections: true",
    ):
        with pytest.raises(Exception, match="parallel"):
            one(file, entry)


def test_kv_bits_are_8_or_4_of_a_chat_model(file: Path) -> None:
    spec = one(file, "kind: chat\nsource: hub:a/b\nkv_bits: 4")
    assert isinstance(spec, ChatSpec)
    assert spec.kv_bits == 4
    for entry in (
        "kind: chat\nsource: hub:a/b\nkv_bits: 3",
        "kind: embedding\nsource: hub:a/b\nkv_bits: 8",
    ):
        with pytest.raises(Exception, match="kv_bits"):
            one(file, entry)


def test_a_draft_whose_entry_is_wrong_is_one_problem(file: Path) -> None:
    text = (DRAFTED % "small").replace('"hub:a/small"', "nothing")
    assert all("small: `source`" in each for each in read(file, text).problems)


def test_a_model_is_loaded_anew_if_its_draft_is_another(file: Path) -> None:
    before = read(file, DRAFTED % "small").catalog
    renamed = read(file, (DRAFTED % "small").replace("[tiny]", "[other]")).catalog
    assert renamed.changes_since(before).changed == ()
    small = '"hub:a/small", fuse_projections: true'
    fused = read(file, (DRAFTED % "small").replace('"hub:a/small"', small)).catalog
    assert fused.changes_since(before).changed == ("large", "small", "middle")
    small = '"hub:a/small", kv_bits: 8'
    fewer = read(file, (DRAFTED % "small").replace('"hub:a/small"', small)).catalog
    assert fewer.changes_since(before).changed == ("large", "small", "middle")
    moved = read(file, (DRAFTED % "small").replace("hub:a/small", "hub:b/small")).catalog
    assert moved.changes_since(before).changed == ("large", "small", "middle")
    assert read(file, DRAFTED % "null").catalog.changes_since(before).changed == ("large",)


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
        ("other", "other has a base of its own, and cannot be one"),
        ("fused", "fused has `fuse_projections`, and no adapter is of fused ones"),
        ("shared", "shared has `parallel`, and no adapter is divided"),
        ("encoder", "encoder is of kind embedding, and a base is a chat model"),
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
        ('base: b, adapter: "path:x.gguf"', "`adapter` is a folder, as mlx-lm writes it, no GGUF"),
        ('base: b, adapter: "path:nowhere"', "there is no folder"),
        ("base: b", "`base` needs `adapter` beside it"),
        ('adapter: "hub:a/x"', "`adapter` needs `base` beside it"),
        (
            'base: b, adapter: "hub:a/x", source: "hub:a/y"',
            "an adapter has its base's weights, and no `source`",
        ),
        ('base: b, adapter: "hub:a/x", dtype: float16', "`dtype` is the base's to set"),
        ('base: b, adapter: "hub:a/x", batching: off', "`batching` is the base's to set"),
        ('base: b, adapter: "hub:a/x", kv_bits: 8', "`kv_bits` is the base's to set"),
        ('base: b, adapter: "hub:a/x", draft: b', "`draft` is the base's to set"),
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


def test_an_adapter_cannot_draft(file: Path) -> None:
    text = (ADAPTED % ("base", '"hub:a/pirate"')).replace("draft: small", "draft: other")
    [found] = read(file, text).problems
    assert "base: `draft`: other is an adapter, and a draft is a model of its own" in found


def test_an_adapter_is_loaded_anew_if_its_base_is_another(file: Path) -> None:
    """Its sampling is not loaded with it."""
    text = ADAPTED % ("base", '"hub:a/pirate"')
    first = read(file, text).catalog
    changed = read(file, text.replace("hub:a/base", "hub:a/base2")).catalog
    assert changed.changes_since(first).changed == ("pirate", "base", "other")
    moved = read(file, text.replace("hub:a/pirate", "hub:a/pirate2")).catalog
    assert moved.changes_since(first).changed == ("pirate",)
    cooler = read(file, text.replace("temperature: 0", "temperature: 1")).catalog
    assert cooler.changes_since(first).changed == ()
