# mypy: ignore-errors
# (its libraries are not where types are checked)
"""Makes ModernBERT's reference vectors, and the tiny rerankers with their reference scores.

Needs the environment of make_golden.py.
Run:  python tests/golden/make_rerank_golden.py
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from make_golden import (
    _BERT_NAMES,
    _ROBERTA_NAMES,
    _ROBERTA_SIZE,
    HERE,
    SEED,
    TEXTS,
    _byte_level,
    make_noise,
    template,
    tiny,
    trained,
    unigram,
    word_piece,
)
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

QUERIES = ["What is the capital?", "hello", "漢字 and words", " ", "one lane to the device"]


def make_pairs(count: int = 64) -> list[tuple[str, str]]:
    """Return every text with a query, and then some whose lengths are spread evenly."""
    words = " ".join(TEXTS[3:4] + TEXTS[-2:]).split()
    draw = random.Random(SEED)
    more = [" ".join(draw.choices(words, k=3 * n)) for n in range(1, count - len(TEXTS) + 1)]
    return [(QUERIES[i % len(QUERIES)], text) for i, text in enumerate([*TEXTS, *more])]


PAIRS = make_pairs()


def save_scores(model: CrossEncoder, folder: Path) -> None:
    """Write the raw logits, and the ids and where token type 1 begins, of pairs cut by the model
    itself: documents only.
    """
    cut = {"text": {"truncation": "only_second"}}
    features = [model[0].preprocess([pair], processing_kwargs=cut) for pair in PAIRS]
    rows = []
    for each in features:
        ids = each["input_ids"][0].tolist()
        types = each["token_type_ids"][0].tolist() if "token_type_ids" in each else [0] * len(ids)
        rows.append({"ids": ids, "second": (*types, 1).index(1)})
    logits = model.predict(
        PAIRS, batch_size=1, activation_fn=torch.nn.Identity(), processing_kwargs=cut
    )
    np.save(folder / "scores.npy", logits.astype(np.float32).reshape(len(PAIRS), -1))
    (folder / "pairs.json").write_text(json.dumps(rows) + "\n")


def tiny_reranker(
    name: str,
    net: PreTrainedModel,
    tokenizer: Tokenizer,
    tokenizer_config: dict[str, object],
    max_length: int,
) -> None:
    """Fill a tiny model with seeded noise, save it as sentence-transformers does, and run it."""
    make_noise(net)
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as plain:
        net.eval().save_pretrained(plain)
        tokenizer.save(f"{plain}/tokenizer.json")
        Path(plain, "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        model = CrossEncoder(plain, max_length=max_length, device="cpu")
        model.save_pretrained(str(folder), create_model_card=False)
    (folder / "model.safetensors").chmod(0o644)
    save_scores(CrossEncoder(str(folder), device="cpu"), folder)


def bert() -> None:
    """BERT with its pooler, two token types and one label."""
    tokenizer = word_piece()
    template(tokenizer, "[CLS]", "[SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=96,
        num_labels=1,
    )
    names = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **_BERT_NAMES}
    tiny_reranker("bert-reranker", BertForSequenceClassification(config), tokenizer, names, 80)


def xlm_roberta() -> None:
    """XLM-RoBERTa with three labels: no pooler, one token type."""
    tokenizer = unigram()
    template(tokenizer, "<s>", "</s>", "<s> $A </s> </s> $B </s>")
    size = {**_ROBERTA_SIZE, "max_position_embeddings": 98}
    config = XLMRobertaConfig(vocab_size=tokenizer.get_vocab_size(), **size, num_labels=3)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **_ROBERTA_NAMES}
    net = XLMRobertaForSequenceClassification(config)
    tiny_reranker("xlm-roberta-reranker", net, tokenizer, names, 96)


def modernbert() -> None:
    """ModernBERT as an embedder and with both heads; a window of 8 tokens, texts of up to 640."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
        _byte_level,
    )
    template(tokenizer, "[CLS]", "[SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        **_BERT_NAMES,
    }
    size = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 700,
        "local_attention": 8,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "bos_token_id": 2,
        "sep_token_id": 3,
        "eos_token_id": 3,
    }
    tiny("modernbert", ModernBertModel(ModernBertConfig(**size)), tokenizer, names, "mean", 640)
    for pooling in ("cls", "mean"):
        config = ModernBertConfig(**size, num_labels=1, classifier_pooling=pooling)
        net = ModernBertForSequenceClassification(config)
        tiny_reranker(f"modernbert-{pooling}-reranker", net, tokenizer, names, 640)


def main() -> None:
    """Write everything anew."""
    (HERE / "pairs.json").write_text(json.dumps(PAIRS, ensure_ascii=True, indent=1) + "\n")
    for make in (bert, xlm_roberta, modernbert):
        make()


if __name__ == "__main__":
    main()
