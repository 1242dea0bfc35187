"""The metrics of the gateway."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ParamSpec, TypeAlias, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    REGISTRY,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway import clock

CONTENT_TYPE = CONTENT_TYPE_LATEST
M = TypeVar("M", Counter, Gauge, Histogram)
P = ParamSpec("P")
T = TypeVar("T")


@cache
def of(metric: M, *labels: str) -> M:
    """Return a metric's series for these labels."""
    return metric.labels(*labels)


_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    *(10, 15, 20, 30, 45, 60, 120),
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = tuple(n * 10**power for power in range(6) for n in (1, 2, 5))
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)

REQUESTS = Counter("gateway_requests", "Requests answered.", ["route", "status"])
REQUEST_SECONDS = Histogram(
    "gateway_request_seconds", "From first byte in to last byte out.", ["route"], buckets=_SECONDS
)
REJECTED = Counter("gateway_rejected", "Requests refused by a full queue.", ["model"])
CANCELLED = Counter(
    "gateway_cancelled",
    "Requests whose client disconnected, or that were cancelled, by their stage at that time.",
    ["model", "stage"],
)
TOKENS_IN = Counter("gateway_prompt_tokens", "Tokens read.", ["model"])
TOKENS_OUT = Counter("gateway_completion_tokens", "Tokens written.", ["model"])
PROMPT_LENGTH = Histogram(
    "gateway_prompt_length_tokens",
    "Tokens of a request's prompt, or the sum over its texts.",
    ["model"],
    buckets=_TOKENS,
)
ANSWER_LENGTH = Histogram(
    "gateway_answer_length_tokens", "Tokens of a complete answer.", ["model"], buckets=_TOKENS
)
FINISHED = Counter("gateway_finished", "Answers completed, by finish reason.", ["model", "reason"])
TRUNCATED = Counter("gateway_truncated_inputs", "Embedding inputs cut to the limit.", ["model"])
STAGE_SECONDS = Histogram(
    "gateway_stage_seconds",
    "A request's time by stage.",
    ["model", "stage", "route"],
    buckets=_SECONDS,
)
FIRST_TOKEN_SECONDS = Histogram(
    "gateway_time_to_first_token_seconds",
    "Seconds from a request's arrival to its first token.",
    ["model"],
    buckets=_SECONDS,
)
OUTPUT_TOKEN_SECONDS = Histogram(
    "gateway_time_per_output_token_seconds",
    "Seconds per token of an answer, after its first token.",
    ["model"],
    buckets=_SECONDS,
)
BATCH_ROWS = Histogram(
    "gateway_batch_rows", "Texts or answers in a pass.", ["model"], buckets=_ROWS
)
BATCH_PADDING = Histogram(
    "gateway_batch_padding_ratio",
    "Share of a batch's tokens that are padding.",
    ["model"],
    buckets=_SHARES,
)
BATCH_FAULTS = Counter(
    "gateway_batch_faults", "Failed passes, after which their answers are retried.", ["model"]
)
SHEDDINGS = Counter("gateway_sheddings", "Times that the device ran out of memory in a pass.")
FAST_PATH = Counter(
    "gateway_fast_path", "Embedding batches that started at once, on an idle device.", ["model"]
)
EMBEDDING_CACHE = Counter(
    "gateway_embedding_cache", "Texts looked up in the embedding cache.", ["model", "outcome"]
)
EMBEDDING_OUTPUTS = Counter(
    "gateway_embedding_outputs",
    "Texts embedded, by the output asked for: dense, sparse or multi_vector.",
    ["model", "output"],
)
CACHED_TOKENS = Counter(
    "gateway_cached_prompt_tokens", "Prompt tokens found in the prefix cache.", ["model"]
)
UNKEPT_TOKENS = Counter(
    "gateway_prefix_unkept_tokens",
    "Prompt tokens that the prefix cache had no room for.",
    ["model"],
)
IMAGES = Counter("gateway_images", "Images in prompts.", ["model"])
IMAGE_TOKENS = Counter("gateway_image_tokens", "Prompt tokens that stand for images.", ["model"])
IMAGE_FEATURES = Counter(
    "gateway_image_features",
    "Images to be read whose features were at hand, hit, and those that were encoded, miss.",
    ["model", "result"],
)
TOWER_SECONDS = Histogram(
    "gateway_tower_seconds",
    "Seconds of a pass that encodes images.",
    ["model"],
    buckets=_SECONDS,
)
OUTCOMES = frozenset(
    ("measured", "decoded", "refused", "large", "busy", "late", "slow", "died", "killed")
)
IMAGE_DECODING = Histogram(
    "gateway_image_decode_seconds",
    "Seconds until an image file was read, waits included, by the outcome.",
    ["outcome"],
    buckets=_SECONDS,
)
READ_AHEAD = Counter(
    "gateway_tokens_read_ahead",
    "Tokens decoded ahead: forced by a grammar, drafted, and accepted drafts.",
    ["model", "kind"],
)
DRAFT_GAIN = Gauge(
    "gateway_draft_gain",
    "Speed with drafts relative to without, when last measured; drafting pauses below 1.",
    ["model", "drafter"],
)
WIDTH_GAIN = Gauge(
    "gateway_batch_width_gain",
    "Tokens per second of answers that take turns, relative to one batch; 1 while they share one.",
    ["model"],
)
PREEMPTIONS = Counter(
    "gateway_preemptions", "Answers whose KV was freed, to be continued later.", ["model"]
)
QUEUE_DEPTH = Gauge("gateway_queue_depth", "Requests waiting or running.", ["model"])
QUEUE_CHOICES = Gauge("gateway_queue_choices", "Answers of requests waiting or running.", ["model"])
QUEUE_TOKENS = Gauge("gateway_queue_tokens", "Tokens of requests waiting or running.", ["model"])
QUEUE_TOKENS_LIMIT = Gauge("gateway_queue_tokens_limit", "Limit of queued tokens.", ["model"])
MODELS_LOADED = Gauge("gateway_models_loaded", "Models held in the cache.")
MODEL_LOADS = Counter("gateway_model_loads", "Loads by outcome.", ["model", "outcome"])
PULLED_BYTES = Counter(
    "gateway_pulled_bytes",
    "Bytes of models' files downloaded, by the API key that asked for them.",
    ["key"],
)
EVICTIONS = Counter("gateway_model_evictions", "Models freed to make room.", ["model"])
LANE_WAIT = Histogram("gateway_lane_wait_seconds", "Waits for a turn.", ["kind"], buckets=_SECONDS)
LANE_HOLD = Histogram("gateway_lane_hold_seconds", "Length of turns.", ["kind"], buckets=_SECONDS)
LANE_SECONDS = Counter("gateway_lane_seconds", "Seconds of the device, by kind of work.", ["kind"])
GRAMMARS = Counter("gateway_grammars", "Grammars requested, by outcome.", ["model", "outcome"])
CHECKED_ANSWERS = Counter(
    "gateway_checked_answers",
    "Answers checked against their JSON schema, by outcome.",
    ["model", "outcome"],
)
GRAMMAR_COMPILE_SECONDS = Histogram(
    "gateway_grammar_compile_seconds", "Seconds to compile a grammar.", ["model"], buckets=_SECONDS
)


