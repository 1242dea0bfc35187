"""transformers reads the sources of its models once, and finds in them what it did before."""

import json
import subprocess
import sys

COUNT = """
import json, os, sys
seen = []
def note(event, args):
    if event == "os.scandir" and str(args[0]).endswith(os.path.join("models", "bert")):
        seen.append(args[0])
sys.addaudithook(note)
import {first}
import transformers.models
from mlx_lm import tokenizer_utils
times = len(seen)
from transformers import PreTrainedTokenizerFast
from transformers.models.bert import BertConfig
from transformers.utils import import_utils
scan = import_utils.create_import_structure_from_path
folder = os.path.dirname(transformers.models.__file__)
is_same = not hasattr(scan, "__wrapped__") or scan(folder) == scan.__wrapped__(folder)
print(json.dumps([times, is_same]))
"""


def count(first: str) -> list[object]:
    code = COUNT.format(first=first)
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    found: list[object] = json.loads(told.stdout)
    return found


def test_each_folder_of_models_is_read_once() -> None:
    assert count("json") == [2, True]  # if not, transformers has mended it itself
    assert count("gateway.engine") == [1, True]
