"""demo-vision's tokenizer and chat template, as transformers reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import tokens
from demo.tokens import ASSISTANT, BEGIN, END, PAD

USER: Final = "<|user|>"
IMAGE, OPEN, CLOSE = "<|image|>", "<|picture|>", "<|/picture|>"
CONTEXT: Final = 2048
_SPECIAL: Final = (PAD, BEGIN, END, "<|system|>", USER, ASSISTANT, IMAGE, OPEN, CLOSE)
_VOCABULARY: Final = 448
TEMPLATE: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role not in ('system', 'user', 'assistant') -%}
        {{- raise_exception('demo-vision knows no role ' ~ message.role) -}}
    {%- endif -%}
    <|{{ message.role }}|>
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {{- '<|picture|><|image|><|/picture|>' if part.type == 'image' else part.text -}}
        {%- endfor -%}
    {%- endif -%}
    <|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def train_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Learn a byte-level BPE in which each word of the texts is a token."""
    tokenizer = Tokenizer(models.BPE())
    cuts = Regex(r" ?\p{L}+|\p{N}|\s|[^\s\p{L}\p{N}]+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cuts, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokens.save_tokenizer(tokenizer, folder, special=_SPECIAL, context=CONTEXT, template=TEMPLATE)
