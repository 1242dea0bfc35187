# mypy: ignore-errors
# (its libraries are not where types are checked)
"""Make the references of the engine's tests of embeddings and reranking: tiny checkpoints, and
their vectors and scores as sentence-transformers computes them.

This needs packages that the gateway does not: an environment with
    torch==2.13.0 sentence-transformers==6.2.0 transformers==5.24.0
Run:  python tests/golden/make_golden.py <folder of all-MiniLM-L6-v2>
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
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
    BertForSequenceClassification,
    BertModel,
    EmbeddingGemma2Config,
    EmbeddingGemma2Model,
    EmbeddingGemma2TextConfig,
    EmbeddingGemma2TextModel,
    EuroBertConfig,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GteConfig,
    GteModel,
    JinaEmbeddingsV3Config,
    JinaEmbeddingsV3Model,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

HERE = Path(__file__).parent
TEXTS = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
PAIRS = [tuple(pair) for pair in json.loads((HERE / "pairs.json").read_text(encoding="utf-8"))]
SEED = 7
OF_TOKENIZERS = ("bert", "roberta", "xlm-roberta", "qwen3", "modernbert")  # embedders with ids
LEARNT = TEXTS[:4] + TEXTS[28:32] + TEXTS[35:36]  # what tokenizers are trained on

SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
ROBERTA_SIZE = {
    **SIZE,
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
}
MODERNBERT_SIZE = {
    **SIZE,
    "num_hidden_layers": 5,
    "intermediate_size": 48,
    "max_position_embeddings": 700,
    "local_attention": 8,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "bos_token_id": 2,
    "sep_token_id": 3,
    "eos_token_id": 3,
}
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BERT_NAMES = {f"{token[1:-1].lower()}_token": token for token in BERT_SPECIAL}
BERT_PAIR = "[CLS] $A [SEP] $B:1 [SEP]:1"
BERT_TOKENIZER = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **BERT_NAMES}
ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ROBERTA_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "cls_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
}
MODERNBERT_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "attention_mask"],
    **BERT_NAMES,
}
GEMMA_SPECIAL = ["<pad>", "<eos>", "<bos>"]
GEMMA_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
}
GEMMA_PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
QWEN3_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN3_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "padding_side": "left",
}


def word_piece() -> Tokenizer:
    """Train a WordPiece vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=BERT_SPECIAL)
    tokenizer.train_from_iterator(LEARNT, trainer)
    return tokenizer


def byte_level(special: list[str]) -> Tokenizer:
    """Train byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(LEARNT, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """Train a Unigram vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=ROBERTA_SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LEARNT, trainer)
    return tokenizer


def framed(tokenizer: Tokenizer, single: str, pair: str | None = None) -> Tokenizer:
    """Add special tokens around a text, and around a pair."""
    names = [name for name in single.split() if name != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in names],
    )
    return tokenizer


def save(
    name: str,
    net: PreTrainedModel,
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, object],
    load: Callable[[str], Any],
) -> Path:
    """Fill a tiny model with seeded noise, and save it as sentence-transformers does."""
    torch.manual_seed(SEED)
    with torch.no_grad():
        for weight in net.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            else:
                weight.copy_(torch.randn_like(weight) * 0.25)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as plain:
        net.eval().save_pretrained(plain)
        tokenizer.save(f"{plain}/tokenizer.json")
        Path(plain, "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        load(plain).save_pretrained(str(folder), create_model_card=False)
    for file in folder.rglob("*.safetensors"):
        file.chmod(0o644)
    return folder


def save_vectors(model: SentenceTransformer, folder: Path) -> None:
    """Write the vectors."""
    vectors = model.encode(TEXTS, batch_size=1, convert_to_numpy=True)
    np.save(folder / "vectors.npy", vectors.astype(np.float32))


def save_ids(model: SentenceTransformer, folder: Path) -> None:
    """Write the ids as cut by the model itself, of tokenizers that tests are about."""
    ids = [model[0].preprocess([text])["input_ids"][0].tolist() for text in TEXTS]
    (folder / "ids.json").write_text(json.dumps(ids) + "\n")


def embedder(
    name: str,
    net: PreTrainedModel,
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, object],
    pooling: str,
    max_seq_length: int,
    dense: Sequence[Dense] = (),
    prompts: dict[str, str] | None = None,
    dimensions: int | None = None,
) -> SentenceTransformer:
    """Write a tiny embedder and its vectors; return it."""

    def load(plain: str) -> SentenceTransformer:
        transformer = Transformer(plain, max_seq_length=max_seq_length)
        pooled = Pooling(dimensions or net.config.hidden_size, pooling)
        parts = [transformer, pooled, *dense, Normalize()]
        return SentenceTransformer(modules=parts, prompts=prompts, device="cpu")

    folder = save(name, net, tokenizer, tokenizer_config, load)
    # The saved tokenizer.json keeps whatever transformers made of it; read back what we serve.
    model = SentenceTransformer(str(folder), device="cpu")
    save_vectors(model, folder)
    if name in OF_TOKENIZERS:
        save_ids(model, folder)
    return model


