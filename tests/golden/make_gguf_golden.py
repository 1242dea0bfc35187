"""Make the golden ids of GGUF tokenizers anew: llama.cpp's ids for gguf/texts.json.

It needs an environment of its own, and node-llama-cpp, whose npm package carries llama.cpp built:

    pip install gguf tokenizers sentencepiece mistral-common; npm install node-llama-cpp
    python tests/golden/make_gguf_golden.py <folder of node_modules> <SmolLM2's GGUF file>

Two small vocabularies are trained here. That of the byte-level kind has tokens across every
boundary between words, so that each way of cutting text shows in the ids. Of SmolLM2's own
vocabulary, the tokens of the texts are kept: BPE does the same without merges it never used.

Mistral's tekken is the exception. llama.cpp cuts some of its words otherwise than Mistral, so its
ids are tiktoken's, by the pattern that Mistral publishes; where the two differ is written beside.

Last made with node-llama-cpp 3.22.1, tokenizers 0.23.3, sentencepiece 0.2.3, tiktoken 0.14.0 and
mistral-common 1.13.1.
"""

import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent / "gguf"
TEXTS = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
# One name of each way of cutting text; the others share it.
PRES = ["gpt-2", "default", "smollm", "llama-bpe", "qwen2", "deepseek-r1-qwen"]
PRES += ["tekken", "deepseek-coder"]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
USERS = ("<think>", "</think>", "<tool_call>")

NODE = """
import {getLlama} from "node-llama-cpp";
const {path, texts} = JSON.parse(await new Response(process.stdin).text());
const llama = await getLlama({gpu: false, build: "never", progressLogs: false, logLevel: "error"});
const model = await llama.loadModel({modelPath: path, vocabOnly: true});
const rows = texts.map((text) => {
    const ids = model.tokenize(text, true);
    return [ids, model.detokenize(ids, true)];
});
process.stdout.write("\\n" + JSON.stringify(rows), () => process.exit(0));
"""

Metadata = dict[str, Any]


def llama_cpp(path: Path, texts: Sequence[str], node: Path) -> list[tuple[list[int], str]]:
    """Return llama.cpp's ids of each text, special tokens read as such, and its text of them."""
    script = node / "tokenize.mjs"  # its imports are looked for beside it
    script.write_text(NODE)
    try:
        done = subprocess.run(
            ["node", script],
            input=json.dumps({"path": str(path), "texts": texts}).encode(),
            stdout=subprocess.PIPE,
            check=True,
        )
    finally:
        script.unlink()
    return [(ids, text) for ids, text in json.loads(done.stdout.splitlines()[-1])]


def write_gguf(path: Path, metadata: Metadata) -> None:
    """Write a file that holds a vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = ("context_length", "embedding_length", "block_count", "feed_forward_length")
    for name in (*sizes, "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def corpus(seed: int) -> list[str]:
    """Mix pieces of the texts, so that all that may stand side by side does so often."""
    chance = random.Random(seed)
    texts = [text for text in TEXTS if not any(mark in text for mark in ("<|", "<s>", "</s>"))]
    pieces = [piece for text in texts for piece in text.replace(" ", " \0").split("\0") if piece]
    signs = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "'s", "'LL", "1", "23", "456"]
    signs += ["...", "!"]
    mixed = [
        "".join(chance.choice(chance.choice((pieces, signs))) for _ in range(12))
        for _ in range(4000)
    ]
    return [*texts, *mixed]


def spelled(text: str) -> str:
    """Spell a text's bytes in GPT-2's alphabet."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in split.pre_tokenize_str(text))


