"""Records of a log as one JSON object a line: of the server, and of the engine's process beside it."""

from __future__ import annotations

import json
import logging
import time


class JsonLines(logging.Formatter):
    """One object a record: time (UTC), level, logger, message; of an error its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self.more(record),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False, default=str)

    def more(self, record: logging.LogRecord) -> dict[str, object]:
        """What else there is to tell of a record."""
        return {}


def are_written() -> bool:
    """Whether this process writes its log so."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)
