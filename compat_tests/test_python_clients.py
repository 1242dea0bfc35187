"""Python clients with an environment of their own, `.venv-clients`, and their fixtures."""

import json
import os
import re
import subprocess
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

from compat_tests.conftest import started
from tests.processes import ROOT

HERE = Path(__file__).parent / "clients"
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
ABOARD = "smollm2-135m"
PASSED = {"demo-chat": 39, ABOARD: 37}  # LangChain's; others are skipped or beyond the model
SESSION_LOOP = [
    "-o", "asyncio_mode=auto",
    "-o", "asyncio_default_fixture_loop_scope=session",
    "-o", "asyncio_default_test_loop_scope=session",
]  # fmt: skip
pytestmark = [
    pytest.mark.compat,
    pytest.mark.skipif(not PYTHON.exists(), reason="`make setup-clients` installs them"),
]


def run(*command: str, cwd: Path = HERE, url: str = "", model: str = "") -> tuple[int, str]:
    """Run with the clients' Python; return the exit code and the output."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(PYTHON), *command],
        cwd=cwd,
        env={**environment, "OPENAI_BASE_URL": url, "TEST_API_BASE_URL": url, "CHAT_MODEL": model},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
        check=False,
    )
    return done.returncode, done.stdout.decode()


def test_openai_agents_go_on_from_the_previous_response(url: str) -> None:
    """A tool's call and result, a second turn, and a streamed third."""
    code, printed = run("agents_conversation.py", f"{url}/v1")
    assert code == 0, printed


@pytest.mark.parametrize(("model", "served"), [("demo-chat", "url"), (ABOARD, "shipped_url")])
def test_langchains_standard_suites_pass(
    request: pytest.FixtureRequest, model: str, served: str
) -> None:
    """The suites for chat and embeddings share one event loop: the client is kept between tests."""
    code, printed = run(
        "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", *SESSION_LOOP,
        "langchain_suite.py", url=f"{request.getfixturevalue(served)}/v1", model=model,
    )  # fmt: skip
    assert code == 0, printed
    assert (passed := re.search(r"(\d+) passed", printed)), printed
    assert int(passed[1]) >= PASSED[model], printed


def test_litellms_router_goes_on_without_a_gateway_that_is_gone(url: str) -> None:
    """The router uses deploy/balancer/litellm.yaml; the other address answers nothing."""
    config = ROOT / "deploy" / "balancer" / "litellm.yaml"
    code, printed = run("litellm_router.py", str(config), "demo-chat", url, "http://127.0.0.1:9")
    assert code == 0, printed
    answers = [line for line in printed.splitlines() if line.startswith("[")]
    assert len(answers) == 6, printed


QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Berlin", "a fish"], "answer": 0},
    {"question": "Two and two are", "choices": ["four", "five", "日本 🙂"], "answer": 0},
    {
        "question": "Once upon a time" + ", and a time" * 30,
        "choices": ["there was", "no"],
        "answer": 1,
    },
]


def likelihood(model: Any, context: list[int], rest: list[int]) -> tuple[float, bool]:
    """Compute with mlx-lm how likely tokens follow others, and whether they are the likeliest."""
    ids = [*context, *rest]
    logits = model(mx.array([ids]))[0, len(context) - 1 : -1]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    picked = mx.take_along_axis(logprobs, mx.array(rest)[:, None], axis=-1)
    return float(np.array(picked).sum()), mx.argmax(logits, axis=-1).tolist() == rest


@pytest.mark.parametrize("prompts", ["ids", "text"])
def test_lm_evaluation_harness_computes_what_mlx_lm_does(
    url: str, tmp_path: Path, prompts: str
) -> None:
    """Choices by their loglikelihood, and whole texts by theirs; without torch."""
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(QUESTIONS))
    folder = ROOT / "demo" / "chat"
    code, printed = run(
        "lm_eval_tasks.py", f"{url}/v1", "demo-chat", str(folder), str(questions), prompts
    )
    assert code == 0, printed
    result = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    assert not result["torch"]
    loaded: Any = load(str(folder))
    model, tokenizer = loaded[0], loaded[1]
    model.set_dtype(mx.float32)  # the gateway's type on a CPU

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    seen = 0
    for sample in result["samples"]["choices"]:
        for (context, rest), ((told, is_greedy),) in zip(
            sample["arguments"], sample["responses"], strict=True
        ):
            before = encoded(context)
            right = likelihood(model, before, encoded(context + rest)[len(before) :])
            assert (told, is_greedy) == (pytest.approx(right[0], abs=1e-3), right[1])
            seen += 1
    for sample in result["samples"]["rolling"]:
        ((text,),), ((told,),) = sample["arguments"], sample["responses"]
        right = likelihood(model, [tokenizer.bos_token_id], encoded(text))
        assert told == pytest.approx(right[0], abs=1e-3)
        seen += 1
    assert seen == sum(len(each["choices"]) for each in QUESTIONS) + len(QUESTIONS)


