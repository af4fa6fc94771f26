"""What a group says of itself, from what its ranks do. What is in a fingerprint is for the fronts to say."""

from __future__ import annotations

import json
from collections.abc import Callable

import xxhash

from planaria.core.fingerprint import BY_RANK
from planaria.errors import UsageError

Prints = tuple[tuple[str, str], ...]


def of_group(mine: Prints, gather: Callable[[bytes], list[bytes]], strict: Callable[[str], bool]) -> Prints:
    """What all ranks of a group have in common, and a digest of what they have not, if they may differ in that.
    ``gather`` hands every rank's bytes to all ranks. Raises UsageError for a key that is ``strict`` and differs."""
    ranks = [dict(json.loads(each)) for each in gather(json.dumps(mine).encode())]
    entries = {}
    for key in sorted({key for rank in ranks for key in rank}):
        values = [rank.get(key, "") for rank in ranks]
        alike = len(set(values)) == 1
        if not alike and strict(key):
            raise UsageError(f"the ranks of a group differ in {key} ({', '.join(values)}); it must be the same on all")
        entries[key] = values[0] if alike else BY_RANK + xxhash.xxh3_64_hexdigest(json.dumps(values).encode())
    return tuple(sorted(entries.items()))


def digest_of_group(mine: str, gather: Callable[[bytes], list[bytes]]) -> str:
    """Of the digests of all its ranks, in order: of one rank, its own. All ranks ask."""
    digests = [each.decode() for each in gather(mine.encode())]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest(" ".join(digests).encode())