def byte_level() -> Metadata:
    """Train byte-level BPE on text that is not cut into words.

    Long words are added that no two tokens make: some rules keep a word whole that is a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(1),
        trainers.BpeTrainer(
            vocab_size=1300,
            special_tokens=[*CONTROLS, *USERS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            max_token_length=24,
            show_progress=False,
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"]]
    known = set(tokens)
    words = {spelled(word) for text in TEXTS for word in text.split() if word.isalpha()}
    whole = [
        word
        for word in sorted(words - known)
        if len(word) > 8
        and not any(word[:cut] in known and word[cut:] in known for cut in range(len(word)))
    ]
    tokens += whole[:20]
    types = [CONTROL] * len(CONTROLS) + [USER_DEFINED] * len(USERS)
    types += [NORMAL] * (len(tokens) - len(types))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD1]"],
        "tokenizer.ggml.token_type": [*types, UNUSED],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentence_pieces(folder: Path) -> Metadata:
    """Train SentencePiece's BPE with the settings that Llama 2's vocabulary was made with."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus(2)),
        model_prefix=str(folder / "pieces"),
        model_type="bpe",
        vocab_size=1100,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_by_whitespace=False,
        user_defined_symbols=list(USERS),
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(str(folder / "pieces.model"))
    size = range(pieces.get_piece_size())
    kinds: tuple[tuple[int, Callable[[int], bool]], ...] = (
        (UNKNOWN, pieces.is_unknown),
        (CONTROL, pieces.is_control),
        (BYTE, pieces.is_byte),
        (UNUSED, pieces.is_unused),
        (USER_DEFINED, lambda token: pieces.id_to_piece(token) in USERS),
        (NORMAL, lambda token: True),
    )
    tokens = [pieces.id_to_piece(token) for token in size]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        # Mistral's runs of spaces have this score, one and all.
        "tokenizer.ggml.scores": [
            -1e9 if len(token) > 1 and not token.strip("▁") else float(pieces.get_score(place))
            for place, token in enumerate(tokens)
        ],
        "tokenizer.ggml.token_type": [
            next(kind for kind, holds in kinds if holds(token)) for token in size
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def smollm2(path: Path) -> Metadata:
    """Read the tokenizer's metadata of a whole model's file."""
    fields = gguf.GGUFReader(path).fields
    return {key: each.contents() for key, each in fields.items() if key.startswith("tokenizer.")}


def used(metadata: Metadata, rows: Sequence[Sequence[int]]) -> Metadata:
    """Return the part of a byte-level vocabulary that these ids were made with.

    `ids` lists the ids of its tokens in the whole vocabulary.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    made_of = {left + right: (left, right) for left, right in reversed(merges)}
    needed: set[str] = set(pre_tokenizers.ByteLevel.alphabet()) & set(tokens)
    waiting = [tokens[token] for row in rows for token in row]
    waiting += tokens[:17]
    while waiting:
        token = waiting.pop()
        if token not in needed:
            needed.add(token)
            waiting += made_of.get(token, ())
    ids = [place for place, token in enumerate(tokens) if token in needed]
    kept = [pair for pair in merges if needed.issuperset((*pair, "".join(pair)))]
    types = metadata["tokenizer.ggml.token_type"]
    return {
        **{key: value for key, value in metadata.items() if not isinstance(value, list)},
        "tokenizer.ggml.tokens": [tokens[place] for place in ids],
        "tokenizer.ggml.token_type": [types[place] for place in ids],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in kept],
        "ids": ids,
    }


def golden(
    metadata: Metadata, folder: Path, node: Path, texts: Sequence[str] = TEXTS
) -> Mapping[str, Any]:
    """Return llama.cpp's ids of all texts, and which it gets back from them."""
    path = folder / "vocabulary.gguf"
    write_gguf(path, metadata)
    rows = llama_cpp(path, texts, node)
    returned = [place for place, (_, text) in enumerate(rows) if text == texts[place]]
    return {"ids": [ids for ids, _ in rows], "returned": returned}


def tekken(metadata: Metadata, texts: Sequence[str] = TEXTS) -> list[list[int]]:
    """Return tiktoken's ids of all texts, their words by Mistral's own pattern."""
    published = files("mistral_common") / "data" / "tekken_240911.json"
    # GPT-2's encoder.py: printable bytes are themselves, the others follow from U+0100 on.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet |= {chr(0x100 + place): byte for place, byte in enumerate(others)}
    ranks: dict[bytes, int] = {}
    special: dict[str, int] = {}
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    for place, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == NORMAL:
            ranks[bytes(alphabet[sign] for sign in token)] = place
        elif kind != UNUSED:
            special[token] = place
    encoding = tiktoken.Encoding(
        "tekken",
        pat_str=json.loads(published.read_text())["config"]["pattern"],
        mergeable_ranks=ranks,
        special_tokens=special,
    )
    return [encoding.encode(text, allowed_special="all") for text in texts]


def save(name: str, value: Mapping[str, Any]) -> None:
    """Write JSON that has a line for each value, and for each text's ids."""
    path = HERE / f"{name}.json"
    path.write_text(lines(value) + "\n")


def lines(value: Any) -> str:
    """Write a value as JSON, with as few line breaks as help who compares two versions."""
    if isinstance(value, Mapping):
        return "{\n" + ",\n".join(f"{json.dumps(key)}:{lines(value[key])}" for key in value) + "}"
    if isinstance(value, list) and any(isinstance(each, list) for each in value):
        return "[\n" + ",\n".join(map(lines, value)) + "]"
    return json.dumps(value, separators=(",", ":"))


def main() -> None:
    """Write everything anew."""
    node, whole = Path(sys.argv[1]), Path(sys.argv[2])
    HERE.mkdir(exist_ok=True)
    goldens: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = byte_level()
        for pre in PRES:
            # Qwen2's tokenizer composes a text first, which llama.cpp leaves to its caller.
            composed = [unicodedata.normalize("NFC", text) for text in TEXTS]
            goldens[pre] = golden(
                {**vocabulary, "tokenizer.ggml.pre": pre},
                folder,
                node,
                composed if pre == "qwen2" else TEXTS,
            )
        mistral = tekken(vocabulary)
        pairs = enumerate(zip(mistral, goldens["tekken"]["ids"], strict=True))
        goldens["tekken"] = {
            **goldens["tekken"],
            "ids": mistral,
            "differs": [place for place, (row, other) in pairs if row != other],
        }
        save("byte_level", vocabulary)
        pieces = sentence_pieces(folder)
        for prefixes in (True, False):
            goldens[f"llama, add_space_prefix {str(prefixes).lower()}"] = golden(
                {**pieces, "tokenizer.ggml.add_space_prefix": prefixes}, folder, node
            )
        save("sentencepiece", pieces)
        own = smollm2(whole)
        goldens["SmolLM2"] = golden(own, folder, node)
        save("smollm2", used(own, goldens["SmolLM2"]["ids"]))
    # Most texts are cut alike by most: one that is cut as by GPT-2 is not written again.
    plain = goldens["gpt-2"]["ids"]
    for pre in PRES[1:]:
        rows = goldens[pre]["ids"]
        same = [None if row == other else row for row, other in zip(rows, plain, strict=True)]
        goldens[pre] = {**goldens[pre], "ids": same}
    save("ids", goldens)


if __name__ == "__main__":
    main()
