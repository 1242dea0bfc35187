"""A model's kind is read from its files, or the refusal shows the entry that models.yaml needs."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.engine.discovery import TELLING, read_kind
from gateway.errors import ModelRefused
from tests.checkpoints import GEMMA4, write_assistant, write_chat
from tests.engine.embedding.harness import GOLDEN
from tests.gguf_files import write_model

SOURCE = "hub:org/name"


def kind(folder: Path, config: dict[str, Any], *files: str, name: str = "org/name") -> str:
    """Read the kind of a folder with this config.json and these other files, each an object."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", *files):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(json.dumps(config if file == "config.json" else {"a": 1}))
    return read_kind(folder, name, SOURCE)


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
BERT = {"model_type": "bert", "architectures": ["BertModel"]}
RANKER = {
    "model_type": "xlm-roberta",
    "architectures": ["XLMRobertaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
}


def test_each_kind_is_read_from_its_files(tmp_path: Path) -> None:
    assert kind(tmp_path / "a", QWEN3, "chat_template.jinja") == "chat"
    assert kind(tmp_path / "b", QWEN3, "modules.json", "chat_template.jinja") == "embedding"
    assert kind(tmp_path / "c", BERT, "1_Pooling/config.json") == "embedding"
    assert kind(tmp_path / "d", RANKER, "config_sentence_transformers.json") == "rerank"
    assert read_kind(write_chat(tmp_path / "e"), "mine", "path:e") == "chat"


def test_gemma_4s_drafter_is_named_as_a_draft(tmp_path: Path) -> None:
    drafter = write_assistant(tmp_path / "small", write_chat(tmp_path / "model", **GEMMA4))
    with pytest.raises(ModelRefused, match="whose `draft:` it may be") as refused:
        read_kind(drafter, "small", "path:small")
    assert '"small": {kind: chat, source: "path:small"}' in str(refused.value)


@pytest.mark.parametrize(
    "golden", ["bge-m3", "splade-bert", "colbert-bert", "colbert-pylate", "colbert-stanford"]
)
def test_sparse_and_multi_vector_models_are_embedding_models(golden: str) -> None:
    assert read_kind(GOLDEN / golden, "org/name", SOURCE) == "embedding"


@pytest.mark.parametrize(
    ("config", "files", "name", "says"),
    [
        (QWEN3, (), "org/name", "no chat template.*kind: chat, chat_template:"),
        (QWEN3, ("chat_template.jinja",), "mlx-community/Qwen3-Embedding-4B-4bit", "pooling: last"),
        (QWEN3, ("chat_template.jinja",), "org/Qwen3-Reranker-0.6B", "scoring: labels"),
        (QWEN3, ("chat_template.jinja",), "org/gte-Qwen2-7B", "kind: embedding"),
        (BERT, (), "org/name", "pooling: mean"),
        ({**RANKER, "id2label": {"0": "bad", "1": "good"}}, (), "org/name", "classifies texts"),
        ({**RANKER, "model_type": "llama"}, (), "org/name", "classifies texts"),
        (
            {**QWEN3, "architectures": ["Qwen3ForTokenClassification"]},
            ("chat_template.jinja",),
            "org/name",
            "marks words",
        ),
        ({"model_type": "whisper"}, ("chat_template.jinja",), "org/name", "no architecture"),
        ({**QWEN3, "model_file": "x.py"}, ("chat_template.jinja",), "org/name", "never run"),
        ({}, ("adapter_config.json",), "org/name", "base: …, adapter: …"),
        ({}, (), "org/name", "no config.json"),
        ([], (), "org/name", "contain a JSON object"),
    ],
)
def test_a_kind_that_files_leave_open_is_refused_with_an_entry_to_write(
    tmp_path: Path, config: Any, files: tuple[str, ...], name: str, says: str
) -> None:
    with pytest.raises(ModelRefused, match=says) as refused:
        kind(tmp_path, config, *files, name=name)
    if isinstance(config, dict):
        assert f'"{name}": {{' in str(refused.value)
        assert f'source: "{SOURCE}"}}' in str(refused.value)


def test_a_gguf_file_is_a_chat_model_if_it_has_a_template_and_no_pooling(tmp_path: Path) -> None:
    template: dict[str, Any] = {"tokenizer.chat_template": "{{ messages }}"}
    file = write_model(tmp_path / "x.gguf", **template)
    assert read_kind(file, "x", "path:x.gguf") == "chat"
    with pytest.raises(ModelRefused, match="its name says that it embeds"):
        read_kind(file, "org/Qwen3-Embedding/x.gguf", "path:x.gguf")
    unlike: list[dict[str, Any]] = [{"llama.pooling_type": 3}, {"general.architecture": "bert"}]
    for changed in unlike:
        write_model(file, **template, **changed)
        with pytest.raises(ModelRefused):
            read_kind(file, "x", "path:x.gguf")
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelRefused):
        read_kind(file, "x", "path:x.gguf")


def test_a_file_of_any_length_is_read_in_part_alone(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)  # a hole, which takes no disk
    with pytest.raises(ModelRefused, match="is longer than 8,000,000 bytes"):
        read_kind(tmp_path, "x", "path:x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
ARCHITECTURES = (["Qwen3ForCausalLM"], ["BertModel"], ["XForMaskedLM", 1])
TELLING_VALUES = ("qwen3", "bert", "\0", "..", {"0": 1}, ["BertForSequenceClassification"])
VALUES = JSON | st.sampled_from([*ARCHITECTURES, *TELLING_VALUES])
CONFIGS = JSON | st.dictionaries(
    st.sampled_from(["model_type", "architectures", "id2label", "num_labels", "chat_template"]),
    VALUES,
)
BROKEN = st.sampled_from([b"", b"{", b"\xff", b"[" * 100_000, b"1" * 10_000])
CONTENTS = CONFIGS.map(lambda value: json.dumps(value).encode()) | BROKEN


@pytest.mark.generator
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.dictionaries(st.sampled_from(TELLING), CONTENTS), st.text(max_size=20))
def test_no_files_and_no_name_do_more_than_be_refused(
    tmp_path: Path, files: dict[str, bytes], name: str
) -> None:
    for old in TELLING:
        (tmp_path / old).unlink(missing_ok=True)
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(content)
    found = None
    with contextlib.suppress(ModelRefused):
        found = read_kind(tmp_path, name, SOURCE)
    assert found in (None, "chat", "embedding", "rerank")
