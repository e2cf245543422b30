"""Which texts may be generated, as requests say it: OpenAI's ``response_format``, and vLLM's ways."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from toolkit.engine.constraints.grammar_format import check_escapes, check_held
from toolkit.errors import UsageError
from toolkit.serve.fields.strict import Strict

Schema = dict[str, Any] | bool
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = Field(None, description="false: hold to it as far as a grammar can, and refuse nothing")


class ResponseFormat(Strict):
    """The field named by ``type`` holds the rule, if that type has one."""

    type: Literal["text", "json_object", "json_schema", "regex_schema", "grammar", "choice"]
    json_schema: JsonSchema | None = None
    regex_schema: str | None = Field(None, min_length=1, description="A regular expression")
    grammar: str | None = Field(None, min_length=1, description="A grammar in GBNF, as xgrammar reads it")
    choice: Choices | None = None

    @model_validator(mode="after")
    def _one_rule(self) -> ResponseFormat:
        for name in ("json_schema", "regex_schema", "grammar", "choice"):
            given = getattr(self, name) is not None
            if given != (self.type == name):
                raise ValueError(
                    f"type {self.type!r} {'needs the field' if not given else 'does not go with'} {name!r}"
                )
        return self

    @model_validator(mode="after")
    def _held_to(self) -> ResponseFormat:
        """Looked at here, for behind a thought or beside tools the engine sees a part of a larger grammar."""
        asked = self.json_schema
        try:
            if asked is not None and asked.strict is not False:
                check_held("the json_schema", asked.schema_)
            if self.regex_schema is not None:
                check_escapes(self.regex_schema)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    def rule(self) -> dict[str, Any] | None:
        """As GenerationConfig.response_format; None = any text."""
        return None if self.type == "text" else self.model_dump(exclude_none=True, by_alias=True)


def _as_schema(value: Any) -> Any:
    """vLLM takes a schema as a text, too."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError("expected a JSON schema, or one as a text") from error
    return value


JsonOrText = Annotated[Schema, BeforeValidator(_as_schema, json_schema_input_type=dict[str, Any] | bool | str)]


class StructuredOutputs(Strict):
    """vLLM's; one rule of these."""

    json_: JsonOrText | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: Choices | None = None
    grammar: str | None = Field(None, min_length=1)
    json_object: bool | None = None


class FormatFields(Strict):
    """The fields that say it. They become one, ``response_format``."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="As vLLM has it")
    guided_json: JsonOrText | None = Field(None, description="As vLLM had it before structured_outputs")
    guided_regex: str | None = Field(None, min_length=1, description="Likewise")
    guided_choice: Choices | None = Field(None, description="Likewise")
    guided_grammar: str | None = Field(None, min_length=1, description="Likewise")

    @model_validator(mode="after")
    def _one_format(self) -> FormatFields:
        asked = self.structured_outputs or StructuredOutputs.model_validate({})
        rules = {
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex_schema", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
            "structured_outputs.json": ("json_schema", asked.json_),
            "structured_outputs.regex": ("regex_schema", asked.regex),
            "structured_outputs.choice": ("choice", asked.choice),
            "structured_outputs.grammar": ("grammar", asked.grammar),
            "structured_outputs.json_object": ("json_object", asked.json_object or None),
        }
        given = {name: rule for name, rule in rules.items() if rule[1] is not None}
        if not given:
            return self
        if len(given) > 1 or self.response_format is not None:
            raise ValueError(f"{next(iter(given))}: expected one rule alone of response_format and {', '.join(rules)}")
        name, (kind, rule) = next(iter(given.items()))
        body = {"json_object": {}, "json_schema": {kind: {"schema": rule}}}.get(kind, {kind: rule})
        try:
            self.response_format = ResponseFormat.model_validate({"type": kind, **body})
        except ValidationError as error:  # it names no field
            raise ValueError(f"{name}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
        return self
