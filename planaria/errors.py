"""The one exception hierarchy. A message says what happened, where (job, group, rank, step) and what to do."""

from __future__ import annotations

from typing import TypeVar

from planaria.core.exits import EXIT_BAD_INPUT, EXIT_FAILED


class PlanariaError(Exception):
    """Base of everything that Planaria raises on purpose. ``exit_code`` is what a command line exits with."""

    exit_code = EXIT_FAILED


E = TypeVar("E", bound=PlanariaError)


def afresh(error: E) -> E:
    """The same error, as if nobody had raised it yet. Whoever keeps one keeps this: the frames in the traceback of the
    other refer to all that was there when it was raised, and often to the keeper."""
    return type(error)(*error.args)


class UsageError(PlanariaError):
    """Bad input: an option, a script, a model or a dataset that cannot work. Never retried."""

    exit_code = EXIT_BAD_INPUT


class NonFiniteError(UsageError):
    """A gradient or a recorded loss is NaN or infinite; names the step and the shard."""


class CorruptionError(PlanariaError):
    """Memory was changed, or something computed wrongly, and nobody can tell what is right."""


class ProtocolError(PlanariaError):
    """A peer said something that it must not say. Always a bug or a version mismatch, never user input."""


class JobLostError(PlanariaError):
    """Nobody is left who holds the state of the job."""


class CommunicatorError(PlanariaError):
    """A communicator broke. Internal: user code never sees it."""


class Recast(BaseException):
    """Not an error: this process, a standby, is another rank than the one as which it ran its script, which begins
    again. Only ``finally`` blocks are to notice."""
