"""An error without what lived where it came from."""

from __future__ import annotations


def forget_frames(error: BaseException) -> None:
    """Drops the frames of an error, and of the errors behind it, with all that they hold; for one that is kept."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:  # an error may be its own cause
            seen.add(id(one))
            one.__traceback__ = None
            waiting += [one.__cause__, one.__context__]
