"""Compiled kernels on their way from rank 0 to the other ranks, through a store."""

from __future__ import annotations

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
    """Sends the kernels of each program once: rank 0 puts them into a store, the others take them."""

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

    def put(self, program: Program, key: str) -> None:
        """On rank 0, stores what was compiled of a program."""
        if not self._store.is_writer:
            return
        try:
            self._store.put(key, pickle.dumps(self._compiler.dumps(program)))
        except Exception as error:  # whatever it is, the others have compilers, too
            log.warning("every rank compiles for itself: %s: %s", type(error).__name__, error)

    def take(self, program: Program, key: str) -> None:
        """On other ranks, loads what rank 0 has compiled of a program, if it has the same one."""
        if self._store.is_writer:
            return
        try:
            if (data := self._store.take(key)) is not None:
                self._compiler.loads(program, pickle.loads(data))
                return
            why = "rank 0 has compiled no such segments for this kind of device"
        except Exception as error:  # likewise
            why = f"{type(error).__name__}: {error}"
        log.info("this rank compiles for itself: %s", why)