def test_lm_evaluation_harness_needs_no_tokenizer_on_disk(shipped_url: str, tmp_path: Path) -> None:
    """SmolLM2's, which is in a GGUF file alone, is asked of the gateway."""
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(QUESTIONS))
    code, printed = run(
        "lm_eval_tasks.py", f"{shipped_url}/v1", ABOARD, "remote", str(questions), "ids"
    )
    assert code == 0, printed
    result = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
    samples = result["samples"]["choices"]
    (paris, _), (berlin, _) = (each[0] for each in samples[0]["responses"][:2])
    assert 0 > paris > berlin
    assert len(result["samples"]["rolling"]) == len(QUESTIONS)


# What openai-python's own tests ask for and this gateway has not: by the message it is told.
NOT_SERVED = [
    r"Response with id '(resp_677efb5139a88190b512bc3fef8e535d|response_id)' not found",
    r"not streamed again",
    r"Missing required parameter: 'model'",
    r"Not allowed to POST on /v1/responses/compact",
    r"Not allowed to GET on /v1/chat/completions",
    r"Invalid URL \((GET|POST|DELETE) /v1/chat/completions/completion_id",
    r"Not allowed to DELETE on /v1/models/",
    r"Unsupported parameter: '(conversation|suffix|audio)'",
    r"has 384 dimensions and cannot be shortened",
    # The answer is in base64, as the SDK asks; its raw form is checked against a list of numbers.
    r"Data returned by API invalid for expected schema",
]
SERVED = [
    "chat/test_completions.py",
    "test_completions.py",
    "test_decisions.py",
    "test_embeddings.py",
    "test_models.py",
    "test_responses.py",
    "responses",
]


def test_openais_own_tests_pass_for_the_paths_served(tmp_path: Path) -> None:
    """They come from the installed version's sdist; their stand-in ids are not found."""
    code, printed = run("-c", "import openai; print(openai.__version__)")
    assert code == 0, printed
    wanted = f"openai=={printed.strip().splitlines()[-1]}"
    code, printed = run(
        "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", wanted,
        "--dest", str(tmp_path),
    )  # fmt: skip
    assert code == 0, printed
    (archive,) = tmp_path.glob("openai-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.glob("openai-*") if path.is_dir())
    names = "gpt-6-astra, gpt-3.5-turbo-instruct, gpt-4o-mini, model"
    (tmp_path / "gateway").mkdir()
    with started(tmp_path / "gateway", GATEWAY_DEMO_CHAT_ALIASES=names) as url:
        _, printed = run(
            "-m", "pytest", "-q", "-o", "addopts=", "--junitxml", str(tmp_path / "report.xml"),
            *(f"tests/api_resources/{path}" for path in SERVED), cwd=source, url=f"{url}/v1",
        )  # fmt: skip
    cases = list(ET.parse(tmp_path / "report.xml").getroot().iter("testcase"))
    failed = {
        case.attrib["name"]: fault.attrib["message"]
        for case in cases
        for fault in (*case.findall("failure"), *case.findall("error"))
    }
    unexpected = {
        name: message
        for name, message in failed.items()
        if not any(re.search(reason, message) for reason in NOT_SERVED)
    }
    assert not unexpected, printed
    assert len(cases) - len(failed) >= 140, printed


def test_who_asks_for_rankings_has_them(url: str) -> None:
    """Cohere's SDK, LiteLLM in four dialects, LangChain, llama-index by Cohere's wire and TEI's."""
    code, printed = run("rerank_clients.py", url)
    assert code == 0, printed
    rankings = re.findall(r"^(.+) \[1,", printed, re.MULTILINE)
    assert len(rankings) == 9, printed


def test_who_asks_tei_for_vectors_has_them(url: str) -> None:
    """huggingface_hub, llama-index and chromadb, each by its own way to TEI."""
    code, printed = run("embed_clients.py", url)
    assert code == 0, printed
    names = ["hub", "llama_index", "llama_index_async", "llama_index_queries", "chroma"]
    assert printed.splitlines()[-len(names) :] == names, printed


def test_who_asks_cohere_for_vectors_has_them(url: str) -> None:
    """Cohere's SDK in both versions, every type of vector; LangChain; the SDK's errors."""
    code, printed = run("cohere_embed_clients.py", url)
    assert code == 0, printed
    forms = ["v2 float", "v2 int8", "v2 inputs", "v1 float", "v1 int8", "v1 lists"]
    names = [*(f"cohere {form}" for form in forms), "langchain", "errors"]
    assert printed.splitlines()[-len(names) :] == names, printed
