# mypy: ignore-errors
# (its libraries are not where types are checked)
"""Makes the reference vectors and the tiny checkpoints that the engine's tests compare with.

Needs what the gateway itself does not: an environment with
    torch==2.13.0 sentence-transformers==6.2.0 transformers==5.23.0
Run:  python tests/golden/make_golden.py <folder of all-MiniLM-L6-v2>
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

HERE = Path(__file__).parent
_LONG = (
    "The gateway keeps one lane to the device, and every request waits its turn on it. "
    "Embeddings arrive in storms, chats trickle; neither may starve the other. "
)
TEXTS = [
    "Hello, world!",
    "hello world",
    "HELLO WORLD",
    "The quick brown fox jumps over the lazy dog.",
    "a",
    ".",
    " ",
    "   leading and trailing   ",
    "\n\n\n",
    "line one\nline two\r\nline three\ttabbed",
    "😀",
    "family: 👨‍👩‍👧‍👦, flag: 🇩🇪, skin: 👍🏽",
    "机器学习正在改变世界。",
    "これは日本語の文章です。カタカナ、ひらがな、漢字。",
    "한국어 문장을 벡터로 바꿉니다.",
    "هذا نص عربي من اليمين إلى اليسار.",
    "זהו משפט בעברית.",
    "English mixed with العربية and 中文 in one line.",
    "Привет, как дела?",
    "Ελληνικό κείμενο με τελικό σίγμα: ΟΔΟΣ",
    "ไทยไม่มีช่องว่างระหว่างคำ",
    "हिन्दी में एक वाक्य।",
    "café vs cafe\u0301, naïve vs nai\u0308ve",
    "Z\u0351\u036b\u0343\u036aa\u0302\u0308l\u0334g\u0321o combining marks",
    "İstanbul'da ığdır ve Straße, ﬁne ﬂow",
    "zero\u200bwidth\u200djoiner\ufeffand bom",
    "control \x00\x01\x02 characters \x7f",
    "[CLS] [SEP] [MASK] [PAD] <s> </s> <pad> <|endoftext|>",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    '{"key": "value", "list": [1, 2.5, -3e10, null]}',
    "https://example.com/path?query=1&other=two#fragment",
    "3.14159 2,718.28 1e-9 0x1F 12/31/1999",
    "supercalifragilisticexpialidocious" * 4,
    "x" * 300,
    "word " * 100,
    _LONG,
    _LONG * 4,
    _LONG * 20,
    "token " * 700,
    "漢字" * 400,
    "What is the capital of France?",
    "Paris is the capital and largest city of France.",
]
SEED = 7


def save_golden(model: SentenceTransformer, folder: Path) -> None:
    """Write the vectors, and the ids as cut by the model itself."""
    transformer = model[0]
    ids = []
    for text in TEXTS:
        features = transformer.preprocess([text])
        ids.append(features["input_ids"][0].tolist())
    vectors = model.encode(TEXTS, batch_size=1, convert_to_numpy=True)
    np.save(folder / "vectors.npy", vectors.astype(np.float32))
    (folder / "ids.json").write_text(json.dumps(ids) + "\n")


def make_noise(net: PreTrainedModel) -> None:
    """Fill a model with seeded noise."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.copy_(torch.randn_like(weight) * 0.25)


