"""The two programs of a step: the script's gradient, and its update with the mean gradient of all shards.

Nothing in them depends on who takes part in the job, so a change of members never compiles anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax import Array
from jax.tree_util import keystr
from torch import Tensor

from planaria.errors import UsageError
from planaria.exchange.layout import Layout
from planaria.jax.spread import Spread
from planaria.jax.state import KINDS, State, flattened, said
from planaria.jax.views import SHARED

Gradient = Callable[[Any, Any, Array], tuple[Any, Any]]
Update = Callable[[Any, Any], Any]
# Of gradient functions in one job: a script that makes a new one in every step compiles in every step.
MOST = 8


class Programs:
    """Of one job. ``compare(name, text)`` raises UsageError if other processes of the group are about to run another
    program: they would wait for each other for ever."""

    def __init__(self, state: State, update: Update, compare: Callable[[str, str], None]) -> None:
        self.spread: Spread  # of the gradients, once there is one
        self._compare = compare
        self._state = state
        self._update = update
        self._gradients: dict[Gradient, Any] = {}  # by the script's function: what jax.jit made of it
        self._compiled: Any = None  # the update
        self._texts: dict[str, str] = {}  # by which program: a digest of what XLA is to compile
        self._like: list[tuple[tuple[int, ...], np.dtype]] = []  # the leaves of a gradient
        self._tree: Any = None

    # --- gradients -------------------------------------------------------------------------------------------

    def gradient(self, function: Gradient, batch: Any, key: Array, dry: bool) -> tuple[Any, Any]:
        """What the script's function gives for a shard, not waited for."""
        try:
            program = self._gradients.get(function)
        except TypeError:
            raise UsageError(
                f"the function given to step.grad, {said(function)}, cannot be hashed, so jax.jit cannot "
                "tell it from others; give it a function (that calls the object, and is made once)"
            ) from None
        if first := program is None:
            if not callable(function):
                raise UsageError(
                    f"step.grad was given {said(function)} as its function; it needs function(state, batch, key)"
                )
            if len(self._gradients) == MOST:
                raise UsageError(
                    f"step.grad was given {MOST + 1} different functions; each is compiled anew. Make the function "
                    "once, outside of the loop, and give it what changes as part of the batch"
                )
            program = function if hasattr(function, "trace") else jax.jit(function)
            self._gradients[function] = program
        tree = self._state.tree
        if dry:
            self._note(f"gradient {len(self._gradients)}", program.trace(tree, batch, key))
        result = program(tree, batch, key)
        if first and any(leaf.is_deleted() for leaf in self._state.leaves):
            raise UsageError(
                "the function given to step.grad donates the state (jax.jit's donate_argnums), which the next shard "
                "and the update need; let it keep the state"
            )
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UsageError(
                f"the function given to step.grad returns {type(result).__name__}; it must return (gradients, "
                "metrics), metrics a dict of scalars, or None"
            )
        return result

    def leaves(self, gradients: Any) -> list[Array]:
        """Those of one shard, which must be like those of all others. Raises UsageError naming what differs."""
        found, tree = flattened(gradients, "what was given as gradients")
        like = [(tuple(np.shape(leaf)), _dtype(keystr(path), leaf)) for path, leaf in found]
        leaves = [leaf for _, leaf in found]
        refuse_deleted(leaves)
        if self._tree is None:
            if not any(math.prod(shape) for shape, _ in like):
                raise UsageError("a shard's gradients are a pytree without a number in it; there is nothing to train")
            self._tree, self._like = tree, like
            self.spread = Spread(leaves, self._state.everywhere, [keystr(p) for p, _ in found])
        if tree != self._tree or like != self._like:
            both = zip(found, like, self._like, strict=False)
            differ = [
                f"{keystr(path) or 'the root'} ({_form(one)}, and {_form(other)} before)"
                for (path, _), one, other in both
                if one != other
            ]
            what = ", ".join(differ[:5]) if tree == self._tree else f"their structure: {tree}, and {self._tree} before"
            raise UsageError(f"the gradients of this shard are not like those before, at {what}")
        return self.spread.like(leaves)

    # --- the update ------------------------------------------------------------------------------------------

    def apply(self, layout: Layout, buckets: Sequence[Tensor]) -> None:
        """Make the state what the script's update makes of it and the mean gradient, and wait for it: ``buckets``
        (flat fp32) are written again in the next exchange. The memory of the old state is used for the new one."""
        self._state.leaves = self._run(self._state.leaves, layout, buckets)

    def try_out(self, layout: Layout, buckets: Sequence[Tensor]) -> None:
        """Compile the update by running it on a copy of the state."""
        copy = [jax.device_put(jnp.copy(leaf), leaf.sharding) for leaf in self._state.leaves]
        flats = self.spread.flats(layout, buckets)
        self._note("update", self._program().trace(copy, flats))
        self._run(copy, layout, buckets)

    @property
    def digest(self) -> str:
        """Of the text of all programs that were tried."""
        text = " ".join(f"{name} {text}" for name, text in sorted(self._texts.items()))
        return xxhash.xxh3_64_hexdigest(text.encode())

    def _note(self, name: str, traced: Any) -> None:
        self._texts[name] = text = xxhash.xxh3_64_hexdigest(traced.lower().as_text().encode())
        self._compare(name, text)

    def _run(self, leaves: list[Array], layout: Layout, buckets: Sequence[Tensor]) -> list[Array]:
        made: list[Array] = self._program()(leaves, self.spread.flats(layout, buckets))
        jax.block_until_ready(made)
        return made

    def _program(self) -> Any:
        if self._compiled is None:
            state, spread, tree, update = self._state, self.spread, self._tree, self._update

            def body(leaves: list[Array], flats: list[Array]) -> list[Array]:
                mean = tree.unflatten(spread.cut(flats))
                return _checked(state, update(state.treedef.unflatten(leaves), mean))

            self._compiled = jax.jit(body, donate_argnums=0, out_shardings=state.shardings)
        return self._compiled


