"""The world of ranks: process group, device, mesh and store, made once from what the launcher says."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wholestep.errors import ConfigError, RankMissingError
from wholestep.runtime.distributed.consensus import agree
from wholestep.runtime.distributed.heartbeat import Heartbeat, say_farewell
from wholestep.runtime.distributed.launch import (
    REPORT_GRACE_S,
    RankEnvironment,
    Workers,
    number_in_environment,
    read_environment,
)
from wholestep.runtime.distributed.process_group import (
    chosen_backend,
    default_backend,
    device_of_rank,
    own_timeout_s,
    release_before_teardown,
    with_gloo,
)
from wholestep.runtime.distributed.store import HashStore, PrefixStore, Store, TCPStore, default_store

TIMEOUT_S = 600.0
"""How long ranks wait for each other where nobody says."""

DATA_AXIS = "data"
"""The name of the one axis of the default mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process among its peers."""

    rank: int
    """Number of this process, from 0."""
    size: int
    """Number of processes."""
    local_rank: int
    """Number of this process on its host, from 0."""
    device: torch.device
    """Where this rank computes: ``cuda:<local_rank>`` or ``cpu``."""
    mesh: DeviceMesh | None
    """One axis named "data" over all ranks; None for a single process without a process group."""
    timeout_s: float
    """How long a rank waits for the others, in seconds: in a barrier, an agreement or a collective."""

    def barrier(self, name: str, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has come to the barrier of this name. Uses the store, never a collective.

        Raises:
            RankMissingError: ranks did not come in time (`timeout_s`, by default the world's) or have ended. Names
                them, the seconds waited, the file and line in which each other rank waits, and where the missing
                ones were when last heard of.
        """
        session = _session_of(self)
        if self.size == 1:
            return
        session.barriers[name] += 1
        agree(
            "",
            store=session.store,
            rank=self.rank,
            size=self.size,
            key=f"barrier/{session.number}/{name}/{session.barriers[name]}",
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
            what=f'the barrier "{name}"',
            peers=self,
        )

    def departed(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of `ranks` that have ended or given no sign of life for long, and how that is known."""
        heartbeat = _session_of(self).heartbeat
        return {} if heartbeat is None else heartbeat.departed(ranks)

    def locations(self, ranks: Iterable[int]) -> dict[int, str]:
        """Where each of `ranks` was when last heard of: in which compiled step, at which line of the user's code."""
        heartbeat = _session_of(self).heartbeat
        return {} if heartbeat is None else {rank: str(beat) for rank, beat in heartbeat.beats(ranks).items()}

    def stuck(self, ranks: Iterable[int], call: str) -> dict[int, str]:
        """Those of `ranks` that have been in the run of `call` (``train_step, call 7``) for long, and at which line."""
        heartbeat = _session_of(self).heartbeat
        return {} if heartbeat is None else {rank: str(beat) for rank, beat in heartbeat.stuck(ranks, call).items()}

    @property
    def store(self) -> Store:
        """The rendezvous store that all ranks share; without a process group, one of this process alone."""
        return _session_of(self).store

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The signs of life of the ranks; None for a single process."""
        return _session_of(self).heartbeat

    def close(self) -> None:
        """Leave: end the process group if `init` made it, so that a later `init` starts anew. Closing twice is fine."""
        global _session, _announcement
        session = _session
        if session is None or session.world is not self:
            return
        _session = None
        if session.heartbeat is not None:
            session.heartbeat.stop("left its World")
        if session.owned and dist.is_initialized():
            dist.destroy_process_group()
        _announcement = None


@dataclass(slots=True, kw_only=True)
class _Session:
    """The parts of a World that change or cannot be compared."""

    world: World
    group: dist.ProcessGroup | None
    store: Store
    heartbeat: Heartbeat | None
    owned: bool
    number: int
    backend: str
    barriers: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Announcement:
    """Signs of life of this rank, from before its World is made on: other ranks may wait for it to come."""

    group: dist.ProcessGroup | None
    number: int
    """Of the World."""
    heartbeat: Heartbeat


_session: _Session | None = None
_announcement: _Announcement | None = None
_groups_left = 0  # without a World; a later group may have the same store, in which a farewell lies
_sessions_made = 0  # part of every key, so that a second World in the same processes reads no old news


def init(backend: str | None = None, timeout_s: float | None = None) -> World:
    """The World of this process. The first call makes it, later ones return it.

    Reads what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT). With none of them set this is
    a single process, without a process group. A default process group that exists already is adopted as it is; its
    GPU is the one that the group was made for (`device_id`), else that of LOCAL_RANK, else of the rank, around.

    `backend` is "gloo", "nccl", a list such as "cpu:gloo,cuda:nccl", or None: that list where CUDA is available,
    else gloo. A backend without CUDA in it makes the CPU the device. `timeout_s` bounds every wait for other ranks, by
    default ten minutes. In a group that exists already no wait is longer than the group's own
    (``init_process_group(timeout=...)``), which is the default there.

    Raises:
        ConfigError: the environment is half set or contradicts itself, or the backend cannot be used here.
        RankMissingError: a rank did not come to the rendezvous within `timeout_s`; the message names it.
    """
    global _session, _sessions_made
    if _session is not None and _is_current(_session):
        if backend is not None and _session.backend not in (backend, with_gloo(backend)):
            raise ConfigError(
                f"init(backend={backend!r}) was called in a World that uses {_session.backend!r}. "
                "Call World.close() first, or leave the backend out."
            )
        return _session.world
    if _session is not None:
        _session.world.close()
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"init(timeout_s=...) wants a positive number of seconds, got {timeout_s!r}.")
    _sessions_made += 1
    if dist.is_initialized():
        _session = _from_existing_group(timeout_s)
    elif (environment := read_environment()) is None:
        _session = _single_process(backend, timeout_s or TIMEOUT_S)
    else:
        _session = _from_launcher(environment, backend, timeout_s or TIMEOUT_S)
    return _session.world


def announce() -> None:
    """From now on gives signs of life where there is a process group, and says farewell where one is made later.

    Others may be in their World, and wait for this rank. Nothing is done in a World, and for a single rank.
    """
    atexit.unregister(_leave_unseen)
    atexit.register(_leave_unseen)
    release_before_teardown(_leaving)
    in_world = _session is not None and _is_current(_session)
    if not in_world and dist.is_initialized() and dist.get_world_size() > 1:
        with contextlib.suppress(RuntimeError):  # a store that makes no second connection; `init` says so
            _heartbeat(_sessions_made + 1, default_store(), dist.get_rank(), dist.get_world_size())


def _heartbeat(number: int, store: Store, rank: int, size: int) -> Heartbeat:
    """The heartbeat of the World of that number, which may have begun before it."""
    global _announcement
    known, group = _announcement, dist.group.WORLD
    if known is not None and known.number == number and known.group is group:
        return known.heartbeat
    if known is not None:
        known.heartbeat.stop_silently()
    made = Heartbeat(PrefixStore(_key(number), store), rank=rank, size=size)
    made.start()
    _announcement = _Announcement(group=group, number=number, heartbeat=made)
    return made


def _key(number: int) -> str:
    return f"wholestep/world/{number}/{_groups_left}"


class _Leaving:
    """Told of groups that end (`release_before_teardown`)."""

    def release_group(self, group: str) -> None:
        if dist.group.WORLD is not None and dist.group.WORLD.group_name == group:
            _leave_unseen("left its process group")


_leaving = _Leaving()


def _leave_unseen(how: str = "") -> None:
    """The group, or the program, ends without a World. Makes no connection: the others may be gone as well."""
    global _groups_left
    if _session is None and _announcement is None and dist.is_initialized() and dist.get_world_size() > 1:
        say_farewell(PrefixStore(_key(_sessions_made + 1), default_store()), dist.get_rank(), how)
        _groups_left += 1


def run(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    backend: str | None = None,
    grace_s: float = REPORT_GRACE_S,
) -> list[Any]:
    """Call ``fn(*args)`` in `nproc` new processes on this host, each in its World; returns the results in rank order.

    For notebooks and tests; programs are started with ``wholestep run`` or torchrun. `fn` must be importable: a
    function at the top level of a module. When one rank fails the others may report for `grace_s` seconds more and
    are then ended.

    Raises:
        ConfigError: `fn`, its arguments or its result cannot travel between processes.
        RankMissingError: a rank died (with its exit status or signal), or did not finish within `timeout_s`.
        Exception: what the first failing rank raised, of the same class; its cause names the rank and holds the
            traceback of that rank.
    """
    if not timeout_s > 0:
        raise ConfigError(f"run(timeout_s=...) wants a positive number of seconds, got {timeout_s!r}.")
    with Workers(nproc, functools.partial(enter, backend, timeout_s), close_current) as workers:
        return workers.call(fn, args, timeout_s=timeout_s, grace_s=grace_s)


def enter(backend: str | None, timeout_s: float) -> None:
    """`init` for worker processes, which need no World sent back."""
    init(backend, timeout_s)


def close_current() -> None:
    """Close the World of this process, if it has one."""
    if _session is not None:
        _session.world.close()


# ---- the three ways to come by a World ---------------------------------------------------------------------------


def _single_process(backend: str | None, timeout_s: float) -> _Session:
    backend = chosen_backend(backend)
    device = device_of_rank(backend, 0)
    world = World(rank=0, size=1, local_rank=0, device=device, mesh=None, timeout_s=timeout_s)
    return _session_record(world, None, HashStore(), backend, owned=False)


def _from_launcher(environment: RankEnvironment, backend: str | None, timeout_s: float) -> _Session:
    backend = chosen_backend(backend)
    device = device_of_rank(backend, environment.local_rank)
    store = _rendezvous(environment, timeout_s)
    dist.init_process_group(
        backend, store=store, rank=environment.rank, world_size=environment.size, timeout=timedelta(seconds=timeout_s)
    )
    world = World(
        rank=environment.rank,
        size=environment.size,
        local_rank=environment.local_rank,
        device=device,
        mesh=_mesh(device, environment.size),
        timeout_s=timeout_s,
    )
    return _session_record(world, dist.group.WORLD, default_store(), backend, owned=True)


def _from_existing_group(timeout_s: float | None) -> _Session:
    group = dist.group.WORLD
    own_s = TIMEOUT_S if group is None else own_timeout_s(group) or TIMEOUT_S
    timeout_s = own_s if timeout_s is None else min(timeout_s, own_s)
    rank, size, backend = dist.get_rank(), dist.get_world_size(), default_backend()
    bound = getattr(group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda":
        local_rank = bound.index
    elif os.environ.get("LOCAL_RANK"):
        local_rank = number_in_environment("LOCAL_RANK")
    else:
        local_rank = rank % max(1, torch.cuda.device_count())
    device = device_of_rank(backend, local_rank)
    world = World(
        rank=rank, size=size, local_rank=local_rank, device=device, mesh=_mesh(device, size), timeout_s=timeout_s
    )
    return _session_record(world, group, default_store(), backend, owned=False)


def _session_record(
    world: World, group: dist.ProcessGroup | None, store: Store, backend: str, *, owned: bool
) -> _Session:
    number = _sessions_made
    return _Session(
        world=world,
        group=group,
        store=store,
        heartbeat=_heartbeat(number, store, world.rank, world.size) if world.size > 1 else None,
        owned=owned,
        number=number,
        backend=with_gloo(backend),
    )


def _session_of(world: World) -> _Session:
    if _session is None or _session.world is not world:
        raise ConfigError("This World was closed or replaced; wholestep.init() gives the current one.")
    return _session


def _is_current(session: _Session) -> bool:
    """Whether the process group is still the one that this session was made for."""
    return (dist.group.WORLD if dist.is_initialized() else None) is session.group


def _rendezvous(environment: RankEnvironment, timeout_s: float) -> Store:
    """Connect to the store, and wait until every rank has."""
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            environment.host,
            environment.port,
            environment.size,
            is_master=environment.rank == 0 and not kept_by_launcher,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        keeper = "the launcher" if kept_by_launcher else "rank 0"
        raise RankMissingError(
            f"Rank {environment.rank} could not reach the store of {keeper} at {environment.host}:{environment.port} "
            f"(MASTER_ADDR, MASTER_PORT) within {timeout_s:g} s: either {keeper} has not started, or the address is "
            f"wrong, or the port is taken. torch said: {error}"
        ) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed = PrefixStore(f"wholestep/start/{restart}/{_sessions_made}", store)
    agree(
        str(environment.size),
        store=prefixed,
        rank=environment.rank,
        size=environment.size,
        key="rendezvous",
        timeout_s=timeout_s,
        what="the rendezvous",
    )
    return prefixed


def _mesh(device: torch.device, size: int) -> DeviceMesh:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a choice of device that was made above
        return init_device_mesh(device.type, (size,), mesh_dim_names=(DATA_AXIS,))
