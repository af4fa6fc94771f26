"""Whatever bytes come, a decoder makes a value of them or says no in its own words; it takes no more memory than
they are worth.

``make fuzz`` looks for much longer: PLANARIA_FUZZ is the number of examples for each decoder, PLANARIA_FUZZ_START the
first seed.
"""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from tests.fuzz.decoders import DECODERS, Decoder

EXAMPLES = int(os.environ.get("PLANARIA_FUZZ", "60"))
START = int(os.environ.get("PLANARIA_FUZZ_START", "0"))
# What a decoder may take beside what it was given: JSON's smallest values take dozens of bytes for each that they have.
FIXED, FACTOR = 4 << 20, 400

INTERESTING = (b"\x00", b"\xff", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + bytes(7), b"[" * 3000, b'{"a":' * 2000)
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 63,
    1 << 70,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x" * 300,
    [],
    {},
)
VALUES += ([[]], {"tuple": 1}, {"dict": [[[], 1]]}, "../../etc/passwd", "\ud800", [0] * 50)


def changed(data: bytes, rng: random.Random) -> bytes:
    """A few bytes of it otherwise."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at:at] = rng.choice(INTERESTING)
            case 2:
                del raw[at:]
            case 3:
                raw[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
            case _:
                raw[at:at] = raw[rng.randrange(len(raw) + 1) :][: rng.randrange(40)]
    return bytes(raw)


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """A value somewhere in it another, or gone."""
    tree = json.loads(data)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, inner in items:
            places.append((node, key))
            walk(inner)

    walk(tree)
    for node, key in rng.sample(places, min(len(places), rng.choice((1, 1, 2, 3)))):
        if isinstance(node, dict) and rng.random() < 0.3:
            node.pop(key, None)
        elif isinstance(node, dict) or key < len(node):
            node[key] = rng.choice(VALUES)
    depth = rng.choice((0, 0, 0, 300, 700, 990, 5000))
    return b"[" * depth + json.dumps(tree).encode() + b"]" * depth


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name.replace(" ", "-"))
def test_any_bytes(decoder: Decoder) -> None:
    def attempt(data: bytes) -> None:
        tracemalloc.start()
        try:
            with suppress(*decoder.errors):
                decoder.decode(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < FIXED + FACTOR * len(data), f"{peak} bytes for {len(data)}"

    for example in () if decoder.ages else decoder.examples:
        decoder.decode(example)  # they are what it is meant for
    for seed in range(START, START + EXAMPLES):
        rng = random.Random(f"{decoder.name} {seed}")
        example, data = rng.choice(decoder.examples), b""
        try:
            attempt(data := rng.randbytes(rng.randrange(300)))
            attempt(data := decoder.seal(changed(example, rng)))
            if decoder.jsonish:
                attempt(data := decoder.seal(changed_json(example.rstrip(), rng)))
        except BaseException:
            print(f"seed {seed}: {data[:2000]!r}")
            raise