def _checked(state: State, made: Any) -> list[Array]:
    """The leaves of what an update returns, in the form of the state's. Raises UsageError."""
    found, tree = flattened(made, "what the update returns")
    if tree != state.treedef:
        theirs, ours = {f"state{keystr(path)}" for path, _ in found}, set(state.paths)
        odd = [f"{path} is new" for path in sorted(theirs - ours)]
        odd += [f"{path} is gone" for path in sorted(ours - theirs)]
        what = "; ".join(odd[:5]) or f"{tree} is not {state.treedef}"
        raise UsageError(f"the update returns a state of another structure: {what}")
    leaves = []
    for path, (_, leaf), old in zip(state.paths, found, state.leaves, strict=True):
        if not isinstance(leaf, KINDS):
            raise UsageError(f"the update makes {path} {said(leaf)}; a state can hold arrays and numbers only")
        new = jnp.asarray(leaf) if not isinstance(leaf, Array) else leaf
        if new.shape != old.shape or new.dtype != old.dtype:
            raise UsageError(
                f"the update makes {path} {new.dtype}{list(new.shape)}, and it was {old.dtype}{list(old.shape)}: a "
                "state keeps its types and shapes from step to step"
            )
        keeps = jnp.issubdtype(new.dtype, jax.dtypes.prng_key)
        leaves.append(new if keeps else jax.lax.convert_element_type(new, new.dtype))
    return leaves


def refuse_deleted(leaves: Sequence[Array]) -> None:
    """Of a shard's gradients. Raises UsageError."""
    if any(leaf.is_deleted() for leaf in leaves):
        raise UsageError(
            "the shard's gradients were deleted: their memory went to what they were donated to; they are read until "
            "those of the next shard are given"
        )


def _form(like: tuple[tuple[int, ...], np.dtype]) -> str:
    shape, dtype = like
    return f"{dtype}{list(shape)}"


def _dtype(path: str, leaf: Any) -> np.dtype:
    dtype: Any = getattr(leaf, "dtype", None)
    if dtype != jax.dtypes.float0 and (not isinstance(leaf, Array) or isinstance(leaf, jax.core.Tracer)):
        raise UsageError(
            f"the gradient at {path or 'the root'} is {said(leaf)}; gradients are arrays of JAX, given outside of jit"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise UsageError(
            f"the gradient at {path or 'the root'} is {dtype}; gradients are arrays of real floating-point numbers: "
            "differentiate by such parameters only"
        )
    if dtype.name not in SHARED:  # only its bytes could be read
        raise UsageError(
            f"the gradient at {path or 'the root'} is {dtype}, which cannot be added up; cast it to float32"
        )
    return jnp.dtype(dtype)
