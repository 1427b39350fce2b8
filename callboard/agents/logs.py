"""The agent's own logs.

Events with fields through structlog, to stderr; secrets are never fields (tokens and values of variables aren't
logged at all).
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def configure(format_name: Literal["console", "json"], level: str) -> None:
    """Set structlog up for this process."""
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if format_name == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
