"""A model whose template writes calls or thoughts in a form that is not read is named, in the log
at load and in its answers.
"""

from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.app import engines
from tests.checkpoints import write_chat
from tests.cpu_engines import cpu_engines
from tests.sandboxes import SLOW
from tests.serving_app import catalog, served

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning %}<musing>{{ m.reasoning }}</musing>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}run {{ c.function | tojson }}{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
UNKNOWN = {"x-gateway-tool-format": "unknown", "x-gateway-reasoning-format": "unknown"}


async def test_what_is_not_read_is_named_unless_models_yaml_says_that_it_is_text(
    tmp_path: Path,
) -> None:
    (write_chat(tmp_path / "m") / "chat_template.jinja").write_text(TEMPLATE)
    entry = {"kind": "chat", "source": "path:m"}
    silent = {**entry, "tool_parser": "none", "reasoning_parser": "none"}
    models = {"own": entry, "named": {**entry, "tool_parser": "hermes"}, "silent": silent}
    with structlog.testing.capture_logs() as logged:
        async with served(catalog(tmp_path, models), cpu_engines()) as client:
            found = {}
            for model in models:
                body = {"model": model, **ASK, "tools": [TOOL]}
                answer = await client.post("/v1/chat/completions", json=body)
                found[model] = {key: answer.headers.get(key) for key in UNKNOWN}
            plain = await client.post("/v1/chat/completions", json={"model": "named", **ASK})
    assert found["own"] == found["named"] == UNKNOWN
    assert found["silent"] == {**UNKNOWN, "x-gateway-reasoning-format": None}
    assert "x-gateway-tool-format" not in plain.headers
    named = [(e["model"], e["hint"]) for e in logged if e["event"] == "format_unknown"]
    hints = ["set `tool_parser:`", "set `reasoning_parser:`"]
    assert named == [(model, hint) for model in ("own", "named") for hint in hints]


@pytest.mark.slow
async def test_a_template_that_is_slow_for_answers_is_tried_once_while_its_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "RENDER_S", 0.5)
    slow = f"{{% if m.role == 'assistant' %}}{SLOW}{{% endif %}}"
    template = f"{{% for m in messages %}}{{{{ m.content }}}}{slow}{{% endfor %}}"
    files = write_chat(tmp_path / "m")
    (files / "chat_template.jinja").write_text(f"{template}{{# tool_calls reasoning_content #}}")
    models = catalog(tmp_path, {"m": {"kind": "chat", "source": "path:m"}})
    with structlog.testing.capture_logs() as logged:
        async with served(models, cpu_engines()) as client:
            answer = await client.post("/v1/chat/completions", json={"model": "m", **ASK})
    assert answer.status_code == 200
    [why] = [each["why"] for each in logged if each["event"] == "template_untried"]
    assert "processor time" in why
    assert [each["event"] for each in logged].count("sandbox_killed") == 1