def count_prompt(model: str, tokens: int) -> None:
    of(TOKENS_IN, model).inc(tokens)
    of(PROMPT_LENGTH, model).observe(tokens)


def count_images(model: str, tokens: Sequence[int]) -> None:
    """Count a prompt's images; `tokens` has each image's number of tokens."""
    of(IMAGES, model).inc(len(tokens))
    of(IMAGE_TOKENS, model).inc(sum(tokens))


def count_features(model: str, encoded: int, recalled: int) -> None:
    """Count the images whose features a pass has encoded or recalled."""
    for result, images in (("miss", encoded), ("hit", recalled)):
        if images:
            of(IMAGE_FEATURES, model, result).inc(images)


def time_decoding(read: Callable[P, tuple[str, T]]) -> Callable[P, tuple[str, T]]:
    """Return `read` with a timer that records the seconds of each call by the call's outcome."""
    # The process that read a hostile file may name any outcome.

    def timed(*args: P.args, **kwargs: P.kwargs) -> tuple[str, T]:
        started = clock.now()
        outcome = read(*args, **kwargs)
        name = outcome[0] if outcome[0] in OUTCOMES else "invalid"
        of(IMAGE_DECODING, name).observe(clock.now() - started)
        return outcome

    return timed


Reading: TypeAlias = Metric


