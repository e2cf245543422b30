"""What a server writes on standard error: lines for people, or one JSON object a line (``--log-format json``)."""

from __future__ import annotations

import json
import logging
import time

from toolkit.errors import UsageError
from toolkit.serve.request_ids import current

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
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells every request


class JsonLines(logging.Formatter):
    """One object a record: time (UTC), level, logger, message, request_id of the request it is about; of a request that
    was answered its client, method, path and status; of an error its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := current()) is not None:
            told["request_id"] = request.id
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
            told |= dict(zip(_ACCESS, record.args, strict=True))
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)