def reranker(
    name: str,
    net: PreTrainedModel,
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, object],
    max_length: int,
) -> None:
    """Write a tiny cross-encoder, and of pairs cut by itself (documents only) the raw logits, the
    ids and where token type 1 begins.
    """

    def load(path: str) -> CrossEncoder:
        return CrossEncoder(path, max_length=max_length, device="cpu")

    folder = save(name, net, tokenizer, tokenizer_config, load)
    model = CrossEncoder(str(folder), device="cpu")
    cut = {"text": {"truncation": "only_second"}}
    rows = []
    for pair in PAIRS:
        features = model[0].preprocess([pair], processing_kwargs=cut)
        ids = features["input_ids"][0].tolist()
        types = features["token_type_ids"][0].tolist() if "token_type_ids" in features else []
        rows.append({"ids": ids, "second": (*types, 1).index(1) if types else len(ids)})
    logits = model.predict(
        PAIRS, batch_size=1, activation_fn=torch.nn.Identity(), processing_kwargs=cut
    )
    np.save(folder / "scores.npy", logits.astype(np.float32).reshape(len(PAIRS), -1))
    (folder / "pairs.json").write_text(json.dumps(rows) + "\n")


def bert() -> None:
    """BERT with cls pooling; as a reranker with its pooler, two token types and one label."""
    size = {**SIZE, "vocab_size": word_piece().get_vocab_size()}
    net = BertModel(BertConfig(**size, max_position_embeddings=64), add_pooling_layer=True)
    embedder("bert", net, framed(word_piece(), "[CLS] $A [SEP]"), BERT_TOKENIZER, "cls", 48)
    config = BertConfig(**size, max_position_embeddings=96, num_labels=1)
    tokenizer = framed(word_piece(), "[CLS] $A [SEP]", BERT_PAIR)
    net = BertForSequenceClassification(config)
    reranker("bert-reranker", net, tokenizer, BERT_TOKENIZER, 80)


def roberta() -> None:
    """RoBERTa with mean pooling and byte-level BPE; no own limit below its positions."""
    tokenizer = framed(byte_level(ROBERTA_SPECIAL), "<s> $A </s>")
    config = RobertaConfig(vocab_size=tokenizer.get_vocab_size(), **ROBERTA_SIZE)
    net = RobertaModel(config, add_pooling_layer=False)
    embedder("roberta", net, tokenizer, ROBERTA_TOKENIZER, "mean", 64)


def xlm_roberta() -> None:
    """XLM-RoBERTa with mean pooling; as a reranker with three labels: no pooler, one token type."""
    tokenizer = framed(unigram(), "<s> $A </s>")
    config = XLMRobertaConfig(vocab_size=tokenizer.get_vocab_size(), **ROBERTA_SIZE)
    net = XLMRobertaModel(config, add_pooling_layer=False)
    embedder("xlm-roberta", net, tokenizer, ROBERTA_TOKENIZER, "mean", 40)
    tokenizer = framed(unigram(), "<s> $A </s>", "<s> $A </s> </s> $B </s>")
    size = {**ROBERTA_SIZE, "max_position_embeddings": 98}
    config = XLMRobertaConfig(vocab_size=tokenizer.get_vocab_size(), **size, num_labels=3)
    net = XLMRobertaForSequenceClassification(config)
    reranker("xlm-roberta-reranker", net, tokenizer, ROBERTA_TOKENIZER, 96)


