"""log_once(level, text): a line in wholestep's log that a process writes at most once."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("wholestep")


@functools.cache
def log_once(level: int, text: str) -> None:
    """Logs `text` at a level of `logging`, unless this process has done so already."""
    log.log(level, "%s", text)
