"""The requests and answers of POST /v1/decisions, whose prompt docs/decisions.md shows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, Field
from typing_extensions import TypeAliasType, TypedDict

from gateway.clock import Timings
from gateway.errors import BadRequest
from gateway.jobs import Caller
from gateway.jobs.chat import GenerateJob, Question, Sampling, Usage
from gateway.wire.bounds import FAIL_FAST, ITEM_LIMIT, Label
from gateway.wire.messages import join_texts
from gateway.wire.responses import ResponseUsage, usage_dict
from gateway.wire.responses_items import InputPart, as_items, as_parts
from gateway.wire.validation import CharBounds, Part, Request, require

MAX_QUESTIONS = 400
MAX_LABELS = 255
SLICE = 64  # the most labels of a job that has several questions
HEAD = "Judge the following input by the question after it.\n\nInput:\n{input}\n\n"
PREDICATE = (
    "Question: Is this statement about the input true?\n{instructions}\n\nAnswer with yes or no, "
    "and nothing else."
)
CHOICE = (
    "Question: {instructions}\n\nChoices:\n{labels}\n\nAnswer with exactly one of the choices, and "
    "nothing else."
)
SCORE = (
    "Question: {instructions}\n\nLevels, from the lowest to the highest:\n{labels}\n\nAnswer with "
    "exactly one of the levels, and nothing else."
)
YES_NO = ("yes", "no")
_OUTPUTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}
_OPTIONS: Mapping[str, Literal["choices", "levels"]] = {"choice": "choices", "score": "levels"}
_KINDS = ("message", *_OUTPUTS.values(), *_OUTPUTS)


class DecisionInputPart(InputPart):
    """A piece of a message or an output: text, a refusal, or JSON."""

    fields: ClassVar[Mapping[str, str]] = {**InputPart.fields, "input_json": "data"}

    type: Label = Field(json_schema_extra={"enum": [*InputPart.fields, "input_json"]})
    data: dict[str, Any] | list[dict[str, Any]] | None = None


Parts = Annotated[
    list[DecisionInputPart],
    FAIL_FAST,
    ITEM_LIMIT,
    BeforeValidator(as_parts, json_schema_input_type=str | list[DecisionInputPart]),
]


class DecisionInputItem(Part):
    """A message, a tool call, or a tool call's output."""

    harmless = frozenset({"id", "phase", "status"})

    type: Label = Field("message", json_schema_extra={"enum": list(_KINDS)})
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: Label | None = None
    name: Label | None = None
    namespace: Label | None = None
    arguments: str | None = None
    input: str | None = None
    output: Parts | None = None


Items = Annotated[
    list[DecisionInputItem],
    FAIL_FAST,
    ITEM_LIMIT,
    BeforeValidator(as_items, json_schema_input_type=str | list[DecisionInputItem]),
    Field(min_length=1),
]
LabelText = Annotated[Label, Field(min_length=1)]


class ChoiceParam(Part):
    """A possible answer to a question of type `choice`."""

    value: bool | LabelText
    description: str | None = None


class LevelParam(Part):
    """A possible answer to a question of type `score`."""

    label: LabelText
    description: str | None = None


class QuestionParam(Part):
    """A question to answer with yes or no, one of `choices`, or one of `levels`, lowest first."""

    type: Literal["predicate", "choice", "score"]
    instructions: Parts
    name: Label | None = None
    choices: (
        Annotated[list[ChoiceParam], FAIL_FAST, Field(min_length=2, max_length=MAX_LABELS)] | None
    ) = None
    levels: (
        Annotated[list[LevelParam], FAIL_FAST, Field(min_length=2, max_length=MAX_LABELS)] | None
    ) = None

    @property
    def unread(self) -> frozenset[str]:
        return frozenset(_OPTIONS.values()) - {self.options_field}

    @property
    def options_field(self) -> Literal["choices", "levels"] | None:
        return _OPTIONS.get(self.type)

    @property
    def values(self) -> Sequence[str | bool]:
        if self.type == "choice":
            return [choice.value for choice in self.choices or ()]
        return [level.label for level in self.levels or ()]