def qwen3() -> None:
    """A Qwen3 decoder with last-token pooling whose tokenizer ends each text."""
    tokenizer = framed(byte_level(QWEN3_SPECIAL), "$A <|endoftext|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        **SIZE,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    embedder("qwen3", Qwen3Model(config), tokenizer, QWEN3_TOKENIZER, "lasttoken", 96)


def looking_ahead() -> None:
    """The vectors of that Qwen3 if its tokens look ahead; EuroBERT, which always does."""
    with tempfile.TemporaryDirectory() as ahead:
        folder = Path(shutil.copytree(HERE / "qwen3", ahead, dirs_exist_ok=True))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
        model = SentenceTransformer(ahead, device="cpu")
    vectors = model.encode(TEXTS, batch_size=1, convert_to_numpy=True)
    np.save(HERE / "qwen3" / "vectors-both-ways.npy", vectors.astype(np.float32))
    tokenizer = framed(byte_level(QWEN3_SPECIAL), "$A <|endoftext|>")
    size = {"vocab_size": tokenizer.get_vocab_size(), "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 1}
    rope = {"rope_type": "default", "rope_theta": 250_000.0}
    config = EuroBertConfig(
        **SIZE, **size, **ids, max_position_embeddings=128, rope_parameters=rope
    )
    embedder("eurobert", EuroBertModel(config), tokenizer, QWEN3_TOKENIZER, "mean", 96)


def embeddinggemma() -> None:
    """Gemma 3 that looks ahead, in a window of 8 tokens in most layers; then two linear layers, of
    which EmbeddingGemma's have neither a bias nor an activation.
    """
    tokenizer = framed(byte_level(GEMMA_SPECIAL), "<bos> $A <eos>")
    config = Gemma3TextConfig(
        **{**SIZE, "intermediate_size": 32},
        vocab_size=tokenizer.get_vocab_size(),
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=700,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        use_bidirectional_attention=True,
    )
    torch.manual_seed(SEED)
    dense = [
        Dense(32, 64, bias=False, activation_function=torch.nn.Identity()),
        Dense(64, 24, bias=True, activation_function=torch.nn.Tanh()),
    ]
    model = embedder(
        *("embeddinggemma", Gemma3TextModel(config), tokenizer, GEMMA_TOKENIZER, "mean", 640),
        dense=dense,
        prompts=GEMMA_PROMPTS,
    )
    short = model.encode(TEXTS[:12], prompt_name="query", truncate_dim=8, normalize_embeddings=True)
    np.save(HERE / "embeddinggemma" / "queries-of-8-dimensions.npy", short.astype(np.float32))


def embeddinggemma2() -> None:
    """EmbeddingGemma 2's text model, whose windows are of 4 tokens to either side; and a whole
    model around it, with tiny towers, whose rows have tokens that stand for images and sound.
    """
    tokenizer = framed(byte_level(GEMMA_SPECIAL), "<bos> $A <eos>")
    config = EmbeddingGemma2TextConfig(
        **{**SIZE, "num_hidden_layers": 4, "intermediate_size": 32},
        vocab_size=tokenizer.get_vocab_size(),
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=16,
        embedding_dim=24,
        max_position_embeddings=700,
        sliding_window=4,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    )
    net = EmbeddingGemma2TextModel(config)
    for index, layer in enumerate(net.layers):
        layer.layer_scalar.fill_(0.6 + 0.2 * index)
    model = embedder(
        *("embeddinggemma2", net, tokenizer, GEMMA_TOKENIZER, "mean", 640),
        prompts=GEMMA_PROMPTS,
        dimensions=config.embedding_dim,
    )
    short = model.encode(TEXTS[:12], prompt_name="query", truncate_dim=8, normalize_embeddings=True)
    np.save(HERE / "embeddinggemma2" / "queries-of-8-dimensions.npy", short.astype(np.float32))
    vision = {**SIZE, "model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 4}
    audio = {"model_type": "gemma4_audio", "hidden_size": 32, "num_attention_heads": 2}
    towers = {
        "vision_config": {**vision, "patch_size": 4, "position_embedding_size": 16},
        "audio_config": {**audio, "output_proj_dims": 32, "subsampling_conv_channels": [4, 4]},
    }
    for tower in towers.values():
        tower["num_hidden_layers"] = 1
    torch.manual_seed(SEED)
    media = {"image_token_id": 127, "video_token_id": 128, "audio_token_id": 129}
    whole = EmbeddingGemma2Model(
        EmbeddingGemma2Config(text_config=config.to_dict(), **towers, **media)
    )
    whole.language_model.load_state_dict(net.state_dict())
    folder = HERE / "embeddinggemma2-whole"
    whole.eval().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    rows = [[2, *range(10, 40), 1], [2, 127, 7, 128, 129, 1], [2, 9, 1]]
    (folder / "rows.json").write_text(json.dumps(rows) + "\n")
    mask = torch.tensor([[index < len(row) for index in range(32)] for row in rows])
    ids = torch.tensor([row + [0] * (32 - len(row)) for row in rows])
    with torch.no_grad():
        states = whole(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    np.save(folder / "vectors.npy", torch.nn.functional.normalize(vectors).numpy())


def rotary_bert() -> None:
    """nomic-bert, GTE and jina-embeddings-v3."""
    tokenizer = framed(word_piece(), "[CLS] $A [SEP]", BERT_PAIR)
    size = {**SIZE, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    embedder(
        *("nomic-bert", NomicBertModel(NomicBertConfig(**size)), tokenizer, BERT_TOKENIZER),
        *("mean", 96),
    )
    # GTE's own code does ntk by a factor of 4 on a theta of 20,000, with heads of 8.
    rope = {"rope_type": "linear", "rope_theta": 80_000.0, "factor": 4 ** (2 / 8)}
    tokenizer = framed(unigram(), "<s> $A </s>")
    size["vocab_size"] = tokenizer.get_vocab_size()
    config = GteConfig(**size, type_vocab_size=0, rope_parameters=rope)
    embedder("gte", GteModel(config), tokenizer, ROBERTA_TOKENIZER, "cls", 96)
    config = JinaEmbeddingsV3Config(**size)
    net = JinaEmbeddingsV3Model(config, add_pooling_layer=False)
    embedder("jina-v3", net, tokenizer, ROBERTA_TOKENIZER, "mean", 96)


def modernbert() -> None:
    """ModernBERT as an embedder and with both heads; a window of 8 tokens, texts of up to 640."""
    tokenizer = framed(byte_level(BERT_SPECIAL), "[CLS] $A [SEP]", BERT_PAIR)
    size = {**MODERNBERT_SIZE, "vocab_size": tokenizer.get_vocab_size()}
    net = ModernBertModel(ModernBertConfig(**size))
    embedder("modernbert", net, tokenizer, MODERNBERT_TOKENIZER, "mean", 640)
    for pooling in ("cls", "mean"):
        config = ModernBertConfig(**size, num_labels=1, classifier_pooling=pooling)
        net = ModernBertForSequenceClassification(config)
        reranker(f"modernbert-{pooling}-reranker", net, tokenizer, MODERNBERT_TOKENIZER, 640)


def main() -> None:
    """Write everything anew, but for texts and pairs."""
    minilm = HERE / "minilm"
    minilm.mkdir(exist_ok=True)
    model = SentenceTransformer(sys.argv[1], device="cpu")
    save_vectors(model, minilm)
    save_ids(model, minilm)
    decoders = (qwen3, looking_ahead, embeddinggemma, embeddinggemma2)
    for make in (bert, roberta, xlm_roberta, modernbert, rotary_bert, *decoders):
        make()


if __name__ == "__main__":
    main()
