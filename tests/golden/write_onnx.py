"""Write a folder of BERT safetensors as ONNX, for engines that run on onnxruntime.

Run with the python of an environment that holds onnx; `compare_speed.py` does:
    <python> tests/golden/write_onnx.py <folder> <new folder>
The graph is that of onnxruntime's own optimizer for an exported BERT (as in the files that
fastembed loads from the hub): attention, residual norms and biased GELU are one operator each.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, save_model

FUSED = "com.microsoft"


def read_safetensors(file: Path) -> dict[str, Any]:
    """Read float32 arrays by name: https://github.com/huggingface/safetensors#format."""
    content = file.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    return {
        name: np.frombuffer(
            content[slice(*(8 + size + at for at in each["data_offsets"]))], "<f4"
        ).reshape(each["shape"])
        for name, each in header.items()
        if name != "__metadata__" and each["dtype"] == "F32"
    }


class Graph:
    """Nodes in order, each with one output, and the arrays that they read."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.arrays: list[Any] = []

    def add(self, operator: str, *inputs: Any, domain: str = "", **attributes: Any) -> str:
        """Add a node, and return the name of its output; an array among its inputs is stored."""
        output = f"{operator}_{len(self.nodes)}"
        names = [each if isinstance(each, str) else self._store(each) for each in inputs]
        self.nodes.append(helper.make_node(operator, names, [output], domain=domain, **attributes))
        return output

    def _store(self, array: Any) -> str:
        name = f"array_{len(self.arrays)}"
        self.arrays.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name


def make_bert(weights: dict[str, Any], config: dict[str, Any]) -> ModelProto:
    """Make the graph of ids and mask, (texts, tokens), to the last hidden states."""
    assert config["hidden_act"] == "gelu"
    graph, epsilon = Graph(), config["layer_norm_eps"]

    def read(name: str) -> tuple[Any, Any]:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    # All tokens are of type 0, whose vector is added to every position's.
    tables = {n: weights[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position")}
    types = weights["embeddings.token_type_embeddings.weight"]
    length = graph.add("Shape", "input_ids", start=1, end=2)
    starts, axis = np.array([0], np.int64), np.array([0], np.int64)
    positions = graph.add("Slice", tables["position"] + types[0], starts, length, axis)
    x = graph.add("Add", graph.add("Gather", tables["word"], "input_ids"), positions)
    x = graph.add("LayerNormalization", x, *read("embeddings.LayerNorm"), epsilon=epsilon)
    mask = graph.add("Cast", "attention_mask", to=TensorProto.INT32)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}."
        parts = [read(f"{layer}attention.self.{part}") for part in ("query", "key", "value")]
        weight = np.concatenate([weight.T for weight, _ in parts], axis=1)
        bias = np.concatenate([bias for _, bias in parts])
        heads = config["num_attention_heads"]
        mixed = graph.add("Attention", x, weight, bias, mask, domain=FUSED, num_heads=heads)
        weight, bias = read(f"{layer}attention.output.dense")
        norm = read(f"{layer}attention.output.LayerNorm")
        added = (graph.add("MatMul", mixed, weight.T), x, *norm, bias)
        x = graph.add("SkipLayerNormalization", *added, domain=FUSED, epsilon=epsilon)
        weight, bias = read(f"{layer}intermediate.dense")
        up = graph.add("BiasGelu", graph.add("MatMul", x, weight.T), bias, domain=FUSED)
        weight, bias = read(f"{layer}output.dense")
        added = (graph.add("MatMul", up, weight.T), x, *read(f"{layer}output.LayerNorm"), bias)
        x = graph.add("SkipLayerNormalization", *added, domain=FUSED, epsilon=epsilon)
    graph.nodes[-1].output[0] = "last_hidden_state"

    shape: list[Any] = ["texts", "tokens"]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, shape)
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info(
        "last_hidden_state", TensorProto.FLOAT, [*shape, config["hidden_size"]]
    )
    whole = helper.make_graph(graph.nodes, "bert", inputs, [output], graph.arrays)
    operators = [helper.make_opsetid("", 17), helper.make_opsetid(FUSED, 1)]
    return helper.make_model(whole, opset_imports=operators, ir_version=8)


def main() -> None:
    """Write a folder's model.onnx beside a copy of all but its weights."""
    folder, made = (Path(each) for each in sys.argv[1:])
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    bert = make_bert(read_safetensors(folder / "model.safetensors"), config)
    save_model(bert, made / "model.onnx")


if __name__ == "__main__":
    main()
