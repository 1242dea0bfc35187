"""Older request fields, read as today's: vLLM's `guided_*`, OpenAI's `functions`.

Only the writer of a chat completion also knows them: a request with `functions` is answered with
a `function_call`. An error names the older field.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gateway.errors import BadRequest
from gateway.jobs import Grammar
from gateway.wire.bounds import ChoiceTexts, GrammarText, Regex, SchemaOrText
from gateway.wire.generation import StructuredOutputs, StructuredRequest
from gateway.wire.messages import (
    FunctionName,
    FunctionParam,
    NamedTool,
    OtherTool,
    ToolChoice,
    ToolParam,
)

FunctionChoice = Literal["none", "auto"] | FunctionName


class GuidedRequest(StructuredRequest):
    """A request that may name one of the `structured_outputs` by vLLM's older fields."""

    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: ChoiceTexts | None = None
    guided_grammar: GrammarText | None = None

    def forms(self) -> list[tuple[str, Grammar]]:
        forms = super().forms()
        for name in ("json", "regex", "choice", "grammar"):
            field = f"guided_{name}"
            if (value := getattr(self, field)) is not None:
                modern = StructuredOutputs.model_validate({name: value})
                forms += [(field, grammar) for grammar in modern.grammars(field)]
        return forms


class RequestedTools(NamedTuple):
    """A request's tools, its choice among them, and whether calls may be parallel."""

    tools: Sequence[ToolParam | OtherTool]
    choice: ToolChoice | None
    parallel: bool


def read_functions(
    requested: RequestedTools, functions: Sequence[FunctionParam], choice: FunctionChoice | None
) -> RequestedTools:
    """Return the functions as tools, or the request's own tools. Raises BadRequest for both."""
    if functions and (requested.tools or requested.choice is not None):
        raise BadRequest("Send 'tools' or 'functions', not both.", param="functions")
    if isinstance(choice, FunctionName) and not functions:
        raise BadRequest("'function_call' needs 'functions'.", param="function_call")
    if not functions:
        return requested
    tools = [ToolParam(function=function) for function in functions]
    if isinstance(choice, FunctionName):
        return RequestedTools(tools, NamedTool(type="function", function=choice), parallel=False)
    return RequestedTools(tools, choice, parallel=False)
