"""Whether an array or a storage object lies in the memory of tensors, which tell nobody when they are looked at."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from wholestep.capture.guards.fast_guards import held_elsewhere


def test_it_tells_arrays_and_storages_from_tensors() -> None:
    param, flat = nn.Parameter(torch.zeros(4)), torch.zeros(6)
    assert not held_elsewhere([param, param])
    array = param.detach().numpy()
    assert held_elsewhere([param])
    del array
    assert not held_elsewhere([param])
    storage = param.untyped_storage()
    assert held_elsewhere([param])
    del storage
    assert not held_elsewhere([param, flat[:3]])
    of_array = torch.from_numpy(np.zeros(3))
    assert held_elsewhere([of_array])
    assert not held_elsewhere([of_array], loaded=True)


def test_a_graph_that_has_saved_a_view_looks_at_nothing() -> None:
    layer = nn.Linear(3, 2)
    out = layer(torch.ones(1, 3))
    assert not held_elsewhere(layer.parameters())
    out.sum().backward()
    assert not held_elsewhere([param.grad for param in layer.parameters()])
