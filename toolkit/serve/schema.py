"""OpenAPI: bodies are read by our own code (limits, one-line errors), so their schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"


def describe(model: type[BaseModel], summary: str) -> dict[str, Any]:
    """Arguments of a route whose JSON body is ``model``."""
    schema = {"$ref": REF.format(model=model.__name__)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "openapi_extra": {"requestBody": body}, "response_model": None}


def add_schemas(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Make ``app.openapi()`` define ``models`` and everything they refer to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        _, made = models_json_schema([(model, "validation") for model in models], ref_template=REF)
        schemas.update(made["$defs"])  # models of one name are told apart by their modules
        return document

    app.openapi = openapi  # type: ignore[method-assign]
