"""The dashboard shows /metrics' figures, its buttons do as they say, and texts are texts."""

import json
import re
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from compat_tests.dashboard.conftest import ADMIN, HOSTILE, looking, serve
from compat_tests.dashboard.harness import QUESTION, ask, chat, metrics, soon
from tests.fake_hub import FakeHub
from tests.processes import ROOT

FEW = 20  # requests below which there is a mean and no quantile
TEXTS = ["A dog in the park.", "A puppy on the grass."]


def quantile(buckets: dict[float, float], q: float) -> float:
    """Compute it from cumulative buckets as Prometheus' histogram_quantile does."""
    edges = sorted(buckets)
    rank = q * buckets[edges[-1]]
    below = 0.0
    for start, edge in zip([0.0, *edges], edges, strict=False):
        if buckets[edge] >= rank:
            if edge == float("inf"):
                return start
            return start + (edge - start) * (rank - below) / (buckets[edge] - below)
        below = buckets[edge]
    raise AssertionError(buckets)


def in_seconds(shown: str) -> float:
    number, unit = re.fullmatch(r"([\d.,]+) (ms|s)", shown).groups()  # type: ignore[union-attr]
    return float(number.replace(",", "")) * (0.001 if unit == "ms" else 1)


def test_its_numbers_are_those_of_metrics(page: Any, url: str) -> None:
    """Every cell that names a series, every quantile of the stages, or the mean of few requests."""
    for _ in range(20):
        ask(url, "/v1/chat/completions", chat())
    for _ in range(3):
        ask(url, "/v1/embeddings", {"model": "all-minilm-l6-v2", "input": TEXTS})
    page.get_by_role("button", name="since start").click()

    def check_series() -> None:
        told = metrics(url)
        cells = page.eval_on_selector_all(
            "[data-series]", "all => all.map(one => [one.dataset.series, one.textContent])"
        )
        assert len(cells) >= 3 * 4
        totals: dict[str, float] = defaultdict(float)
        for series, value in told.items():
            totals[series.partition("{")[0]] += value
        for series, shown in cells:
            if series != "gateway_requests_total":  # the request itself changes this one
                number = float(shown.partition(" ")[0].replace(",", ""))
                assert number == (told | totals).get(series, 0.0), series

    def check_stages() -> None:
        buckets: dict[tuple[str, ...], dict[float, float]] = defaultdict(dict)
        for series, count in metrics(url).items():
            if series.startswith("gateway_stage_seconds_bucket"):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
                key = (labels["model"], labels["route"], labels["stage"])
                buckets[key][float(labels["le"])] = count
        assert {stage for _, _, stage in buckets} >= {"queue", "lane", "prefill", "inference"}
        kinds = set()
        for (model, route, stage), each in buckets.items():
            row = page.locator(f'#stages tr[data-key="{model} {route}"]')
            texts = row.locator(f"td[data-stage={stage}] > *").all_text_contents()
            count = int(each[float("inf")])
            kinds.add(count < FEW)
            if count < FEW:
                named = f'model="{model}",route="{route}",stage="{stage}"'
                total = metrics(url)[f"gateway_stage_seconds_sum{{{named}}}"]
                assert in_seconds(texts[0]) == pytest.approx(total / count, rel=0.06, abs=1e-5)
                assert texts[1:] == [f"mean of {count}", ""]
                continue
            for q, shown in zip((0.5, 0.95, 0.99), texts, strict=True):
                expected = quantile(each, q)
                assert in_seconds(shown) == pytest.approx(expected, rel=0.06, abs=1e-5), stage
        assert kinds == {True, False}

    soon(check_series)
    soon(check_stages)


