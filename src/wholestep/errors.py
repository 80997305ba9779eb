"""Every error that wholestep raises on purpose.

    WholestepError
    ├── ConfigError (ValueError)      an option, a strategy or an argument that cannot be used
    ├── CaptureError                  the step cannot become one graph; names the user's file and line
    │   └── HyperparameterError       an optimizer, or one of its options, that cannot be read at every call
    ├── PlacementError                a program cannot be spread over the mesh
    ├── RankMismatchError             the ranks hold different plans; carries the readable difference
    ├── RankMissingError              a rank did not arrive, or died; says who, where and after how long
    │   └── PeerRefusedError          another rank's step cannot become one graph
    ├── RetraceLimitError             more signatures than ``max_retraces``; lists the reasons
    ├── VerificationError             what ranks would run differs from what it should be; names the first value
    ├── ArtifactError                 a saved step that does not fit here
    ├── CheckpointError               a checkpoint that cannot be written, or does not fit what it is loaded into
    └── InternalError                 an invariant of wholestep itself is broken: please report it

A message says what was wanted, what came, and what to change. An error leaves parameters, buffers,
optimizer state and ``.grad`` as they were before the call.
"""


class WholestepError(Exception):
    """Root of every error raised by wholestep."""


class ConfigError(WholestepError, ValueError):
    """An option, a strategy or an argument that cannot be used as given."""


class CaptureError(WholestepError):
    """The step cannot become one graph. The message names the user's file and line."""


class HyperparameterError(CaptureError):
    """An optimizer, or one of its options, that cannot be read anew at every call."""


class LazyParameterError(CaptureError):
    """A parameter of a lazy module that has no shape before the first forward."""


class PlacementError(WholestepError):
    """A program cannot be spread over the mesh as the strategy asks."""


class RankMismatchError(WholestepError):
    """The ranks hold different plans. The same message, with the difference, is raised on every rank."""


class RankMissingError(WholestepError):
    """A rank did not arrive, or died. Says who, at what, and after how many seconds."""


class PeerRefusedError(RankMissingError):
    """The step of another rank cannot become one graph, so that rank did not arrive."""


class RetraceLimitError(WholestepError):
    """More call signatures than ``max_retraces`` allows. Lists the reason of each retrace."""


class VerificationError(WholestepError):
    """What the ranks would run gives other values than it should. Names the first one, its node and the user's line."""


class ArtifactError(WholestepError):
    """A saved step that does not fit this program, mesh or version of torch."""


class CheckpointError(WholestepError):
    """A checkpoint that cannot be written or read, or does not fit what it is loaded into."""


class InternalError(WholestepError):
    """An invariant of wholestep itself is broken. Not the user's fault; please report it."""
