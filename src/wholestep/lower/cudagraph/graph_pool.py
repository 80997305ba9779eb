"""Memory that the CUDA graphs of a step share, and captures into it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from wholestep.ir import op_info
from wholestep.ir.segment import Segment
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph import capture_hooks, memset_nodes, rng_replay
from wholestep.util.gc_pause import gc_paused

ROOM = 1.02
"""Room for what is alive at once, over its bytes: blocks of an allocator are larger than tensors, with gaps between
them. From traces of W3: from 1.02 on all fits under DDP and FSDP."""

LEAST_FREE = 1 / 64
"""Share of the device's memory that graphs of more sizes leave free. The driver keeps a graph outside of the pool."""


def is_linear_algebra(error: BaseException) -> bool:
    """Whether an error was raised by a call of a step, or a segment of calls, that solves or factors by a library."""
    node = eager_backend.failing_node(eager_backend.first_error(error))
    if node is None:
        return False
    calls = node.target.calls if isinstance(node.target, Segment) else [node]
    return any(op_info.is_op(one) and "linalg" in one.target._schema.name for one in calls)  # type: ignore[union-attr]


class Member(Protocol):
    """An owner of graphs in a pool."""

    def give_up(self) -> None:
        """Drops its graphs, to capture again when it is called."""


class Pool:
    """The memory that the CUDA graphs of a device share. Nothing uses the device before the first capture.

    [Note: what keeps a pool]
    The allocator gives a pool up when its last graph goes, and captures into it fail from then on: so does a step's
    second capture, before which its only graph goes. A graph that does next to nothing stays in the pool therefore.

    [Note: room in one piece]
    In an empty pool the allocator takes a segment of the device for every request that nothing free is large enough
    for, and a segment never grows: of W3's 15.0 GiB, 20.7 were held. So the first request is one for all that will be
    needed at once, given back at once, and what follows is cut out of it: 15.3 GiB are held. A program that comes later
    and needs more takes segments besides.

    [Note: nothing may stay in it]
    One block in use keeps the whole piece from the device, also when all graphs have gone. cuBLAS keeps a workspace for
    every stream that it has run on, so those are given up after a capture; the next call has one made.

    [Note: the generator's places]
    A replay reads where the random generator stands from a place on the device that all graphs share. A capture writes
    a zero there, on its own stream, and torch has nobody wait for that. On a GPU that others use, too, it came after
    what the first replay had written, on the user's stream, and that replay drew other masks: so we explain 6 of 60
    trainings that went another way from the call on that captured, with eight processes on one GPU.

    [Note: a capture that failed]
    torch leaves its stream current then, the allocator waiting for the end and, up to 2.11, the random generator in the
    belief that a capture goes on, which only one that succeeds takes from it. cuSOLVER fails at its first call after
    one that it could not capture, whatever that call is: so it is given one that nobody needs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None
        self._room_bytes = 0
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._results_owner: Callable[[], Member | None] = lambda: None

    def add(self, member: Member, num_bytes: int = 0) -> None:
        """Registers an owner of graphs, by a weak reference. `num_bytes`: the most that they are to need at once."""
        self._members.add(member)
        self._room_bytes = max(self._room_bytes, num_bytes)

    def is_short_of_memory(self) -> bool:
        """Whether so little of the device is free that another graph might not fit."""
        if self.device.type != "cuda":
            return False
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.device)
        return free_bytes < LEAST_FREE * all_bytes

    def may_keep_results_of(self, member: Member) -> bool:
        """Whether results of `member` may stay in the pool between replays: one owner's at a time may."""
        return self._results_owner() in (None, member)

    def keep_results_of(self, member: Member) -> None:
        """Keeps results of `member` in the pool between replays.

        Graphs captured before use the same memory, so they are dropped; graphs captured later leave it alone."""
        if self._results_owner() is member:
            return
        self._results_owner = weakref.ref(member)
        for other in self._members:
            if other is not member:
                other.give_up()

    def release_results_of(self, member: Member) -> None:
        """Lets the results of another owner stay in the place of those of `member`."""
        if self._results_owner() is member:
            self._results_owner = lambda: None

    def capture(
        self, body: Callable[[], Sequence[Any]], rng: rng_replay.RngReplay | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """What `body` does, as a graph, and the tensors in which that leaves the results of `body`. `rng` are its
        settings of the random generator, if there are any.

        Raises what `body` raises, or RuntimeError for what CUDA cannot capture. Nothing has run then, and torch is as
        it was before.
        """
        # Nothing is collected meanwhile: to destroy a graph, a kernel or a group ends a capture.
        with torch.cuda.device(self.device), gc_paused():
            if self._keeper is None:
                gc.collect()  # what a trace has left may hold memory; it takes 20 times as long as a capture
                self._renew(room_bytes=int(ROOM * self._room_bytes))
            try:
                graph, results = self._captured(body, rng)
            finally:
                torch._C._cuda_clearCublasWorkspaces()  # see "nothing may stay in it"
            memset_nodes.replace_memsets(graph, lambda fill: self._captured(fill)[0], self.device)
            graph.instantiate()
            return graph, results

    def _captured(
        self, body: Callable[[], Any], rng: rng_replay.RngReplay | None = None
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        """What `body` does, as a graph that cannot run yet, and what `body` gives."""
        graph, before = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.current_stream()
        try:
            rng_capture = rng.capturing(graph) if rng is not None else contextlib.nullcontext()
            with capture_hooks.running_hooks(), rng_capture, self._capturing(graph):
                results = body()
        except BaseException as error:
            self._mend(graph, before)
            if is_linear_algebra(error):
                with contextlib.suppress(RuntimeError):
                    torch.linalg.qr(torch.eye(2, device=self.device))
            raise
        return graph, results

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        # The threads of NCCL go on with their own calls meanwhile.
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
            yield
        self._settle()

    def _settle(self) -> None:
        """See "the generator's places"."""
        assert self._stream is not None
        torch.cuda.current_stream().wait_stream(self._stream)

    def _renew(self, *, room_bytes: int) -> None:
        """A pool that nobody uses, with the graph that keeps it, and a stream to capture on."""
        self._handle, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        number, keeper = torch.zeros(1, device=self.device), torch.cuda.CUDAGraph()
        with self._capturing(keeper):
            self._make_room(room_bytes)
            number.zero_()
        self._keeper = keeper

    def _make_room(self, num_bytes: int) -> None:
        """See "room in one piece". Without a piece as large the allocator takes what there is."""
        if num_bytes:
            with contextlib.suppress(torch.OutOfMemoryError):
                room = torch.cuda.caching_allocator_alloc(num_bytes, self.device, self._stream)
                torch.cuda.caching_allocator_delete(room)

    def _mend(self, graph: torch.cuda.CUDAGraph, before: torch.cuda.Stream) -> None:
        """Makes torch usable after a capture that failed, wherever that was."""
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._stream):
            graph.capture_end()  # where it was not come to
        torch.cuda.set_stream(before)
        self._settle()
        graph.reset()
        index = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # raised by the first where the allocator knows that it has ended
            torch._C._cuda_endAllocateToPool(index, self._handle)
            torch._C._cuda_releasePool(index, self._handle)
        self._renew(room_bytes=0)
        self._keeper = None  # nobody may capture any more; who does makes a pool with room
