"""The facts about a machine that a bug report has, and those it leaves out."""

import json
import math
import os
from pathlib import Path

import pytest

from gateway.doctor import report
from gateway.doctor.report import Checked, Finding, Report
from gateway.registry import ChatSpec, PackageSource, PathSource


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("there is no folder /home/ada/models/x", "there is no folder /…"),
        ("path:/srv/models", "path:/…"),
        ("OSError: '/Users/ada/x.gguf': gone", "OSError: '/…': gone"),
        ("(/opt/a), [/opt/b]; ~/c", "(/…), [/…]; /…"),
        ("in /my home/x y/z it is", "in /… it is"),
        ("12 tokens/s of mlx-community/Qwen3, 1/2", "12 tokens/s of mlx-community/Qwen3, 1/2"),
        ("see https://github.com/ml-explore/mlx", "see https://github.com/ml-explore/mlx"),
        ("or a / b", "or a /… b"),
    ],
)
def test_paths_are_struck_out(text: str, without: str) -> None:
    assert report.redact_paths(text, ["/my home/x y"]) == without


def test_what_json_lacks_becomes_text() -> None:
    told = report.redact_paths({"a": [math.nan, 1.5], "b": (math.inf, None, True)}, [])
    assert json.dumps(told, allow_nan=False)
    assert told == {"a": ["nan", 1.5], "b": ["inf", None, True]}


def test_a_report_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    spec = ChatSpec(id="mine", kind="chat", source=PathSource(tmp_path))
    lost = Finding("load", "fail", f"there is no folder {tmp_path}", {"at": str(Path.home() / "x")})
    told = json.dumps(Report({"device": "cpu"}, [], [Checked(spec, [lost])]).as_json())
    for private in (str(tmp_path), str(Path.home()) + "/", os.getcwd()):
        assert private not in told
    assert json.loads(told)["models"][0]["source"] == "path:/…"


def test_only_a_failure_fails_a_report() -> None:
    spec = ChatSpec(id="mine", kind="chat", source=PathSource(Path("x")))

    def passed(*states: str) -> bool:
        found = [Finding("a", state, "") for state in states]  # type: ignore[arg-type]
        return Report({}, [], [Checked(spec, found)]).has_passed

    assert passed("ok", "skip", "warn")
    assert not passed("ok", "fail")
    assert not Report({}, [Finding("start", "fail", "")], []).has_passed


def test_a_row_of_the_table_is_one_line() -> None:
    """Answers and errors may have several, and tabs."""
    spec = ChatSpec(id="mine", kind="chat", source=PathSource(Path("x")))
    found = Finding("answer", "fail", "it says “a\n\tb”.")
    assert Report({}, [], [Checked(spec, [found])]).rows()[-1] == (
        *("mine", "answer", "fail"),
        "it says “a b”.",
    )


def test_the_block_to_paste_has_speeds_and_verdicts_and_no_name_of_ours() -> None:
    """One line of JSON; a model that came with the gateway is named, one's own is not."""
    speed = Finding("speed", "ok", "", {"tokens_per_s": {"1": 12.345, "8": 40}})
    found = [
        Finding("load", "ok", "", {"dtype": "bfloat16"}),
        Finding("answer", "fail", "in /home/ada/x it says no"),
        Finding("fused", "warn", ""),
        speed,
    ]
    own = ChatSpec(id="secret-project", kind="chat", source=PathSource(Path("/home/ada/secret")))
    board = ChatSpec(id="ada-small", kind="chat", source=PackageSource("llm_small", "m.gguf"))
    device = {"device": "metal", "device_name": "Apple M9", "memory_bytes": 32 << 30}
    machine = [Finding("start", "fail", "")]
    models = [Checked(own, found), Checked(board, [speed])]
    text = Report(device, machine, models).as_block("2026-01-02")
    assert "\n" not in text
    assert "secret" not in text
    assert "ada" not in text
    block = json.loads(text)
    assert (block["device"], block["kind"], block["memory_gib"]) == ("Apple M9", "metal", 32)
    assert (block["verdicts"], block["failed"]) == (5, 2)
    assert block["failures"] == ["machine: start", "chat: answer"]
    assert block["figures"] == {
        "tokens, own model, bfloat16, 1 stream, gateway's engine": 12.35,
        "tokens, own model, bfloat16, 8 streams, gateway's engine": 40,
        "tokens, llm_small, unknown, 1 stream, gateway's engine": 12.35,
        "tokens, llm_small, unknown, 8 streams, gateway's engine": 40,
    }
