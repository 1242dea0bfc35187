"""Finds a gateway for a tool: the one at the settings' address, or else a new one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from gateway import logs
from gateway.app.named import name_nearest
from gateway.cli import lazy
from gateway.cli.agents import Offer
from gateway.cli.local_key import list_addresses, read_key
from gateway.cli.progress import LINE_S, loading
from gateway.cli.serve import ANYWHERE
from gateway.errors import GatewayError
from gateway.registry import Catalog, ChatSpec, HubSource, ModelSpec
from gateway.settings import Settings, with_port

ASK_S = 5
LOAD_S = 3600  # seconds for a load, which may download the model
NO_ADMIN = """\
{url} lets nobody {action} a model by the key that this command has: set GATEWAY_ADMIN_KEY to the
gateway's. If the gateway has none, stop it and run:
  export GATEWAY_ADMIN_KEY="$(openssl rand -hex 24)"
  mlx-gateway serve"""
POLL_S = 0.1
STOP_S = 15  # seconds after the drain until a gateway is killed
LAST_LINES = 5

# A proxy would get even requests to this machine, so none is used.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoGateway(Exception):
    """Raised if no gateway can be used. The message gives the reason and the next step."""


def first_key(settings: Settings) -> str | None:
    return settings.api_keys[0].get_secret_value() if settings.api_keys else None


def address(settings: Settings) -> str | None:
    """Return the URL of a gateway with these settings; None if its port is not known."""
    for bind in settings.binds:
        host, _, port = bind.rpartition(":")
        host = host.strip("[]")
        if "://" in bind or bind.startswith("unix:") or port == "0":
            continue
        return f"{settings.scheme}://{with_port(ANYWHERE.get(host, host), int(port))}"
    return None


def find(settings: Settings) -> str | None:
    """Return the URL of a running gateway, ready or not; None if there is none."""
    return next(_answering(address(settings)), None)


def find_all(settings: Settings) -> list[str]:
    """Return the URLs of the running gateway and of this user's others on loopback."""
    others = (f"{settings.scheme}://{each}" for each in list_addresses())
    return [*_answering(address(settings), *others)]


def _answering(*urls: str | None) -> Iterator[str]:
    for url in filter(None, dict.fromkeys(urls)):
        _, answer = _ask(url, "/")
        if isinstance(answer, dict) and answer.get("name") == "mlx-gateway":
            yield url


def require_running(settings: Settings, port: int | None = None, option: str = "--port") -> str:
    """Return the URL of the running gateway. Raises NoGateway, with the command for this port."""
    url, where = find(settings), address(settings) or "a known port"
    if url is None:
        step = "mlx-gateway serve" + (f" --port {port}" if port else "")
        raise NoGateway(f"No gateway answers at {where}. Name its {option}, or run:\n  {step}")
    return url


def list_running(url: str, settings: Settings) -> list[dict[str, Any]]:
    """Return a running gateway's list of models. Raises NoGateway if it lists none."""
    status, answer = _ask(url, "/v1/models", first_key(settings))
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise NoGateway(f"{url} refuses us ({status}). Set GATEWAY_API_KEYS to one of its keys.")
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        raise NoGateway(f"{url}/v1/models does not list its models (status {status}).")
    models: list[dict[str, Any]] = answer["data"]
    return models


def list_offers(url: str, settings: Settings, catalog: Catalog) -> list[Offer]:
    """Return a running gateway's models. Raises NoGateway if it lists none."""
    offers = []
    for model in list_running(url, settings):
        # Both fields are null for a model that is not on the gateway's disk.
        context, modalities = model.get("max_model_len"), model.get("input_modalities")
        offer = Offer(model["id"], model["root"], model["kind"], context, modalities or ("text",))
        spec = catalog.by_id(offer.id)
        offers.append(_explain(offer, spec, is_here=modalities is not None))
    return offers


def manage(url: str, settings: Settings, model: str, action: Literal["load", "unload"]) -> bool:
    """Load or unload a model of a running gateway, however long a load takes. Raises NoGateway.

    Return False if the model will be unloaded later, when its requests end.
    """
    url = url.replace("//localhost:", "//127.0.0.1:")  # the address that `read_key` knows
    key = settings.admin_key.get_secret_value() if settings.admin_key else read_key(url)
    path, due = f"/admin/models/{quote(model, safe='')}/{action}", 0.0
    while True:
        status, answer = _ask(url, path, key, method="POST", timeout_s=LOAD_S)
        if status in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            return status == HTTPStatus.OK
        error = (answer or {}).get("error", {})
        if error.get("code") != "model_loading":
            break
        if time.monotonic() >= due:
            print(
                logs.one_line(error["message"]).removesuffix(" Try again shortly."), file=sys.stderr
            )
            due = time.monotonic() + LINE_S
        time.sleep(POLL_S)
    if status == HTTPStatus.UNAUTHORIZED or error.get("code") == "unknown_url":
        raise NoGateway(NO_ADMIN.format(url=url, action=action))
    if error.get("code") == "model_not_found" and "/" not in model:
        names, words = list[str](), ("load", "list") if action == "load" else ("stop", "ps")
        with contextlib.suppress(NoGateway):  # without an API key, no names are known
            names = [each["id"] for each in list_running(url, settings)]
        raise NoGateway(f"{url} has no model {model!r}. {name_nearest(model, names, *words)}")
    raise NoGateway(error.get("message", f"{url} gave no answer (status {status})."))