def tiny(
    name: str,
    net: PreTrainedModel,
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, object],
    pooling: str,
    max_seq_length: int,
) -> None:
    """Fill a tiny model with seeded noise, save it as sentence-transformers does, and run it."""
    make_noise(net)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as plain:
        net.eval().save_pretrained(plain)
        tokenizer.save(f"{plain}/tokenizer.json")
        Path(plain, "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        transformer = Transformer(plain, max_seq_length=max_seq_length)
        dimensions = net.config.hidden_size
        model = SentenceTransformer(
            modules=[transformer, Pooling(dimensions, pooling), Normalize()], device="cpu"
        )
        model.save(str(folder), create_model_card=False)
    (folder / "model.safetensors").chmod(0o644)
    # The saved tokenizer.json keeps whatever transformers made of it; read back what we serve.
    save_golden(SentenceTransformer(str(folder), device="cpu"), folder)


def trained(
    model: models.Model,
    trainer: trainers.Trainer,
    prepare: Callable[[Tokenizer], None],
) -> Tokenizer:
    """Train a tiny tokenizer on the texts themselves."""
    tokenizer = Tokenizer(model)
    prepare(tokenizer)
    tokenizer.train_from_iterator(TEXTS[:4] + TEXTS[28:32] + [_LONG], trainer)
    return tokenizer


def template(tokenizer: Tokenizer, before: str | None, after: str, pair: str | None = None) -> None:
    """Add special tokens around a text, and around a pair."""
    names = [name for name in (before, after) if name]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join([*([before] if before else []), "$A", after]),
        pair=pair,
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in names],
    )


_BERT_NAMES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def word_piece() -> Tokenizer:
    """Train a WordPiece vocabulary."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

    def prepare(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=200, special_tokens=special),
        prepare,
    )


def bert() -> None:
    """BERT with cls pooling and a WordPiece vocabulary."""
    tokenizer = word_piece()
    template(tokenizer, "[CLS]", "[SEP]")
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    tiny(
        "bert",
        BertModel(config, add_pooling_layer=True),
        tokenizer,
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **_BERT_NAMES},
        "cls",
        48,
    )


_ROBERTA_NAMES = {
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
_ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
_ROBERTA_SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
}


def _byte_level(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()


def roberta() -> None:
    """RoBERTa with mean pooling and byte-level BPE; no own limit below its positions."""
    tokenizer = trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=_ROBERTA_SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
        _byte_level,
    )
    template(tokenizer, "<s>", "</s>")
    config = RobertaConfig(vocab_size=tokenizer.get_vocab_size(), **_ROBERTA_SIZE)
    tiny(
        "roberta",
        RobertaModel(config, add_pooling_layer=False),
        tokenizer,
        {"tokenizer_class": "PreTrainedTokenizerFast", **_ROBERTA_NAMES},
        "mean",
        64,
    )


def unigram() -> Tokenizer:
    """Train a Unigram vocabulary."""

    def prepare(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()

    return trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=220,
            special_tokens=_ROBERTA_SPECIAL,
            unk_token="<unk>",
            show_progress=False,
        ),
        prepare,
    )


def xlm_roberta() -> None:
    """XLM-RoBERTa with mean pooling and a Unigram vocabulary."""
    tokenizer = unigram()
    template(tokenizer, "<s>", "</s>")
    config = XLMRobertaConfig(vocab_size=tokenizer.get_vocab_size(), **_ROBERTA_SIZE)
    tiny(
        "xlm-roberta",
        XLMRobertaModel(config, add_pooling_layer=False),
        tokenizer,
        {"tokenizer_class": "PreTrainedTokenizerFast", **_ROBERTA_NAMES},
        "mean",
        40,
    )


def qwen3() -> None:
    """A Qwen3 decoder with last-token pooling whose tokenizer ends each text."""
    tokenizer = trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
        _byte_level,
    )
    template(tokenizer, None, "<|endoftext|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    tiny(
        "qwen3",
        Qwen3Model(config),
        tokenizer,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "padding_side": "left",
        },
        "lasttoken",
        96,
    )


def main() -> None:
    """Write everything anew."""
    (HERE / "texts.json").write_text(json.dumps(TEXTS, ensure_ascii=True, indent=1) + "\n")
    minilm = HERE / "minilm"
    minilm.mkdir(exist_ok=True)
    save_golden(SentenceTransformer(sys.argv[1], device="cpu"), minilm)
    for make in (bert, roberta, xlm_roberta, qwen3):
        make()


if __name__ == "__main__":
    main()
