"""The program of the sandbox processes, which serving/sandbox.py starts and kills.

It runs as a script, so it imports no other module of the gateway and never mlx. Its arguments are
the file descriptor of a `multiprocessing` connection and the kind of request to warm up for.

Messages are JSON bytes. A request is an object with the fields of its kind and these:

kind         a key of KINDS
processor_s  the processor time until SIGPROF ends the process
seconds      the time until SIGALRM ends the process, even if the gateway is gone
max_bytes    the memory allowed beyond the memory in use at the start
data         the size of a file, which is the next message

An answer is a list: an outcome, a value, and whether to replace the process. If the value is bytes,
the list has null instead and, as a fourth item, the number of bytes in the next message.
"""

import contextlib
import functools
import importlib.util
import io
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

    Reader: TypeAlias = Callable[[io.BytesIO], ImageFile]

Answer: TypeAlias = tuple[str, Any]
Request: TypeAlias = Mapping[str, Any]
Sandbox: TypeAlias = Callable[[Request, bytes], Answer]
"""Runs a request and returns an outcome and its value.

The outcome is one of the request's kind, or large, busy, slow, late, died or killed, with a reason.
A request whose key has ended a process is not run again.
"""

# A recursion that fits this stack also fits the stacks of the gateway's threads.
STACK_BYTES: Final = 4 << 20
TRIAL_STEPS: Final = 8
# Tokens that a grammar may force at once.
MOST_FORCED: Final = 1 << 17
TRIAL_FORCED: Final = 64
MOST_REASON: Final = 2000  # characters
# A larger process is replaced, since malloc returns little memory to the system.
SPENT_BYTES: Final = 512 << 20
# Keywords of JSON Schema that may accept a value because a subschema refuses it or leaves parts of
# it unevaluated.
TURNING: Final = ("not", "oneOf", "if", "maxContains", "unevaluatedItems", "unevaluatedProperties")
END: Final = "<|end of the trial|>"
MOST_PIXELS: Final = 64_000_000  # as in Anthropic's API
MOST_SIDE: Final = 16_384  # pixels
# The longest side, in shorter sides, as in Qwen's image processor.
MOST_ASPECT: Final = 200
LEAST_SIDE: Final = 4  # pixels
# Pillow's transposition that turns an image of each EXIF orientation upright.
TURNS: Final = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270",
    7: "TRANSVERSE", 8: "ROTATE_90",
}  # fmt: skip
ON_ITS_SIDE: Final = 5  # this and later orientations swap width and height


