"""The generated tables of the docs: `make docs` writes them, test_readme compares them."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import Endpoint, template
from gateway.app.limits import budget_bytes
from gateway.cli.recommend import GIB, Fit, fits, machine_with, order, working_set
from gateway.engine.answers.reasoning import REASONING_FORMATS, ReasoningFormat
from gateway.engine.answers.tool_formats import TOOL_FORMATS, ToolFormat
from gateway.logs import human_bytes
from gateway.registry.names import REASONING_PARSERS, TOOL_PARSERS
from gateway.registry.schema import describe_fields
from gateway.settings import Settings, variable
from gateway.settings.sources import in_words
from gateway.wire.validation import Request as WireRequest

DEFAULTS = {  # these defaults are worked out
    "models": "`models.yaml` here, else the packaged one",
    "cache_max_bytes": "three quarters of what the device offers",
}
GROUPS = {  # headings of docs/settings.md, each before this setting
    "models": "Which models",
    "host": "Addresses",
    "api_keys": "Callers",
    "log_level": "Log lines",
    "device": "The device and the hub",
    "cache_max_models": "Memory and loading",
    "responses_kept": "Kept responses",
    "mlx_cache_limit_bytes": "MLX's memory",
    "embedding_max_batch_size": "Embeddings in a batch",
    "generation_max_batch_size": "Answers in a batch, and kept prompts",
    "structured_rows": "Structured output",
    "lane_weight_embedding": "Shares of the device, and queues",
    "max_body_bytes": "Limits of a request",
    "requests_per_minute": "Rates",
    "request_timeout_s": "Deadlines and stalls",
}
DOCS = Path(__file__).parents[1] / "docs"
MEMORIES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # GB, of a Mac
MACS = (8, 16, 32, 64, 128)
Form = TypeVar("Form", ToolFormat, ReasoningFormat)
NAMED = 6  # models in a cell


def endpoints_table(endpoints: Iterable[Endpoint]) -> str:
    """Return the table of endpoints in docs/api.md."""
    rows = ["| Endpoint | What it does |", "| --- | --- |"]
    for endpoint in endpoints:
        paths = filter(None, (endpoint.path, endpoint.also))
        cell = ", ".join(f"`{endpoint.method} {template(path)}`" for path in paths)
        words = f"{endpoint.summary}. {endpoint.details}".strip()
        rows.append(f"| {cell} | {words} |")
    return "\n".join(rows)


def fields_table(endpoints: Iterable[Endpoint]) -> str:
    """Return the table of request fields in docs/api.md."""
    rows = ["| Endpoint | Honoured | Accepted, without effect | Refused with 400 |"]
    rows.append("| --- | --- | --- | --- |")
    first: dict[type[WireRequest], str] = {}
    for endpoint in endpoints:
        name = f"`{endpoint.method} {endpoint.path}`"
        if endpoint.request is not None:
            first.setdefault(endpoint.request, name)
        if endpoint.form is not None:
            first.setdefault(endpoint.form.request, f"{name} {endpoint.form.name}")
    for request, name in first.items():
        columns = (request.served_fields(), sorted(request.harmless), list(request.refused))
        cells = [" ".join(f"`{field}`" for field in fields) for fields in columns]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def environment_table() -> str:
    """Render every variable in the Markdown tables of docs/settings.md, one for each group."""
    words = describe_fields(Settings)
    properties: dict[str, dict[str, Any]] = Settings.model_json_schema()["properties"]
    assert {*GROUPS} <= {*properties}
    lines: list[str] = []
    for name, schema in properties.items():
        if name in GROUPS:
            lines += ["", f"### {GROUPS[name]}", ""]
            lines += ["| Variable | Type | Default | What it does |", "| --- | --- | --- | --- |"]
        default = DEFAULTS.get(name) or _default(schema)
        cells = (f"`{variable(name)}`", _type(schema), default, words[name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _type(schema: Mapping[str, Any]) -> str:
    options = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    if len(options) > 1:
        return " or ".join(_type(each) for each in options)
    one: Mapping[str, Any] = options[0]
    if "const" in one:
        return f"`{one['const']}`"
    if "enum" in one:
        return ", ".join(f"`{each}`" for each in one["enum"])
    if one["type"] == "array":
        return "list, with commas" if one["items"].get("format") != "password" else "secrets"
    if one.get("format") in ("path", "file-path"):
        return "path"
    names = {"integer": "integer", "number": "number", "boolean": "boolean", "string": "text"}
    return names[one["type"]] + _bounds(one)


def _bounds(schema: Mapping[str, Any]) -> str:
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    parts = [
        f"≥ {low:,}" if low is not None else "",
        f"> {above:,}" if above is not None else "",
        f"≤ {high:,}" if high is not None else "",
    ]
    bounds = ", ".join(part for part in parts if part)
    return f" {bounds}" if bounds else ""


def _default(schema: Mapping[str, Any]) -> str:
    text = in_words(schema.get("default"))
    return f"`{text}`" if text else ""


def memory_table() -> str:
    """Return the table of docs/models.md: the models that fit a Mac with this memory."""
    settings = Settings(_env_file=None, cache_max_bytes=None)  # type: ignore[call-arg]
    rows = ["| Memory | Models may take | Fit with all their context | Fit with less |"]
    rows.append("| --- | --- | --- | --- |")
    for memory in MEMORIES:
        offered = working_set(memory * GIB)
        chats = [fit for fit in fits(offered, settings) if fit.kind == "chat" and fit.context]
        whole = _names([fit for fit in chats if fit.is_whole])
        cut = _names([fit for fit in chats if not fit.is_whole])
        budget = human_bytes(budget_bytes(settings, offered))
        rows.append(f"| {memory} GB | {budget} | {whole} | {cut} |")
    return "\n".join(rows)


def macs_table() -> str:
    """Return the table of docs/faq.md: the models to take for a Mac with this memory."""
    settings = Settings(_env_file=None, cache_max_bytes=None)  # type: ignore[call-arg]
    rows = ["| Memory | To chat | Download | Context with room | Reads images | For embeddings |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    for memory in MACS:
        machine = machine_with(working_set(memory * GIB))
        found = order(fits(machine.memory_bytes, settings), machine)
        chat, embedding = (
            next(f for f in found if f.kind == kind) for kind in ("chat", "embedding")
        )
        seeing = next((fit for fit in found if fit.kind == "chat" and fit.sees), chat)
        other = "" if chat.sees or not seeing.sees else f"; for images `{seeing.name}`"
        size, context = human_bytes(chat.weights_bytes), (chat.context or 0) // 1024
        rows.append(
            f"| {memory} GB | `{chat.name}`{other} | {size} | {context}k tokens "
            f"| {'yes' if chat.sees else 'no'} | `{embedding.name}` |"
        )
    return "\n".join(rows)


def _names(fits: list[Fit]) -> str:
    names = [
        f"{fit.name}{'' if fit.is_whole else f' ({(fit.context or 0) // 1024}k)'}" for fit in fits
    ]
    return ", ".join([*names[:NAMED], *(["…"] if names[NAMED:] else [])])


def tools_table() -> str:
    """Return the table of docs/tools.md: how each family's calls are read, by all its names."""
    rows = [
        f"| {_all_names(tools.name, TOOL_PARSERS)} | {tools.models} |"
        for tools in _by_models(TOOL_FORMATS.values())
    ]
    return "\n".join(["| `tool_parser` | Models |", "| --- | --- |", *rows])


