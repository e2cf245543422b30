"""The body of POST /v1/batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from toolkit.serve.fields.strict import Strict
from toolkit.serve.openai.batches.batches import window_seconds
from toolkit.serve.openai.batches.urls import URLS

HOUR, MONTH = 3600, 30 * 24 * 3600
Seconds = Annotated[int, Field(ge=HOUR, le=MONTH)]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: Seconds


class BatchRequest(Strict):
    input_file_id: str = Field(max_length=64, description="A file with the purpose batch")
    endpoint: str = Field(max_length=64, description="The url that every line has")
    completion_window: str = Field(
        max_length=8, description="What is not answered then has an error: 24h, or 1h to 999h"
    )
    metadata: Metadata | None = Field(None, max_length=16)
    output_expires_after: ExpiresAfter | None = None

    @field_validator("endpoint")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in URLS:
            raise ValueError(f"expected {' or '.join(URLS)}, found {value!r}")
        return value

    @field_validator("completion_window")
    @classmethod
    def _hours(cls, value: str) -> str:
        if window_seconds(value) is None:
            raise ValueError(f"expected hours, such as 24h, found {value!r}")
        return value