def test_a_request_is_seen_and_cancelled(page: Any, url: str) -> None:
    """Its client is told, its row goes, and it is among the last errors, without its words."""
    events: list[str] = []

    def stream() -> None:
        body = chat(stream=True, ignore_eos=True, max_tokens=100_000, user="secret-word")
        body["messages"] += [{"role": "user", "content": "secret-word"}]
        headers = {"x-request-id": HOSTILE}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            events.extend(line.decode().strip() for line in answer if line.strip())

    thread = threading.Thread(target=stream)
    while not events:
        thread = threading.Thread(target=stream)
        thread.start()
        row = page.locator("#requests tbody tr", has_text="demo-chat")
        row.wait_for()
        assert row.locator("td").nth(6).text_content() == HOSTILE
        row.get_by_role("button").click()
        thread.join(60)
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "request_cancelled"
    row.wait_for(state="detached")
    page.locator("#errors tbody tr", has_text="request_cancelled").first.wait_for()
    assert "secret-word" not in page.content()
    assert page.locator("main img").count() == 0


def test_a_model_is_loaded_unloaded_and_pinned(page: Any, url: str) -> None:
    row = page.locator('#models tr[data-key="all-minilm-l6-v2"]')
    row.get_by_role("button", name="pin all-minilm-l6-v2", exact=True).click()
    row.get_by_text("pinned", exact=True).wait_for()
    row.get_by_role("button", name="unpin").click()
    row.get_by_role("button", name="unload").click()
    row.locator("[data-is=unloaded]").wait_for()
    row.get_by_role("button", name="load all-minilm-l6-v2", exact=True).click()
    row.locator("[data-is=loaded]").wait_for()
    ask(url, "/v1/embeddings", {"model": "all-minilm-l6-v2", "input": TEXTS})


def test_a_model_is_downloaded_by_name(browser: Any, tmp_path: Path) -> None:
    """Its progress is seen by other watchers too, and a wrong name is explained."""
    with FakeHub({"org/demo": ROOT / "demo" / "chat"}).serving() as hub:
        hub.gate.clear()
        given = {"GATEWAY_HUB_ENDPOINT": hub.url, "GATEWAY_DISK_RESERVE_BYTES": "0"}
        with (
            serve(tmp_path, **given) as url,
            looking(browser, url, ADMIN) as page,
            looking(browser, url) as other,
        ):
            form = page.locator("#pull")
            form.get_by_label("Model to download").fill("hub:org/demo")
            form.get_by_role("button").click()
            for each in (page, other):
                each.locator("#pulls li", has_text=re.compile(r"^org/demo: \d+ ?% of ")).wait_for()
            assert not other.locator("#pull").is_visible()
            hub.gate.set()
            form.get_by_text("org/demo is here.").wait_for()
            page.locator('#models tr[data-key="org/demo"]').wait_for()
            page.locator("#pulls").wait_for(state="hidden")


def test_what_is_wrong_with_a_download_is_said(browser: Any, url: str) -> None:
    context = browser.new_context()  # the console tells of the status, which `looking` forbids
    context.add_init_script(f"sessionStorage.setItem('mlx-gateway.admin-key', {ADMIN!r})")
    page = context.new_page()
    page.goto(f"{url}/dashboard")
    page.get_by_label("Model to download").fill("demo-chad")
    page.get_by_role("button", name="Download").click()
    page.get_by_text("Did you mean `demo-chat`?").wait_for()
    context.close()


def test_a_name_and_an_error_that_are_markup_are_texts(browser: Any, url: str) -> None:
    with looking(browser, url, ADMIN) as page:
        row = page.locator("#models tr", has_text=HOSTILE)
        with pytest.raises(urllib.error.HTTPError):
            ask(url, "/v1/embeddings", {"model": HOSTILE, "input": "a"})
        row.locator("[data-is=failed]").wait_for()
        assert HOSTILE in row.locator(".wrong").text_content()
        options = page.locator("#embed option").all_text_contents()
        assert any(HOSTILE in each for each in options)
        assert page.locator("main img").count() == 0
        assert page.title() == "mlx-gateway"


