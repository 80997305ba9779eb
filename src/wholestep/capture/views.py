"""Things that are no dict and look like one, so that they can be watched and restored: closure cells and classes."""

from __future__ import annotations

import types
from typing import Any


class CellView(dict[str, Any]):
    """A closure cell as a dict with one key."""

    def __init__(self, cell: types.CellType, key: str) -> None:
        super().__init__()
        self.cell, self.key = cell, key

    def __contains__(self, key: object) -> bool:
        return key == self.key

    def __getitem__(self, key: str) -> Any:
        return self.cell.cell_contents

    def update(self, held: Any) -> None:  # type: ignore[override]
        self.cell.cell_contents = held[self.key]


class ClassView(dict[str, Any]):
    """The attributes that a class has itself, not those of its bases."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def __contains__(self, key: object) -> bool:
        return key in vars(self._kind)

    def __getitem__(self, key: str) -> Any:
        return vars(self._kind)[key]

    def __delitem__(self, key: str) -> None:
        delattr(self._kind, key)

    def update(self, held: Any) -> None:  # type: ignore[override]
        for key, item in held.items():
            if vars(self._kind).get(key) is not item:
                setattr(self._kind, key, item)
