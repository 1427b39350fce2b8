"""The branches of a node of branch and bound: a pair of tasks apart or in an order, or half of a range of options."""

from __future__ import annotations

from callboard.autoplace.exact.combination import Combination, Node, Times
from callboard.autoplace.instance.tasks import Found
from callboard.autoplace.instance.timing import bits_of
from callboard.autoplace.problem.problem import Layout


def forced(search: Combination, apart: tuple[int, int], ordered: tuple[int, int]) -> Node | None:
    """The root with one pair apart and another in this order; None when that is impossible."""
    root = search.root()
    if root is None or root.apart[ordered[0]] >> ordered[1] & 1:
        return None
    return in_order(_apart(root, *apart), *ordered)


def around(search: Combination, found: Found, free: frozenset[int]) -> Node | None:
    """The root with every pair as in ``found``, but those inside ``free``; counts are open for all."""
    node = search.root()
    for i, j in search.pairs():
        if node is None or {i, j} <= free:
            continue
        if found.ends[i] <= found.starts[j]:
            node = node if node.before[j] >> i & 1 else in_order(node, i, j)
        elif found.ends[j] <= found.starts[i]:
            node = node if node.before[i] >> j & 1 else in_order(node, j, i)
        else:
            node = _apart(node, i, j)
    return node


def split(search: Combination, node: Node, masks: tuple[int, ...], times: Times, choice: tuple[int, ...]) -> list[Node]:
    """The node in parts: by a pair that overlaps, or by a range of options."""
    pair = _worst_pair(search, node, masks, times, choice)
    if pair is not None:
        i, j = pair
        orders = (in_order(node, i, j), in_order(node, j, i))
        parts = orders if search.layout is Layout.COLLOCATED else (_apart(node, i, j), *orders)
        return [part for part in parts if part]
    return halves(node)


def _worst_pair(
    search: Combination, node: Node, masks: tuple[int, ...], times: Times, choice: tuple[int, ...]
) -> tuple[int, int] | None:
    worst: tuple[int, int] | None = None
    most = -1
    for i in range(search.size):
        for j in bits_of(masks[i] & ~node.apart[i]):
            if j < i:
                continue
            both = min(times.ends[i], times.ends[j]) - max(times.starts[i], times.starts[j])
            weight = both * (search.chains[i].gpus[choice[i]] + search.chains[j].gpus[choice[j]])
            if weight > most:
                worst, most = (i, j), weight
    return worst


def _apart(node: Node, i: int, j: int) -> Node:
    apart = list(node.apart)
    apart[i] |= 1 << j
    apart[j] |= 1 << i
    return Node(node.low, node.high, node.before, node.above, tuple(apart))


def in_order(node: Node, i: int, j: int) -> Node | None:
    """i ends before j starts; so does all that ends no later than i, before all that starts no sooner than j."""
    if node.above[i] >> j & 1:
        return None
    sooner = node.above[i] | 1 << i
    before, above = list(node.before), list(node.above)
    for later in range(len(node.low)):
        if later == j or node.above[later] >> j & 1:
            before[later] |= sooner
            above[later] |= sooner
    return Node(node.low, node.high, tuple(before), tuple(above), node.apart)


def halves(node: Node) -> list[Node]:
    """The node with the widest range of options in two, the wider options first; nothing if all are chosen."""
    widest = max(range(len(node.low)), key=lambda i: node.high[i] - node.low[i])
    low, high = node.low[widest], node.high[widest]
    if low == high:
        return []
    middle = (low + high) // 2
    upper = (*node.low[:widest], middle + 1, *node.low[widest + 1 :])
    lower = (*node.high[:widest], middle, *node.high[widest + 1 :])
    return [
        Node(upper, node.high, node.before, node.above, node.apart),
        Node(node.low, lower, node.before, node.above, node.apart),
    ]