def test_a_chat_is_shown_as_it_is_written(page: Any) -> None:
    """Its text is an element for each line, with its figures and the reason of its end below."""
    page.fill("#chat [name=text]", QUESTION)
    page.keyboard.press("Enter")
    page.locator("#chat .result", has_text="completion tokens").wait_for()
    assert "Paris" in page.locator("#chat .turn.assistant .words p").text_content()
    assert page.get_by_text("The model ended its answer.").is_visible()
    assert page.locator("#chat .turn").count() == 2


def test_two_texts_are_compared(page: Any, url: str) -> None:
    page.get_by_role("tab", name="Embed").click()
    page.select_option("#embed select", "all-minilm-l6-v2")
    page.get_by_role("button", name="Compare").click()
    shown = page.locator("#embed .figure").text_content()
    answer = ask(url, "/v1/embeddings", {"model": "all-minilm-l6-v2", "input": TEXTS})
    one, other = (each["embedding"] for each in answer["data"])
    cosine = sum(a * b for a, b in zip(one, other, strict=True))
    assert float(shown) == pytest.approx(cosine, abs=0.001)


def test_documents_are_sorted(page: Any, url: str) -> None:
    page.get_by_role("tab", name="Rerank").click()
    page.select_option("#rerank select", "all-minilm-l6-v2")
    documents = ["Bananas are yellow.", "Goethe wrote Faust.", "<i>Nobody</i> wrote it."]
    page.fill("#rerank [name=documents]", "\n".join(documents))
    page.get_by_role("button", name="Sort").click()
    page.locator("#rerank li").first.wait_for()
    shown = page.locator("#rerank li > span:first-child").all_text_contents()
    body = {"model": "all-minilm-l6-v2", "query": "Who wrote Faust?", "documents": documents}
    results = ask(url, "/v1/rerank", body)["results"]
    assert shown == [documents[each["index"]] for each in results]
    scores = page.locator("#rerank li b").all_text_contents()
    assert scores == [f"{each['relevance_score']:.3f}" for each in results]


def test_it_fits_a_phone(browser: Any, url: str) -> None:
    """No part but the tables is wider than the screen."""
    with looking(browser, url, ADMIN, viewport={"width": 390, "height": 844}) as page:
        page.locator("#models tbody tr").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_without_the_admin_key_no_request_is_told(browser: Any, url: str) -> None:
    with looking(browser, url) as page:
        page.get_by_text("Enter the admin key under Keys to see the last errors.").wait_for()
        assert page.locator("#requests tbody tr, #errors tbody tr").count() == 0
        assert page.locator("#models").get_by_role("button").count() == 0


def test_a_key_is_asked_for_and_kept_in_its_tab_alone(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No address, cookie or storage of other tabs has it; a wrong one is asked for again."""
    with serve(tmp_path_factory.mktemp("keys"), GATEWAY_API_KEYS="open-up") as url:
        context = browser.new_context()
        page = context.new_page()
        fetched: list[str] = []
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(f"{url}/dashboard")
        for key, is_right in (("wrong", False), ("open-up", True)):
            page.locator("dialog[open]").wait_for()
            page.fill("dialog [name=api]", key)
            page.get_by_role("button", name="Use").click()
            if is_right:
                page.locator("#status[data-is=good]").wait_for()
            else:
                page.locator("#keys-reason", has_text="does not accept this API key").wait_for()
        page.locator("#chat option").first.wait_for(state="attached")
        page.fill("#chat [name=text]", QUESTION)
        page.get_by_role("button", name="Send").click()
        page.locator("#chat .result", has_text="completion tokens").wait_for()
        assert page.evaluate("localStorage.length") == 0
        assert context.cookies() == []
        assert not [each for each in fetched if "open-up" in each]
        other = context.new_page()
        other.goto(f"{url}/dashboard")
        other.locator("dialog[open]").wait_for()
        context.close()
