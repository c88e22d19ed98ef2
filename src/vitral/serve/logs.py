"""The server's log: one line per event, as JSON or as text."""

from __future__ import annotations

import logging
import time
from typing import Any, Literal, TextIO

from vitral.utils.json_toml import dump_json
from vitral.utils.text import count_text

LogFormat = Literal["text", "json"]


class LogFormatter(logging.Formatter):
    """Formats the message and the `fields` attribute of a record."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self.log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        traceback = self.formatException(record.exc_info) if record.exc_info else None
        if self.log_format == "json":
            return self._json(record, fields, traceback)
        if record.getMessage() == "request" and "route" in fields:
            images = f"  {count_text(fields['images'], 'image')}" if "images" in fields else ""
            return f"{fields['method']:<5}{fields['status']}  {fields['ms']:>7.1f} ms  {fields['route']}{images}"
        lines = [record.getMessage(), *(f"{key}: {value}" for key, value in fields.items()), traceback]
        return "\n".join(line for line in lines if line)

    def _json(self, record: logging.LogRecord, fields: dict[str, Any], traceback: str | None) -> str:
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        entry = {"time": timestamp, "level": record.levelname.lower(), "event": record.getMessage()} | fields
        return dump_json(entry | ({"traceback": traceback} if traceback else {}), ensure_ascii=False)


def configure_logging(stream: TextIO, log_format: LogFormat) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter(log_format))
    for name, level in (("vitral.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
