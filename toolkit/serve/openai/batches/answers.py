"""What files and batches answer, for /openapi.json alone (``toolkit.serve.http.openapi.answers``)."""

from __future__ import annotations

from typing import Literal

from toolkit.serve.http.openapi.answer import Answer
from toolkit.serve.http.openapi.answers import Page


class FileCard(Answer):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Page):
    data: list[FileCard]


class DeletedFile(Answer):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchFault(Answer):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchFaults(Answer):
    object: Literal["list"]
    data: list[BatchFault]


class BatchCounts(Answer):
    total: int
    completed: int
    failed: int


class BatchCard(Answer):
    """OpenAI's batch; times are in seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Page):
    data: list[BatchCard]