def try_grammar(request: Request) -> Answer:
    """Compile a grammar for a small tokenizer and take some steps.

    `spec` is in llguidance's format, `specials` are the control tokens in it, and `limits` are
    arguments of LLParserLimits.
    """
    from llguidance import LLMatcher, LLParserLimits

    # This shows whether llguidance survives the grammar, before the gateway compiles it again.
    tokenizer, eos = _bytes_tokenizer(tuple(request["specials"]))
    matcher = LLMatcher(
        tokenizer, request["spec"], log_level=0, limits=LLParserLimits(**request["limits"])
    )
    if problem := matcher.get_error():
        return "wrong", problem[:MOST_REASON]
    for _ in range(TRIAL_STEPS):
        if matcher.get_error() or matcher.is_stopped():
            break
        forced = matcher.compute_ff_tokens()
        if len(forced) > MOST_FORCED:
            return "wrong", f"it leaves no choice for over {MOST_FORCED:,} bytes"
        for token in forced[:TRIAL_FORCED]:
            matcher.consume_token(token)
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(eos) if mask[i // 8] >> (i % 8) & 1]
        if not allowed:
            break
        # A quote ends a JSON string, so the steps reach more of the grammar.
        matcher.consume_token(ord('"') if ord('"') in allowed else allowed[0])
    return "tried", None


@functools.lru_cache(maxsize=8)
def _bytes_tokenizer(specials: tuple[str, ...]) -> tuple[Any, int]:
    """Return a tokenizer of all bytes, `specials` and END, and END's id."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    class Bytes:
        tokens: Final = [*(bytes([i]) for i in range(256)), *(s.encode() for s in (*specials, END))]
        special_token_ids: Final = list(range(256, len(tokens)))
        eos_token_id: Final = len(tokens) - 1
        bos_token_id: Final = None

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Bytes())), Bytes.eos_token_id


def render(request: Request) -> Answer:
    """Render a chat template with the arguments of transformers' `render_jinja_template`."""
    try:
        rendered: Any = _renderer()(**json.loads(request["arguments"]))
    except MemoryError:
        raise
    except Exception as error:
        return "refused", str(error)[:MOST_REASON]
    text, max_chars = rendered[0][0], request["max_chars"]
    if len(text) > max_chars:
        return "large", f"it writes {len(text)} characters, and may write {max_chars}"
    return "rendered", text


@functools.cache
def _renderer() -> Callable[..., Any]:
    # Skipping both packages' `__init__.py` saves two thirds of the time and a third of the memory.
    for package in ("transformers", "transformers.utils"):
        if package in sys.modules:
            continue
        spec = importlib.util.find_spec(package)
        if spec is not None:
            sys.modules[package] = importlib.util.module_from_spec(spec)
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def judge(request: Request) -> Answer:
    """Judge whether a JSON answer fits a JSON Schema, with the validator `draft` of jsonschema_rs.

    A reference to another document is never followed, but allows all values. The outcome is
    `refused` if the answer may fit only for that reason.
    """
    import jsonschema_rs as rs

    schema, answer = json.loads(request["schema"]), json.loads(request["answer"])
    if isinstance(schema, dict):
        schema.pop("$schema", None)
    draft = getattr(rs, request["draft"])
    followed: list[str] = []

    def allow_all(address: str) -> dict[str, object]:
        followed.append(address)
        return {}

    # The second kind backtracks, which look-arounds need.
    options = (rs.RegexOptions(), rs.FancyRegexOptions(backtrack_limit=100_000))
    for patterns in options:
        try:
            validator = draft(
                schema,
                pattern_options=patterns,
                validate_formats=False,
                retriever=allow_all,
            )
            is_valid = validator.is_valid(answer)
            if followed and (is_valid or any(f'"{name}"' in request["schema"] for name in TURNING)):
                return "refused", f"it leads to {followed[0]}"
            return "judged", is_valid
        except (ValueError, rs.ReferencingError) as error:
            problem = str(error)[:MOST_REASON]
    return "refused", problem


def read_answer(request: Request) -> Answer:
    """Parse a model's answer with its checkpoint's `response_template`, as transformers does.

    `prefix` is the end of the prompt. If `text` is None, only check the template.
    """
    # Imports the parser's dependency without the rest of transformers.
    _renderer()
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    template, prefix = load_response_template(request["template"]), request["prefix"]
    if request["text"] is None:
        return "read", None
    # Otherwise the prefix would be parsed as a whole conversation.
    if template.start_anchor_re.search(prefix) is None:
        prefix = ""
    return "read", parse_response(request["text"], template, prefix=prefix, tools=request["tools"])


class Unfit(Exception):
    """The image is not decoded, for the reason in the message."""


def read_image(request: Request) -> Answer:
    """Measure the image file `data`, or decode it to `width` × `height` pixels of red, green, blue
    bytes.

    The measured size is that of the upright image.
    """
    from PIL.Image import Resampling, Transpose

    try:
        image, orientation = _open_image(request["data"])
        if request["kind"] == "measure":
            return "measured", image.size[:: -1 if orientation >= ON_ITS_SIDE else 1]
        image.load()
        turn = TURNS.get(orientation)
        turned = image.transpose(Transpose[turn]) if turn else image
        del image  # frees memory
        size, resample = (request["width"], request["height"]), request["resample"].upper()
        return "decoded", _to_rgb(turned).resize(size, Resampling[resample]).tobytes()
    except MemoryError:
        raise
    except Unfit as error:
        return "refused", str(error)
    except Exception as error:
        is_cut = "truncated" in str(error).lower()
        return "refused", "it is cut off" if is_cut else f"it is broken: {error}"[:MOST_REASON]


def refuse_size(width: int, height: int) -> str | None:
    """Return the reason why an image of this size is not decoded, or None."""
    size = f"it has {width:,} × {height:,} pixels"
    if width * height > MOST_PIXELS:
        return f"{size}, over {MOST_PIXELS:,} in all"
    if max(width, height) > MOST_SIDE:
        return f"{size}; a side may have {MOST_SIDE:,}"
    if min(width, height) < LEAST_SIDE:
        return f"{size}; a side has {LEAST_SIDE} at least"
    if max(width, height) > MOST_ASPECT * min(width, height):
        return f"{size}; one side may be {MOST_ASPECT} times the other"
    return None


def _open_image(data: bytes) -> "tuple[ImageFile, int]":
    """Return an image, not decoded yet, and its EXIF orientation."""
    from PIL import Image

    reader = next((each for is_one, each in _image_readers() if is_one(data)), None)
    if reader is None:
        raise Unfit("it is none of PNG, JPEG, WEBP, GIF and BMP")
    try:
        image = reader(io.BytesIO(data))
    except Image.DecompressionBombError:
        raise Unfit(f"it has over {MOST_PIXELS:,} pixels") from None
    if problem := refuse_size(*image.size):
        raise Unfit(problem)
    if b"eXIf" in data:  # a PNG file may have EXIF after its pixels
        image.load()
    with contextlib.suppress(Exception):  # broken EXIF is ignored
        orientation = Image.Image.getexif(image).get(0x0112)
        return image, orientation if orientation in TURNS else 1
    return image, 1


@functools.cache
def _image_readers() -> "Sequence[tuple[Callable[[bytes], bool], Reader]]":
    """Return a test of a file's first bytes and a reader, for each image format."""
    from PIL import Image
    from PIL.BmpImagePlugin import BmpImageFile
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile
    from PIL.WebPImagePlugin import WebPImageFile

    # The WEBP reader raises DecompressionBombError above twice this limit, before it allocates
    # memory.
    Image.MAX_IMAGE_PIXELS = MOST_PIXELS // 2
    return (
        (lambda data: data.startswith(b"\x89PNG\r\n\x1a\n"), PngImageFile),
        (lambda data: data.startswith(b"\xff\xd8\xff"), JpegImageFile),
        (lambda data: data.startswith(b"RIFF") and data[8:12] == b"WEBP", WebPImageFile),
        (lambda data: data.startswith((b"GIF87a", b"GIF89a")), GifImageFile),
        (lambda data: data.startswith(b"BM"), BmpImageFile),
    )


def _to_rgb(image: "Image") -> "Image":
    """Convert an image to 8 bits of red, green and blue, with white where it is transparent."""
    from PIL.Image import new

    # Pillow's `convert` would turn all 16-bit values above 255 into white.
    if image.mode.startswith("I"):
        clear, wide = image.info.pop("transparency", None), image.convert("I")
        image = wide.point([value >> 8 for value in range(1 << 16)], "L")
        if clear is not None:
            image.putalpha(wide.point([255 * (value != clear) for value in range(1 << 16)], "L"))
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if image.mode != "RGBA":
        image = image.convert("RGBA")
    white = new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white


KINDS: Final[Mapping[str, Callable[[Request], Answer]]] = {
    "grammar": try_grammar,
    "template": render,
    "answer": judge,
    "reading": read_answer,
    "measure": read_image,
    "decode": read_image,
}
READY: Final[Mapping[str, Callable[[], Answer]]] = {
    "grammar": lambda: try_grammar({"spec": "start: /a+/", "specials": (), "limits": {}}),
    "template": lambda: render(
        {
            "arguments": json.dumps({"conversations": [[]], "chat_template": ""}),
            "max_chars": 0,
        }
    ),
    "image": lambda: read_image({"kind": "measure", "data": b""}),
}


def serve(connection: "Connection[Any, Any]", kind: str) -> None:
    """Answer requests until the other end closes the connection."""
    READY[kind]()
    base_bytes = _address_space_bytes()
    connection.send_bytes(json.dumps(("ready", None, False)).encode())
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            signal.setitimer(signal.ITIMER_PROF, request["processor_s"])
            if "data" in request:
                request["data"] = connection.recv_bytes(request["data"])
            _bound_memory(base_bytes + request["max_bytes"])
            outcome, value = _answer(request)
            del request
            is_spent = _most_resident_bytes() > SPENT_BYTES
            is_bytes = isinstance(value, bytes)
            listed = (None, is_spent, len(value)) if is_bytes else (value, is_spent)
            connection.send_bytes(json.dumps((outcome, *listed)).encode())
            if is_bytes:
                connection.send_bytes(value)
            for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0)


def _answer(request: Request) -> Answer:
    try:
        return KINDS[request["kind"]](request)
    except MemoryError:
        return "large", "it needs more memory than it may have"
    except BaseException as error:
        return "refused", f"{type(error).__name__}: {error}"[:MOST_REASON]


def _bound_memory(limit: int) -> None:
    """Limit this process's address space, in bytes.

    macOS doesn't enforce the limit, so the gateway checks the resident memory there.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard_limit))


def _address_space_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return 1 << 30  # a guess
    return pages * resource.getpagesize()


def _most_resident_bytes() -> int:
    # On Linux, getrusage's maximum includes the memory of the gateway, this process's parent.
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the gateway handles them
    with contextlib.suppress(OSError):  # Linux kills this process first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(int(sys.argv[1]))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(connection, sys.argv[2]))
    thread.start()
    thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
