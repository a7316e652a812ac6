"""Which of two sides each variable takes so that the least is paid: an exact minimum cut.

Side *low* is the source, side *high* (float32) is the sink. What is paid:

* a value v of weight w that is low and has any high reader pays w once, however many such readers there
  are; a value that is high and has any low reader pays w once. Each direction is one auxiliary node:
  v → a (capacity w), a → reader (unlimited), and reader → b (unlimited), b → v (capacity w).
* a link (u, v) pays its own weight for itself: the parts of a cast that cannot be shared.
* a variable pays its own cost on each side.
* an implication (u, v), "u low needs v low", is an unlimited edge.

Method:

1. Drop what pins decide: variables that are pinned are one of the two terminals.
2. Take each connected component of the free variables by itself; two components that look alike, as the
   layers of a model do, are solved once.
3. A component that touches only the high side is high: it pays nothing. Up to three free variables are
   tried out; a larger component goes to networkx.
4. Of all minimum cuts the one with the fewest low variables is taken (what the source still reaches in
   the residual graph), so that ties go to float32.

Capacities are integers: sums are exact and the solver cannot lose an edge to rounding.
Method of the cut for two labels: Greig, Porteous and Seheult, 1989; Kolmogorov and Zabih, 2004.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

_LOW, _HIGH = "low", "high"


@dataclass(frozen=True, slots=True)
class CutValue:
    """A value whose cast is shared by its readers.

    ``low_to_high`` is paid if the owner is low and a reader is high, ``high_to_low`` the other way round.
    """

    owner: Hashable
    readers: tuple[Hashable, ...]
    low_to_high: int
    high_to_low: int


@dataclass(frozen=True, slots=True)
class CutLink:
    """A cost between two variables that nothing shares.

    ``low_to_high`` is paid if ``source`` is low and ``target`` is high.
    """

    source: Hashable
    target: Hashable
    low_to_high: int
    high_to_low: int


@dataclass
class CutProblem:
    """Variables, what is known about them and what their disagreement costs.

    Args:
        pins: side of the variables that are decided, True for low.
        values: values with a shared cast.
        links: costs that are not shared.
        implications: pairs (u, v): where u is low, v must be low.
        costs: per variable what it pays when low and when high.
    """

    pins: dict[Hashable, bool] = field(default_factory=dict)
    values: list[CutValue] = field(default_factory=list)
    links: list[CutLink] = field(default_factory=list)
    implications: list[tuple[Hashable, Hashable]] = field(default_factory=list)
    costs: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    variables: dict[Hashable, None] = field(default_factory=dict)

    def all_variables(self) -> dict[Hashable, None]:
        """Every variable, in the order of mention."""
        found = dict(self.variables)
        for value in self.values:
            found[value.owner] = None
            found.update(dict.fromkeys(value.readers))
        for link in self.links:
            found[link.source] = found[link.target] = None
        for before, after in self.implications:
            found[before] = found[after] = None
        found.update(dict.fromkeys(self.costs))
        found.update(dict.fromkeys(self.pins))
        return found


def assignment_cost(problem: CutProblem, low: Mapping[Hashable, bool]) -> int | None:
    """What an assignment pays in all, None if it breaks a pin or an implication."""
    if any(low[name] != side for name, side in problem.pins.items()):
        return None
    if any(low[before] and not low[after] for before, after in problem.implications):
        return None
    total = 0
    for value in problem.values:
        if low[value.owner]:
            total += value.low_to_high if any(not low[reader] for reader in value.readers) else 0
        else:
            total += value.high_to_low if any(low[reader] for reader in value.readers) else 0
    for link in problem.links:
        if low[link.source] and not low[link.target]:
            total += link.low_to_high
        if not low[link.source] and low[link.target]:
            total += link.high_to_low
    for name, (if_low, if_high) in problem.costs.items():
        total += if_low if low[name] else if_high
    return total


# A directed edge of a component: -1 is the source (low), -2 the sink (high); capacity None is unlimited.
_Edge = tuple[int, int, int | None]
_Term = CutValue | CutLink | tuple[Hashable, Hashable]
_SOURCE, _SINK = -1, -2


def min_cut_assignment(problem: CutProblem) -> dict[Hashable, bool]:
    """The cheapest assignment, True for low; of equally cheap ones the one with the fewest low variables.

    Raises:
        ValueError: a pinned-low variable implies a pinned-high one, so that no assignment exists.
    """
    free = {name: None for name in problem.all_variables() if name not in problem.pins}
    answer: dict[Hashable, bool] = dict(problem.pins)
    solved: dict[tuple[int, tuple[_Edge, ...]], tuple[bool, ...]] = {}
    for members, edges in _components(problem, free):
        key = (len(members), edges)
        if key not in solved:
            solved[key] = _solve(len(members), edges)
        answer.update(zip(members, solved[key], strict=True))
    return answer


def _components(
    problem: CutProblem, free: Mapping[Hashable, None]
) -> Iterable[tuple[list[Hashable], tuple[_Edge, ...]]]:
    """Step 2: the connected parts of the free variables, each with its edges in local numbers."""
    pins = problem.pins
    for before, after in problem.implications:
        if pins.get(before) is True and pins.get(after) is False:
            raise ValueError(f"{before} is pinned low and needs {after} low, which is pinned to float32.")
    # Terms: the things that connect variables. Each term touches the free variables that it mentions.
    terms: list[_Term] = []
    touching: dict[Hashable, list[int]] = {name: [] for name in free}
    every: Iterable[_Term] = itertools.chain[_Term](problem.values, problem.links, problem.implications)
    for term in every:
        mentioned = {name: None for name in _mentions(term) if name in free}
        if not mentioned:
            continue
        for name in mentioned:
            touching[name].append(len(terms))
        terms.append(term)

    seen: set[Hashable] = set()
    for start in free:
        if start in seen:
            continue
        seen.add(start)
        members, term_ids = [start], dict[int, None]()
        for name in members:  # grows while it is walked
            for term_id in touching[name]:
                if term_id in term_ids:
                    continue
                term_ids[term_id] = None
                for other in _mentions(terms[term_id]):
                    if other in free and other not in seen:
                        seen.add(other)
                        members.append(other)
        local = {name: index for index, name in enumerate(members)}
        yield members, _edges(problem, [terms[term_id] for term_id in term_ids], local)


def _mentions(term: _Term) -> Sequence[Hashable]:
    if isinstance(term, CutValue):
        return (term.owner, *term.readers)
    if isinstance(term, CutLink):
        return (term.source, term.target)
    return term


def _edges(
    problem: CutProblem,
    terms: Sequence[_Term],
    local: Mapping[Hashable, int],
) -> tuple[_Edge, ...]:
    """The edges of one component; auxiliary nodes are numbered after the variables."""

    def place(name: Hashable) -> int:
        index = local.get(name)
        if index is None:
            return _SOURCE if problem.pins[name] else _SINK
        return index

    edges: list[_Edge] = []
    auxiliary = len(local)
    for name, index in local.items():
        if_low, if_high = problem.costs.get(name, (0, 0))
        if if_low:
            edges.append((index, _SINK, if_low))
        if if_high:
            edges.append((_SOURCE, index, if_high))
    for term in terms:
        if isinstance(term, CutLink):
            source, target = place(term.source), place(term.target)
            edges.append((source, target, term.low_to_high))
            edges.append((target, source, term.high_to_low))
        elif isinstance(term, CutValue):
            owner = place(term.owner)
            readers = list(dict.fromkeys(place(reader) for reader in term.readers))
            if len(readers) == 1:  # nothing to share: no auxiliary nodes
                edges.append((owner, readers[0], term.low_to_high))
                edges.append((readers[0], owner, term.high_to_low))
                continue
            if term.low_to_high and owner != _SINK:
                edges.append((owner, auxiliary, term.low_to_high))
                edges.extend((auxiliary, reader, None) for reader in readers)
                auxiliary += 1
            if term.high_to_low and owner != _SOURCE:
                edges.append((auxiliary, owner, term.high_to_low))
                edges.extend((reader, auxiliary, None) for reader in readers)
                auxiliary += 1
        else:
            edges.append((place(term[0]), place(term[1]), None))
    # Edges into the source and out of the sink, loops and empty edges can never be cut.
    return tuple(
        (a, b, capacity)
        for a, b, capacity in edges
        if a != b and capacity != 0 and a != _SINK and b != _SOURCE
    )


def _solve(count: int, edges: tuple[_Edge, ...]) -> tuple[bool, ...]:
    """Steps 3 and 4: the sides of one component's variables."""
    # An auxiliary node with a pinned reader makes edges between terminals: these are constants.
    if not any(a == _SOURCE for a, _, _ in edges):
        return (False,) * count
    if count <= 3:
        return _try_out(count, edges)
    return _max_flow(count, edges)


