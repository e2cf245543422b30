"""What a server writes on standard error: lines for people, or one JSON object a line (``--log-format json``)."""

from __future__ import annotations

import logging

from toolkit.base.json_lines import JsonLines
from toolkit.errors import UsageError
from toolkit.serve.http.request_ids import current

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_FORMATS = ("text", "json")
_ACCESS = ("client", "method", "path", "http_version", "status")  # what uvicorn's line about a request is made of


def begin(level: str, form: str) -> None:
    """Have this process write its log so. Raises UsageError for a level or format that is none."""
    if level not in LOG_LEVELS:
        raise UsageError(f"--log-level: expected one of {', '.join(LOG_LEVELS)}, found {level!r}")
    if form not in LOG_FORMATS:
        raise UsageError(f"--log-format: expected one of {', '.join(LOG_FORMATS)}, found {form!r}")
    handler = logging.StreamHandler()
    text = _Text("%(asctime)s %(levelname)s %(name)s: %(about)s%(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells every request


class _Json(JsonLines):
    """Also request_id of the request it is about; of one that was answered its client, method, path and status."""

    def more(self, record: logging.LogRecord) -> dict[str, object]:
        told: dict[str, object] = {}
        if (request := current()) is not None:
            told["request_id"] = request.id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            told |= dict(zip(_ACCESS, record.args, strict=True))
        return told


class _Text(logging.Formatter):
    """Time, level, logger, the request it is about, message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        request = current()
        record.about = "" if request is None else f"[{request.id}] "
        return super().formatMessage(record)
