"""The controller's own logs: structured lines on standard error, for people or machines.

Nothing that is logged holds a spec, an environment or a token: lines name things, they don't quote them.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

from callboard.model.log import structlog


class _Lines:
    """Writes lines as long as somebody reads them.

    A controller whose terminal or pipe is gone goes on without: a line that can't be written must end no call.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    def msg(self, message: str) -> None:
        try:
            self._target.write(message + "\n")
            self._target.flush()
        except (OSError, ValueError):
            return  # closed or gone; there is no place to complain

    log = debug = info = warning = error = critical = exception = fatal = failure = err = warn = msg


def configure_logs(log_format: Literal["auto", "console", "json"], level: str) -> None:
    """Sets up structlog for this process.

    Args:
        log_format: ``auto``: console on a terminal, else JSON.
        level: least severe level: debug, info, warning, error.
    """
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_: _Lines(sys.stderr),
        # Not cached: tests configure it more than once in one process.
        cache_logger_on_first_use=False,
    )
