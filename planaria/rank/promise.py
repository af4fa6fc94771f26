"""The two promises that a job can make about its result.

"bits": the final weights are those of a run in which nothing failed. Every kernel inside a shard must then be
deterministic. On a CPU with a fixed number of threads all are; on a GPU a front has to ask for it, and some get slower.

"samples": no step is discarded and no sample lost, but sums may round differently. It costs nothing.
"""

from __future__ import annotations

from planaria.core.messages import PROMISES, Policy
from planaria.errors import UsageError
from planaria.rank.settings import Settings

BITS, SAMPLES = PROMISES


def choose(wanted: str | None, settings: Settings, on_cpu: bool) -> str:
    """The promise of the job: what is wanted, else "bits" where it costs nothing.

    Raises UsageError for one that is unknown, or that the other settings rule out.
    """
    if wanted not in (None, "", BITS, SAMPLES):
        raise UsageError(f"unknown exact={wanted!r}; known: {BITS}, {SAMPLES}")
    rounding = settings.reduction == "fast" or settings.policy is Policy.SHRINK
    if wanted == BITS and rounding:
        raise UsageError(
            f"exact={BITS!r} needs another reduction than 'fast' and another policy than {Policy.SHRINK.value!r}, not "
            f"{settings.reduction!r} and {settings.policy.value!r}; change those, or say exact={SAMPLES!r}"
        )
    return wanted or (SAMPLES if rounding or not on_cpu else BITS)
