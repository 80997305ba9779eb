"""Compiled kernels on their way from the rank that compiles them to the others, through a store."""

from __future__ import annotations

import contextlib
import logging
import pickle
from typing import TYPE_CHECKING

import torch

from wholestep.ir.program import Program
from wholestep.ir.segment import segments_of
from wholestep.lower.program_compiler import ProgramCompiler
from wholestep.runtime.distributed.blob_store import BlobStore
from wholestep.util.lazy_import import lazy_import

if TYPE_CHECKING:
    from wholestep.lower.inductor import segment_compiler
else:
    segment_compiler = lazy_import("wholestep.lower.inductor.segment_compiler")

log = logging.getLogger("wholestep")


def receives_kernels(store: BlobStore | None) -> bool:
    """Whether this rank loads kernels that another one has compiled."""
    return store is not None and not store.is_writer


class KernelExchange:
    """Sends the kernels of each program once: the rank that comes first puts them into a store, the others take them.

    Which ranks need a program, and when, depends on the sizes that each of them sees.
    """

    def __init__(self, compiler: ProgramCompiler, device: torch.device, store: BlobStore) -> None:
        """`compiler` is the one whose kernels are sent or replaced."""
        self._compiler, self._device, self._store = compiler, device, store
        self._seen = set[str]()
        """Keys of programs whose kernels need not be sent any more."""

    def mark_seen(self, program: Program) -> str | None:
        """The key of a program, whose kernels are not sent from now on; None if that was so already."""
        key = segment_compiler.segments_key(segments_of(program), self._device)
        if key in self._seen:
            return None
        self._seen.add(key)
        return key

    def compiles(self, key: str) -> bool:
        """Whether this rank compiles the program of a key for all: it has to `put` it or to `give_up`."""
        try:
            return self._store.claim(key)
        except Exception as error:  # a store out of reach is told by who cannot do without
            log.warning("this rank compiles for itself: %s: %s", type(error).__name__, error)
            return True

    def give_up(self, key: str) -> None:
        """Has the others compile for themselves."""
        with contextlib.suppress(Exception):  # there is an error on its way already
            self._store.give_up(key)

    def put(self, program: Program, key: str) -> None:
        """Stores what was compiled of a program."""
        try:
            self._store.put(key, pickle.dumps(self._compiler.dumps(program)))
        except Exception as error:  # whatever it is, the others have compilers, too
            log.warning("every rank compiles for itself: %s: %s", type(error).__name__, error)
            self.give_up(key)

    def take(self, program: Program, key: str) -> None:
        """Loads what another rank has compiled of a program."""
        try:
            if (data := self._store.take(key)) is not None:
                self._compiler.loads(program, pickle.loads(data))
                return
            why = "the rank that was first could not"
        except Exception as error:  # likewise
            why = f"{type(error).__name__}: {error}"
        log.info("this rank compiles for itself: %s", why)
