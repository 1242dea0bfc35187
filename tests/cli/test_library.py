"""list, ps, show, load and stop: what they print, and the next step of all that they refuse."""

import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

from gateway import engine  # noqa: F401  (OpenBLAS before mlx)

# isort: split
import httpx2
import mlx.core as mx
import pytest
from anyio.from_thread import BlockingPortal
from structlog.testing import capture_logs

from gateway.app.gateway import Gateway
from gateway.cli.local_key import keep_key, read_key
from gateway.registry import read_short_names
from tests.checkpoints import AFTER_LAST, HEADED, add_head, write_chat
from tests.cli.conftest import Inside
from tests.fakes import ScriptedEngines
from tests.processes import command, environment, free_port, ran, started
from tests.serving_app import catalog, ready, served, served_app, settings

NOBODY = "1"  # a port at which nothing answers
ADMIN = {"GATEWAY_ADMIN_KEY": "sesame"}
MODELS: dict[str, dict[str, Any]] = {
    "org/writer": {"kind": "chat", "source": "path:writer", "aliases": ["w"]},
    "embedder": {"kind": "embedding", "source": "hub:org/embedder"},
}
Ran: TypeAlias = "subprocess.CompletedProcess[str]"
Run: TypeAlias = Callable[..., Ran]
Served: TypeAlias = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "writer").mkdir()
    catalog(tmp_path, MODELS)
    return tmp_path


@pytest.fixture
def run(home: Path, inside: Inside) -> Run:
    def ran(*arguments: str, port: str = NOBODY, **given: str) -> Ran:
        own = {"GATEWAY_PORT": port, "XDG_CACHE_HOME": str(home / "xdg")}
        own["GATEWAY_HUB_CACHE"] = "cache"
        return inside(home, *arguments, **{**own, **given})

    return ran


@pytest.fixture
def gateway(home: Path, portal: BlockingPortal) -> Served:
    """Give a context that serves the models, and gives the port."""

    @contextmanager
    def serving(engines: ScriptedEngines | None = None, **given: Any) -> Iterator[str]:
        app = served(catalog(home, MODELS), engines or ScriptedEngines(), **given)
        with capture_logs(), portal.wrap_async_context_manager(app) as client:
            yield port_of(client)

    return serving


def port_of(client: httpx2.AsyncClient) -> str:
    return str(client.base_url).rstrip("/").rpartition(":")[2]


def test_list_has_a_line_for_each_model(home: Path, run: Run) -> None:
    write_chat(home / "writer")
    lines = run("list").stdout.splitlines()
    assert [line.split("\t")[:3] for line in lines] == [
        ["embedder", "embedding", "no"], ["org/writer", "chat", "yes"]
    ]  # fmt: skip


