"""The series that the expressions of the board and of the alerts ask for."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
BOARD: dict[str, Any] = json.loads((FOLDER / "grafana" / "dashboard.json").read_text("utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ALERTS = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]


def filled(expression: str) -> str:
    """Put values in the place of Grafana's variables."""
    expression = expression.replace("$__rate_interval", "1m")
    for variable in BOARD["templating"]["list"]:
        expression = expression.replace(f"${variable['name']}", variable.get("allValue", ""))
    assert "$" not in expression.replace('$"', '"'), expression
    return expression


EXPRESSIONS = {
    **{
        f"{panel['title']} {target['refId']}": filled(target["expr"])
        for panel in PANELS
        for target in panel["targets"]
    },
    **{rule["alert"]: rule["expr"] for rule in ALERTS},
}


@dataclass(frozen=True)
class Wanted:
    """Series that an expression selects, and the labels that it groups them by."""

    name: str
    selector: str
    labels: frozenset[str]


def wanted(expression: str) -> Iterator[Wanted]:
    """List the series that an expression selects. Raises ValueError for one that cannot be read."""
    yield from _wanted(promql_parser.parse(expression), frozenset())


def _wanted(node: Any, labels: frozenset[str]) -> Iterator[Wanted]:
    match node:
        case promql_parser.VectorSelector():
            bare = str(node.prettify()).partition(" offset ")[0]
            named = {matcher.name for matcher in node.matchers.matchers}
            yield Wanted(str(node.name), bare, labels | named)
        case promql_parser.MatrixSelector():
            yield from _wanted(node.vector_selector, labels)
        case promql_parser.AggregateExpr():
            by = node.modifier.labels if node.modifier else []
            yield from _wanted(node.expr, labels | set(by))
        case promql_parser.BinaryExpr():
            yield from _wanted(node.lhs, labels)
            yield from _wanted(node.rhs, labels)
        case promql_parser.Call():
            for argument in node.args:
                yield from _wanted(argument, labels)
        case promql_parser.ParenExpr():
            yield from _wanted(node.expr, labels)
        case _:
            assert isinstance(node, promql_parser.NumberLiteral), node
