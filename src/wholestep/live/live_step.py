"""LiveStep: a step whose Python runs at every call, with the tensor calls of known paths compiled."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.scalars.symbol_views import types_shown
from wholestep.capture.wrappers.ddp import silent_forwards
from wholestep.errors import CaptureError, PeerRefusedError, RankMismatchError, RetraceLimitError
from wholestep.live.followed_calls import Learned
from wholestep.live.opaque.functions import redirected
from wholestep.live.opaque.modules import OpaqueModule
from wholestep.live.pieces.pending_calls import PendingCalls
from wholestep.live.pieces.piece import Piece, PieceSpec, make_piece, size_carrier
from wholestep.live.ranks.peers import Peers, next_meeting
from wholestep.live.ranks.shard_calls import executed_on_gathered, executed_on_whole, whole_operands
from wholestep.live.recording.events import PUTS_GRADIENTS, RUNS_PIECE, Event
from wholestep.live.recording.handle import CURRENT, RUNS, RecordingMode
from wholestep.live.recording.modes import begin_blocks
from wholestep.live.recording.path import Path, Paths
from wholestep.live.recording.record import Read
from wholestep.live.recording.snapshot import AsRecorded, as_recorded
from wholestep.live.run import Run


class Compiled(Protocol):
    """A compiled step."""

    @property
    def plan(self) -> str:
        """The collectives of what ran last."""

    def __call__(
        self, inputs: list[torch.Tensor], numbers: list[float], sizes: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs it."""

    def call_if_unchanged(
        self, inputs: list[torch.Tensor], numbers: list[float], sizes: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        """Runs it, if all that it reads of Python is as in the last call; else None, and nothing has run."""


MAX_PIECES = 16
"""Compiled pieces of one path."""
MAX_EAGER_CALLS = 8
"""Calls in a row without a piece, and without anything learned, after which a step is no longer recorded."""
MAX_EAGER_CALLS_OF_RANKS = 32
"""Likewise on several ranks, which stop in the same call: what one has learned the others do not know, so all count."""
MAX_COMPILED, LAUNCHES_EACH = 48, 16
"""Pieces that are compiled at first; and how often those have to run, on average, for more to be."""
MAX_REASONS = 12
"""Kinds of reasons that are kept. They name values, so there may be a new one at every call."""


@dataclass(slots=True)
class CompiledPiece:
    """One piece, what it was compiled to, and whether it could be."""

    path: Path
    spec: PieceSpec
    piece: Piece
    call: Compiled | None = None
    """None before all ranks have come to it."""
    plans: int = 0
    """A number of the plans that the ranks had when it was compiled; 0 if it was not, or there is one rank."""
    refused: str = ""
    """Why it can be no graph."""
    launches: int = 0


@dataclass(slots=True)
class LiveStats:
    """What the calls of a live step were."""

    calls: int = 0
    launches: int = 0
    """Pieces that ran compiled."""
    executed: int = 0
    """Tensor calls that were executed one by one."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why calls went off the known paths or could be no piece, and how many calls of the step did: the first kinds."""

    def note_reasons(self, reasons: Iterable[str]) -> None:
        """Counts why a call of the step was not all pieces."""
        self.reasons.update(one for one in reasons if one in self.reasons or len(self.reasons) < MAX_REASONS)


class LiveStep:
    """One step, live."""

    def __init__(
        self,
        step: Callable[..., Any],
        name: str,
        reason: str,
        compile_piece: Callable[[Callable[..., Any], int], Any],
        peers: Peers | None = None,
        *,
        runs_eagerly: str = "",
    ) -> None:
        """`name` goes into the names of pieces, `reason` says why the step is live. `peers` of several ranks.

        `runs_eagerly`: why its modules communicate by themselves, so that all is eager code; empty if they do not.
        """
        self.name, self.reason = name, reason
        self.stats = LiveStats()
        self._step, self._compile, self._peers = step, compile_piece, peers
        self.learned = Learned()
        self._paths = Paths()
        self._pieces: dict[tuple[Path, PieceSpec], CompiledPiece] = {}
        self._last: CompiledPiece | None = None
        self._runs_eagerly = runs_eagerly
        self._has_pieces = not runs_eagerly and (peers is None or peers.runs_pieces)
        self._scopes: list[dict[str, Any]] | None = None
        """Globals of the user's code that names ``type``; None before the first call."""
        self._eager_calls = self._num_compiled = 0
        self._looks = True

    @property
    def is_recorded(self) -> bool:
        """Whether calls are recorded; not if too many of them in a row had no piece, or the strategy allows none."""
        most = MAX_EAGER_CALLS if self._peers is None else MAX_EAGER_CALLS_OF_RANKS
        return self._has_pieces and self._eager_calls < most

    @property
    def note(self) -> str:
        """What the strategy does in a live step; empty where that is what it always does."""
        return self._peers.note if self._peers is not None else self._runs_eagerly

    @property
    def pieces(self) -> list[CompiledPiece]:
        """All that were compiled or tried, the last ones last."""
        return list(self._pieces.values())

    @property
    def reads(self) -> list[Read]:
        """Where the Python of the path used last asks for values."""
        return sorted(self._paths.all[0].reads, key=lambda read: read.position) if self._paths.all else []

    @property
    def compiled_pieces(self) -> list[Any]:
        """The compiled steps of the pieces."""
        return [one.call for one in self._pieces.values() if one.call is not None and not one.refused]

    @property
    def last_piece(self) -> Any:
        """The compiled step of the piece that ran last; None if there is none."""
        return self._last.call if self._last is not None else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call: the user's function runs."""
        self.stats.calls += 1
        peers = self._peers
        if peers is None:
            with nullcontext() if self._runs_eagerly else silent_forwards(frozenset()):
                return self._called(args, kwargs)
        peers.begin(args, kwargs, f"{self.name}, live call {self.stats.calls}")
        with silent_forwards(peers.managed), peers.reducing():
            result = self._called(args, kwargs)
        if changed := peers.end():
            self._pieces = {key: piece for key, piece in self._pieces.items() if piece.path not in changed}
        return result

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        peers = self._peers
        with nullcontext() if peers is None else self._computing(peers):
            return (self._recorded if self.is_recorded else self._step)(*args, **kwargs)

    def _computing(self, peers: Peers) -> AbstractContextManager[None]:
        """What calls on shards compute with."""
        if not peers.computes_whole:
            return executed_on_gathered(peers) if self.is_recorded else nullcontext()
        return executed_on_whole(peers) if self.is_recorded else whole_operands(peers)

    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        """One call, whose calls of torch are recorded."""
        peers = self._peers
        agree = None if peers is None else lambda: peers.meet(Event(PUTS_GRADIENTS))
        leaves = pytree.tree_leaves((args, kwargs))
        run = Run(self._paths.all, leaves, self._launch, self.learned, agree)
        begin_blocks()
        if self._scopes is None:
            named = find_reachable(self._step, args, kwargs).builtin_scopes.items()
            self._scopes = [scope for (_, name), scope in named if name == "type"]
        with redirected(looks=self._looks), types_shown(self._scopes):
            CURRENT.run = RUNS[threading.get_ident()] = run
            try:
                with RecordingMode():
                    result = self._step(*args, **kwargs)
            except BaseException:
                run.flush("the step raised an error")
                raise
            finally:
                CURRENT.run = None
                del RUNS[threading.get_ident()]
            run.finish()
        self._learn(run)
        return result

    def _learn(self, run: Run) -> None:
        stats = self.stats
        stats.launches += len(run.pieces)
        stats.executed += run.executed
        self._looks = run.executed > 0
        stats.note_reasons({run.reason, run.refused or run.departure} - {""})
        changed: Path | None = None
        if run.executed and not run.reason:
            changed = self._paths.add(run.path())  # something varies that is a constant in the pieces of this path
            known = [path for path in self._paths.all if path is not changed]
            self._pieces = {key: piece for key, piece in self._pieces.items() if piece.path in known}
        elif run.candidates:
            self._paths.used(run.candidates[0])
        if self._peers is not None and (run.candidates or (run.executed and not run.reason)):
            paths = self._paths.all
            self._peers.told.note(paths[0], run.reads, paths, is_changed=changed is not None)
        # A path that has learned what varies on it may serve the next call.
        has_learned = changed is not None and self._peers is None
        self._eager_calls = 0 if run.pieces or has_learned else self._eager_calls + 1

    def _launch(self, run: PendingCalls, spec: PieceSpec) -> list[torch.Tensor] | None:
        path = run.candidates[0]
        read = run.read_by(path.records, range(*spec.span))
        compiled = self._piece(path, spec)
        if self._peers is not None:
            event = Event(RUNS_PIECE)
            if compiled is not None and not compiled.refused:
                is_ahead = spec.span[1] > len(run.records)
                event = self._peers.run_of(compiled.piece, compiled.plans, is_ahead=is_ahead)
            if not self._peers.meet(event):
                return None
        if compiled is None:
            run.stop(f"this way through the step has {MAX_PIECES} pieces, which is the most")
            return None
        if compiled.refused:
            run.refused = compiled.refused
            return None
        is_new = compiled.call is None if self._peers is None else not self._peers.have_compiled
        if is_new:
            if self._num_compiled >= MAX_COMPILED and self.stats.launches < LAUNCHES_EACH * self._num_compiled:
                run.refused = f"of {self._num_compiled} compiled pieces too few run again for more to be compiled"
                return None
            number = 0 if self._peers is None else next_meeting()
            compiled.call = self._compile(compiled.piece.function, number)
            self._num_compiled += 1
        try:
            results = self._run_piece(compiled, run, read)
        except (CaptureError, RetraceLimitError, PeerRefusedError, RankMismatchError) as error:
            run.refused = compiled.refused = str(error)
            return None
        if results is not None:
            if is_new and self._peers is not None and compiled.call is not None:
                compiled.plans = self._peers.number_of_plans(compiled.call.plan)
            compiled.launches += 1
            self._last = compiled
        return results

    def _run_piece(
        self, compiled: CompiledPiece, run: PendingCalls, read: list[AsRecorded]
    ) -> list[torch.Tensor] | None:
        """Runs a piece with what its calls read of Python as it was when they were recorded; None if it was two."""
        piece, call, tensors = compiled.piece, compiled.call, run.tensors
        assert call is not None
        # What is no state has been used before it runs.
        inputs = [*map(tensors.tensor_of, piece.earlier), *(tensors.externals[index] for index in piece.externals)]
        numbers = [tensors.numbers[number] for number in piece.numbers]
        sizes = [size_carrier(int(tensors.numbers[number])) for number in piece.sizes]
        modules = [one for one in read if isinstance(one, OpaqueModule)]
        with as_recorded([one for one in read if not isinstance(one, OpaqueModule)]):
            # The guards of the piece look at the modules as well. Where nothing has changed, nothing is to be put back.
            if (results := call.call_if_unchanged(inputs, numbers, sizes)) is not None:
                return results
            with as_recorded(modules):
                if changed := next((one for one in modules if one.is_changed), None):
                    run.refused = f"{changed.__name__} is called in two states"
                    return None
                return call(inputs, numbers, sizes)

    def _piece(self, path: Path, spec: PieceSpec) -> CompiledPiece | None:
        """The compiled piece; None if the path has enough of them."""
        compiled = self._pieces.get((path, spec))
        if compiled is None and sum(one.path is path for one in self._pieces.values()) < MAX_PIECES:
            compiled = CompiledPiece(path, spec, make_piece(f"{self.name}_piece", path, spec))
            self._pieces[path, spec] = compiled
        return compiled
