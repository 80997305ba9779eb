"""`wholestep run script.py ...`: torchrun with defaults for one machine or several."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from wholestep.cli.common.options import Nproc, choose_nproc, threads_per_rank
from wholestep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start, ready for `os.execve`."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def plan_launch(
    target: str,
    args: Sequence[str],
    *,
    nproc: int,
    is_module: bool = False,
    nnodes: int = 1,
    rendezvous: str | None = None,
) -> Launch:
    """The torchrun command for `target`.

    Raises ConfigError where the script is missing or the nodes cannot meet.
    """
    if not is_module and not Path(target).is_file():
        raise ConfigError(f"`wholestep run` wants a Python script, and {target!r} is no file. For a module, add -m.")
    if nnodes < 1:
        raise ConfigError(f"--nnodes wants at least 1 machine, got {nnodes}.")
    if nnodes > 1 and rendezvous is None:
        raise ConfigError(
            f"--nnodes {nnodes} wants a place where the machines meet. Start the same command on each of them with "
            "--rendezvous HOST:PORT, HOST being one of the machines."
        )
    meet = ["--standalone"]
    if rendezvous is not None:
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=wholestep"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *meet, f"--nnodes={nnodes}", f"--nproc-per-node={nproc}"]
    # torchrun would set one thread and print a warning about it.
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(nproc)), **os.environ}
    # "--": what follows is not torchrun's, even where a script's option looks like one of its own.
    argv = (*launcher, *(["-m"] if is_module else []), "--", target, *args)
    return Launch(argv=argv, environment=environment)


def command(
    target: Annotated[str, typer.Argument(help="The script to start on every rank (a module with -m).")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, passed on as they are.")] = None,
    *,
    nproc: Nproc = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="The target is a module, as with python -m.")] = False,
    nnodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT where several machines meet.")] = None,
) -> None:
    """Start a training script on every local GPU, or on two CPU processes: torchrun with sane defaults.

    Options of `wholestep run` come before the script; all that follows it is the script's own.
    """
    launch = plan_launch(
        target, args or [], nproc=choose_nproc(nproc), is_module=module, nnodes=nnodes, rendezvous=rendezvous
    )
    sys.stdout.flush()
    # The launcher takes this process's place: signals and the exit status are its own.
    os.execve(launch.argv[0], launch.argv, launch.environment)