def _try_out(count: int, edges: tuple[_Edge, ...]) -> tuple[bool, ...]:
    """The best of all assignments of up to three variables, fewest low first."""
    auxiliary = sorted({end for a, b, _ in edges for end in (a, b) if end >= count})
    behind = {b for _, b, capacity in edges if capacity is not None}  # auxiliary nodes of the first sort
    best: tuple[bool, ...] | None = None
    best_cost = 0
    for sides in sorted(itertools.product((False, True), repeat=count), key=sum):
        side: dict[int, bool] = {_SOURCE: True, _SINK: False, **dict(enumerate(sides))}
        for node in auxiliary:
            # node behind the value (v → a → readers): low unless a reader is high;
            # node before the value (readers → b → v): low if a reader is low.
            if node in behind:
                side[node] = all(side[b] for a, b, _ in edges if a == node)
            else:
                side[node] = any(side[a] for a, b, _ in edges if b == node)
        cost = 0
        for a, b, capacity in edges:
            if side[a] and not side[b]:
                if capacity is None:
                    break
                cost += capacity
        else:
            if best is None or cost < best_cost:
                best, best_cost = sides, cost
    if best is None:
        raise ValueError("The pins and implications of a component contradict each other.")
    return best


def _max_flow(count: int, edges: tuple[_Edge, ...]) -> tuple[bool, ...]:
    """The minimum cut by maximum flow, the smallest source side."""
    graph = nx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    for a, b, capacity in edges:
        if graph.has_edge(a, b):
            known = graph[a][b].get("capacity")
            if known is None or capacity is None:
                graph[a][b].pop("capacity", None)
            else:
                graph[a][b]["capacity"] = known + capacity
        elif capacity is None:
            graph.add_edge(a, b)
        else:
            graph.add_edge(a, b, capacity=capacity)
    try:
        residual = nx.algorithms.flow.boykov_kolmogorov(graph, _SOURCE, _SINK)
    except nx.NetworkXUnbounded as error:
        raise ValueError("The pins and implications of a component contradict each other.") from error
    reached = {_SOURCE}
    queue = deque([_SOURCE])
    while queue:
        node = queue.popleft()
        for neighbour, edge in residual[node].items():
            if neighbour not in reached and edge["flow"] < edge["capacity"]:
                reached.add(neighbour)
                queue.append(neighbour)
    return tuple(index in reached for index in range(count))
