"""The benchmark of structured output counts compiled schemas and accepted instances."""

import json
from pathlib import Path

import pytest

from benchmarks import structured_output

ROW = {
    "id": "a",
    "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "tests": [
        {"data": {"a": 1, "b": "more"}, "valid": True},
        {"data": {"a": "1"}, "valid": False},
        {"data": [], "valid": False},
    ],
}
REFUSED = {"id": "b", "schema": {"type": 12}, "tests": []}


def test_schemas_and_their_instances_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "schemas.jsonl"
    lines.write_text("\n".join(map(json.dumps, (ROW, REFUSED))))
    structured_output.main([str(lines), "--examples", "1"])
    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in told if " " in key} == {
        "valid instance taken": 1,
        "invalid instance refused": 2,
    }
    assert (told["schemas"], told["accepted"], told["whole"], told["refused"]) == (2, 1, 1, 1)
    assert told["p95_ms"] >= told["p50_ms"] > 0
    assert told["examples"]["refused"][0].startswith("b: ")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "c.json").write_text(json.dumps(ROW))
    assert [case.name for case in structured_output.read(folder)] == ["a"]
    assert list(structured_output.read(lines, 0)) == []
