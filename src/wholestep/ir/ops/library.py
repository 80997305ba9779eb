"""The library under which our operators are registered: ``torch.ops.wholestep``."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("wholestep", "DEF")
