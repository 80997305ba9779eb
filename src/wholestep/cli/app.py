"""The application: which commands there are, and how an error leaves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console

from wholestep.cli import bench, calibrate, demo, explain, run
from wholestep.errors import WholestepError

ERROR_STATUS = 2
"""Exit status of an error of ours, as of a wrong option."""

app = typer.Typer(
    name="wholestep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.command)
app.command("run", context_settings={"allow_interspersed_args": False})(run.command)
app.command("explain")(explain.command)
app.command("bench")(bench.command)
app.command("calibrate")(calibrate.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(version("wholestep"))
        except PackageNotFoundError:
            print("not installed (run from its source)")
        raise typer.Exit


@app.callback()
def _application(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """An ordinary PyTorch training step becomes one graph: forward, backward, communication, clipping, optimizer."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; `args` default to those of the process. Leaves with status 2 on an error of wholestep."""
    try:
        app(args=None if args is None else list(args), prog_name="wholestep")
    except WholestepError as error:
        # soft_wrap: the reader's terminal wraps lines, and a pipe gets them whole; no markup: messages hold brackets.
        Console(stderr=True).print(f"{type(error).__name__}: {error}", soft_wrap=True, markup=False, highlight=False)
        sys.exit(ERROR_STATUS)
