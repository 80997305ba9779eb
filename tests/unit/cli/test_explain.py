"""`wholestep explain`: which step is meant, and what it prints for the demo's and for a user's own."""

import json
import sys
from pathlib import Path

import pytest

import wholestep as ws
from wholestep.cli import main
from wholestep.cli.explain import load_target, split_target, step_and_args
from wholestep.errors import ConfigError

USER_FILE = """
import torch
import wholestep as ws

def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ws.compile(step, strategy=ws.DDP()), (model, optimizer, torch.ones(2, 3))

def no_pair():
    return 3

number = 7
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "my_training.py"
    path.write_text(USER_FILE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_training", raising=False)
    return str(path)


@pytest.mark.parametrize("target", ["dmeo", "file.py", "file.txt:make", "file.py:not-a-name", ":make"])
def test_a_target_that_names_nothing(target: str) -> None:
    with pytest.raises(ConfigError, match=r"FILE\.py:FUNCTION"):
        split_target(target)


def test_a_target_is_split_at_its_last_colon(user_file: str) -> None:
    assert split_target(f"{user_file}:make") == (Path(user_file).resolve(), "make")


@pytest.mark.parametrize("name", ["number", "missing"])
def test_a_function_that_is_not_there_lists_those_that_are(user_file: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'; it has: make, no_pair, step"):
        load_target(f"{user_file}:{name}")


def test_what_the_function_returns_is_checked(user_file: str) -> None:
    with pytest.raises(ConfigError, match="returned int, no pair"):
        step_and_args(load_target(f"{user_file}:no_pair")(), "x")
    with pytest.raises(ConfigError, match="starts with function, no compiled step"):
        step_and_args((load_target, ()), "x")
    step, args = load_target(f"{user_file}:make")()
    with pytest.raises(ConfigError, match="arguments as list, no tuple"):
        step_and_args((step, list(args)), "x")
    assert step_and_args((step, args), "x") == (step, args)
    assert isinstance(step, ws.CompiledStep)


@pytest.mark.ranks
def test_a_users_step_is_explained(user_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main_without_exit(["explain", f"{user_file}:make", "--nproc", "2", "--measure", "2", "--json"])
    plain = json.loads(capsys.readouterr().out)
    assert plain["measured"]["num_calls"] == 2
    told = json.dumps(plain)
    assert "all_reduce" in told
    assert "weight" in told  # the parameter and its bucket
    assert "60" in told  # bytes: 5 x 3 float32


@pytest.mark.ranks
@pytest.mark.slow
def test_the_demos_step_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main_without_exit(["explain", "demo", "--nproc", "2"])
    shown = capsys.readouterr().out
    assert "all_reduce" in shown
    assert "embedding.weight" in shown


def main_without_exit(args: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(args)
    assert not left.value.code
