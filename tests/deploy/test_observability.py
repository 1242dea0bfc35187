"""The board, the alerts and the compose file: of series that are, in a shape that Grafana reads."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.promql import ALERTS, BOARD, EXPRESSIONS, FOLDER, PANELS, wanted
from tests.fakes import ScriptedEngines
from tests.serving_app import catalog, served

COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))["services"]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
OF_PROMETHEUS = {"up"}


def unknown(expression: str, known: set[str]) -> list[str]:
    return [each.name for each in wanted(expression) if each.name not in known | OF_PROMETHEUS]


@pytest.mark.anyio
async def test_every_series_asked_for_is_one_of_the_gateways(tmp_path: Path) -> None:
    """A series that is renamed in metrics.py has to be renamed in the board and in the alerts."""
    async with served(catalog(tmp_path, {}), ScriptedEngines()) as client:
        text = (await client.get("/metrics")).text
    known = {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(text)
        for suffix in SUFFIXES.get(family.type, ())
    }
    assert unknown("sum(rate(gateway_no_such_total[5m])) / gateway_rows", known) == [
        "gateway_no_such_total"
    ]
    missing = {name: unknown(expression, known) for name, expression in EXPRESSIONS.items()}
    assert not {name: each for name, each in missing.items() if each}


def test_grafanas_own_types_hold_all_of_the_board() -> None:
    """Made from its schema: a key that this lacks would be missing after a round trip."""
    register_default_plugins()

    def read(board: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))

    assert not list(_lost(BOARD, read(BOARD), ""))
    wrong = {**BOARD, "panels": [{**PANELS[0], "dataSource": None}], "schemaVersoin": 1}
    assert list(_lost(wrong, read(wrong), "")) == [".panels[0].dataSource", ".schemaVersoin"]


def _lost(given: Any, read: Any, path: str) -> list[str]:
    """List the parts of a document that another lacks or has other values of."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            each
            for key in given
            for each in (
                _lost(given[key], read[key], f"{path}.{key}") if key in read else [f"{path}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [
            each
            for index, (mine, other) in enumerate(zip(given, read, strict=True))
            for each in _lost(mine, other, f"{path}[{index}]")
        ]
    return [] if given == read else [path]


def test_every_target_asks_the_prometheus_and_the_gateways_that_are_chosen() -> None:
    chosen = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert chosen["datasource"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["datasource"] == source
        targets = panel["targets"]
        assert targets
        assert len({target["refId"] for target in targets}) == len(targets)
        for target in targets:
            assert target["datasource"] == source
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= chosen.keys() | {
                "__rate_interval"
            }
    for name, expression in EXPRESSIONS.items():
        if name not in {rule["alert"] for rule in ALERTS}:
            assert all("instance" in each.labels for each in wanted(expression)), name


def test_the_readme_lists_every_alert() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == [rule["alert"] for rule in ALERTS]
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
    tested = (FOLDER / "alerts_test.yaml").read_text("utf-8")
    for rule in ALERTS:
        assert re.search(rf"alertname: {rule['alert']}\n +exp_alerts: \[\]", tested)
        assert re.search(rf"alertname: {rule['alert']}\n +exp_alerts:\n", tested)


def test_images_are_pinned_and_listen_on_loopback_alone() -> None:
    """Nothing is published on the host's network: the programs themselves must not be open."""
    for service in COMPOSE.values():
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        assert "ports" not in service
        assert service["network_mode"] == "host"
    assert "--web.listen-address=127.0.0.1:9090" in COMPOSE["prometheus"]["command"]
    assert COMPOSE["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    password = COMPOSE["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert password.startswith("${GRAFANA_PASSWORD:?")


def test_what_is_mounted_is_there_and_is_what_is_named_inside() -> None:
    mounts = dict(
        mount.removesuffix(":ro").split(":")
        for service in COMPOSE.values()
        for mount in service["volumes"]
    )
    files = {inside: FOLDER / outside for outside, inside in mounts.items() if "/" in outside}
    assert all(file.is_file() for file in files.values())
    assert "--config.file=/etc/prometheus/prometheus.yaml" in COMPOSE["prometheus"]["command"]
    assert "/etc/prometheus/prometheus.yaml" in files
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert files[home].name == "dashboard.json"
    provider = yaml.safe_load((FOLDER / "grafana" / "provider.yaml").read_text("utf-8"))
    assert home.startswith(provider["providers"][0]["options"]["path"])
    datasource = yaml.safe_load((FOLDER / "grafana" / "datasource.yaml").read_text("utf-8"))
    assert datasource["datasources"][0]["uid"] == BOARD["templating"]["list"][0]["current"]["value"]
