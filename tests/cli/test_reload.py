"""serve and SIGHUP: models.yaml is read again, while requests go on."""

import signal
import time
from pathlib import Path

import httpx2

from tests.checkpoints import write_chat
from tests.processes import command, started

MODELS = """
version: 1
models:
  tiny: {kind: chat, source: "path:tiny", preload: true}
"""


def wait_for(log: Path, event: str) -> None:
    deadline = time.monotonic() + 20
    while event not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def test_a_hangup_reads_the_models_again(tmp_path: Path) -> None:
    """A file that is wrong is logged by line, and changes nothing; a whole one is served."""
    write_chat(tmp_path / "tiny")
    file = tmp_path / "models.yaml"
    file.write_text(MODELS)
    with started(command("serve"), tmp_path) as served:
        file.write_text("version: 1\nmodels:\n  a: {kind: chta, source: 'path:.'}\n")
        served.process.send_signal(signal.SIGHUP)
        wait_for(served.log, "models.yaml:3")
        assert [each["id"] for each in listed(served.url)] == ["tiny"]
        file.write_text(MODELS.replace("{", "{aliases: small, "))
        served.process.send_signal(signal.SIGHUP)
        wait_for(served.log, '"event":"reloaded"')
        names = [(each["id"], each["state"]) for each in listed(served.url)]
        assert names == [("tiny", "loaded"), ("small", "loaded")]
        assert served.log.read_text().count('"event":"model_loaded"') == 1


def listed(url: str) -> list[dict[str, object]]:
    data: list[dict[str, object]] = httpx2.get(f"{url}/v1/models").json()["data"]
    return data
