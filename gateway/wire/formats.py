"""What an answer must look like: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Annotated, Any, Literal

import orjson
from pydantic import ConfigDict, Field, model_validator

from gateway.errors import BadRequest
from gateway.jobs import Grammar
from gateway.wire.bounds import Choices, GrammarText, Regex, Schema, SchemaOrText, parse
from gateway.wire.reading import Part
from gateway.wire.sampling import SampledRequest

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


class Form(Part):
    """A form of answers: a key that nobody knows may mean another form, so it is refused."""

    model_config = ConfigDict(extra="forbid")


class JsonSchema(Form):
    """A schema and its name. With or without `strict` the answer is held to it, as far as a
    grammar can; what none can is refused when `strict`.
    """

    name: Name = "response"
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Form):
    """OpenAI's own form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type 'json_schema' needs a 'json_schema'")
        return self


class StructuredOutputs(Form):
    """vLLM's form: one of these."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> "StructuredOutputs":
        asked = (self.json_, self.json_object, self.regex, self.choice, self.grammar)
        if not any(given is not None for given in asked):
            raise ValueError("it should have one of json, json_object, regex, choice, grammar")
        return self

    def grammars(self, param: str) -> list[Grammar]:
        """List what was asked for."""
        asked = []
        if self.json_ is not None:
            asked.append(json_schema(self.json_, param=param))
        if self.json_object:
            asked.append(ANY_OBJECT)
        if self.regex is not None:
            asked.append(Grammar("regex", self.regex))
        if self.choice is not None:
            asked.append(Grammar("choice", orjson.dumps(self.choice).decode()))
        if self.grammar is not None:
            asked.append(Grammar("grammar", self.grammar))
        return asked


def json_schema(
    schema: dict[str, Any] | str | None, *, param: str, strict: bool = False
) -> Grammar:
    """Give the grammar of a schema, or of any object where there is none.

    The order of keys is kept: it is the order in which they are written. A `strict` schema is
    held to whole, or refused.
    """
    if schema is None:
        return ANY_OBJECT
    if isinstance(schema, str):
        try:
            schema = parse(schema.encode())
        except ValueError as error:
            raise BadRequest(f"The schema is not JSON: {error}.", param=param) from None
    return Grammar("json_schema", orjson.dumps(schema).decode(), strict=strict)


class FormedRequest(SampledRequest):
    """A request whose answer may be held to a form, in any of the ways to say so."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

    def form(self) -> tuple[str, Grammar | None]:
        """Give the one grammar that is asked for, and the field that asks; two are refused."""
        asked: list[tuple[str, Grammar]] = []
        if self.response_format is not None and self.response_format.type != "text":
            wanted = self.response_format.json_schema
            schema, strict = (wanted.schema_, bool(wanted.strict)) if wanted else (None, False)
            name = "response_format"
            asked.append((name, json_schema(schema, param=name, strict=strict)))
        if self.structured_outputs is not None:
            name = "structured_outputs"
            asked += [(name, grammar) for grammar in self.structured_outputs.grammars(name)]
        asked += self._guided()
        if len(asked) > 1:
            raise BadRequest(
                f"'{asked[0][0]}' and '{asked[1][0]}' each ask for a form of their own: send one.",
                param=asked[1][0],
            )
        return asked[0] if asked else ("response_format", None)

    def _guided(self) -> list[tuple[str, Grammar]]:
        """Read vLLM's older names as its newer form."""
        asked = []
        for name in ("json", "regex", "choice", "grammar"):
            if (given := getattr(self, f"guided_{name}")) is not None:
                older = StructuredOutputs.model_validate({name: given})
                asked += [(f"guided_{name}", each) for each in older.grammars(f"guided_{name}")]
        return asked


def held_to_prompt(grammar: Grammar | None, prompt: str) -> Grammar | None:
    """Hold an answer of any JSON object to the schema that its prompt ends with, if it does.

    So do clients ask servers without `json_schema`. A small model answers such a prompt with
    anything, or with the schema itself; for a large one this would be a guess, so it is a
    model's setting.
    """
    if grammar != ANY_OBJECT:
        return grammar
    try:
        schema = parse(prompt.rsplit("\n\n", 1)[-1].encode())
    except ValueError:
        return grammar
    is_schema = isinstance(schema, dict) and isinstance(schema.get("properties"), dict)
    return json_schema(schema, param="messages") if is_schema else grammar
