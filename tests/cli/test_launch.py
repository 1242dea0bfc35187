"""launch and connect: which gateway and model a tool gets, by which settings, and how it ends."""

import asyncio
import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any, TypeAlias

import httpx2
import pytest
from anyio.from_thread import BlockingPortal
from structlog.testing import capture_logs

from gateway.cli import gateways, launch
from gateway.cli.agents import AGENT_CONTEXT, TOOLS, NoModel, Offer, Service, choose
from gateway.cli.gateways import NoGateway, started
from gateway.cli.launch import Signals
from gateway.registry import Inputs
from gateway.registry.short_names import read_short_names
from gateway.settings import Settings
from tests.checkpoints import write_chat
from tests.cli.conftest import Inside
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.processes import ROOT, children, command, environment
from tests.serving_app import catalog, served, settings

CLAUDE = TOOLS["claude"]
BLIND_AND_SEEING = [
    Service("http://x", "m", "s", 40_000, "/folder", modalities)
    for modalities in (("text",), ("text", "image"))
]
OURS = ("AIDER", "ANTHROPIC", "CLINE", "COPILOT", "LLM", "MLX", "OPENAI", "OPENCODE", "QWEN")
NOBODY = "1"  # a port at which nothing answers
LARGE: dict[str, Any] = {"kind": "chat", "source": "path:large"}
SMALL = {"kind": "chat", "source": "path:small"}
EMBEDDER = {"kind": "embedding", "source": "path:embedder"}
MODELS: dict[str, dict[str, Any]] = {
    "embedder": EMBEDDER,
    "small": SMALL,
    "large": {**LARGE, "aliases": ["big"]},
}
READS = {"small": Inputs(8192), "large": Inputs(40_960)}
FAKE = f"""#!{sys.executable}
import json, os, re, signal, sys, time
if "--wait" in sys.argv:
    def end(number, _):
        print("got", number, flush=True)
        if number == signal.SIGTERM:
            sys.exit(number)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    print("waiting", flush=True)
    time.sleep(600)
if "--die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
files, there = {{}}, None
for given in (*sys.argv, *os.environ.values()):
    for folder in re.findall(os.environ["TMPDIR"] + "/(?:mlx-gateway-|tmp[.])[^/]+", given):
        files |= {{each: open(os.path.join(folder, each)).read() for each in os.listdir(folder)}}
if "--ask" in sys.argv:
    import urllib.request
    there = json.load(urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/ready"))
if "--kill" in sys.argv:
    launch = os.getppid()
    siblings = open(f"/proc/{{launch}}/task/{{launch}}/children").read().split()
    (pid,) = {{int(each) for each in siblings}} - {{os.getpid()}}
    os.kill(pid, signal.SIGKILL)
    state = lambda: open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0]
    while state() != "Z" or len(os.listdir(f"/proc/{{pid}}/task")) > 1:
        time.sleep(0.01)
print(json.dumps({{"arguments": sys.argv[1:], "variables": dict(os.environ), "files": files,
                  "there": there}}))
sys.exit(int(sys.argv[-1]) if sys.argv[-1].isdigit() else 0)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with models of two contexts, and fake tools in `bin`."""
    for name, context in (("small", 8192), ("large", 40_960), ("embedder", 50_000)):
        (tmp_path / name).mkdir()
        config = {"max_position_embeddings": context, "model_type": "llama"}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    catalog(tmp_path, MODELS)
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        (tmp_path / "bin" / name).write_text(FAKE)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def around(home: Path, port: str, given: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of a user, with the fake tools first in PATH."""
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    names = {"PATH": path, "TMPDIR": str(home), "GATEWAY_PORT": port, "ANTHROPIC_API_KEY": "theirs"}
    loads = {"GATEWAY_WARM_UP": "false", "GATEWAY_SELF_TEST": "false"}  # are another test's subject
    return environment(**{**names, **loads, **given})


Ran: TypeAlias = "subprocess.CompletedProcess[str]"
Launch: TypeAlias = Callable[..., Ran]
Found: TypeAlias = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def run(home: Path, inside: Inside) -> Launch:
    """Give a function that runs a command of mlx-gateway until it ends.

    The command runs in this process, but for its tool and for a gateway that it starts.
    """

    def ran(*arguments: str, port: str = NOBODY, **given: str) -> Ran:
        return inside(home, *arguments, **around(home, port, given))

    return ran


def seen(outcome: Ran) -> dict[str, Any]:
    """Return the arguments and variables that the tool was given."""
    seen: dict[str, Any] = json.loads(outcome.stdout)
    return seen


@contextmanager
def begun(home: Path, *arguments: str, **given: str) -> Iterator["subprocess.Popen[str]"]:
    """Begin a command of mlx-gateway in a process of its own; it is told to end if nothing else
    ends it.
    """
    with subprocess.Popen(
        command(*arguments),
        cwd=home,
        env=around(home, NOBODY, given),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        last = Timer(60, process.terminate)
        last.start()
        try:
            yield process
        finally:
            last.cancel()
            process.terminate()


@pytest.fixture
def found(home: Path, portal: BlockingPortal) -> Found:
    """Give a context that serves models in this process, where launch finds them.

    It gives the URL.
    """

    @contextmanager
    def serving(
        models: Mapping[str, dict[str, Any]] = MODELS,
        reads: Mapping[str, Inputs | None] = READS,
        **given: Any,
    ) -> Iterator[str]:
        engines = ScriptedEngines(chat=ScriptedChat(max_context=50_000), reads={**reads})
        gateway = served(catalog(home, models), engines, **given)
        # Its log would go to this process's output, as the command's does.
        with capture_logs(), portal.wrap_async_context_manager(gateway) as client:
            yield str(client.base_url).rstrip("/")

    return serving


def port_of(url: str) -> str:
    return url.rpartition(":")[2]


def left(home: Path) -> list[Path]:
    """List the private folders that are still there."""
    return list(home.glob("mlx-gateway-*"))


def test_a_gateway_that_answers_is_used(home: Path, found: Found, run: Launch) -> None:
    with found() as url:
        outcome = run("launch", "claude", "--", "-p", "Hi", port=port_of(url))
        died = run("launch", "claude", "--", "--die", port=port_of(url))
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert seen(outcome)["arguments"] == ["-p", "Hi"]
    variables = seen(outcome)["variables"]
    assert variables["ANTHROPIC_BASE_URL"] == url
    assert variables["ANTHROPIC_MODEL"] == variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "large"
    assert variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "40960"
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "unused"
    assert "ANTHROPIC_API_KEY" not in variables
    assert died.returncode == 128 + signal.SIGKILL, "as shells say it"


def test_the_first_key_is_the_tools(home: Path, found: Found, run: Launch) -> None:
    """The gateway's own variables, the admin key among them, are not."""
    keys = {"GATEWAY_API_KEYS": "first,second", "GATEWAY_ADMIN_KEY": "admin"}
    with found(api_keys="first,second") as url:
        outcome = run("launch", "claude", port=port_of(url), **keys)
        refused = run("launch", "claude", port=port_of(url), GATEWAY_API_KEYS="wrong")
    variables = seen(outcome)["variables"]
    assert variables["ANTHROPIC_AUTH_TOKEN"] == "first"
    assert not {"GATEWAY_API_KEYS", "GATEWAY_ADMIN_KEY"} & variables.keys()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "refuses us (401). Set GATEWAY_API_KEYS" in refused.stderr


def test_a_gateway_that_was_found_says_what_it_serves(
    home: Path, found: Found, run: Launch
) -> None:
    """Its loaded models' contexts are its own; a model that it does not have is refused."""
    with found() as url:
        port = port_of(url)
        question = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
        httpx2.post(f"{url}/v1/chat/completions", json=question).raise_for_status()
        loaded = run("launch", "claude", "--model", "./small", port=port)
        catalog(home, {**MODELS, "unheard": LARGE})
        unheard = run("launch", "claude", "--model", "unheard", port=port)
    assert seen(loaded)["variables"]["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "50000"
    assert unheard.returncode == 1
    assert unheard.stderr == (
        "unheard: there is no such chat model. The chat models are: large, big, small.\n"
        "Run:\n  mlx-gateway launch claude --model large\n"
    )


@asynccontextmanager
async def stranger(asked: list[bytes]) -> AsyncIterator[str]:
    """Answer whoever asks as another server might, and remember it; give the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"name": "else"}')
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield str(server.sockets[0].getsockname()[1])


def test_without_one_a_gateway_lasts_as_long_as_the_tool(
    home: Path, portal: BlockingPortal, run: Launch
) -> None:
    """A stranger on the port is none: it gets neither a key nor the tool."""
    asked: list[bytes] = []
    arguments = ("--model", "big", "--", "--ask", "7")
    with portal.wrap_async_context_manager(stranger(asked)) as port:
        outcome = run("launch", "claude", *arguments, port=port, GATEWAY_API_KEYS="secret")
    assert outcome.returncode == 7
    assert outcome.stderr == "Starting a gateway…\n"
    assert seen(outcome)["there"]["status"] == "ready"
    assert seen(outcome)["variables"]["ANTHROPIC_MODEL"] == "big"
    url = seen(outcome)["variables"]["ANTHROPIC_BASE_URL"]
    assert port_of(url) != port
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/ready")
    assert not left(home)
    assert asked
    assert b"secret" not in b"".join(asked)


def test_a_new_gateway_serves_a_model_that_is_named_by_its_folder(home: Path, run: Launch) -> None:
    write_chat(home / "tiny", max_position_embeddings=40_960)
    outcome = run("launch", "claude", "--model", "./tiny", "--", "--ask", "7")
    assert outcome.returncode == 7, outcome.stderr
    assert seen(outcome)["there"]["models"] == {"tiny": "loaded"}
    assert seen(outcome)["variables"]["ANTHROPIC_MODEL"] == "tiny"
    outcome = run("launch", "claude", "--model", "hub:no")
    assert outcome.returncode == 2
    assert "'hub:no' should read hub:org/name" in " ".join(outcome.stderr.replace("│", "").split())


def test_a_gateway_that_cannot_start_says_why(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(NoGateway) as refused, started(settings(models=home / "none.yaml")):
        raise AssertionError("it is ready")
    first, *log = str(refused.value).splitlines()
    assert first == "The gateway ended with status 1."
    assert log[-1] == f"{home / 'none.yaml'}: No such file or directory"


def test_a_gateway_with_a_certificate_is_not_started(home: Path) -> None:
    (home / "file.pem").touch()
    given = settings(tls_cert=home / "file.pem", tls_key=home / "file.pem")
    with pytest.raises(NoGateway, match=r"https://127\.0\.0\.1:8000"), started(given):
        raise AssertionError("it is ready")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the process in /proc")
@pytest.mark.slow
def test_a_gateway_that_dies_is_reported_when_the_tool_ends(home: Path) -> None:
    with begun(home, "launch", "llm", "--", "--kill", "3") as process:
        _, err = process.communicate()
    assert process.returncode == 3
    assert "The gateway ended with status -9." in err
    assert not left(home)


def test_a_tool_that_is_not_installed_or_not_known_is_named(home: Path, run: Launch) -> None:
    (home / "bin" / "codex").unlink()
    outcome = run("launch", "codex", PATH=str(home / "bin"))
    assert (outcome.returncode, outcome.stdout) == (1, "")
    assert outcome.stderr == (
        "codex is not installed. Run:\n  npm install -g @openai/codex\n  mlx-gateway launch codex\n"
    )
    outcome = run("launch", "codex", "--model", "a b", PATH=str(home / "bin"))
    assert outcome.stderr.endswith("\n  mlx-gateway launch codex --model 'a b'\n")
    outcome = run("launch", "cluade")
    assert outcome.returncode == 2
    assert ", ".join(TOOLS) in re.sub(r"[│\s]+", " ", outcome.stderr)


@pytest.mark.parametrize(("kept_bytes", "kept"), [("1000000", "about 1,302"), ("auto", None)])
def test_the_kept_part_of_a_prompt_is_told_before_an_agent_runs(
    home: Path, found: Found, run: Launch, kept_bytes: str, kept: str | None
) -> None:
    """It is less than the model's context: a token of this model has 768 bytes of KV."""
    write_chat(home / "large", max_position_embeddings=40_960)
    with found() as url:
        given = {"GATEWAY_PREFIX_CACHE_BYTES": kept_bytes}
        ended = run("launch", "claude", "--model", "large", port=port_of(url), **given)
    assert ended.returncode == 0
    assert (kept or "") in ended.stderr
    assert ("processes the rest again" in ended.stderr) is (kept is not None)


def test_files_of_a_tool_are_private_and_removed(home: Path, found: Found, run: Launch) -> None:
    with found() as url:
        outcome = run(
            "launch", "llm", "--model", "small", "--small-model", "big", port=port_of(url)
        )
    models = json.loads(seen(outcome)["files"]["extra-openai-models.yaml"])
    assert [model["model_id"] for model in models] == ["small", "big"]
    assert {model["api_base"] for model in models} == {f"{url}/v1"}
    assert seen(outcome)["variables"]["LLM_MODEL"] == "small"
    assert not left(home)


class Interrupted(dict[str, str]):
    """Variables whose reader, about to start a process, gets a signal."""

    def items(self) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return super().items()


def test_a_signal_that_comes_while_the_tool_starts_is_the_tools() -> None:
    """It ended launch alone, and the tool ran on."""
    signals, sleeps = Signals(), [sys.executable, "-c", "import time; time.sleep(600)"]
    with signals.handled():
        assert signals.start(sleeps, Interrupted(os.environ)) == -signal.SIGTERM


@pytest.fixture
def not_ignored() -> Iterator[None]:
    """Let children have Ctrl-C, which shells have jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("not_ignored")
def test_signals_are_the_tools(home: Path) -> None:
    """launch waits until the tool has handled them, and then stops its gateway."""
    with begun(home, "launch", "llm", "--", "--wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        for number in (signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert process.stdout.readline() == f"got {number.value}\n"
        out, _ = process.communicate()
    assert (process.returncode, out) == (signal.SIGTERM, "")
    assert not left(home)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/somewhere"),
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
    ],
)
def test_a_full_disk_is_named_and_nothing_starts(
    run: Launch, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """The second is Python's error when none of the folders it knows has room."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    before = children()
    monkeypatch.setattr(tempfile, "TemporaryDirectory", fail)
    outcome = run("launch", "claude")
    assert (outcome.returncode, outcome.stderr) == (1, f"Starting a gateway…\n{error}\n")
    assert children() == before


@contextmanager
def interrupted(line: int) -> Iterator[None]:
    """Get a signal at this line of all that is executed to start a process that serves."""
    files = {module.__file__ for module in (gateways, tempfile, subprocess)}
    lines = itertools.count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "wait_ready":
            return None
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.slow
@pytest.mark.parametrize("line", range(0, 400, 7))
def test_a_signal_at_any_line_of_its_start_leaves_no_gateway(
    home: Path, monkeypatch: pytest.MonkeyPatch, line: int
) -> None:
    """Its folder was left, or it ran on."""
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    monkeypatch.chdir(home)
    signals, chosen, before = Signals(), settings(models=home / "models.yaml"), children()
    with signals.handled(), pytest.raises(SystemExit), interrupted(line):
        start(chosen, signals)
    assert not left(home)
    assert children() <= before


def start(chosen: Settings, signals: Signals) -> None:
    with started(chosen, signals.deferred):
        pytest.fail("no signal came")


def test_a_signal_while_the_gateway_starts_stops_it(home: Path) -> None:
    with begun(home, "launch", "llm") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "Starting a gateway…\n"
        process.terminate()
        out, _ = process.communicate()
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert not left(home)


@pytest.mark.parametrize("name", TOOLS)
def test_what_connect_prints_does_in_a_shell_what_launch_does(
    home: Path, found: Found, run: Launch, name: str
) -> None:
    with found(api_keys="a'key") as url:
        port, keys = port_of(url), {"GATEWAY_API_KEYS": "a'key"}
        launched = run("launch", name, "--model", "large", port=port, **keys)
        printed = run("connect", name, "--model", "large", port=port, **keys)
    assert "a'key" not in printed.stdout
    shell = subprocess.run(
        ["sh", "-c", f'eval "$PRINTED"\n{name}'],
        env=around(home, port, {**keys, "PRINTED": printed.stdout}),
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    one, other = (
        json.loads(re.sub(r"/(mlx-gateway-|tmp\.)\w+", "/FOLDER", each))
        for each in (launched.stdout, shell.stdout)
    )
    assert one["arguments"] == other["arguments"]
    assert {key: text.strip() for key, text in other["files"].items()} == one["files"]
    given = {each for each in one["variables"] if each.startswith(OURS)}
    assert {TOOLS[name].key} <= given
    assert {each: one["variables"][each] for each in given} == {
        each: text for each, text in other["variables"].items() if each.startswith(OURS)
    }


def test_connect_shows_a_key_only_when_asked(home: Path, run: Launch) -> None:
    """Otherwise it shows the variable that has the key; one in .env has to be exported."""
    (home / ".env").write_text("GATEWAY_API_KEYS=hidden,other\n")
    outcome = run("connect", "claude")
    assert 'ANTHROPIC_AUTH_TOKEN="${GATEWAY_API_KEYS%%,*}"' in outcome.stdout
    assert "hidden" not in outcome.stdout + outcome.stderr
    assert "GATEWAY_API_KEYS is in .env" in outcome.stderr
    outcome = run("connect", "claude", "--show-key")
    assert "export ANTHROPIC_AUTH_TOKEN=hidden\n" in outcome.stdout


def test_a_model_is_chosen_by_its_context() -> None:
    offers = [
        Offer("vectors", "vectors", "embedding"),
        Offer("unknown", "unknown", "chat"),
        Offer("short", "short", "chat", AGENT_CONTEXT - 1),
        Offer("short-alias", "short", "chat", AGENT_CONTEXT - 1),
        Offer("right", "right", "chat", AGENT_CONTEXT),
    ]
    assert choose(offers, None, CLAUDE).name == "right"
    assert choose(offers, None, TOOLS["llm"]).name == "unknown"
    with pytest.raises(NoModel) as refused:
        choose(offers[:-1], None, CLAUDE)
    assert str(refused.value).splitlines()[1:] == [
        "  unknown: it is not on disk, so its context is not known",
        "  short: its context is 31,999 tokens, and claude needs 32,000",
        "Run:",
        "  mlx-gateway pull unknown",
        "  mlx-gateway launch claude --model unknown",
    ]


def test_a_model_that_another_gateway_could_serve_is_launched_on_a_new_one() -> None:
    offers = [Offer("right", "right", "chat", AGENT_CONTEXT)]
    with pytest.raises(NoModel) as refused:
        choose(offers, "qwen3.5-9b", CLAUDE, known=read_short_names())
    said = "GATEWAY_PORT=0 mlx-gateway launch claude --model qwen3.5-9b  # on a new gateway"
    assert str(refused.value).splitlines()[1:] == ["Run:", f"  {said}"]


@pytest.mark.parametrize(
    ("wanted", "reason", "commands"),
    [
        ("alias", "alias: it is not on disk", ["pull unknown", "launch claude --model alias"]),
        ("short", "short: its context is 8,192", ["launch claude --model right"]),
        ("vectors", "vectors: there is no such chat model", ["launch claude --model right"]),
    ],
)
def test_a_refusal_ends_with_the_commands_that_do_it(
    wanted: str, reason: str, commands: list[str]
) -> None:
    """They name the asked model, if its download may do, and the models file, if given."""
    offers = [
        Offer("vectors", "vectors", "embedding"),
        Offer("alias", "unknown", "chat"),
        Offer("short", "short", "chat", 8192),
        Offer("right", "right", "chat", AGENT_CONTEXT),
    ]
    with pytest.raises(NoModel, match=reason) as refused:
        choose(offers, wanted, CLAUDE)
    assert "any of" not in str(refused.value)  # another may do
    lines = str(refused.value).split("Run:\n")[-1].splitlines()
    assert lines == [f"  mlx-gateway {each}" for each in commands]
    with pytest.raises(NoModel, match=r"launch claude --models 'a file' --model"):
        choose(offers, wanted, CLAUDE, Path("a file"))
    with pytest.raises(NoModel, match=r"models recommend\n.* claude --model NAME$"):
        choose(offers[2:3], wanted, CLAUDE)


@pytest.mark.parametrize("lack", ["its files are not there: path:/x", "its files say none"])
def test_no_pull_is_advised_that_would_bring_nothing(lack: str) -> None:
    offers = [
        Offer("here", "here", "chat", lack=lack, can_pull=False),
        Offer("right", "right", "chat", AGENT_CONTEXT),
    ]
    with pytest.raises(NoModel) as refused:
        choose(offers, "here", CLAUDE)
    assert str(refused.value).splitlines()[1:] == [
        f"  here: {lack}",
        "Run:",
        "  mlx-gateway launch claude --model right",
    ]
    with pytest.raises(NoModel) as refused:
        choose(offers[:1], None, CLAUDE)
    assert "pull" not in str(refused.value)


def test_why_a_context_is_not_known_is_said_as_it_is(home: Path, found: Found, run: Launch) -> None:
    """A running gateway gives the files' reasons; only models of the hub are to be downloaded."""
    (home / "mute").mkdir()
    (home / "mute" / "config.json").write_text("{}")
    sources = {"far": "hub:org/far", "mute": "path:mute", "uninstalled": "package:no_such/model"}
    models = {name: {"kind": "chat", "source": source} for name, source in sources.items()}
    catalog(home, {**models, "small": SMALL})
    lacks = {
        "far": "it is not on disk, so its context is not known",
        "mute": "its files state no context (set `max_context:`), or cannot be read",
        "uninstalled": "its files are not there: package:no_such/model",
    }

    def refusals(**more: str) -> dict[str, str]:
        given = {"GATEWAY_HUB_CACHE": str(home / "cache"), **more}
        return {name: run("launch", "claude", "--model", name, **given).stderr for name in models}

    alone = refusals()
    reads = {**dict.fromkeys(models), "mute": Inputs(None), "small": Inputs(8192)}
    with found({**models, "small": SMALL}, reads) as url:
        assert refusals(port=port_of(url)) == alone
        catalog(home, {"other": SMALL})
        unheard = run("launch", "claude", "--model", "small", port=port_of(url)).stderr
        elsewhere = refusals(port=port_of(url))
    for name, lack in lacks.items():
        assert f"claude cannot use {name}:\n  {name}: {lack}\n" in alone[name]
        assert re.findall("pull (.*)", alone[name]) == ["far"]
        assert "mlx-gateway pull" not in elsewhere[name], "these settings have no such model"
    assert "small: its context is 8,192 tokens, and claude needs 32,000" in unheard


def test_the_commands_of_a_refusal_name_the_models_file(home: Path, run: Launch) -> None:
    (home / "models.yaml").rename(home / "mine.yaml")
    given = ("--models", "mine.yaml", "--model", "small")
    outcome = run("launch", "claude", *given)
    *_, advice = outcome.stderr.splitlines()
    assert advice == "  mlx-gateway launch claude --models mine.yaml --model large"
    outcome = run(*advice.split()[1:], "--", "--ask")
    assert seen(outcome)["variables"]["ANTHROPIC_MODEL"] == "large"
    assert seen(outcome)["there"]["models"] == {}, "as no model of that file is preloaded"


def test_no_file_of_a_tool_has_a_key() -> None:
    """Its arguments have none either: the key is in the variable alone, which an entry names."""
    service = Service("http://x", "m", "s", 40_000, "/folder")
    for tool in TOOLS.values():
        setup = tool.set_up(service)
        variables = tool.environment(setup, "secret", {"GATEWAY_API_KEYS": "secret"})
        assert [name for name, text in variables.items() if "secret" in text] == [tool.key]
        placed = [*setup.arguments, *setup.variables.values()]
        assert any("/folder" in (each or "") for each in placed) is bool(setup.files)


@pytest.mark.parametrize("name", ["aider", "cline", "cn", "copilot", "opencode", "pi", "qwen"])
def test_an_agent_is_told_how_many_tokens_it_has(name: str) -> None:
    """A quarter of the context is for an answer; where a prompt is asked for, the rest."""
    given = str(TOOLS[name].set_up(Service("http://x", "m", "s", 40_000)))
    assert re.findall(r"\b[1-9]0000\b", given) == [
        "30000" if name == "copilot" else "40000",
        "10000",
    ]


def test_setups_quote_what_would_be_code() -> None:
    service = Service("http://x", "a'b\"$(c)`d`", "e", 40_000)
    for tool in TOOLS.values():
        lines = "\n".join(tool.shell_lines(tool.set_up(service), "k"))
        subprocess.run(["sh", "-n", "-c", lines], check=True)
    arguments = TOOLS["codex"].set_up(service).arguments
    (model,) = (each for each in arguments if each.startswith("model="))
    assert json.loads(model.removeprefix("model=")) == service.model


def test_a_model_that_reads_text_is_sent_no_images_of_earlier_turns() -> None:
    """Claude Code asks with a header, before the user's own ones, and Cline with one of its own.

    Claude Code may ask another model than the main one: the small one, or one that is chosen later.
    """
    text, sees = BLIND_AND_SEEING
    own = {"ANTHROPIC_CUSTOM_HEADERS": "x-mine: 1"}
    for service in (text, sees):
        given = CLAUDE.environment(CLAUDE.set_up(service), None, own)
        assert given["ANTHROPIC_CUSTOM_HEADERS"] == "x-gateway-leave-out-images: true\nx-mine: 1"
    headers = [str(TOOLS["cline"].set_up(each).files) for each in (text, sees)]
    assert ["x-gateway-leave-out-images" in each for each in headers] == [True, False]


def test_codex_has_a_catalog_with_what_its_model_reads() -> None:
    """Without one it warns that it knows nothing of the model, and takes it for one that sees."""
    for service in BLIND_AND_SEEING:
        codex = TOOLS["codex"].set_up(service)
        assert 'model_catalog_json="/folder/models.json"' in codex.arguments
        (model,) = json.loads(codex.files["models.json"])["models"]
        assert (model["slug"], model["context_window"]) == ("m", 40_000)
        assert model["input_modalities"] == [*service.modalities]


@pytest.mark.parametrize(
    ("name", "blind", "seeing"),
    [
        ("aider", '"supports_vision": false', '"supports_vision": true'),
        ("cn", '"capabilities": ["tool_use"]', '"capabilities": ["tool_use", "image_input"]'),
        ("llm", '"vision": false', '"vision": true'),
        ("opencode", '"input": ["text"]', '"input": ["text", "image"]'),
        ("pi", '"input": ["text"]', '"input": ["text", "image"]'),
        ("qwen", '"modalities": {"image": false}', '"modalities": {"image": true}'),
    ],
)
def test_a_tool_is_told_whether_its_model_reads_images(name: str, blind: str, seeing: str) -> None:
    """Otherwise opencode and Pi replace a picture by words of theirs."""
    for service, own, other in zip(BLIND_AND_SEEING, (blind, seeing), (seeing, blind), strict=True):
        setup = TOOLS[name].set_up(service)
        given = "\n".join(filter(None, (*setup.variables.values(), *setup.files.values())))
        assert own in given
        assert other not in given


def test_launch_goes_by_the_modalities_that_the_gateway_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offers = [Offer("m", "m", "chat", 40_000, ("text", "image"))]
    monkeypatch.setattr(launch, "list_offers", lambda *_: offers)
    chosen = launch._choose_models("http://x", settings(), CLAUDE, None, None)
    assert chosen.modalities == ("text", "image")


@pytest.mark.parametrize(
    ("own", "headers"),
    [
        ("", "x-gateway-leave-out-images: true"),
        ("a: 'b'", "x-gateway-leave-out-images: true\na: 'b'"),
    ],
)
def test_connect_keeps_the_users_own_headers(own: str, headers: str) -> None:
    setup = CLAUDE.set_up(Service("http://x", "m", "s", 40_000))
    lines = "\n".join(CLAUDE.shell_lines(setup, "k"))
    shown = subprocess.run(
        ["sh", "-c", 'eval "$PRINTED"; printf %s "$ANTHROPIC_CUSTOM_HEADERS"'],
        env={**os.environ, "PRINTED": lines, "ANTHROPIC_CUSTOM_HEADERS": own},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert shown.stdout == headers
