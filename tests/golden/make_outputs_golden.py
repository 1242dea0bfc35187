# mypy: ignore-errors
# (its libraries are not where types are checked)
"""Make the references of the sparse and multi-vector outputs: tiny checkpoints, and their outputs
as sentence-transformers' SparseEncoder and MultiVectorEncoder compute them. BGE-M3's are computed
with the formulas of FlagEmbedding (inference/embedder/encoder_only/m3.py), which needs more.

In the environment of make_golden.py, and after it:  python tests/golden/make_outputs_golden.py
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from make_golden import (
    BERT_SPECIAL,
    BERT_TOKENIZER,
    HERE,
    MODERNBERT_SIZE,
    MODERNBERT_TOKENIZER,
    ROBERTA_SIZE,
    ROBERTA_TOKENIZER,
    SEED,
    SIZE,
    TEXTS,
    byte_level,
    framed,
    save,
    unigram,
    word_piece,
)
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Normalize
from sentence_transformers.sparse_encoder.modules import SpladePooling
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

FEW = TEXTS[:10] + TEXTS[28:31]


def save_sparse(folder: Path, rows: list[dict[int, float]]) -> None:
    """Write each text's token ids and weights, in the order of the ids."""
    ordered = [[[*ids], [float(row[i]) for i in ids]] for row in rows for ids in [sorted(row)]]
    (folder / "sparse.json").write_text(json.dumps(ordered) + "\n")


def save_vectors(folder: Path, name: str, vectors: list[np.ndarray]) -> None:
    """Write texts' vectors under their indices."""
    np.savez_compressed(folder / name, **{f"{i:02}": v for i, v in enumerate(vectors)})


def bge_m3() -> None:
    """The tiny XLM-RoBERTa of make_golden.py, with cls pooling and BGE-M3's two heads."""
    folder = HERE / "bge-m3"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE / "xlm-roberta", folder, ignore=shutil.ignore_patterns("*.npy", "ids.*"))
    config = folder / "1_Pooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pooling_mode": "cls"}))
    torch.manual_seed(SEED)
    sparse, colbert = torch.nn.Linear(32, 1), torch.nn.Linear(32, 24)
    for head in (sparse, colbert):
        torch.nn.init.normal_(head.weight, std=0.5)
    torch.nn.init.constant_(sparse.bias, 5)  # about half of the weights are above 0
    torch.save({k: v.half() for k, v in sparse.state_dict().items()}, folder / "sparse_linear.pt")
    torch.save(colbert.state_dict(), folder / "colbert_linear.pt")
    sparse.half().float()  # the weights as they were saved
    net = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    unused = [
        tokenizer.convert_tokens_to_ids(ROBERTA_TOKENIZER[f"{role}_token"])
        for role in ("cls", "eos", "pad", "unk")
    ]
    rows, dense, vectors = [], [], []
    for text in FEW:
        inputs = tokenizer(text, truncation=True, max_length=40, return_tensors="pt")
        with torch.no_grad():
            hidden = net(**inputs).last_hidden_state
            weights = torch.relu(sparse(hidden))[0, :, 0].tolist()
            tokens = torch.nn.functional.normalize(colbert(hidden[:, 1:]), dim=-1)
        row = {}
        for weight, token in zip(weights, inputs["input_ids"][0].tolist(), strict=True):
            if token not in unused and weight > row.get(token, 0):
                row[token] = weight
        rows.append(row)
        dense.append(torch.nn.functional.normalize(hidden[0, 0], dim=-1).numpy())
        vectors.append(tokens[0].numpy())
    np.save(folder / "vectors.npy", np.stack(dense))
    save_sparse(folder, rows)
    save_vectors(folder, "tokens.npz", vectors)


def splade(name, net, tokenizer, tokenizer_config, **pooling) -> None:
    """A SparseEncoder."""

    def load(plain: str) -> SparseEncoder:
        transformer = Transformer(plain, transformer_task="fill-mask", max_seq_length=48)
        parts = [transformer, SpladePooling(**pooling)]
        return SparseEncoder(modules=parts, device="cpu")

    folder = save(name, net, tokenizer, tokenizer_config, load)
    model = SparseEncoder(str(folder), device="cpu")
    rows = []
    for text in FEW:
        row = model.encode(text, convert_to_sparse_tensor=False)
        rows.append({int(i): float(row[i]) for i in np.flatnonzero(row)})
    save_sparse(folder, rows)