class DecisionsRequest(Request):
    """A request to OpenAI's decisions endpoint."""

    harmless = frozenset(
        {"metadata", "prompt_cache_key", "prompt_cache_options", "safety_identifier", "user"}
    )
    params: ClassVar = {"prompt": "input"}
    example: ClassVar = {
        "input": "The parcel came late, and the box was broken.",
        "questions": [{"type": "predicate", "instructions": "The customer complains."}],
    }

    model: Annotated[Label, Field(min_length=1)]
    input: Items
    questions: Annotated[
        list[QuestionParam], FAIL_FAST, Field(min_length=1, max_length=MAX_QUESTIONS)
    ]


def to_jobs(
    request: DecisionsRequest,
    caller: Caller,
    template_args: Mapping[str, Any],
    *,
    bounds: CharBounds,
) -> list[GenerateJob]:
    """Return the jobs of a request, each with one or several of the questions.

    Raises BadRequest for missing or equal options, and for content that is no text or too long.
    """
    head = HEAD.format(input=_input_text(request.input))
    questions = [_question(i, question) for i, question in enumerate(request.questions)]
    bounds.check([head], param="input", noun="The input")
    bounds.check([question.text for question in questions], param="questions", noun="A question")
    slices = _slice(questions)
    caller.timings.parallel = [Timings() for _ in slices[1:]]
    return [
        GenerateJob(
            # Jobs that run in parallel need separate timings.
            caller=replace(caller, timings=timings),
            messages=[{"role": "user", "content": head}],
            questions=some,
            sampling=Sampling(),
            max_tokens=1,
            # The label must be the first token of the answer, so thinking is off.
            template_args={**template_args, "enable_thinking": False},
        )
        for some, timings in zip(slices, [caller.timings, *caller.timings.parallel], strict=True)
    ]


def _slice(questions: Sequence[Question]) -> list[list[Question]]:
    """Group the questions in order. Only a single question may exceed SLICE labels."""
    slices: list[list[Question]] = []
    labels = SLICE
    for question in questions:
        labels += len(question.labels)
        if labels > SLICE:
            slices.append([])
            labels = len(question.labels)
        slices[-1].append(question)
    return slices


def _input_text(items: Sequence[DecisionInputItem]) -> str:
    # A single user message needs no heading.
    if len(items) == 1 and items[0].type == "message" and items[0].role == "user":
        return _text(items[0].content, "input[0].content")
    names: dict[tuple[str, str], str] = {}
    blocks = []
    for i, item in enumerate(items):
        place = f"input[{i}]"
        heading: str
        match item.type:
            case "message":
                role = require(item.role, f"{place}.role")
                heading, text = role, _text(item.content, f"{place}.content")
            case "function_call" | "custom_tool_call":
                field = "arguments" if item.type == "function_call" else "input"
                call_id, name = _require(item, place, "call_id"), _require(item, place, "name")
                full_name = f"{item.namespace}.{name}" if item.namespace else name
                names[item.type, call_id] = full_name
                heading, text = f"call of {full_name}", _require(item, place, field)
            case "function_call_output" | "custom_tool_call_output":
                call_id = _require(item, place, "call_id")
                called = names.get((_OUTPUTS[item.type], call_id))
                if called is None:
                    raise BadRequest(
                        f"Invalid '{place}.call_id': no call before it has this id.",
                        param=f"{place}.call_id",
                    )
                heading, text = f"output of {called}", _text(item.output, f"{place}.output")
            case other:
                raise BadRequest(
                    f"Invalid '{place}.type': items of type '{other}' are not served.",
                    param=f"{place}.type",
                )
        blocks.append(f"[{heading}]\n{text}")
    return "\n\n".join(blocks)