def test_list_has_what_was_pulled_under_the_names_that_serve_takes(home: Path, run: Run) -> None:
    """Short names of the catalogue and the hub's; a model that is listed already is not again."""
    repos = {"qwen3-0.6b": "", "": "org/pulled", "embedder": "org/embedder"}
    repos["qwen3-0.6b"] = str(read_short_names()["qwen3-0.6b"]["source"]).partition(":")[2]
    for repo in repos.values():
        repository, _, commit = repo.partition("@")
        folder = home / "cache" / f"models--{repository.replace('/', '--')}"
        snapshot = folder / "snapshots" / (commit or "a" * 40)
        write_chat(snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(snapshot.name)
    rows = [line.split("\t")[:3] for line in run("list").stdout.splitlines()]
    assert rows == [
        ["embedder", "embedding", "yes"], ["org/writer", "chat", "no"],
        ["qwen3-0.6b", "chat", "yes"], ["org/pulled", "chat", "yes"],
    ]  # fmt: skip
    assert "org/pulled" not in run("models").stdout


def test_a_head_in_a_models_files_is_named_beside_its_size(home: Path, run: Run) -> None:
    names = ("mtp", "later", "beside", "bare", "torn", "broken")
    for name in names:
        folder = write_chat(home / name, **(AFTER_LAST if name == "later" else HEADED))
        if name != "bare":
            add_head(folder)
    catalog(home, {name: {"kind": "chat", "source": f"path:{name}"} for name in names})
    file = home / "beside" / "model.safetensors"
    weights: Any = mx.load(str(file))
    head = {name: weights.pop(name) for name in list(weights) if ".mtp." in name}
    mx.save_safetensors(str(file.with_name("mtp.safetensors")), head)
    mx.save_safetensors(str(file), weights)
    torn = home / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    (home / "broken" / "config.json").write_text("{")
    for listing in ("models", "list"):
        rows = [line.split("\t") for line in run(listing).stdout.splitlines()]
        sizes = {row[0]: row[-1] for row in rows}
        assert {*sizes} == {*names}
        headed = {name for name, size in sizes.items() if size.endswith("iB, mtp_head")}
        assert headed == {"mtp", "later", "beside"}
        assert all(sizes[name].endswith("iB") for name in {*names} - headed)
    shown = dict(line.split("\t") for line in run("show", "mtp").stdout.splitlines())
    assert shown["on disk"].endswith("iB, mtp_head")


def test_a_terminal_shows_each_model_in_a_line(home: Path) -> None:
    """The source, whose commit has 40 digits, is for scripts and for `show`."""
    commit = "a" * 40
    catalog(home, {"embedder": {"kind": "embedding", "source": f"hub:org/embedder@{commit}"}})
    given = {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1", "GATEWAY_HUB_CACHE": "cache"}
    for name in ("list", "models"):
        master, slave = pty.openpty()
        subprocess.run(command(name), cwd=home, env=environment(**given), stdout=slave, check=True)
        os.close(slave)
        shown = os.read(master, 65536).decode()
        os.close(master)
        assert "aaaaa" not in shown
        assert len([line for line in shown.splitlines() if line.strip()]) == 3


def test_show_tells_what_the_files_say(home: Path, run: Run) -> None:
    write_chat(home / "writer", max_position_embeddings=4096)
    models = {**MODELS, "org/writer": {**MODELS["org/writer"], "sampling": {"top_k": 3}}}
    catalog(home, models)
    for name in ("w", "org/writer", "./writer"):
        shown = dict(line.split("\t") for line in run("show", name).stdout.splitlines())
        assert shown["source"] == f"path:{home.resolve() / 'writer'}"
        assert shown["path"] == str(home.resolve() / "writer")
        assert shown["on disk"].startswith("yes ")
        assert (shown["context"], shown["reads"]) == ("4,096 tokens", "text")
    shown = dict(line.split("\t") for line in run("show", "w").stdout.splitlines())
    assert (shown["id"], shown["kind"], shown["aliases"]) == ("org/writer", "chat", "w")
    assert json.loads(shown["sampling"]) == {"top_k": 3}
    assert "preload" not in shown


def test_show_of_files_that_are_not_here_tells_the_entry(run: Run) -> None:
    shown = dict(line.split("\t") for line in run("show", "embedder").stdout.splitlines())
    assert shown["on disk"] == "no"
    assert "path" not in shown
    unknown = run("show", "writter")
    assert unknown.returncode == 1
    assert unknown.stderr


@pytest.mark.parametrize("arguments", [("ps",), ("load", "w"), ("stop", "w")])
def test_without_a_gateway_the_next_step_is_serve(run: Run, arguments: tuple[str, ...]) -> None:
    outcome = run(*arguments)
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr == (
        "No gateway answers at http://127.0.0.1:1. Name its --port, or run:\n  mlx-gateway serve\n"
    )
    assert "at a known port." in run(*arguments, port="0").stderr
    named = run(*arguments, "--port", "2").stderr
    assert named.endswith(
        "at http://127.0.0.1:2. Name its --port, or run:\n  mlx-gateway serve --port 2\n"
    )
    assert run(*arguments, "--port", "0").returncode == 2


def test_models_are_loaded_listed_and_unloaded_by_any_of_their_names(
    run: Run, gateway: Served
) -> None:
    with gateway(admin_key="sesame") as port:
        nothing = run("ps", port=port)
        assert (nothing.returncode, nothing.stdout) == (0, "")
        assert nothing.stderr.startswith("No model is loaded")
        for name in ("w", "org/writer", "hub:org/writer"):
            assert run("load", name, port=port, **ADMIN).stdout == f"{name[-10:]} is loaded.\n"
            (line,) = run("ps", "--port", port).stdout.splitlines()
            model, kind, state, memory, idle = line.split("\t")
            assert (model, kind, state) == ("org/writer", "chat", "loaded")
            assert re.fullmatch(r"[\d.,]+ [KMG]?i?B", memory)
            assert re.fullmatch(r"(\d:\d\d:\d\d)?", idle)
            said = run("stop", name, port=port, **ADMIN).stdout
            assert said == f"{name[-10:]} is unloaded; a later request loads it again.\n"
        assert run("ps", port=port).stdout == ""


def test_load_waits_longer_than_a_request_does(run: Run, gateway: Served) -> None:
    engines = ScriptedEngines()
    engines.load_gate.close()
    with gateway(engines, admin_key="sesame", load_wait_s=0) as port, loading(port) as load:
        assert load.stderr is not None
        assert load.stderr.readline() == "The model `org/writer` is still loading.\n"
        engines.load_gate.open()
        assert load.wait(60) == 0
        assert load.communicate() == ("w is loaded.\n", "")


def test_a_load_that_is_left_goes_on(run: Run, gateway: Served) -> None:
    engines = ScriptedEngines()
    engines.load_gate.close()
    with gateway(engines, admin_key="sesame", load_wait_s=0) as port, loading(port) as load:
        assert load.stderr is not None
        assert load.stderr.readline()
        load.send_signal(signal.SIGINT)
        assert load.wait(60) == 130
        assert load.stderr.read() == "w goes on loading; to end that:\n  mlx-gateway stop w\n"
        assert "\tloading\t" in run("ps", port=port).stdout
        engines.load_gate.open()


def test_a_terminal_shows_how_long_a_load_takes(gateway: Served) -> None:
    engines, shown = ScriptedEngines(), b""
    engines.load_gate.close()
    master, slave = pty.openpty()
    with gateway(engines, admin_key="sesame") as port, loading(port, slave) as load:
        os.close(slave)
        while not re.search(rb"Loading w .*0:00:0[1-9]", shown):
            shown += os.read(master, 4096)
        engines.load_gate.open()
        assert load.wait(60) == 0
    os.close(master)


@contextmanager
def loading(port: str, stderr: int = subprocess.PIPE) -> Iterator["subprocess.Popen[str]"]:
    own = environment(**ADMIN, GATEWAY_PORT=port, TERM="xterm")
    typed, pipe = command("load", "w"), subprocess.PIPE
    with subprocess.Popen(typed, env=own, text=True, stdout=pipe, stderr=stderr) as load:
        try:
            yield load
        finally:
            load.kill()


def test_stop_lets_requests_end(run: Run, gateway: Served) -> None:
    engines = ScriptedEngines()
    with gateway(engines, admin_key="sesame", api_keys="k", load_wait_s=0.1) as port:
        assert run("load", "w", port=port, **ADMIN).returncode == 0
        with answering(port, engines):
            stopped = run("stop", "w", port=port, **ADMIN)
    assert stopped.stdout.startswith("w will be unloaded when its requests end;")


@contextmanager
def answering(port: str, engines: ScriptedEngines) -> Iterator[None]:
    """Hold an answer under way until the context ends."""
    url, key = f"http://127.0.0.1:{port}/v1/chat/completions", {"authorization": "Bearer k"}
    question = {"model": "w", "messages": [{"role": "user", "content": "Hi"}]}
    engines.chat.gate.close()
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(httpx2.post, url, json=question, headers=key, timeout=60)
        try:
            assert engines.chat.gate.reached.wait(60)
            yield
        finally:
            engines.chat.gate.open()
    assert answer.result().status_code == 200, answer.result().text


def test_a_model_that_the_gateway_lacks_is_named(run: Run, gateway: Served) -> None:
    with gateway(admin_key="sesame") as port:
        for verb, step in (("load", "list"), ("stop", "ps")):
            unknown = run(verb, "embeder", port=port, **ADMIN)
            assert unknown.returncode == 1
            start, end = (
                f"http://127.0.0.1:{port} has no model",
                f"Run `mlx-gateway {verb} embedder`.",
            )
            assert unknown.stderr == f"{start} 'embeder'. Nearest: embedder. {end}\n"
            unknown = run(verb, "xyzzy", port=port, **ADMIN)
            assert unknown.stderr == f"{start} 'xyzzy'. Run `mlx-gateway {step}`.\n"


def test_what_a_gateway_writes_reaches_no_terminal_as_a_command(run: Run) -> None:
    """Names and errors may come from another program at the port."""
    evil = "x\x1b]52;c;cm0=\x07\x9b2J"
    model = {"id": evil, "root": evil, "kind": "chat", "state": "loaded", "last_used": 1}
    models = {"data": [{**model, "bytes": 1}]}
    answers = {"/": {"name": "mlx-gateway"}, "/v1/models": models}
    with answered(answers, {"error": {"message": evil}}) as port:
        for outcome in (run("ps", port=port), run("load", "w", port=port, **ADMIN)):
            assert outcome.stdout + outcome.stderr
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", outcome.stdout + outcome.stderr)
        assert r"x\x1b]52;c;cm0=\x07\x9b2J" in run("ps", port=port).stdout
        assert run("load", "w", port=port, **ADMIN).stderr == r"x\x1b]52;c;cm0=\x07\x9b2J" + "\n"


@contextmanager
def answered(answers: Mapping[str, Any], otherwise: Any) -> Iterator[str]:
    """Answer GET requests by their paths, and others with a 400; give the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, answers[self.path])

        def do_POST(self) -> None:
            self.answer(400, otherwise)

        def answer(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield str(server.server_port)
        finally:
            server.shutdown()


def test_stop_ends_no_gateway(run: Run, gateway: Served) -> None:
    with gateway(admin_key="sesame") as port:
        outcome = run("stop", port=port, **ADMIN)
        assert outcome.returncode == 2
        assert "Missing argument" in outcome.stderr
        assert "press Ctrl-C where it runs" in run("stop", "-h").stdout
        assert run("ps", port=port).returncode == 0


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_the_admin_key_the_refusal_has_the_next_step(
    run: Run, gateway: Served, key: str | None
) -> None:
    own = {} if key is None else {"GATEWAY_ADMIN_KEY": key}
    for given in ({"admin_key": "sesame"}, {}, {"api_keys": "k"}):
        with gateway(**given) as port:
            refused = run("load", "w", port=port, GATEWAY_API_KEYS="k", **own)
        assert refused.returncode == 1
        assert "set GATEWAY_ADMIN_KEY to the\ngateway's" in refused.stderr
        assert refused.stderr.endswith("\n  mlx-gateway serve\n")


def test_ps_needs_a_key_where_the_gateway_has_keys(run: Run, gateway: Served) -> None:
    with gateway(api_keys="k") as port:
        refused = run("ps", port=port)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "Set GATEWAY_API_KEYS to one of its keys." in refused.stderr
        assert run("ps", port=port, GATEWAY_API_KEYS="k").returncode == 0


class Keyed:
    """A gateway without an admin key, whose own key is in a file if `keep_key` has kept it."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key
        self.port = url.rpartition(":")[2]

    def post(self, headers: Mapping[str, str], **given: Any) -> httpx2.Response:
        url = f"{self.url}/admin/models/w/load"
        return httpx2.post(url, headers=headers, timeout=60, **given)


@pytest.fixture
def keyed(home: Path, portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyed]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    own = settings()
    gateway = Gateway(own, catalog(home, MODELS), ScriptedEngines())
    assert gateway.local_key is not None
    app = served_app(gateway.asgi, own)
    with capture_logs(), portal.wrap_async_context_manager(app) as client:
        portal.call(ready, client)
        yield Keyed(f"http://127.0.0.1:{port_of(client)}", gateway.local_key)


def key_file(home: Path, keyed: Keyed) -> Path:
    return home / "xdg" / "mlx-gateway" / "keys" / f"127.0.0.1_{keyed.port}"


def test_a_gateway_on_loopback_lets_its_user_load_and_unload(
    home: Path, keyed: Keyed, run: Run
) -> None:
    refused = run("load", "w", port=keyed.port)
    assert refused.returncode == 1
    with keep_key(keyed.key, "127.0.0.1", int(keyed.port)):
        file = key_file(home, keyed)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert run("load", "w", port=keyed.port).stdout == "w is loaded.\n"
        assert run("stop", "w", port=keyed.port, GATEWAY_HOST="localhost").returncode == 0
        for given in ({}, {"GATEWAY_HOST": "::1"}):
            assert run("load", "w", port=NOBODY, **given).returncode == 1
    assert not file.exists()
    assert run("load", "w", port=keyed.port).returncode == 1


def test_to_everybody_else_there_is_no_admin(
    home: Path, keyed: Keyed, portal: BlockingPortal
) -> None:
    """The answers are those of a gateway that has no key at all, but for the request's id."""
    with portal.wrap_async_context_manager(
        served(catalog(home, MODELS), ScriptedEngines(), host="0.0.0.0", allow_unauthenticated=True)
    ) as client:
        plain = Keyed(f"http://127.0.0.1:{port_of(client)}", "")
        page = {"origin": "https://evil.example"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, page):
            answers = [each.post(headers) for each in (keyed, plain)]
            assert answers[0].status_code == (403 if headers is page else 404)
            seen = [(each.status_code, each.text.replace(keyed.port, "")) for each in answers]
            assert seen[0] == seen[1]
            assert [*answers[0].headers] == [*answers[1].headers]
        for method in ("GET", "HEAD", "OPTIONS", "PUT"):
            answers = [
                httpx2.request(method, f"{each.url}/admin/reload", timeout=60)
                for each in (keyed, plain)
            ]
            assert answers[0].status_code == answers[1].status_code == 404
            assert answers[0].text == answers[1].text
    assert keyed.post({"authorization": f"Bearer {keyed.key}"}).status_code == 200
    assert keyed.post({"x-api-key": keyed.key}).status_code == 200
    document = httpx2.get(f"{keyed.url}/openapi.json", timeout=60).text
    assert "/admin" not in document.replace("`/admin`", "")
    with httpx2.stream("GET", f"{keyed.url}/dashboard/samples", timeout=60) as samples:
        assert json.loads(next(samples.iter_lines()))["has_admin"] is False


def test_the_key_opens_nothing_but_admin(home: Path, portal: BlockingPortal) -> None:
    own = settings(api_keys="k")
    gateway = Gateway(own, catalog(home, MODELS), ScriptedEngines())
    with capture_logs(), portal.wrap_async_context_manager(served_app(gateway.asgi, own)) as client:
        url = f"http://127.0.0.1:{port_of(client)}"
        headers = {"authorization": f"Bearer {gateway.local_key}"}
        user, nobody = {"authorization": "Bearer k"}, dict[str, str]()
        assert httpx2.get(f"{url}/v1/models", headers=headers, timeout=60).status_code == 401
        for given, status in ((headers, 404), (user, 404), (nobody, 401)):
            path = "/admin/models/nobody/unload"
            answer = httpx2.post(url + path, headers=given, timeout=60)
            assert answer.status_code == status
            assert ("model_not_found" in answer.text) is (given is headers)


@pytest.mark.parametrize(
    "given",
    [
        {"admin_key": "sesame"},
        {"host": "0.0.0.0", "api_keys": "k"},
        {"bind": ["127.0.0.1:1", "192.0.2.1:1"], "api_keys": "k"},
    ],
)
def test_a_gateway_that_others_reach_or_that_has_an_admin_key_makes_none(
    home: Path, given: dict[str, Any]
) -> None:
    gateway = Gateway(settings(**given), catalog(home, MODELS), ScriptedEngines())
    assert gateway.local_key is None


def test_every_gateway_has_another_key(home: Path) -> None:
    models = catalog(home, MODELS)
    keys = {Gateway(settings(), models, ScriptedEngines()).local_key for _ in range(2)}
    assert len(keys) == 2


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mlx-gateway" / "keys"


def test_a_folder_that_others_may_read_or_a_link_gets_no_key(keys: Path, tmp_path: Path) -> None:
    keys.mkdir(parents=True, mode=0o755)
    keys.chmod(0o755)
    with capture_logs() as logs, keep_key("k", "127.0.0.1", 80):
        assert [*keys.iterdir()] == []
        (keys / "127.0.0.1_80").write_text("another's")
        assert read_key("http://127.0.0.1:80") is None
    assert [each["event"] for each in logs] == ["no_local_key"]
    keys.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o700)
    keys.symlink_to(tmp_path / "elsewhere")
    with capture_logs() as logs, keep_key("k", "127.0.0.1", 80):
        assert read_key("http://127.0.0.1:80") is None
    assert [each["event"] for each in logs] == ["no_local_key"]
    assert (tmp_path / "elsewhere" / "127.0.0.1_80").read_text() == "another's"


def test_a_link_in_the_place_of_a_key_is_replaced(keys: Path, tmp_path: Path) -> None:
    keys.mkdir(parents=True, mode=0o700)
    (tmp_path / "precious").write_text("x")
    (keys / "::1_80").symlink_to(tmp_path / "precious")
    with keep_key("k", "::1", 80):
        assert read_key("http://[::1]:80") == "k"
    assert (tmp_path / "precious").read_text() == "x"


def test_a_file_that_a_killed_gateway_left_gives_way_to_the_next(keys: Path) -> None:
    """A gateway that ends late leaves the file of the next one at its address."""
    with keep_key("new", "127.0.0.1", 80):
        with keep_key("old", "127.0.0.1", 80):
            (keys / "127.0.0.1_80").write_text("new")
        assert read_key("http://127.0.0.1:80") == "new"
    assert read_key("http://127.0.0.1:80") is None


def test_gateways_at_two_addresses_have_two_files(keys: Path) -> None:
    with keep_key("a", "127.0.0.1", 80), keep_key("b", "127.0.0.1", 81), keep_key(None, "", 82):
        assert [read_key(f"http://127.0.0.1:{port}") for port in (80, 81, 82)] == ["a", "b", None]
        with keep_key("c", "/a.sock", None):
            assert len([*keys.iterdir()]) == 2


@pytest.mark.slow
def test_serve_keeps_its_key_until_it_ends_and_logs_it_nowhere(home: Path) -> None:
    write_chat(home / "writer")
    catalog(home, {"tiny": {"kind": "chat", "source": "path:writer"}})
    port, other = str(free_port()), str(free_port())
    own = {"GATEWAY_PORT": port, "XDG_CACHE_HOME": str(home / "xdg"), "GATEWAY_LOG_LEVEL": "debug"}
    own |= {"GATEWAY_WARM_UP": "false", "GATEWAY_SELF_TEST": "false"}
    own["GATEWAY_BIND"] = f"127.0.0.1:{port},127.0.0.1:{other}"
    file = home / "xdg" / "mlx-gateway" / "keys" / f"127.0.0.1_{port}"
    with started(command("serve"), home, GATEWAY_LOG_PROMPTS="true", **own) as gateway:
        key = file.read_text()
        assert file.with_name(f"127.0.0.1_{other}").read_text() == key
        assert ran(home, "load", "tiny", **own).stdout == "tiny is loaded.\n"
        assert ran(home, "ps", **own).stdout.startswith("tiny\tchat\tloaded\t")
        assert ran(home, "stop", "tiny", **own).stdout.startswith("tiny is unloaded;")
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == 0
        assert key not in gateway.log.read_text()
    assert [*file.parent.iterdir()] == []


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("show org", ["org/writer"]),
        ("rm embedde", ["embedder"]),
        ("load w", ["w"]),
        ("stop org", ["org/writer"]),
        ("pull qwen3.5-9", ["qwen3.5-9b"]),
        ("serve embedder or", ["org/writer"]),
        ("show bge-rer", ["bge-reranker-v2-m3"]),
        ("run bge-rer", []),
        ("run embedde", []),
        ("run org", ["org/writer"]),
        ("mod", ["models"]),
    ],
)
def test_a_shell_completes_commands_and_names_of_models(
    home: Path, typed: str, offered: list[str]
) -> None:
    assert completed(home, typed) == offered


