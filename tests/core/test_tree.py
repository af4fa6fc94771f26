"""The tree: what it looks like, and that its brackets never move."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planaria.core.tree import Merge, Node, children, fold_plan, leaves, maximal_nodes, merge_plan, root

Floats = npt.NDArray[np.float32]
quick = settings(max_examples=60, deadline=None)  # no deadline: the machine may be busy
SHARDS = st.integers(1, 40)


# --- written down independently of the code under test: straight from the definition ------------------------


def brackets(low: int, high: int, present: frozenset[int]) -> str:
    """The parenthesised sum over the shards present, by the definition of the tree."""
    if high - low == 1:
        return str(low) if low in present else ""
    half = 1
    while half * 2 < high - low:
        half *= 2
    left, right = brackets(low, low + half, present), brackets(low + half, high, present)
    return f"({left}+{right})" if left and right else left or right


def every_shard(shards: int) -> frozenset[int]:
    return frozenset(range(shards))


def all_nodes(node: Node) -> list[Node]:
    return [node] + ([each for child in children(node) for each in all_nodes(child)] if node.size > 1 else [])


def fold_text(nodes: Sequence[Node], shards: int, present: frozenset[int]) -> str:
    texts = [brackets(node.start, node.stop, present) for node in nodes]
    for into, add in fold_plan(nodes, shards):
        texts[into] = f"({texts[into]}+{texts[add]})"
    return texts[0]


def fold_floats(leaves: Floats, nodes: Sequence[Node], shards: int) -> Floats:
    buffers = [tree_sum(leaves, node.start, node.stop) for node in nodes]
    for into, add in fold_plan(nodes, shards):
        buffers[into] += buffers[add]
    return buffers[0]


def tree_sum(leaves: Floats, low: int, high: int) -> Floats:
    """The sum as one uninterrupted process would make it."""
    if high - low == 1:
        leaf: Floats = leaves[low].copy()
        return leaf
    left, right = children(Node(low, high))
    total: Floats = tree_sum(leaves, left.start, left.stop) + tree_sum(leaves, right.start, right.stop)
    assert total.dtype == np.float32
    return total


@st.composite
def ownerships(draw: st.DrawFn) -> tuple[int, list[frozenset[int]]]:
    """Any shards given to any number of owners."""
    shards = draw(SHARDS)
    owners = draw(st.integers(1, 6))
    digits = draw(st.integers(0, owners**shards - 1))  # one number instead of many draws: fast
    owner_of = [digits // owners**shard % owners for shard in range(shards)]
    return shards, [frozenset(s for s in range(shards) if owner_of[s] == owner) for owner in range(owners)]


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[Node]]:
    """Any cut of the whole tree into subtrees, ascending."""
    shards = draw(SHARDS)
    cut: list[Node] = []
    stack = [root(shards)]
    while stack:
        node = stack.pop()
        if node.size > 1 and draw(st.booleans()):
            stack.extend(reversed(children(node)))
        else:
            cut.append(node)
    return shards, cut


# --- examples -----------------------------------------------------------------------------------------------


def test_the_tree_over_six_shards() -> None:
    assert root(6) == Node(0, 6)
    assert children(Node(0, 6)) == (Node(0, 4), Node(4, 6))
    assert children(Node(0, 4)) == (Node(0, 2), Node(2, 4))
    assert children(Node(4, 6)) == (Node(4, 5), Node(5, 6))
    assert brackets(0, 6, every_shard(6)) == "(((0+1)+(2+3))+(4+5))"


def test_the_left_child_of_five_shards_has_four() -> None:
    assert children(Node(0, 5)) == (Node(0, 4), Node(4, 5))


def test_a_contiguous_half_is_one_node() -> None:
    assert maximal_nodes(range(4, 8), 8) == (Node(4, 8),)


def test_a_ragged_run_is_a_few_nodes() -> None:
    assert maximal_nodes({1, 2, 3, 4}, 8) == (Node(1, 2), Node(2, 4), Node(4, 5))


def test_owning_nothing_is_no_node() -> None:
    assert maximal_nodes((), 8) == ()


def test_leaves_are_what_is_held_if_nothing_was_merged() -> None:
    assert leaves({7, 4, 5}, 8) == (Node(4, 5), Node(5, 6), Node(7, 8))


def test_two_groups_with_one_half_each_need_one_addition() -> None:
    assert fold_plan([Node(0, 4), Node(4, 8)], 8) == ((0, 1),)


def test_three_groups_of_eight_shards() -> None:
    nodes = [Node(0, 2), Node(2, 3), Node(3, 4), Node(4, 6), Node(6, 8)]
    assert fold_plan(nodes, 8) == ((1, 2), (0, 1), (3, 4), (0, 3))


def test_the_whole_tree_needs_no_addition() -> None:
    assert fold_plan([Node(0, 8)], 8) == ()


def test_an_absent_subtree_is_skipped() -> None:
    """Policy shrink, the group with shards 2 and 3 is gone: (0+1) meets (4+5) directly."""
    assert fold_plan([Node(0, 2), Node(4, 6)], 6) == ((0, 1),)
    assert fold_plan([Node(3, 4)], 6) == ()


def test_nodes_in_the_order_of_the_ranks_also_end_in_buffer_zero() -> None:
    """After a failure rank 0 holds the end and rank 1 the beginning."""
    assert fold_plan([Node(6, 8), Node(0, 4), Node(4, 6)], 8) == ((0, 2), (0, 1))


def test_a_group_merges_finished_siblings() -> None:
    assert merge_plan([], 0, 6) == ()
    assert merge_plan([Node(0, 1)], 1, 6) == (Merge(Node(0, 1), Node(1, 2), Node(0, 2)),)
    assert merge_plan([Node(0, 2), Node(2, 3), Node(4, 6)], 3, 6) == (
        Merge(Node(2, 3), Node(3, 4), Node(2, 4)),
        Merge(Node(0, 2), Node(2, 4), Node(0, 4)),
        Merge(Node(0, 4), Node(4, 6), Node(0, 6)),
    )


def test_neighbours_that_are_no_siblings_do_not_merge() -> None:
    assert merge_plan([Node(1, 2)], 2, 4) == ()


@pytest.mark.parametrize(
    ("nodes", "shards", "sentence"),
    [
        ([], 4, "nothing to add up"),
        ([Node(0, 2), Node(1, 2)], 4, "overlap: the samples of shard 1"),
        ([Node(0, 2), Node(0, 2)], 4, "overlap"),
        ([Node(0, 4), Node(1, 2), Node(2, 4)], 4, "overlap"),
        ([Node(1, 3)], 4, r"\[1,3\) is not a subtree of the tree over 4 shards"),
        ([Node(0, 3), Node(3, 4)], 4, r"\[0,3\) is not a subtree"),
        ([Node(2, 4), Node(4, 8)], 6, "beyond the 6 shards"),
    ],
)
def test_what_is_no_cut_of_the_tree_is_refused(nodes: list[Node], shards: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fold_plan(nodes, shards)


def test_other_bad_input_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="at least one shard"):
        root(0)
    with pytest.raises(ValueError, match="no shards are in the range"):
        Node(3, 3)
    with pytest.raises(ValueError, match="has no children"):
        children(Node(3, 4))
    with pytest.raises(ValueError, match=r"only 0\.\.3"):
        maximal_nodes({3, 4}, 4)
    with pytest.raises(ValueError, match=r"only 0\.\.3"):
        leaves({3, 4}, 4)
    with pytest.raises(ValueError, match="count its samples twice"):
        merge_plan([Node(0, 2)], 1, 4)
    with pytest.raises(ValueError, match="not in this job"):
        merge_plan([], 4, 4)


# --- properties ---------------------------------------------------------------------------------------------


@quick
@given(SHARDS)
def test_children_split_their_parent_and_the_left_is_the_largest_power_of_two(shards: int) -> None:
    for node in all_nodes(root(shards)):
        if node.size == 1:
            continue
        left, right = children(node)
        assert (left.start, left.stop, right.stop) == (node.start, right.start, node.stop)
        assert left.size & (left.size - 1) == 0
        assert left.size < node.size <= 2 * left.size


@quick
@given(ownerships())
def test_maximal_nodes_cover_exactly_and_cannot_be_joined(case: tuple[int, list[frozenset[int]]]) -> None:
    shards, owners = case
    tree = set(all_nodes(root(shards)))
    for owned in owners:
        nodes = maximal_nodes(owned, shards)
        assert [s for node in nodes for s in range(node.start, node.stop)] == sorted(owned)
        assert set(nodes) <= tree
        whole = {node for node in tree if owned.issuperset(range(node.start, node.stop))}
        parents = {child: node for node in whole if node.size > 1 for child in children(node)}
        assert set(nodes) == whole - set(parents)


@quick
@given(ownerships())
def test_any_owners_give_the_brackets_of_a_single_owner(case: tuple[int, list[frozenset[int]]]) -> None:
    shards, owners = case
    nodes = sorted(node for owned in owners for node in maximal_nodes(owned, shards))
    assert fold_text(nodes, shards, every_shard(shards)) == brackets(0, shards, every_shard(shards))


@quick
@given(partitions())
def test_any_cut_gives_the_brackets_of_a_single_owner(case: tuple[int, list[Node]]) -> None:
    shards, nodes = case
    assert fold_text(nodes, shards, every_shard(shards)) == brackets(0, shards, every_shard(shards))


@quick
@given(ownerships())
def test_shards_left_out_leave_the_other_brackets_alone(case: tuple[int, list[frozenset[int]]]) -> None:
    shards, owners = case
    present = frozenset[int]().union(*owners[1:]) or every_shard(shards)  # the first owner is lost
    nodes = maximal_nodes(present, shards)
    assert fold_text(nodes, shards, present) == brackets(0, shards, present)


@quick
@given(ownerships(), st.integers(0, 2**32 - 1))
def test_the_bits_are_those_of_a_single_owner_in_any_order(case: tuple[int, list[frozenset[int]]], seed: int) -> None:
    shards, owners = case
    generator = np.random.default_rng(seed)
    scale = 10.0 ** generator.integers(-6, 7, (shards, 1))
    leaves = (generator.standard_normal((shards, 5)) * scale).astype(np.float32)
    nodes = [node for owned in owners for node in maximal_nodes(owned, shards)]  # by rank
    random.Random(seed).shuffle(nodes)
    assert fold_floats(leaves, nodes, shards).tobytes() == tree_sum(leaves, 0, shards).tobytes()


def test_the_order_of_additions_does_change_bits() -> None:
    """Otherwise the test above would prove nothing."""
    leaves = np.array([[1.0], [1e8], [-1e8], [1.0]], dtype=np.float32)
    assert leaves[0] + leaves[1] + leaves[2] + leaves[3] != tree_sum(leaves, 0, 4)


@quick
@given(partitions())
def test_every_buffer_but_the_first_is_added_exactly_once(case: tuple[int, list[Node]]) -> None:
    shards, nodes = case
    pairs = fold_plan(nodes, shards)
    assert sorted(add for _, add in pairs) == list(range(1, len(nodes)))
    gone: set[int] = set()
    for into, add in pairs:
        assert into < add
        assert not {into, add} & gone
        gone.add(add)


@quick
@given(SHARDS, st.randoms(use_true_random=False))
def test_merging_as_shards_finish_keeps_a_group_at_its_maximal_nodes(shards: int, rng: random.Random) -> None:
    order = rng.sample(range(shards), rng.randint(1, shards))
    texts: dict[Node, str] = {}
    for done, shard in enumerate(order, start=1):
        merges = merge_plan(texts, shard, shards)
        texts[Node(shard, shard + 1)] = str(shard)
        for merge in merges:
            texts[merge.parent] = f"({texts.pop(merge.left)}+{texts.pop(merge.right)})"
        assert tuple(sorted(texts)) == maximal_nodes(order[:done], shards)
    for node, text in texts.items():
        assert text == brackets(node.start, node.stop, every_shard(shards))


def test_many_shards_are_no_problem() -> None:
    """Quadratic work would take minutes here."""
    shards = 20_000
    leaves = [Node(shard, shard + 1) for shard in range(shards)]
    assert len(fold_plan(leaves, shards)) == shards - 1
    assert maximal_nodes(range(shards), shards) == (root(shards),)
