"""The comparison with transformers: its rows, their outcomes and the table, without torch."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.architectures import DOCUMENT
from benchmarks.reference import forms, keys, table
from benchmarks.reference.__main__ import changed, run
from benchmarks.reference.rows import Gap, Results, Row, judged, part_of

FIELDS = {
    "model_type": "some",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size": 512,
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "strange": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def test_each_key_that_may_change_an_answer_is_changed_and_training_s_are_not() -> None:
    found = keys.changes(FIELDS)
    assert found[""] == keys.Change()
    assert found["hidden_act=gelu"].wanted == {"hidden_act": "gelu"}
    assert found["attention_bias=True"].wanted == {"attention_bias": True}
    assert found["sliding_window=24"].wanted == {"sliding_window": 24}
    assert found["num_experts_per_tok=3"].wanted == {"num_experts_per_tok": 3}
    assert not [name for name in found if "dropout" in name or "vocab" in name]


def test_a_key_that_is_seen_beside_others_alone_is_compared_beside_them() -> None:
    change = keys.changes(FIELDS)["layer_types=[full, slid]"]
    assert change.beside == {"sliding_window": 24}
    assert change.wanted == {
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"],
    }


def test_each_kind_of_rotation_is_a_row_and_its_own_keys_are_beside_it() -> None:
    found = keys.changes(FIELDS)
    yarn = found["rope yarn"].wanted
    assert yarn["rope_parameters"]["rope_type"] == "yarn"
    truncate = found["rope yarn, truncate"]
    assert truncate.beside == yarn
    assert truncate.wanted["rope_parameters"] == {**yarn["rope_parameters"], "truncate": False}
    assert (
        len(
            found["rope longrope, within the original context"].wanted["rope_parameters"][
                "long_factor"
            ]
        )
        == 16
    )  # two dimensions share a frequency


def test_each_layer_type_has_rotations_of_its_own() -> None:
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    found = keys.changes({**FIELDS, "rope_parameters": rope})
    for name in ("full rope linear", "full rope yarn, truncate"):
        wanted = found[name].wanted["rope_parameters"]
        assert wanted["sliding_attention"] == rope["sliding_attention"]
        assert wanted["full_attention"]["rope_theta"] == 1e6
    assert found["full rope yarn, truncate"].beside == found["full rope yarn"].wanted


def test_keys_without_another_value_are_named() -> None:
    assert keys.uncovered(FIELDS) == ["strange"]


def test_originals_say_rotations_at_the_top() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "truncate": False}
    found = forms.as_original({"model_type": "qwen3", "rope_parameters": rope}, SimpleNamespace())
    assert found == {
        "model_type": "qwen3",
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "truncate": False},
    }


def test_what_originals_have_no_keys_for_is_no_row_of_theirs() -> None:
    rope = {"full_attention": {}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(forms.NotWritten):
        forms.as_original({"model_type": "gemma3_text", "rope_parameters": rope}, SimpleNamespace())


@pytest.mark.parametrize(
    ("error", "outcome"), [(1e-5, "equal"), (1e-2, "WRONG"), (float("nan"), "WRONG")]
)
def test_a_row_is_equal_where_its_worst_position_is(error: float, outcome: str) -> None:
    reference = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    found = reference.copy()
    found[3] += np.float32(error)
    said = judged(Gap.between(reference, found), Gap.between(reference, reference))
    assert said["outcome"] == outcome
    assert said.get("first") == (None if outcome == "equal" else 3)


def test_steps_after_a_prefill_may_be_what_is_wrong() -> None:
    reference = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32)
    same, other = Gap.between(reference, reference), Gap.between(reference, -reference)
    assert judged(same, other)["outcome"] == "WRONG"


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "build" / "results.jsonl"
    first, second = Row("glm", "v5"), Row("llama", "hub", "rope yarn")
    results = Results(path)
    results.add(first, {"outcome": "WRONG"})
    results.add(second, {"outcome": "equal"})
    with path.open("a") as file:
        file.write('{"architecture": "cut sho')  # the process died there
    again = Results(path)
    assert again[first] == {"outcome": "WRONG"}
    assert again.is_wrong(first)
    assert not again.is_wrong(second)
    assert Row("llama", "v5") not in again
    again.forget(["glm"])
    later = Results(path)
    assert first not in later
    assert later[second] == {"outcome": "equal"}


def test_parts_take_each_architecture_once() -> None:
    names = ["a", "b", "c", "d", "e"]
    parts = [part_of(names, f"{n}/3") for n in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == names


def test_a_line_names_a_row() -> None:
    row = Row("llama", "v5", "rope yarn, truncate")
    assert Row(*json.loads(row.line())) == row


WRONG = {"outcome": "WRONG", "gap": 0.3468, "decode": 0.3469}
ITEMS: list[tuple[Row, dict[str, Any]]] = [
    (Row("llama", "v5"), {"outcome": "equal", "gap": 1e-6, "decode": 1e-6}),
    (Row("llama", "hub"), {"outcome": "equal", "gap": 1e-6, "decode": 1e-6}),
    (Row("llama", "v5", "mlp_bias=True"), {"outcome": "equal"}),
    (Row("llama", "hub", "mlp_bias=True"), {"outcome": "equal"}),
    (Row("llama", "v5", "hidden_act=gelu"), WRONG),
    (Row("llama", "hub", "hidden_act=gelu"), WRONG),
    (Row("llama", "v5", "rope yarn"), {"outcome": "refused"}),
    (Row("llama", "hub", "rope yarn"), WRONG),
    (Row("llama", "hub", "window=24"), {"outcome": "limited", "context": 24}),
    (Row("llama", "v5", "head_dim=64"), {"outcome": "unseen"}),
    (Row("llama", "v5", "strange=1"), {"outcome": "not made", "reason": "refused there"}),
    (Row("glm", "v5"), {"outcome": "WRONG", "gap": 1.6, "decode": 1.5}),
    (Row("glm", "hub"), {"outcome": "refused", "reason": "a reason"}),
    (Row("odd", "v5"), {"outcome": "not made", "reason": "no class"}),
]


def test_the_table_has_a_row_for_each_architecture_that_transformers_makes() -> None:
    text = table.table(table.summary(ITEMS, {"llama": ["strange"]}))
    assert (
        "| llama | equal; keys: 1 | equal; keys: 1 | hidden_act=gelu; rope yarn (hub) "
        "| rope yarn (v5) | window=24 (hub) | strange |" in text
    )
    assert "| glm | WRONG: gap 1.6 | refused |  |  |  |  |" in text
    assert "| odd |" not in text
    assert "2 architectures, 0 without a wrong row; 7 rows change a key." in text


def test_kinds_of_rotation_share_their_words() -> None:
    items: list[tuple[Row, dict[str, Any]]] = [
        (Row("llama", "v5"), {"outcome": "equal", "gap": 0.0, "decode": 0.0}),
        (Row("llama", "v5", "rope dynamic"), WRONG),
        (Row("llama", "v5", "rope yarn, truncate"), {"outcome": "throws", "reason": "why"}),
    ]
    text = table.table(table.summary(items, {}))
    assert "| llama | equal; keys: 0 |  | rope: dynamic, yarn truncate |" in text


@pytest.mark.slow
def test_a_row_that_fails_stops_no_other(tmp_path: Path) -> None:
    rows = [Row("nobody_knows", "v5"), Row("nor_this", "hub")]
    results = Results(tmp_path / "results.jsonl")
    run(rows, results, jobs=1)
    assert [results[row]["outcome"] for row in rows] == ["not made", "not made"]
    assert changed(rows, results) == []


def test_the_summary_has_each_key_by_its_outcome() -> None:
    found = table.summary(ITEMS, {"llama": ["strange"]})
    assert found["llama"]["v5"] == {
        "base": "equal",
        "equal": ["mlp_bias=True"],
        "WRONG": {"hidden_act=gelu": 0.35},
        "refused": ["rope yarn"],
        "unseen": 1,
        "not made": 1,
    }
    assert found["llama"]["hub"]["limited"] == {"window=24": 24}
    assert found["llama"]["uncovered"] == ["strange"]
    assert found["glm"]["hub"] == {"base": "refused", "reason": "a reason"}


def test_the_list_is_that_of_the_document() -> None:
    found = json.loads(table.LIST.read_text(encoding="utf-8"))
    document = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert set(table.table(found).splitlines()[2:]) <= set(document)