def reasoning_table() -> str:
    """Return the table of docs/tools.md: the marks of thinking, by all names of each."""
    rows = ["| `reasoning_parser` | Models | Marks |", "| --- | --- | --- |"]
    for thinking in _by_models(REASONING_FORMATS.values()):
        pairs = zip(thinking.starts, thinking.ends, strict=True)
        marks = ", ".join(f"`{start}` … `{end}`" for start, end in pairs).replace("|", "\\|")
        names = _all_names(thinking.name, REASONING_PARSERS)
        rows.append(f"| {names} | {thinking.models} | {marks} |")
    return "\n".join(rows)


_CALL = "a call"
_RESULT = "the result of a call; without a name if the call is not there"
# The types of an earlier turn's blocks or items, and the model's reading of each, by protocol.
READ_AS: Mapping[str, Mapping[str, str]] = {
    "Messages": {
        "text": "its text",
        "document": "its text, after title and context",
        "search_result": "its text, after title and source",
        "thinking": "thoughts of its turn",
        "redacted_thinking": "nothing, as nobody can read it",
        "tool_use": _CALL,
        "tool_result": _RESULT,
        "tool_reference": "the tool's name, in a result",
        "compaction": "its text, in the user's turn before",
    },
    "Responses": {
        "message": "its text",
        "reasoning": "thoughts of its turn: its content, else its summary",
        "function_call": _CALL,
        "custom_tool_call": "a call with the argument `input`",
        "local_shell_call": "a call of `local_shell` with its action as arguments",
        "apply_patch_call": "a call of `apply_patch` with its operation as arguments",
        "function_call_output": _RESULT,
        "custom_tool_call_output": _RESULT,
        "local_shell_call_output": _RESULT,
        "apply_patch_call_output": _RESULT,
        "item_reference": "the stored item with its id",
    },
}
# Some of those that are skipped, as all others are.
SKIPPED: Mapping[str, frozenset[str]] = {
    "Messages": frozenset(
        {
            *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result"),
            *("code_execution_tool_result", "bash_code_execution_tool_result"),
            *("text_editor_code_execution_tool_result", "tool_search_tool_result"),
            *("advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "mcp_tool_listing"),
            *("container_upload", "tool_addition", "tool_removal", "fallback"),
        }
    ),
    "Responses": frozenset(
        {
            *("web_search_call", "file_search_call", "image_generation_call", "computer_call"),
            *("code_interpreter_call", "computer_call_output", "shell_call", "shell_call_output"),
            *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
            *("tool_search_call", "tool_search_output", "additional_tools", "program"),
            *("program_output", "compaction", "compaction_summary", "compaction_trigger"),
            *("configuration_update", "ghost_snapshot"),
        }
    ),
}


def history_table() -> str:
    """Return the table of docs/tools.md: the parts of earlier turns read in each protocol."""
    rows = ["| Protocol | Block or item | The model reads |", "| --- | --- | --- |"]
    for protocol, types in READ_AS.items():
        by_words: dict[str, list[str]] = {}
        for kind, words in types.items():
            by_words.setdefault(words, []).append(f"`{kind}`")
        rows += [
            f"| {protocol} | {' '.join(names)} | {words} |" for words, names in by_words.items()
        ]
        skipped = " ".join(f"`{kind}`" for kind in sorted(SKIPPED[protocol]))
        rows.append(
            f"| {protocol} | {skipped} and types that nobody knows | nothing: skipped, named |"
        )
    return "\n".join(rows)


def _by_models(forms: Iterable[Form]) -> list[Form]:
    return sorted(forms, key=lambda form: (form.name == "none", form.models.casefold()))


def _all_names(name: str, parsers: Mapping[str, tuple[str, ...]]) -> str:
    others = ", ".join(f"`{other}`" for other in parsers[name])
    return f"`{name}`{f' ({others})' if others else ''}"


TABLES: dict[str, tuple[Path, Callable[[], str]]] = {
    "settings": (DOCS / "settings.md", environment_table),
    "endpoints": (DOCS / "api.md", lambda: endpoints_table(ENDPOINTS)),
    "memory": (DOCS / "models.md", memory_table),
    "macs": (DOCS / "faq.md", macs_table),
    "fields": (DOCS / "api.md", lambda: fields_table(ENDPOINTS)),
    "tools": (DOCS / "tools.md", tools_table),
    "reasoning": (DOCS / "tools.md", reasoning_table),
    "history": (DOCS / "tools.md", history_table),
}


def generated(name: str) -> tuple[Path, str, str]:
    """Return the page of a table, its text as it is, and its text as it should be."""
    page, table = TABLES[name]
    text = page.read_text(encoding="utf-8")
    before, mark, rest = re.split(rf"(<!-- {name}:[^>]*-->\n)", text)
    _, after = rest.split(f"<!-- /{name} -->")
    return page, text, f"{before}{mark}{table().strip()}\n<!-- /{name} -->{after}"


if __name__ == "__main__":
    for name in TABLES:
        page, _, new = generated(name)
        page.write_text(new, encoding="utf-8")
