"""What a contender of ours says of itself."""

import torch
from torch import nn

import wholestep as ws
from wholestep.cli.suite.contenders import Contender, Kind
from wholestep.cli.suite.rank_session import _told


def test_a_step_of_ours_says_what_it_is_predicted_to_take_and_a_stock_one_nothing() -> None:
    model = nn.Linear(64, 64)
    step = ws.compile(lambda x: model(x).sum().detach(), backend="eager", fullgraph=True)
    step(torch.ones(4, 64))
    told = step.explain()
    ours = Contender(kind=Kind.OURS, call=lambda: torch.zeros(()), step=step)
    assert _told(ours) == (told.backend, 1e-3 * told.predicted.step_us, told.peak.num_bytes)
    assert told.predicted.step_us > 0
    assert told.peak.num_bytes > 0
    assert _told(Contender(kind=Kind.EAGER, call=lambda: torch.zeros(()), step=None)) == ("", None, None)
