"""Which parameters of a model are exchanged together: the fragments of Streaming DiLoCo. Numbers and names only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from planaria.errors import UsageError
from planaria.torch.buckets import local_numel

# "layers.3.attention.wq.weight" is a part of the block "layers.3".
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")

Fragments = tuple[tuple[int, ...], ...]  # indices of parameters, ascending


def cut(named: Sequence[tuple[str, Tensor]], fragments: int | Sequence[Any]) -> Fragments:
    """The fragments of the parameters ``named``: so many, made here; or those that are given, each a module, a
    parameter or a sequence of such. Raises UsageError if they are not a division of all parameters."""
    return _strided(named, fragments) if isinstance(fragments, int) else _given(named, fragments)


def _strided(named: Sequence[tuple[str, Tensor]], count: int) -> Fragments:
    """Block ``i`` of the model goes to fragment ``i`` modulo ``count`` (the strided pattern of arXiv 2501.18512, which
    learns a little better than runs of blocks), and what is in no block to the smallest."""
    blocks: dict[str, list[int]] = defaultdict(list)
    rest: dict[str, list[int]] = defaultdict(list)
    for index, (name, _) in enumerate(named):
        if found := _BLOCK.match(name):
            blocks[found[0]].append(index)
        else:
            rest[name.rpartition(".")[0] or name].append(index)
    if len(blocks) + len(rest) < count:
        raise UsageError(
            f"the model has {len(blocks) + len(rest)} parts (numbered blocks, and modules outside of such), which make "
            f"no {count} fragments; take fewer, or give the fragments as lists of modules and parameters"
        )
    made: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count

    def put(where: int, indices: list[int]) -> None:
        made[where] += indices
        sizes[where] += sum(local_numel(named[index][1]) for index in indices)

    for number, indices in enumerate(blocks.values()):
        put(number % count, indices)
    empty = count - min(count, len(blocks))
    by_size = sorted(rest.values(), key=lambda each: (-sum(local_numel(named[i][1]) for i in each), each))
    for number, indices in enumerate(by_size):
        smallest = min(range(count), key=lambda each: (sizes[each], each))
        put(count - empty + number if number < empty else smallest, indices)
    return tuple(tuple(sorted(each)) for each in made)


def _given(named: Sequence[tuple[str, Tensor]], fragments: Sequence[Any]) -> Fragments:
    index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
    found: dict[int, int] = {}
    made: list[list[int]] = []
    for number, fragment in enumerate(fragments):
        mine: list[int] = []
        for parameter in {id(each): each for each in _parameters(fragment, number)}.values():
            if not parameter.requires_grad:
                continue
            index = index_of.get(id(parameter))
            if index is None:
                raise UsageError(
                    f"fragment {number} has a parameter of shape {tuple(parameter.shape)} that is not in the model; "
                    "make fragments of the very modules and parameters that are trained"
                )
            if index in found:
                raise UsageError(
                    f"the parameter {named[index][0]} is in the fragments {found[index]} and {number}; it must be in "
                    "exactly one"
                )
            found[index] = number
            mine.append(index)
        if not mine:
            raise UsageError(f"fragment {number} has no parameters that are trained")
        made.append(sorted(mine))
    missing = [name for index, (name, _) in enumerate(named) if index not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UsageError(f"no fragment has the parameters {', '.join(missing[:3])}{more}; each must be in exactly one")
    return tuple(tuple(each) for each in made)


def _parameters(fragment: Any, number: int) -> Iterator[Tensor]:
    if isinstance(fragment, nn.Module):
        yield from fragment.parameters()
    elif isinstance(fragment, Tensor):
        yield fragment
    elif isinstance(fragment, Sequence) and not isinstance(fragment, str):
        for each in fragment:
            yield from _parameters(each, number)
    elif isinstance(fragment, Mapping):
        yield from _parameters(list(fragment.values()), number)
    else:
        raise UsageError(
            f"fragment {number} is a {type(fragment).__name__}; it must be a module, a parameter or a list of such"
        )
