"""Conversation → prompt: the model's own template, rendered and encoded, on any thread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer

from gateway.errors import BadRequest, ModelLoadFailed
from gateway.jobs import GenerateJob


class ChatTokenizer:
    """A chat model's tokenizer and template. Stateless in use, so threads may share it."""

    def __init__(self, wrapper: TokenizerWrapper, template_args: Mapping[str, Any]) -> None:
        self._render: Any = wrapper.apply_chat_template
        self._template_args = dict(template_args)
        self.backend: Tokenizer = wrapper.backend_tokenizer
        # Set once: changing these per call is what makes a tokenizer say "Already borrowed".
        self.backend.no_truncation()
        self.backend.no_padding()
        self.eos_ids = frozenset(wrapper.eos_token_ids)

    def prompt(self, job: GenerateJob) -> list[int]:
        """Render the conversation and encode it; the template adds its own special tokens.

        Raises BadRequest with the template's own words when it refuses the conversation.
        """
        try:
            text = self._render(
                [dict(message) for message in job.messages],
                tools=list(job.tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                **{**self._template_args, **job.template_args},
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRequest(
                f"The model's chat template refuses these messages: {error}",
                param="messages",
            ) from error
        return list(self.backend.encode(text, add_special_tokens=False).ids)


def load_chat_tokenizer(
    folder: Path,
    *,
    name: str,
    eos_ids: int | list[int] | None,
    chat_template: str | None,
    template_args: Mapping[str, Any],
) -> ChatTokenizer:
    """Load tokenizer.json and the template beside it, or the given one in its place.

    Raises ModelLoadFailed naming what is missing. No code of the model's is ever run.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadFailed(name, f"there is no tokenizer.json in {folder.name}")
    try:
        wrapper = load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=eos_ids)
    except Exception as error:
        raise ModelLoadFailed(name, f"its tokenizer cannot be read: {error}") from error
    if chat_template is not None:
        wrapper.chat_template = chat_template
    if not (wrapper.has_chat_template or chat_template):
        raise ModelLoadFailed(name, "it has no chat template; set `chat_template:` in models.yaml")
    return ChatTokenizer(wrapper, template_args)