def _require(item: DecisionInputItem, place: str, field: str) -> str:
    value: str | None = getattr(item, field)
    return require(value, f"{place}.{field}")


def _text(parts: Sequence[DecisionInputPart] | None, place: str) -> str:
    return join_texts(require(parts, place), place)


def _question(number: int, param: QuestionParam) -> Question:
    place = f"questions[{number}]"
    instructions = _text(param.instructions, f"{place}.instructions").strip()
    if not instructions:
        raise BadRequest(
            f"Invalid '{place}.instructions': they are empty.", param=f"{place}.instructions"
        )
    if (field := param.options_field) is None:
        return Question(number, PREDICATE.format(instructions=instructions), YES_NO)
    form = CHOICE if field == "choices" else SCORE
    options: Sequence[ChoiceParam | LevelParam] = require(getattr(param, field), f"{place}.{field}")
    labels = _labels(param.values)
    if len(set(labels)) < len(labels):
        raise BadRequest(f"Invalid '{place}.{field}': two are the same.", param=f"{place}.{field}")
    lines = [
        f"- {label}: {option.description}" if option.description else f"- {label}"
        for label, option in zip(labels, options, strict=True)
    ]
    text = form.format(instructions=instructions, labels="\n".join(lines))
    return Question(number, text, labels)


def _labels(values: Sequence[str | bool]) -> list[str]:
    # Strings are quoted if one of them looks like a boolean among the values.
    spelled = {str(value).lower() for value in values if isinstance(value, bool)}
    is_quoted = any(value in spelled for value in values if isinstance(value, str))
    return [
        value if isinstance(value, str) and not is_quoted else orjson.dumps(value).decode()
        for value in values
    ]


class PredicateAnswer(TypedDict):
    """The probability that a statement is true."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(TypedDict):
    """The probability of one choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    """The likeliest choice, and every choice's probability."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(TypedDict):
    """The probability of one level."""

    label: str
    value: int  # the level's number, 0 for the lowest
    probability: float


class ScoreAnswer(TypedDict):
    """Every level's probability, and their mean level as the score."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


Answer = TypeAliasType("Answer", PredicateAnswer | ChoiceAnswer | ScoreAnswer)


class Decision(TypedDict):
    """The answers, in the order of the questions."""

    model: str
    answers: list[Answer]
    usage: ResponseUsage


def to_decision(
    request: DecisionsRequest, logprobs: Sequence[Sequence[float]], usage: Usage
) -> Decision:
    """Return the answers; `logprobs` has a row for each question, with a value for each label."""
    answers = [
        _answer(question, _normalize(row))
        for question, row in zip(request.questions, logprobs, strict=True)
    ]
    return {"model": request.model, "answers": answers, "usage": usage_dict(usage)}


def _answer(question: QuestionParam, probabilities: Sequence[float]) -> Answer:
    if question.type == "predicate":
        return {"type": "predicate", "name": question.name, "probability": probabilities[0]}
    count, highest = len(probabilities), max(probabilities)
    # The confidence is 0 if all labels are equally likely, and 1 if one is certain.
    confidence = max(0.0, (count * highest - 1) / (count - 1))
    if question.type == "choice":
        return {
            "type": "choice",
            "name": question.name,
            "choice": question.values[probabilities.index(highest)],
            "confidence": confidence,
            "probabilities": [
                {"value": value, "probability": probability}
                for value, probability in zip(question.values, probabilities, strict=True)
            ],
        }
    return {
        "type": "score",
        "name": question.name,
        "score": math.fsum(level * probability for level, probability in enumerate(probabilities)),
        "confidence": confidence,
        "probabilities": [
            {"label": str(label), "value": level, "probability": probability}
            for level, (label, probability) in enumerate(
                zip(question.values, probabilities, strict=True)
            )
        ],
    }


def _normalize(logprobs: Sequence[float]) -> list[float]:
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
