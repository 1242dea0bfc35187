"""Older request fields, read as today's: vLLM's `guided_*`, OpenAI's `functions`.

Nothing else knows them but the writer of a chat answer, which names calls as they were asked for.
What is wrong with such a field is refused under the name that it came by.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gateway.errors import BadRequest
from gateway.jobs import Grammar
from gateway.wire.bounds import Choices, GrammarText, Regex, SchemaOrText
from gateway.wire.generation import FormedRequest, StructuredOutputs
from gateway.wire.messages import (
    Choice,
    FunctionName,
    FunctionParam,
    NamedTool,
    OtherTool,
    ToolParam,
)

FunctionChoice = Literal["none", "auto"] | FunctionName


class GuidedRequest(FormedRequest):
    """A request that may ask for a form by vLLM's older names: one of its `structured_outputs`."""

    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def forms(self) -> list[tuple[str, Grammar]]:
        """Return every form that is asked for, each with the field that asks."""
        forms = super().forms()
        for name in ("json", "regex", "choice", "grammar"):
            field = f"guided_{name}"
            if (given := getattr(self, field)) is not None:
                modern = StructuredOutputs.model_validate({name: given})
                forms += [(field, grammar) for grammar in modern.grammars(field)]
        return forms


class AskedTools(NamedTuple):
    """The tools of a request, which of them to call, and whether several at once."""

    tools: Sequence[ToolParam | OtherTool]
    choice: Choice | None
    parallel: bool


def read_functions(
    asked: AskedTools, functions: Sequence[FunctionParam], choice: FunctionChoice | None
) -> AskedTools:
    """Return what was asked for, as tools. Raises BadRequest where both names are used."""
    if functions and (asked.tools or asked.choice is not None):
        raise BadRequest("Send 'tools' or 'functions', not both.", param="functions")
    if isinstance(choice, FunctionName) and not functions:
        raise BadRequest("'function_call' needs 'functions'.", param="function_call")
    if not functions:
        return asked
    tools = [ToolParam(function=function) for function in functions]
    if isinstance(choice, FunctionName):
        return AskedTools(tools, NamedTool(type="function", function=choice), parallel=False)
    return AskedTools(tools, choice, parallel=False)
