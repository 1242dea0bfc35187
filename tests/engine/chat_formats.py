"""Tokenizers and templates of chat models' families, as far as their formats need them."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.engine.answers.output_parts import OutputPart
from gateway.engine.prompting.chat_tokenizer import (
    ChatFormats,
    ChatTokenizer,
    chat_tokenizer,
    wrap_folder_tokenizer,
)
from gateway.jobs.chat import Calling, Function, Sampling
from gateway.jobs.steps import SequenceParams

DEMO = Path(__file__).parents[2] / "demo" / "chat"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def family(
    folder: Path,
    *,
    tokens: Sequence[str] = (),
    added: Sequence[str] = (),
    template: str = PLAIN,
    words: str = "",
    model_type: str = "llama",
    **given: Any,
) -> ChatTokenizer:
    """Write a tokenizer with more special `tokens` and `added` ones, and load it.

    `words` stand in the template, where no conversation shows them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    known = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    first = max([*known.values(), *tokenizer["model"]["vocab"].values()]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] = [
        *(each for each in tokenizer["added_tokens"] if each["content"] not in (*tokens, *added)),
        *(
            {"id": first + i, "content": content, "special": content in tokens, **plain}
            for i, content in enumerate([*tokens, *added])
        ),
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    config = folder / "config.json"
    written = json.loads(config.read_text()) if config.is_file() else {"model_type": model_type}
    config.write_text(json.dumps(written))
    hidden = "{% if false %}{% raw %}" + words + "{% endraw %}{% endif %}" if words else ""
    (folder / "chat_template.jinja").write_text(template + hidden)
    return open_tokenizer(folder, eos_ids=2, **given)


def open_tokenizer(folder: Path, eos_ids: int | list[int], **options: Any) -> ChatTokenizer:
    """Open the tokenizer of a folder that may have a config."""
    config = folder / "config.json"
    model_type = json.loads(config.read_text()).get("model_type") if config.is_file() else None
    wrapper = wrap_folder_tokenizer(folder, name="x", eos_ids=eos_ids)
    return chat_tokenizer(wrapper, ChatFormats(**options), name="x", model_type=str(model_type))


def row(functions: Sequence[Function] = (), **given: Any) -> SequenceParams:
    """Return a row's job that may call these functions."""
    calling = Calling(functions=list(functions)) if functions else None
    whole: dict[str, Any] = {"calling": calling, **given}
    return SequenceParams(prompt=[1], max_tokens=999, sampling=Sampling(), **whole)


def said(chat: ChatTokenizer, job: SequenceParams, text: str) -> dict[str, Any]:
    """Push a text token by token, and gather the parts that come out."""
    output = chat.answers.output_processor(job)
    ids = chat.backend.encode(text, add_special_tokens=False).ids
    parts = [part for i in ids for part in output.push(i, None, is_shown_as_text=True)]
    return gathered([*parts, *output.finish()])


def gathered(parts: Sequence[OutputPart]) -> dict[str, Any]:
    """Join parts as a client does."""
    calls: dict[int, dict[str, str]] = {}
    for part in parts:
        if part.call is not None:
            call = calls.setdefault(part.call.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += part.call.id or ""
            call["name"] += part.call.name or ""
            call["arguments"] += part.call.arguments
    return {
        "text": "".join(part.text for part in parts),
        "reasoning": "".join(part.reasoning for part in parts),
        "calls": [(call["name"], json.loads(call["arguments"])) for call in calls.values()],
        "ids": [call["id"] for call in calls.values()],
    }
