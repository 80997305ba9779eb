"""The command line: one file per command, wired in `app`. It uses the public names of wholestep."""

from wholestep.cli.app import main

__all__ = ["main"]