def splades() -> None:
    """Each family's head, both poolings and both activations."""
    tokenizer = framed(word_piece(), "[CLS] $A [SEP]")
    size = {**SIZE, "vocab_size": tokenizer.get_vocab_size()}
    net = BertForMaskedLM(BertConfig(**size, max_position_embeddings=64))
    splade("splade-bert", net, tokenizer, BERT_TOKENIZER, pooling_strategy="max")
    tokenizer = framed(unigram(), "<s> $A </s>")
    config = XLMRobertaConfig(vocab_size=tokenizer.get_vocab_size(), **ROBERTA_SIZE)
    splade(
        *("splade-xlm-roberta", XLMRobertaForMaskedLM(config), tokenizer, ROBERTA_TOKENIZER),
        pooling_strategy="sum",
    )
    tokenizer = framed(byte_level(BERT_SPECIAL), "[CLS] $A [SEP]")
    size = {**MODERNBERT_SIZE, "vocab_size": tokenizer.get_vocab_size()}
    net = ModernBertForMaskedLM(ModernBertConfig(**size))
    splade(
        *("splade-modernbert", net, tokenizer, MODERNBERT_TOKENIZER),
        pooling_strategy="max",
        activation_function="log1p_relu",
    )


def colbert(name, net, tokenizer, tokenizer_config, mask=None, prompts=None, **settings) -> Path:
    """A MultiVectorEncoder."""
    torch.manual_seed(SEED)
    dense = Dense(
        32,
        16,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )

    def load(plain: str) -> MultiVectorEncoder:
        ends = [MultiVectorMask(mask), Normalize(module_input_name="token_embeddings")]
        parts = [Transformer(plain, **settings), dense, *ends]
        return MultiVectorEncoder(modules=parts, prompts=prompts, device="cpu")

    return save(name, net, tokenizer, tokenizer_config, load)


def save_roles(folder: Path) -> None:
    """Write the vectors of documents and of queries."""
    model = MultiVectorEncoder(str(folder), device="cpu")
    for role, encode in (("documents", model.encode_document), ("queries", model.encode_query)):
        vectors = [encode([text])[0] for text in FEW]
        save_vectors(folder, f"{role}.npz", [np.asarray(one) for one in vectors])


def colberts() -> None:
    """The formats of sentence-transformers, PyLate and colbert-ir.

    sentence-transformers reads the others' with its own classes, and says that it equals them.
    """
    tokenizer = framed(word_piece(), "[CLS] $A [SEP]")
    size = {**SIZE, "vocab_size": tokenizer.get_vocab_size()}
    net = BertModel(BertConfig(**size, max_position_embeddings=64), add_pooling_layer=False)
    expansion = {"strategy": "fixed", "attend": True, "length": 12}
    folder = colbert(
        *("colbert-bert", net, tokenizer, BERT_TOKENIZER, [".", ",", "?"]),
        prompts={"query": "q: ", "document": "d: "},
        document_length=40,
        query_expansion=expansion,
    )
    save_roles(folder)
    tokenizer = framed(byte_level(BERT_SPECIAL), "[CLS] $A [SEP]")
    tokenizer.add_tokens(["[Q] ", "[D] "])
    size = {**MODERNBERT_SIZE, "vocab_size": tokenizer.get_vocab_size()}
    net = ModernBertModel(ModernBertConfig(**size))
    folder = colbert("colbert-pylate", net, tokenizer, MODERNBERT_TOKENIZER)
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    for part in ("2_MultiVectorMask", "3_Normalize"):
        shutil.rmtree(folder / part)
    dense = json.loads((folder / "1_Dense" / "config.json").read_text())
    dense = {k: v for k, v in dense.items() if not k.startswith("module_")}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    settings = {
        "model_type": "ColBERT",
        "prompts": {},
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
        "query_length": 8,
        "document_length": 50,
        "attend_to_expansion_tokens": False,
        "skiplist_words": [".", ",", "a"],
        "do_query_expansion": True,
    }
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 49}))
    save_roles(folder)
    pieces = word_piece()
    pieces.add_tokens(["[unused0]", "[unused1]"])
    tokenizer = framed(pieces, "[CLS] $A [SEP]")
    size = {**SIZE, "vocab_size": tokenizer.get_vocab_size()}
    net = BertModel(BertConfig(**size, max_position_embeddings=64), add_pooling_layer=False)
    folder = colbert("colbert-stanford", net, tokenizer, BERT_TOKENIZER)
    weights = {f"bert.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config))
    for part in ("1_Dense", "2_MultiVectorMask", "3_Normalize"):
        shutil.rmtree(folder / part)
    for file in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / file).unlink()
    metadata = {
        "query_token_id": "[unused0]",
        "doc_token_id": "[unused1]",
        "query_maxlen": 16,
        "doc_maxlen": 40,
        "attend_to_mask_tokens": False,
        "mask_punctuation": True,
    }
    (folder / "artifact.metadata").write_text(json.dumps(metadata))
    save_roles(folder)


def main() -> None:
    bge_m3()
    splades()
    colberts()


if __name__ == "__main__":
    main()
