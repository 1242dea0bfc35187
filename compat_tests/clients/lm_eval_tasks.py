"""lm-evaluation-harness on two tasks of ours: prints its result of every sample, as JSON."""

import json
import os
import sys
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.mkdtemp())
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(FOLDER / "cache")}

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASKS = {
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list: [{metric: acc}]
""",
    "rolling": """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}"
metric_list: [{metric: word_perplexity}]
""",
}


def main(url: str, model: str, tokenizer: str, questions: str, ids: str) -> None:
    """Evaluate: with prompts as token ids, or as text; `tokenizer` is a folder, or `remote`."""
    for name, task in TASKS.items():
        (FOLDER / f"{name}.yaml").write_text(task % json.dumps(questions))
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/completions",
            "tokenizer_backend": "remote" if tokenizer == "remote" else "huggingface",
            "tokenizer": None if tokenizer == "remote" else tokenizer,
            "tokenized_requests": ids == "ids",
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 1024,
        },
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(FOLDER), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert results is not None
    told = {
        name: [
            {"arguments": sample["arguments"], "responses": sample["resps"]} for sample in samples
        ]
        for name, samples in results["samples"].items()
    }
    print(json.dumps({"samples": told, "torch": "torch" in sys.modules}, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
