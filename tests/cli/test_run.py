"""run: which gateway and model answer, what reaches a pipe and a terminal, and how it ends."""

import asyncio
import base64
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from anyio.from_thread import BlockingPortal
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from structlog.testing import capture_logs

from gateway.cli import answers, conversation
from gateway.cli.answers import Piece, Refused, ask, clean, read_pieces
from gateway.cli.conversation import Conversation, find_pictures, make_question, parse_command
from gateway.cli.screen import Screen, make_markdown, make_reader, open_history, whole_blocks
from tests.cli.conftest import Inside
from tests.fakes import ScriptedChat, ScriptedEngines
from tests.processes import command, environment
from tests.serving_app import catalog, served
from tests.serving_app import settings as given_settings

Delta: TypeAlias = dict[str, Any]
Served: TypeAlias = Callable[..., AbstractContextManager[str]]
Run: TypeAlias = Callable[..., "subprocess.CompletedProcess[str]"]
MODELS: dict[str, dict[str, Any]] = {
    "writer": {"kind": "chat", "source": "path:writer"},
    "embedder": {"kind": "embedding", "source": "path:embedder"},
}
NOBODY = "1"  # a port at which nothing answers
STOP: Delta = {"finish_reason": "stop"}
# What rich itself writes: colours, and nothing that a text could have asked for.
COLOURS = re.compile(r"\x1b\[[\d;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
SEQUENCES = [
    "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJm\x1b\\", "\x9d0;title\x9c", "\x1b]8;;http://x\x07",
    "\x1b[31m", "\x1b[2J", "\x1b[1;1H", "\x9b31m", "\x1b[?1049h",
    "\x1bP+q544e\x1b\\", "\x90q\x9c", "\x1b_G\x1b\\", "\x1b^x\x07", "\x1bXx\x9c",
    "\x1bc", "\x1b7", "\x1b(0", "\x07", "\x08", "\r", "\x00", "\x7f", "\x85", "\ud800",
]  # fmt: skip
MARKDOWN = """\
# A title

A paragraph of
two lines.

- one
- two

  with more

```python
x = "\u00e9"

y = 2
```
> quoted
lazily

| a | b |
| - | - |
| 1 | 2 |

1. first
2. second

Title
---
The end
"""


def says(*texts: str) -> list[Delta]:
    """Script an answer of these texts, one a step."""
    return [*({"text": text, "tokens": 1} for text in texts), STOP]


@pytest.fixture
def serving(tmp_path: Path, portal: BlockingPortal) -> Served:
    """Give a context that serves a scripted chat in this process. It gives the URL."""

    for name in MODELS:
        (tmp_path / name).mkdir()

    @contextmanager
    def serving(
        chat: ScriptedChat, engines: ScriptedEngines | None = None, **given: Any
    ) -> Iterator[str]:
        scripted = engines or ScriptedEngines(chat=chat)
        gateway = served(catalog(tmp_path, MODELS), scripted, **given)
        with capture_logs(), portal.wrap_async_context_manager(gateway) as client:
            yield str(client.base_url).rstrip("/")

    return serving


@pytest.fixture
def run(tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a function that runs `mlx-gateway run` with a pipe as its standard input."""

    def ran(url: str, *arguments: str, piped: bytes = b"", **given: str) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        return inside(tmp_path, "run", *arguments, GATEWAY_PORT=url.rpartition(":")[2], **given)

    return ran


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_control_characters_are_removed_and_no_others(sequence: str) -> None:
    left = "".join(letter for letter in sequence if letter.isascii() and letter.isprintable())
    assert clean(f"\ta{sequence}\nb\u202e") == f"\ta{left}\nb\u202e"


HOSTILE = st.lists(
    st.sampled_from([*SEQUENCES, "\x1b", "[", "]", "31m", "\\", "a", " ", "\n", "&#27;", "&#x9b;",
                     "&#13;", "# ", "- ", "```\n", "`", "<b>", "|", "[x](http://y)", "![z](w)"]),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.mark.generator
@given(text=HOSTILE)
@settings(deadline=None)
def test_markdown_writes_no_control_but_richs_colours(text: str) -> None:
    """Numeric characters of HTML, such as &#27;, are of the parser's making."""
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=40).print(make_markdown(clean(text)))
    assert not CONTROL.search(COLOURS.sub("", out.getvalue()))


def test_events_are_read_without_control_characters() -> None:
    lines = [
        b": keep-alive\n", b"\n",
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n',
        b'data: {"choices": [{"delta": {"reasoning_content": "h\\u001bm"}}]}\n',
        b'data: {"choices": [{"delta": {"reasoning_content": "."}}]}\n',
        b'data: {"choices": [{"delta": {"content": "Yes"}, "finish_reason": "stop"}]}\n',
        b'data: {"choices": [], "usage": {}}\n', b"data: [DONE]\n", b"data: never read\n",
    ]  # fmt: skip
    pieces = list(read_pieces(lines))
    assert "".join(piece.thoughts for piece in pieces) == "hm."
    assert pieces[-1] == Piece("Yes")
    with pytest.raises(EOFError):
        list(read_pieces(lines[:-2]))
    with pytest.raises(Refused, match="no memory"):
        list(read_pieces([b'data: {"error": {"message": "no memory"}}\n']))


def test_a_block_is_whole_once_the_next_begins() -> None:
    """However much of the text is there, it is cut only where the whole text would be."""
    lines = MARKDOWN.splitlines(keepends=True)
    begins = {0} | {
        sum(map(len, lines[:token.map[0]]))
        for token in make_markdown(MARKDOWN).parsed
        if token.map and token.level == 0
    }  # fmt: skip
    found = {whole_blocks(MARKDOWN[:end]) for end in range(len(MARKDOWN) + 1)}
    assert found == begins


def draw(*pieces: Piece, height: int = 10, **about: Any) -> str:
    """Return the text that a terminal is sent, without the commands that hide the cursor."""
    out = io.StringIO()
    about |= {"width": 40, "height": height, "color_system": None}
    console = Console(file=out, force_terminal=True, **about)
    Screen(console).draw(iter(pieces))
    return re.sub(r"\x1b\[\?25[hl]", "", out.getvalue())


def test_a_long_answer_is_whole_on_the_terminal() -> None:
    """A block that is longer than the screen is printed too, once."""
    text = "\n".join(["Lines:", "", *(f"- line {number}" for number in range(50)), "", "End."])
    drawn = draw(*(Piece(part) for part in re.split("(?<= )", text)), force_interactive=False)
    shown = [line.strip() for line in drawn.splitlines() if line.strip()]
    assert shown == ["Lines:", *(f"• line {number}" for number in range(50)), "End."]


def test_what_is_drawn_again_is_never_higher_than_the_screen() -> None:
    """Else the terminal could not take it back, and would show it twice."""
    code = "```\n" + "".join(f"{number}\n" for number in range(40))
    drawn = draw(*map(Piece, code.splitlines(keepends=True)), height=8)
    assert max(map(len, re.findall(r"(?:\x1b\[1A\x1b\[2K)+", drawn))) <= 8 * len("\x1b[1A\x1b[2K")
    assert drawn.rpartition("\x1b")[2].count("\n") >= 40


def test_no_line_is_as_wide_as_the_terminal() -> None:
    """Else the ^C that the terminal echoes would wrap, and leave a line there twice."""
    drawn = draw(Piece("word " * 20 + "\n```\nx = 1\n```\n"))
    assert max(map(len, re.sub(r"\x1b\[\w*", "\n", drawn).splitlines())) == 38


def test_thoughts_are_folded_when_the_answer_begins() -> None:
    pieces = (Piece(thoughts="Hm, "), Piece(thoughts="so."), Piece("Yes."))
    drawn = draw(*pieces, force_interactive=False)
    assert drawn.split("\n")[0] == "thought for 0 s"
    assert "Yes." in drawn
    assert "so." not in drawn


def test_html_addresses_and_lines_are_shown() -> None:
    """Of HTML and of images rich would show nothing; a link might hide where it leads."""
    text = "<div>one</div>\ntwo [three](http://four)\n![five](six)"
    drawn = draw(Piece(text), force_interactive=False).splitlines()
    shown = [line.strip() for line in drawn if line.strip()]
    assert shown == ["<div>one</div>", "two three (http://four)", "!five (six)"]


def test_a_long_block_of_code_is_whole_and_has_fewer_colours() -> None:
    """Colours took seconds for 500 lines."""
    colours = []
    for lines in (5, 2000):
        out, code = io.StringIO(), "```python\n" + "x = 1\n" * lines + "```\n"
        Console(file=out, force_terminal=True, color_system="standard").print(make_markdown(code))
        assert COLOURS.sub("", out.getvalue()).count("x = 1") == lines
        colours.append({*COLOURS.findall(out.getvalue())})
    assert colours[1] < colours[0]


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("Hello", None),
        ("", None),
        ("/tmp/cat.png What is this?", None),
        ("1/2", None),
        (" /usr is what?", None),
        ("/clear ", ("/clear", "")),
        ("/system Be brief.\nAnd kind.", ("/system", "Be brief.\nAnd kind.")),
        ("/save  my file.json", ("/save", "my file.json")),
    ],
)
def test_a_line_is_a_command_or_a_prompt(line: str, parsed: object) -> None:
    assert parse_command(line) == parsed


