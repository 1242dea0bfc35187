"""Models with random weights: as much work as trained ones, and nothing to download.

And a GGUF file unpacked, for those who read folders only. Imports mlx. A random model's answer is
as long as was asked for, because the end of a turn, like every token that is not plain words, has a
logit of zero, and some word's is always above it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import gateway.engine  # noqa: F401  (first: OpenBLAS must be there before mlx)

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gateway.bench.requests import Texts
from gateway.engine.device import Device
from gateway.engine.models.gguf.checkpoint import GgufCheckpoint, read_gguf_decoder
from gateway.engine.models.gguf.vocabulary import wrap_tokenizer

VOCABULARY = 16_384
_MODULES = "sentence_transformers.models"
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = tuple(f"<|{role}|>" for role in ("system", "user", "assistant"))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# One layer of four attends to all tokens: the others see 512 of them, or keep a state of linear
# attention, as do Gemma 3's and Qwen3-Next's.
SLIDING = {
    "model_type": "gemma3_text",
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 512,
    "sliding_window_pattern": 4,
}
HYBRID = {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
}
NEAR_FREE = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 128,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
# The shape of ms-marco-MiniLM-L6-v2: https://huggingface.co/cross-encoder/ms-marco-MiniLM-L6-v2
RERANKER = {
    **NEAR_FREE,
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "id2label": {"0": "relevance"},  # else transformers expects two
}
# The shape of bge-base-en-v1.5: https://huggingface.co/BAAI/bge-base-en-v1.5
BGE_BASE = {
    **NEAR_FREE,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}


def write_chat(
    folder: Path, vocabulary: int = VOCABULARY, *, repeats: int | None = None, **config: Any
) -> Path:
    """Write a llama of 8 layers by 512, unless `config` says otherwise.

    It takes 175 MB on disk, and some seconds. An answer `repeats` itself after that number of
    tokens, though as much is computed for each: none depends on the tokens before the last one.
    """
    tokenizer = write_chat_tokenizer(folder, vocabulary)
    whole = {**LLAMA, "vocab_size": tokenizer.get_vocab_size(), **config}
    _write(folder / "config.json", whole)
    mx.random.seed(0)
    classes: Any = _get_classes(whole)
    model = classes[0](classes[1].from_dict(whole))
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    plain = mark_plain(tokenizer)[:, None]
    weights["lm_head.weight"] *= plain
    if repeats is not None:
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weights[name] = mx.zeros_like(weight)
        ids = mx.arange(plain.size)
        earlier = ids - 1 + repeats * (ids % repeats == 0)  # circles of `repeats` tokens
        weights["lm_head.weight"] = 99 * plain * weights["model.embed_tokens.weight"][earlier]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def write_chat_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> Tokenizer:
    """Write the tokenizer and the template of a chat model into a new folder."""
    folder.mkdir(parents=True)
    tokenizer = _byte_pairs(vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": BEGIN,
            "eos_token": END,
            "additional_special_tokens": ROLES,
            "clean_up_tokenization_spaces": False,
        },
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tokenizer


def write_embedder(folder: Path) -> Path:
    """Write a BERT of one layer by 32: next to no work, so that the cost around it shows.

    models.yaml must say its pooling and whether it normalizes.
    """
    return _write_bert(folder, NEAR_FREE)


def write_bge_base(folder: Path, **config: Any) -> Path:
    """Write a BERT whose folder says that the first token's vector counts: of 12 layers by 768, as
    far as `config` says no other.
    """
    whole = {**BGE_BASE, **config}
    _write_bert(folder, whole)
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"{_MODULES}.{kind}"}
        for index, (kind, path) in enumerate(parts.items())
    ]
    _write(folder / "modules.json", modules)
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    size = {"word_embedding_dimension": whole["hidden_size"]}
    _write(pooling / "config.json", {**size, "pooling_mode_cls_token": True})
    return folder


def write_reranker(folder: Path, **config: Any) -> Path:
    """Write a BERT with a head of one label: of 6 layers by 384, unless `config` says otherwise."""
    whole = {**RERANKER, **config}
    size = whole["hidden_size"]
    head = {
        "bert.pooler.dense.weight": (size, size),
        "bert.pooler.dense.bias": (size,),
        "classifier.weight": (1, size),
        "classifier.bias": (1,),
    }
    return _write_bert(folder, whole, prefix="bert.", more=head)


def _write_bert(
    folder: Path, config: dict[str, Any], *, prefix: str = "", more: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    tokenizer = _word_pieces()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": config["max_position_embeddings"],
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
        },
    )
    whole = {**config, "vocab_size": tokenizer.get_vocab_size()}
    _write(folder / "config.json", whole)
    mx.random.seed(0)
    shapes = {prefix + name: shape for name, shape in _bert_shapes(whole)} | (more or {})
    weights = {name: mx.random.normal(shape) * 0.1 for name, shape in shapes.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A chat model's folder: its tokenizer, and the bytes of its weights."""

    tokenizer: Any
    nbytes: int

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a user's prompt, by the model's template."""
        messages = [{"role": "user", "content": prompt}]
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return list(encoded)


def write_unpacked(file: Path, folder: Path) -> Unpacked:
    """Write the model of a GGUF file as a folder that mlx-lm reads, float32 as on a CPU."""
    folder.mkdir(parents=True)
    checkpoint = GgufCheckpoint(file.stem, file)
    steps = read_gguf_decoder(checkpoint, device=Device.CPU, dtype="float32", is_packed=False)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            weights = dict(tree_flatten(end.value.parameters()))
            break
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    tokenizer = wrap_tokenizer(checkpoint)
    tokenizer._tokenizer.save_pretrained(str(folder))
    config = {name: each for name, each in checkpoint.config().items() if name != "quantization"}
    _write(folder / "config.json", {**config, "eos_token_id": sorted(tokenizer.eos_token_ids)})
    return Unpacked(tokenizer, sum(array.nbytes for array in weights.values()))


def _bert_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name each weight as Hugging Face does."""
    size, wide = config["hidden_size"], config["intermediate_size"]
    for name, rows in (
        ("word", config["vocab_size"]),
        ("position", config["max_position_embeddings"]),
        ("token_type", config["type_vocab_size"]),
    ):
        yield f"embeddings.{name}_embeddings.weight", (rows, size)
    yield "embeddings.LayerNorm.weight", (size,)
    yield "embeddings.LayerNorm.bias", (size,)
    parts = [f"attention.self.{part}" for part in ("query", "key", "value")]
    for layer in (f"encoder.layer.{index}." for index in range(config["num_hidden_layers"])):
        for dense, rows, columns in (
            *((part, size, size) for part in (*parts, "attention.output.dense")),
            ("intermediate.dense", wide, size),
            ("output.dense", size, wide),
        ):
            yield f"{layer}{dense}.weight", (rows, columns)
            yield f"{layer}{dense}.bias", (rows,)
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            yield f"{layer}{norm}.weight", (size,)
            yield f"{layer}{norm}.bias", (size,)


def _byte_pairs(vocabulary: int) -> Tokenizer:
    """Train a byte-level tokenizer on made-up words and on the texts that will be asked."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, BEGIN, END, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=1000, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator((Texts(0, [30])[n] for n in range(1000)), trainer)
    ends = [(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


def _corpus() -> Iterator[str]:
    """Make up words enough for a vocabulary, each some times, with the words of `Texts`."""
    random, texts = Random(0), Texts(0, [20])
    syllables = [f"{c}{v}{e}" for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", *"nrst")]
    words = ["".join(random.choices(syllables, k=random.randint(2, 4))) for _ in range(30_000)]
    for number in range(6_000):
        yield " ".join(random.choices(words, k=20))
        yield texts[number]


def mark_plain(tokenizer: Tokenizer) -> mx.array:
    """Mark with 1 the tokens, (vocabulary,), of letters and spaces: each is text by itself."""
    size = tokenizer.get_vocab_size()
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(size)]
    plain = [text.isascii() and text.replace(" ", "").isalpha() for text in texts]
    return mx.array(plain, dtype=mx.float32)


def _write(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
