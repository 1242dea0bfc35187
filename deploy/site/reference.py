"""The API's reference as pages of the site, from the document that the gateway serves.

`python -m deploy.site.reference FOLDER` writes two pages and the document itself.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.api.endpoints import ENDPOINTS
from gateway.api.openapi import document, template
from gateway.api.requests import Exposure
from gateway.registry import read_models

ROOT = Path(__file__).parents[2]
ENDPOINTS_PAGE = "api-endpoints.md"
TYPES_PAGE = "api-types.md"
DOCUMENT = "openapi.json"
BOUNDS = {
    "minimum": "≥ {:,}",
    "exclusiveMinimum": "> {:,}",
    "maximum": "≤ {:,}",
    "exclusiveMaximum": "< {:,}",
    "minLength": "{:,} characters or more",
    "maxLength": "up to {:,} characters",
    "minItems": "{:,} items or more",
    "maxItems": "up to {:,} items",
    "maxProperties": "up to {:,} keys",
    "pattern": "matches `{}`",
}
Schema = Mapping[str, Any]


def write(folder: Path) -> None:
    """Write the document of a gateway that serves all it can, and its two pages."""
    everything = Exposure(has_keys=True, has_admin=True, has_dashboard=True)
    catalog = read_models(ROOT / "models.yaml", {}).catalog
    assert catalog is not None, "models.yaml cannot be served"
    told = document(catalog, ENDPOINTS, everything, strict=False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ENDPOINTS_PAGE).write_text(endpoints_page(told), encoding="utf-8")
    (folder / TYPES_PAGE).write_text(types_page(told), encoding="utf-8")
    (folder / DOCUMENT).write_text(json.dumps(told, indent=1), encoding="utf-8")


def endpoints_page(told: Schema) -> str:
    """Render every operation: its key, parameters, body and answers."""
    lines = [
        "# Endpoints of the API",
        "",
        f"Made from the document that the gateway serves as `/openapi.json`, of version "
        f"{told['info']['version']}; [this one]({DOCUMENT}) has all that a gateway can serve. "
        "Paths with `/v1` are served without it too. What the fields do is in [the API](api.md).",
    ]
    for endpoint in ENDPOINTS:
        operation = told["paths"][template(endpoint.bare_path)][endpoint.method.lower()]
        lines += ["", f"## {endpoint.method} {template(endpoint.path)}", "", *_operation(operation)]
        if endpoint.also is not None:
            lines += ["", f"The same is served as `{endpoint.method} {endpoint.also}`."]
    return "\n".join(lines) + "\n"


def types_page(told: Schema) -> str:
    """Render every type: a table of its fields, or what it is one of."""
    lines = [
        "# Types of the API",
        "",
        "In requests, null counts as absent.",
    ]
    for name, schema in sorted(told["components"]["schemas"].items()):
        lines += ["", f"## {name}", "", schema.get("description", ""), ""]
        if "properties" in schema:
            lines += _fields(schema)
        else:
            lines.append(f"{in_words(schema)}.")
    return "\n".join(lines) + "\n"


def in_words(schema: Schema) -> str:
    """Return a field's type as Markdown, with its bounds; types of the document are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}]({TYPES_PAGE}#{name.lower()})"
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(schema.get("type"), list):
        options = [{**schema, "type": each} for each in schema["type"]]
    if options:
        return " or ".join(dict.fromkeys(map(in_words, options)))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    words: str = schema.get("type", "anything")
    if words == "array":
        words = f"list of {in_words(schema.get('items', {}))}"
    elif words == "object" and schema.get("additionalProperties"):
        values = schema["additionalProperties"]
        words = "object" if values is True else f"object of {in_words(values)}"
    bounds = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    return words + (f" ({', '.join(bounds)})" if bounds else "")


def _operation(operation: Schema) -> Iterator[str]:
    words = f"{operation['summary']}. {operation.get('description', '')}".strip()
    yield words.replace("](#", "](api.md#")  # they are written for the table there
    if operation.get("security") == []:
        yield "It needs no key."
    elif {"admin_key": []} in operation.get("security", []):
        yield "It needs the admin key."
    yield ""
    for parameter in operation.get("parameters", ()):
        words = f"{in_words(parameter['schema'])}. {parameter.get('description', '')}"
        yield f"- `{parameter['name']}`, in the {parameter['in']}: {words}".strip()
    if "requestBody" in operation:
        content = operation["requestBody"]["content"]["application/json"]
        example = json.dumps(content["example"], indent=2, ensure_ascii=False)
        yield from ("", f"Body: {in_words(content['schema'])}, such as", "")
        yield from ("```json", example, "```")
    yield from ("", "| Status | Answer |", "| --- | --- |")
    for status, response in sorted(operation["responses"].items()):
        bodies = [_body(kind, content) for kind, content in response["content"].items()]
        yield _row(f"{status} {response['description']}", "; ".join(bodies))


def _body(kind: str, content: Schema) -> str:
    schema = content.get("x-event-schema") or content.get("schema")
    words = "" if kind == "application/json" and schema else f"`{kind}`"
    return " of ".join(filter(None, (words, in_words(schema) if schema else "")))


def _fields(schema: Schema) -> Iterator[str]:
    yield from ("| Field | Type | Default | |", "| --- | --- | --- | --- |")
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else ""
        if "default" in field:
            default = f"`{json.dumps(field['default'])}`"
        words = in_words(field)
        if name not in required:
            words = words.removesuffix(" or null")  # as every such field is
        yield _row(f"`{name}`", words, default, field.get("description", ""))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write(parser.parse_args().folder)