def completed(home: Path, typed: str) -> list[str]:
    """Ask for completions as bash does."""
    own = {"_MLX_GATEWAY_COMPLETE": "complete_bash", "COMP_WORDS": f"mlx-gateway {typed}"}
    done = ran(home, COMP_CWORD=str(len(typed.split())), **own)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_completion_reads_no_broken_file_and_imports_no_mlx(home: Path) -> None:
    (home / "models.yaml").write_text("a: [")
    assert completed(home, "show qwen3.5-9") == ["qwen3.5-9b"]
    code = "import sys; from types import SimpleNamespace as Context; "
    code += "from gateway.cli.terminal import complete_model; "
    code += "complete_model(Context(info_name='show'), 'q'); "
    code += "print([each for each in ('mlx', 'mlx_lm', 'numpy') if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_help_has_a_short_form_in_a_newcomers_order(home: Path, run: Run) -> None:
    shown = run("-h").stdout
    assert shown == run("--help").stdout
    found = re.findall(r"^│ ([a-z]+) ", shown, re.MULTILINE)
    order = (
        "serve run list pull show ps load stop rm models launch connect "
        "doctor bench check config init schema"
    )
    assert found == order.split()
    assert run("-v").stdout == run("--version").stdout != ""
    for name in found:
        assert run(name, "-h").returncode == 0