@dataclass(frozen=True, slots=True)
class Level:
    """A gauge whose value is computed at scrape time."""

    name: str
    text: str

    def read(self, value: float) -> Reading:
        return GaugeMetricFamily(self.name, self.text, value=value)

    def read_by_model(self, values: Mapping[str, float]) -> Reading:
        reading = GaugeMetricFamily(self.name, self.text, labels=["model"])
        for model, value in values.items():
            reading.add_metric([model], value)
        return reading


READY = Level("gateway_ready", "1 while /ready answers 200, else 0.")
HEARTBEAT_AGE = Level(
    "gateway_heartbeat_age_seconds",
    "Seconds for which the device's thread has made no progress; 0 while it has no work.",
)
LOG_LINES_LOST = Level(
    "gateway_log_lines_lost", "Log lines that could not be written, for example to a full disk."
)
ROWS = Level("gateway_rows", "Answers under way: prompts being read, or answers being written.")
TICKETS = Level("gateway_tickets", "Answers, or embeddings requests, that wait to join a batch.")
LEASES = Level("gateway_leases", "Requests that use a model, or wait for it to be loaded.")
TASKS = Level("gateway_tasks", "Tasks of the event loop.")
BUDGET_HELD = Level("gateway_budget_held_bytes", "Bytes that models and answers hold.")
BUDGET_LIMIT = Level("gateway_budget_limit_bytes", "Limit of the bytes of models and answers.")
DEVICE_ACTIVE = Level("gateway_device_active_bytes", "Bytes of MLX's arrays.")
DEVICE_CACHED = Level("gateway_device_cached_bytes", "Freed bytes that MLX keeps for reuse.")
RESPONSES_KEPT = Level("gateway_responses_kept", "Responses stored for `previous_response_id`.")
RESPONSES_BYTES = Level("gateway_responses_kept_bytes", "Bytes of the stored responses, as JSON.")
BODY_BYTES = Level(
    "gateway_body_bytes",
    "Bytes of request bodies and of unread responses in memory, beyond the first 64 KiB of each.",
)


class _Readings(Collector):
    def __init__(self, read: Callable[[], Iterable[Reading]]) -> None:
        self._read = read

    def describe(self) -> Sequence[Reading]:
        """Return nothing: the registry would refuse a second gateway's names as duplicates."""
        return ()

    def collect(self) -> Iterable[Reading]:
        return self._read()


@contextmanager
def register(read: Callable[[], Iterable[Reading]]) -> Iterator[None]:
    """While entered, add the readings that `read` returns to each scrape."""
    collector = _Readings(read)
    REGISTRY.register(collector)
    try:
        yield
    finally:
        REGISTRY.unregister(collector)


def forget(model: str) -> None:
    """Drop all series of a model."""
    for metric in tuple(globals().values()):
        if isinstance(metric, Counter | Gauge | Histogram) and "model" in metric._labelnames:
            metric.remove_by_labels({"model": model})
    of.cache_clear()  # the cache would still return the dropped series


def text() -> bytes:
    """Return every metric in Prometheus' text format."""
    return generate_latest()


def total(gauge: Gauge) -> float:
    return sum(sample.value for family in gauge.collect() for sample in family.samples)


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """The series of a histogram: labels, cumulative counts per edge, and sum."""

    edges: list[float]  # without infinity
    series: list[tuple[dict[str, str], list[float], float]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The gateway's values on /metrics, by metric name."""

    values: dict[str, list[tuple[dict[str, str], float]]]
    histograms: dict[str, HistogramReading]


def snapshot() -> Snapshot:
    """Return the present values of the gateway's metrics."""
    values: dict[str, list[tuple[dict[str, str], float]]] = {}
    histograms = {}
    for family in REGISTRY.collect():
        if not family.name.startswith("gateway_"):
            continue
        if family.type == "histogram":
            histograms[family.name] = _read_histogram(family)
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                values.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Snapshot(values, histograms)


def _read_histogram(family: Metric) -> HistogramReading:
    edges: list[float] = []
    series: list[tuple[dict[str, str], list[float], float]] = []
    counts: list[float] = []
    for sample in family.samples:  # each series has its buckets, then count, then sum
        if sample.name.endswith("_bucket"):
            edge = sample.labels["le"]
            if edge != "+Inf" and not series:
                edges.append(float(edge))
            counts.append(sample.value)
        elif sample.name.endswith("_sum"):
            series.append((sample.labels, counts, sample.value))
            counts = []
    return HistogramReading(edges, series)