@pytest.mark.parametrize(
    "prompt",
    [
        "{0}/cat.png What is this?",
        "What is {0}/cat.png?",
        "'{0}/my cat.JPG'",
        'See "{0}/my cat.JPG".',
        "{0}/my\\ cat.JPG",
        "It's in {0}/cat.png, isn't it",
        "{0}/at\u202f9.png",
        "./cat.png",
        "~/cat.png",
    ],
)
def test_the_path_of_a_picture_is_found(
    prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cat.png", "my cat.JPG", "at\u202f9.png"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    [picture] = find_pictures(prompt.format(tmp_path))
    assert picture.is_file()


def test_other_paths_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name without a slash, too: a prompt may be about the file."""
    for name in ("cat.png", "cat.png.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for path in (
        f"{tmp_path}/cat.png.txt",
        "cat.png",
        "'cat.png'",
        "https://x/cat.png",
        f"'{'x' * 999}.png'",
    ):
        assert find_pictures(path) == []


def test_a_picture_is_sent_with_its_question(tmp_path: Path) -> None:
    picture = tmp_path / "cat.JPG"
    picture.write_bytes(b"pixels")
    text, image = make_question("What?", [picture])["content"]
    assert text == {"type": "text", "text": "What?"}
    kind, _, data = image["image_url"]["url"].partition(";base64,")
    assert (kind, base64.b64decode(data)) == ("data:image/jpg", b"pixels")


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_question_without_an_answer_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    """Wherever Ctrl-C comes: after it was sent, or while its answer is waited for."""

    def answer(*_: Any) -> Iterator[Piece]:
        raise KeyboardInterrupt
        yield Piece("Yes.")

    def show(pieces: Iterator[Piece]) -> None:
        if is_begun:
            next(pieces)
        raise KeyboardInterrupt

    monkeypatch.setattr(conversation, "ask", answer)
    monkeypatch.setattr(conversation, "write", show)
    chat = Conversation("", given_settings(), "writer")
    with pytest.raises(KeyboardInterrupt):
        chat.answer("Why?")
    assert chat.turns == []


def test_what_was_said_stays_in_the_conversation() -> None:
    chat = Conversation("", given_settings(), "writer", system="Be brief.", thinks=False)
    chat.turns.append(make_question("Two?", []))
    with closing(chat.hear(iter([Piece(thoughts="Hm."), Piece("Ye"), Piece("s")]))) as heard:
        next(heard), next(heard)
    assert chat.body() == {
        "model": "writer",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "Ye", "reasoning_content": "Hm."},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_pipe_gets_the_text_of_the_answer_alone(serving: Served, run: Run) -> None:
    script: list[Delta] = [{"reasoning": "Hm.", "tokens": 1}, *says("**Ye", "\x1bs", "\x07**")]
    chat = ScriptedChat(script=script)
    with serving(chat) as url:
        done = run(url, "writer", "Why?", "--no-think", piped=b"one\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "**Yes**\n", "")
    [job] = chat.jobs
    assert job.messages[-1]["content"] == "Why?\n\none\ntwo\n"
    assert job.template_args["enable_thinking"] is False


def test_an_answer_that_is_cut_says_so(serving: Served, run: Run) -> None:
    script: list[Delta] = [{"text": "Ye\n", "tokens": 1}, {"finish_reason": "length"}]
    with serving(ScriptedChat(script=script)) as url:
        done = run(url, "writer", piped=b"Why?")
    assert (done.returncode, done.stdout) == (1, "Ye\n")
    assert done.stderr == "The answer is not whole (length).\n"


def test_a_model_that_cannot_answer_is_refused_with_the_next_command(
    serving: Served, run: Run
) -> None:
    with serving(ScriptedChat()) as url:
        absent = run(url, "no\x1b[31mbody", "Hi")
        embedder = run(url, "embedder", "Hi")
        blind = run(url, "writer", "Hi", "--image", __file__)
        refused = run(url, "writer", "refuse me")
    assert {done.returncode for done in (absent, embedder, blind, refused)} == {1}
    assert absent.stderr == (
        f"The gateway at {url} does not serve the chat model no[31mbody. Run one of:\n"
        "  mlx-gateway run writer\n"
        "  mlx-gateway models recommend\n"
    )
    assert "does not serve the chat model embedder. Run one of:\n" in embedder.stderr
    assert "this model reads text" in blind.stderr
    assert refused.stderr == "The template refuses.\n"


def test_a_model_that_a_new_gateway_has_is_named(serving: Served, run: Run, tmp_path: Path) -> None:
    """By a name that it takes: the one that was typed, or the nearest of the catalogue."""
    (tmp_path / "folder").mkdir()
    listed = "version: 1\nmodels: {listed: {kind: chat, source: 'path:folder'}}\n"
    with serving(ScriptedChat()) as url:
        (tmp_path / "models.yaml").write_text(listed)
        for name, new in (
            ("listed", "listed"), ("list", "listed"),
            ("qwen3.5:9b", "qwen3.5-9b"), ("qwen3.5-9b", "qwen3.5-9b"), ("./folder", "./folder"),
            ("org/name", "org/name"),
        ):  # fmt: skip
            command = f"\n  GATEWAY_PORT=0 mlx-gateway run {new}  # on a new gateway\n"
            assert command in run(url, name, "Hi").stderr


def test_a_picture_is_named_on_the_command_line(serving: Served, run: Run, tmp_path: Path) -> None:
    """A path in a prompt is text there, as scripts make prompts of what they have."""
    (tmp_path / "cat.png").touch()
    chat = ScriptedChat(script=says("Yes"))
    with serving(chat) as url:
        assert run(url, "writer", "Is ./cat.png a name?").returncode == 0
    assert chat.jobs[0].messages[-1]["content"] == "Is ./cat.png a name?"


def test_wrong_usage_has_status_2(run: Run) -> None:
    for arguments, piped, problem in (
        (("writer",), b"", "there is no question"),
        (("writer",), b"\x89PNG", "'utf-8' codec can't decode"),
        (("writer", "Hi", "--image", "gone.png"), b"", "does not exist"),
        (("writer", "Hi", "--image", "/"), b"", "is a directory"),
        (("writer", "Hi \udcff"), b"", "Invalid value for PROMPT: it is not UTF-8"),
        (("", "Hi"), b"", "Invalid value for MODEL"),
        (("hub:", "Hi"), b"", "may end in @revision"),
    ):
        done = run(NOBODY, *arguments, piped=piped)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert problem in " ".join(done.stderr.split()), arguments


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_wrong_usage(
    stream: str, tmp_path: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter has None in its place."""
    monkeypatch.setattr(sys, stream, None)
    done = inside(tmp_path, "run", "writer", "Hi", GATEWAY_PORT=NOBODY)
    assert done.returncode == 2
    assert "standard input or output is closed" in done.stderr


def test_a_history_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older one, too. A relative XDG_STATE_HOME is ignored, as its specification has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    file = tmp_path / "home" / ".local" / "state" / "mlx-gateway" / "history"
    file.parent.mkdir(parents=True)
    file.touch(0o644)
    open_history().store_string("secret")
    assert file.stat().st_mode & 0o777 == 0o600
    assert "+secret" in file.read_text()
    assert [*tmp_path.iterdir()] == [tmp_path / "home"]


def test_a_prompt_that_the_history_cannot_take_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = open_history()
    file = tmp_path / "mlx-gateway" / "history"
    file.unlink()
    file.mkdir()
    history.store_string("secret")
    assert "Prompts are not kept for later: " in capsys.readouterr().err


def test_a_user_without_a_home_has_no_history(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container whose user has no entry in its list of users."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        typed.send_text("Hi\r")
        assert make_reader(keeps_history=True)() == "Hi"
    assert "Prompts are not kept for later: " in capsys.readouterr().err


def test_a_key_is_sent_and_a_wrong_one_named(serving: Served, run: Run) -> None:
    with serving(ScriptedChat(script=says("Yes")), api_keys="first,second") as url:
        right = run(url, "writer", "Hi", GATEWAY_API_KEYS="second")
        wrong = run(url, "writer", "Hi", GATEWAY_API_KEYS="third")
    assert (right.returncode, right.stdout) == (0, "Yes\n")
    assert wrong.returncode == 1
    assert "refuses us (401)" in wrong.stderr


def test_an_answer_that_breaks_keeps_its_text_and_fails(serving: Served, run: Run) -> None:
    with serving(ScriptedChat(fail_at_step=3)) as url:
        done = run(url, "writer", "Hello")
    assert (done.returncode, done.stdout) == (1, "He\n")
    assert done.stderr == "The model `writer` failed on this request: the step failed\n"


def test_no_gateway_and_a_name_of_nothing_is_a_failure(run: Run) -> None:
    done = run(NOBODY, "nobody", "Hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert "nobody" in done.stderr


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait for a fact; the minute only ends a test that would hang."""
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def endless() -> ScriptedChat:
    """Give a chat that says more than anybody waits for."""
    return ScriptedChat(script=says(*["word "] * 100_000), max_context=200_000)


def test_closing_an_answer_frees_its_row(serving: Served) -> None:
    chat = endless()
    with serving(chat) as url:
        body = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}]}
        with closing(ask(url, None, body)) as pieces:
            assert next(piece.text for piece in pieces if piece.text) == "word "
        wait_for(lambda: chat.left)


def test_a_gateway_that_is_gone_is_named(serving: Served) -> None:
    with serving(ScriptedChat()) as url:
        pass
    with pytest.raises(Refused, match=f"The gateway at {url} ended before the answer did"):
        list(ask(url, None, {}))


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[str]:
    """Answer whoever asks with these bytes, and close the connection. Give the URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.writelines(parts)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_gateway_that_ends_in_the_middle_of_an_answer_is_named(
    portal: BlockingPortal, is_chunked: bool
) -> None:
    event = b'data: {"choices": [{"delta": {"content": "Ye"}}]}\n\n'
    parts = [b"HTTP/1.1 200 OK\r\n\r\n", event]
    if is_chunked:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        parts = [head, b"%x\r\n" % len(event), event, b"\r\n40\r\ndata: {"]
    with portal.wrap_async_context_manager(answering(*parts)) as url:
        pieces = ask(url, None, {"messages": []})
        assert next(pieces) == Piece("Ye")
        with pytest.raises(Refused, match=f"{url} ended before the answer did"):
            next(pieces)


@pytest.mark.parametrize("body", [b"<br>", b'{"error": "text"}', b"[1]", b'{"error": null}'])
def test_an_error_that_is_not_the_gateways_is_named(portal: BlockingPortal, body: bytes) -> None:
    """As of a proxy before it."""
    head = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: %d\r\n\r\n" % len(body)
    with portal.wrap_async_context_manager(answering(head, body)) as url:
        with pytest.raises(Refused, match=f"^{url} answered with status 502, and no reason.$"):
            list(ask(url, None, {"messages": []}))


@pytest.mark.parametrize("event", [b'{"choices": null}', b"[1]", b"1", b'{"error": "text"}'])
def test_an_event_that_is_not_the_gateways_is_named(portal: BlockingPortal, event: bytes) -> None:
    parts = b"HTTP/1.1 200 OK\r\n\r\n", b"data: %s\n\n" % event
    with portal.wrap_async_context_manager(answering(*parts)) as url:
        with pytest.raises(Refused, match=f"^{url} sent an event that is no part of an answer.$"):
            list(ask(url, None, {"messages": []}))


def test_an_answer_waits_for_its_model(serving: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway refuses requests while a model takes longer to load than GATEWAY_LOAD_WAIT_S."""
    engines, waits = ScriptedEngines(chat=ScriptedChat(script=says("Yes"))), list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        engines.load_gate.open()

    monkeypatch.setattr(answers, "time", SimpleNamespace(sleep=wait))
    engines.load_gate.close()
    with serving(engines.chat, engines=engines, load_wait_s=0) as url:
        body = {"model": "writer", "messages": [{"role": "user", "content": "Hi"}]}
        said = "".join(piece.text for piece in ask(url, None, body))
    assert (said, {*waits}) == ("Yes", {answers.RETRY_S})


def test_commands_change_the_conversation(
    serving: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    chat = ScriptedChat(script=[{"reasoning": "Hm.", "tokens": 1}, *says("Yes")])
    with serving(chat) as url:
        lines = [
            *("/system Be brief.", "Why?", f"/save {saved}", f"/save {saved}", "/clear"),
            "/save ~nobody-of-this-name/x",
            *("/think", "/think off", "Again?", "", "/model", "/model embedder"),
            *("/think what", "/save", "/nothing", "/help", "/bye", "never read"),
        ]
        read = iter(lines)
        Conversation(url, given_settings(), "writer").hold(read.__next__)
    assert [*read] == ["never read"]
    out, err = capsys.readouterr()
    said = [[message["content"] for message in job.messages] for job in chat.jobs]
    assert said == [["Be brief.", "Why?"], ["Be brief.", "Again?"]]
    assert chat.jobs[1].template_args["enable_thinking"] is False
    shown = ["Yes", "thinking is on", "thinking is off", "Yes", "writer"]
    assert out.splitlines()[: len(shown)] == shown
    problems = [
        f"File exists: '{saved}'",
        "'~nobody-of-this-name/x'",
        "does not serve the chat model embedder",
    ]
    lost = ("/think what", "/save", "/nothing")
    for problem in (*problems, *(f"{line} is not understood: /help" for line in lost)):
        assert problem in err
    assert json.loads(saved.read_text())["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."},
    ]


# Ctrl-C is a signal only on the terminal that controls a session.
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A terminal that a command runs on, and all that it has written there."""

    def __init__(self, folder: Path, *arguments: str, **given: str) -> None:
        master, slave = pty.openpty()
        # A terminal that is no emulator answers no question about its cursor.
        about = {"PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm", "XDG_STATE_HOME": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *command(*arguments)[1:]],
            cwd=folder,
            env=environment(**{**about, **given}),
            stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self._master, self.written = master, ""

    def wait_for(self, text: str) -> None:
        """Read until a text has been written since the last one."""
        while text not in self.written:
            self.written += os.read(self._master, 65536).decode(errors="replace")
        self.written = self.written.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def close(self) -> int:
        self.process.kill()
        os.close(self._master)
        return self.process.wait(60)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Give a function that runs a command on a terminal of its own."""
    opened: list[Terminal] = []

    def open_one(*arguments: str, **given: str) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments, **given))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_then_leaves(
    serving: Served, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    """Its row is freed, and the conversation goes on with what was said."""
    chat = endless()
    with serving(chat) as url:
        shell = terminal("run", "writer", GATEWAY_PORT=url.rpartition(":")[2])
        shell.wait_for(">>> ")
        shell.type("Hello\r")
        shell.wait_for("word")
        shell.type("\x03")
        shell.wait_for("stopped")
        wait_for(lambda: chat.left)
        chat.script = says("Good.")
        shell.wait_for(">>> ")
        shell.type("one\x1b\rtwo\r")
        shell.wait_for("Good.")
        shell.wait_for(">>> ")
        shell.type("\x03")
        shell.wait_for("Ctrl-C once more")
        shell.wait_for(">>> ")
        shell.type("\x03")
        assert shell.process.wait(60) == 0
    said = [message["content"] for message in chat.jobs[1].messages]
    assert (said[0], said[1][:5], said[2]) == ("Hello", "word ", "one\ntwo")
    history = tmp_path / "mlx-gateway" / "history"
    assert "+Hello" in history.read_text()
    assert [path.stat().st_mode & 0o777 for path in (history, history.parent)] == [0o600, 0o700]


@pytest.mark.slow
def test_ctrl_c_before_the_answer_takes_the_question_back(
    serving: Served, terminal: Callable[..., Terminal]
) -> None:
    chat = ScriptedChat(script=says("Yes."))
    with serving(chat) as url:
        shell = terminal("run", "writer", GATEWAY_PORT=url.rpartition(":")[2])
        shell.wait_for(">>> ")
        chat.gate.close()
        shell.type("Hello\r")
        assert chat.gate.reached.wait(60)
        shell.type("\x03")
        shell.wait_for("stopped")
        chat.gate.open()
        shell.wait_for(">>> ")
        shell.type("Again\r")
        shell.wait_for("Yes.")
    assert [message["content"] for message in chat.jobs[-1].messages] == ["Again"]


@pytest.mark.slow
def test_ctrl_c_ends_a_single_answer_with_130(
    serving: Served, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    chat = endless()
    with serving(chat) as url:
        shell = terminal("run", "writer", "Hi", GATEWAY_PORT=url.rpartition(":")[2])
        shell.wait_for("word")
        shell.process.send_signal(signal.SIGINT)
        assert shell.process.wait(60) == 130
        wait_for(lambda: chat.left)
    assert not (tmp_path / "mlx-gateway").exists(), "no history of what is on the command line"


@pytest.mark.slow
@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_conversation_goes_on_without_a_history(
    serving: Served, terminal: Callable[..., Terminal], tmp_path: Path, is_wanted: bool
) -> None:
    """Whether the user wants none, or its folder cannot be made, which is said."""
    with serving(ScriptedChat(script=says("Yes."))) as url:
        given = {"GATEWAY_PORT": url.rpartition(":")[2]}
        shell = terminal("run", "writer", "--no-history", **given)
        if is_wanted:
            shell = terminal("run", "writer", XDG_STATE_HOME="/dev/null", **given)
            shell.wait_for("Prompts are not kept for later")
        shell.wait_for(">>> ")
        shell.type("secret\r")
        shell.wait_for("Yes.")
        shell.wait_for(">>> ")
        shell.type("\x04")
        assert shell.process.wait(60) == 0
    assert not (tmp_path / "mlx-gateway").exists()


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_the_answer_quietly(serving: Served, tmp_path: Path) -> None:
    chat = endless()
    with serving(chat) as url:
        line = " ".join([*command("run", "writer", "Hi"), "| head -c 4; exit ${PIPESTATUS[0]}"])
        given = environment(GATEWAY_PORT=url.rpartition(":")[2])
        done = subprocess.run(
            ["bash", "-c", line], env=given, cwd=tmp_path, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=120, check=False,
        )  # fmt: skip
        wait_for(lambda: chat.left)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"word", b"")
