"""Worker processes that run functions: started in parallel, watched, and ended together; what a launcher has set.

The parent keeps the rendezvous store, so no port is guessed and the store outlives every rank. A function travels
by name, as pickle does it; results and errors travel back as bytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch.distributed as dist

from wholestep.errors import ConfigError, RankMissingError, WholestepError
from wholestep.runtime.distributed.function_pickle import dump_function, load_function
from wholestep.runtime.distributed.rank_diff import ranks_text
from wholestep.runtime.distributed.store import TCPStore

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for every process and `init` reads."""

REPORT_GRACE_S = 1.0
"""After the first failure the other ranks may report for so long; then they are ended."""
START_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0


class RemoteTraceback(Exception):
    """The cause of an error that was raised on a rank: says which, and carries its traceback as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one call ended on one rank."""

    rank: int
    value: bytes | None = None
    """The pickled result, or None after an error."""
    error: bytes | None = None
    """The pickled exception, or None when there is none or it cannot be pickled."""
    summary: str = ""
    """``TypeError: what it said``, or how the process ended."""
    traceback: str = ""
    follows: bool = False
    """Whether the error reads like the consequence of another rank's failure."""
    died: bool = False


class Workers:
    """`nproc` processes that live until `close` and run one function after another.

    `setup` runs first in each of them, and `teardown` last; both travel like any function. After a call that
    raised, `healthy` says whether every rank reported: if so `reset` makes the workers fit for the next call,
    else they are to be closed.
    """

    def __init__(self, nproc: int, setup: Callable[[], object], teardown: Callable[[], object]) -> None:
        if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
            raise ConfigError(f"nproc wants a positive number of processes, got {nproc!r}.")
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise ConfigError(
                "Processes were started while a new process was importing your script, which would never end. "
                'Put the code that starts them under `if __name__ == "__main__":`.'
            )
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is not None and not os.path.exists(script):
            raise ConfigError(
                f"New processes import the program that starts them, and {script!r} cannot be imported: save a program "
                "that comes from standard input to a file, and run that."
            )
        self.nproc = nproc
        self.healthy = True
        self._setup, self._teardown = setup, teardown
        self._store = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT_S)
        )
        context = multiprocessing.get_context("spawn")
        self._processes: list[multiprocessing.context.SpawnProcess] = []
        self._connections: list[connection.Connection] = []
        for rank in range(nproc):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), name=f"wholestep rank {rank}")
            with _environment(_rank_environment(rank, nproc, self._store.port)):
                process.start()  # returns before the new process has imported anything
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            self.call(setup, (), timeout_s=START_TIMEOUT_S)
        except BaseException:
            self.close(orderly=False)
            raise

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), *, timeout_s: float, grace_s: float = REPORT_GRACE_S
    ) -> list[Any]:
        """Run ``fn(*args)`` on every rank and return the results in rank order.

        Raises:
            ConfigError: `fn` or `args` cannot travel to another process.
            RankMissingError: a rank ended without a report, or did not finish within `timeout_s`.
            Exception: what the first failing rank raised, with its own class and a `RemoteTraceback` as its cause.
        """
        payload = dump_function(fn, args)
        self.healthy = False
        for channel in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionError):  # a dead process is found below
                channel.send_bytes(payload)
        name = getattr(fn, "__qualname__", repr(fn))
        reports = self._gather(name, timeout_s, grace_s)
        failed = [report for report in reports if report.value is None]
        self.healthy = len(reports) == self.nproc and not any(report.died for report in reports)
        if failed:
            _raise(failed, self.nproc)
        values = {report.rank: pickle.loads(report.value) for report in reports if report.value is not None}
        return [values[rank] for rank in range(self.nproc)]

    def reset(self) -> None:
        """Leave the process groups and make new ones, so that an unmatched collective cannot disturb the next call."""
        self.call(self._teardown, timeout_s=END_TIMEOUT_S)
        self.call(self._setup, timeout_s=START_TIMEOUT_S)

    def close(self, *, orderly: bool = True) -> None:
        """End the processes: by asking them when `orderly` and all are healthy, and in any case within seconds."""
        if orderly and self.healthy:
            with contextlib.suppress(Exception):
                self.call(self._teardown, timeout_s=END_TIMEOUT_S)
                for channel in self._connections:
                    channel.send_bytes(b"")
                for process in self._processes:
                    process.join(END_TIMEOUT_S)
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        for channel in self._connections:
            channel.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(orderly=kind is None)

    def _gather(self, name: str, timeout_s: float, grace_s: float) -> list[Report]:
        """Reports in the order of arrival. Fewer than `nproc` only after a failure."""
        started = time.monotonic()
        deadline = started + timeout_s
        reports: list[Report] = []
        pending = set(range(self.nproc))
        while pending:
            sources = {self._connections[r]: r for r in pending} | {self._processes[r].sentinel: r for r in pending}
            ready = connection.wait(list(sources), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if not any(report.value is None for report in reports):
                    reports.append(self._timed_out(name, pending, time.monotonic() - started))
                return reports
            for rank in sorted({sources[source] for source in ready}):  # type: ignore[index]
                report = self._receive(rank)
                reports.append(report)
                pending.discard(rank)
                if report.value is None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        return reports

    def _receive(self, rank: int) -> Report:
        """The report that waits in the pipe, or else how the process ended."""
        channel, process = self._connections[rank], self._processes[rank]
        with contextlib.suppress(EOFError, OSError):
            if channel.poll():
                return Report(rank=rank, **pickle.loads(channel.recv_bytes()))
        process.join(END_TIMEOUT_S)
        return Report(rank=rank, summary=_ending(process.exitcode), died=True)

    def _timed_out(self, name: str, pending: set[int], waited_s: float) -> Report:
        """A report in the name of the ranks that did not finish; their stacks go to their own stderr."""
        if hasattr(signal, "SIGUSR1"):
            for rank in pending:
                os.kill(self._processes[rank].pid or os.getpid(), signal.SIGUSR1)
            time.sleep(0.3)
        done = set(range(self.nproc)) - pending
        others = f"{ranks_text(done)} did" if done else "no rank did"
        error = RankMissingError(
            f"{ranks_text(pending).capitalize()} of {self.nproc} did not finish {name} in {waited_s:.1f} s; {others}. "
            "The stacks of those that did not are in the standard error output. Look there for a collective that the "
            "other ranks did not call, or raise timeout_s."
        )
        return Report(rank=min(pending), error=pickle.dumps(error), summary=f"RankMissingError: {error}", died=True)


def _raise(failed: list[Report], nproc: int) -> None:
    """Raise the failure that explains the others: a death first, then errors in order of arrival, causes first."""
    first = min(failed, key=lambda report: (not report.died, report.follows))
    others = [f"  rank {r.rank}: {r.summary}" for r in sorted(failed, key=lambda r: r.rank) if r is not first]
    also = "\nThe other failures:\n" + "\n".join(others) if others else ""
    if first.died and first.error is None:
        raise RankMissingError(
            f"Rank {first.rank} of {nproc} {first.summary} before it could return a result. Its own output may "
            f"say more; the system killing it for memory, a crash in native code and os._exit all look like this.{also}"
        )
    cause = RemoteTraceback(f"raised on rank {first.rank} of {nproc}:\n{first.traceback}{also}")
    if first.error is not None:
        raise pickle.loads(first.error) from cause
    raise RuntimeError(f"Rank {first.rank} raised {first.summary}") from cause


def _ending(exitcode: int | None) -> str:
    if exitcode is None:
        return "closed its connection and did not end"
    if exitcode >= 0:
        return f"ended with exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = str(-exitcode)
    return f"was ended by signal {name}"


# ---- in the new process ----------------------------------------------------------------------------------------


def _serve(channel: connection.Connection, rank: int) -> None:
    """The life of a worker: answer calls until the parent says stop, or ends."""
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            message = channel.recv_bytes()
        except (EOFError, KeyboardInterrupt):
            return
        if not message:
            return
        channel.send_bytes(pickle.dumps(_attempt(message)))


def _attempt(message: bytes) -> dict[str, Any]:
    """The fields of a `Report`. An exit is none: SystemExit ends the process with its status, as anywhere."""
    try:
        fn, args = load_function(message)
        result = fn(*args)
        try:
            return {"value": pickle.dumps(result)}
        except Exception as error:
            raise ConfigError(
                f"{getattr(fn, '__qualname__', fn)!r} returned a {type(result).__name__} that cannot be sent back: "
                f"{error}. Return plain data or tensors."
            ) from error
    except Exception as error:
        return {
            "error": _pickled_error(error),
            "summary": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
            "follows": isinstance(error, dist.DistError | RankMissingError) or _blames_a_peer(error),
        }


def _blames_a_peer(error: Exception) -> bool:
    return not isinstance(error, WholestepError) and isinstance(error, RuntimeError) and "gloo" in str(error)


def _pickled_error(error: Exception) -> bytes | None:
    """None for exceptions that do not survive the journey, such as those with an __init__ of several arguments."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _rank_environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The environment variables of torchrun, with the agent's store in the parent."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if sys.platform == "linux":
        # gloo looks the host name up, which containers often cannot; all ranks are on this host.
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return environment


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """A new process inherits the environment at its start, and torch reads it while it is imported."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- what a launcher has set --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """The rank of this process and the rendezvous, as environment variables say."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int


def read_environment() -> RankEnvironment | None:
    """None when no launcher has set anything.

    Raises:
        ConfigError: naming the variable that is missing or makes no sense.
    """
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if len(missing) == len(VARIABLES):
        return None
    if missing:
        present = ", ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name not in missing)
        raise ConfigError(
            f"The environment is set by half: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, "
            f"while {present}. Start the program with `wholestep run` or torchrun, which set all of them; or, for a "
            f"single process, unset {', '.join(name for name in VARIABLES if name not in missing)}."
        )
    rank, size, local_rank, port = (
        number_in_environment(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} wants to be at least 0 and less than WORLD_SIZE={size}.")
    if not 0 <= local_rank < size:
        raise ConfigError(f"LOCAL_RANK={local_rank} wants to be at least 0 and less than WORLD_SIZE={size}.")
    return RankEnvironment(rank=rank, size=size, local_rank=local_rank, host=os.environ["MASTER_ADDR"], port=port)


def number_in_environment(name: str) -> int:
    """An environment variable as a whole number. Raises ConfigError for another text, KeyError where there is none."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise ConfigError(f"{name} wants a whole number, got {os.environ[name]!r}.") from None