def catalog_offers(catalog: Catalog, settings: Settings) -> list[Offer]:
    hub, offers = lazy.hub_of(settings, may_download=False), []
    for name, spec in ((model.name, model.spec) for model in catalog):
        # Reading other models' files would import mlx, and tools use only chat models.
        inputs = lazy.inputs.read_inputs(spec, hub) if isinstance(spec, ChatSpec) else None
        context = None if inputs is None else inputs.max_tokens
        offer = Offer(name, spec.id, spec.kind, context, spec.input_modalities)
        offers.append(_explain(offer, spec, is_here=inputs is not None))
    return offers


def _explain(offer: Offer, spec: ModelSpec | None, *, is_here: bool) -> Offer:
    """Return an offer with the reason to show if the model's context is not known.

    `spec` is None for a model that only the running gateway has.
    """
    if is_here:
        lack = "its files state no context (set `max_context:`), or cannot be read"
        return replace(offer, lack=lack, can_pull=False)
    whole = spec.base_spec or spec if isinstance(spec, ChatSpec) else spec
    if whole is not None and isinstance(whole.source, HubSource):
        return offer
    lack = offer.lack if whole is None else f"its files are not there: {whole.source}"
    return replace(offer, lack=lack, can_pull=False)


def kept_tokens(model: str, catalog: Catalog, settings: Settings) -> int | None:
    """Estimate the tokens of a prompt that fit into a model's prefix cache; None if unknown."""
    spec = catalog.by_id(model)
    if not isinstance(spec, ChatSpec):
        return None
    whole = spec.base_spec or spec
    try:
        files = lazy.hub.on_disk(whole, lazy.hub_of(settings, may_download=False))
        return None if files is None else lazy.count_kept(whole, files, settings)
    except (GatewayError, ValueError):  # the error is reported when the model is loaded
        return None


def wait_ready(url: str) -> None:
    """Wait until a running gateway is ready. Raises NoGateway if it stops answering."""
    while True:
        status, _ = _ask(url, "/ready")
        if status == HTTPStatus.OK:
            return
        if status is None:
            raise NoGateway(f"The gateway at {url} no longer answers.")
        time.sleep(POLL_S)


class Started:
    """A gateway in a separate process, which logs to a file."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.url = ""
        self._drain_s = settings.drain_s
        self._log = folder / "gateway.log"
        file, command = settings.models_file, [sys.executable, "-m", "gateway", "serve"]
        command += ["--models", str(file)] if file else []
        command += settings.serve
        with self._log.open("wb") as output:
            # Ctrl-C must only reach the tool, so the gateway has a separate session.
            self._process = subprocess.Popen(
                command,
                env=os.environ | _ALONE,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        while not self.url or _ask(self.url, "/ready")[0] != HTTPStatus.OK:
            self.require_alive()
            match = re.search(r'"url":"([^"]+)"', self._log.read_text(errors="replace"))
            if match:
                self.url = match[1]
            time.sleep(POLL_S)

    def require_alive(self) -> None:
        """Raise NoGateway if the gateway has ended."""
        status = self._process.poll()
        if status is not None:
            lines = self._log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise NoGateway("\n".join((f"The gateway ended with status {status}.", *lines)))

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(self._drain_s + STOP_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


_ALONE: Mapping[str, str] = {
    "GATEWAY_BIND": "127.0.0.1:0",
    "GATEWAY_LOG_FORMAT": "json",  # the gateway's address is read from these logs
    "GATEWAY_LOG_LEVEL": "info",
}


@contextlib.contextmanager
def started(
    settings: Settings,
    deferred: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Started]:
    """Start a gateway on a free port of this machine, and stop it at exit."""
    if settings.tls_cert:
        raise NoGateway(
            f"No gateway answers at {address(settings)}, and clients would not trust a new one "
            "with this certificate. Run `mlx-gateway serve` at the certificate's address."
        )
    with contextlib.ExitStack() as stack:
        # Defer signals: an exception here would leave the process or the folder behind.
        with deferred():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mlx-gateway-"))
            gateway = Started(settings, Path(folder))
            stack.callback(gateway.stop)
        with loading(" ".join(settings.serve) or "models"):
            gateway.wait_ready()
        yield gateway


@contextlib.contextmanager
def reached(
    found: str | None,
    settings: Settings,
    deferred: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[str]:
    """Yield the URL of the running gateway once it is ready, or of a new one. Raises NoGateway."""
    if found is not None:
        if _ask(found, "/ready")[0] != HTTPStatus.OK:
            print(f"Waiting until the gateway at {found} is ready…", file=sys.stderr)
        wait_ready(found)
        yield found
        return
    print("Starting a gateway…", file=sys.stderr)
    with started(settings, deferred) as gateway:
        yield gateway.url
        try:  # the gateway may have ended meanwhile
            gateway.require_alive()
        except NoGateway as error:
            print(error, file=sys.stderr)


def _ask(
    url: str, path: str, key: str | None = None, *, method: str = "GET", timeout_s: float = ASK_S
) -> tuple[int | None, Any]:
    request = urllib.request.Request(url + path, method=method)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with DIRECTLY.open(request, timeout=timeout_s) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    except (OSError, HTTPException, ValueError):
        return None, None
    try:
        return status, json.loads(body)
    except ValueError:
        return status, None
