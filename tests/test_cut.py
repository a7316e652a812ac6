"""The minimum cut against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampfx.cut import CutLink, CutProblem, CutValue, assignment_cost, min_cut_assignment


def brute_force(problem: CutProblem) -> tuple[int, int] | None:
    """Least cost and the least number of low variables among the cheapest assignments."""
    names = list(problem.all_variables())
    free = [name for name in names if name not in problem.pins]
    best: tuple[int, int] | None = None
    for sides in itertools.product((False, True), repeat=len(free)):
        low: dict[Hashable, bool] = {**problem.pins, **dict(zip(free, sides, strict=True))}
        cost = assignment_cost(problem, low)
        if cost is not None and (best is None or (cost, sum(sides)) < best):
            best = (cost, sum(sides))
    return best


@st.composite
def problems(draw: st.DrawFn, max_free: int = 12) -> CutProblem:
    count = draw(st.integers(1, max_free))
    names: list[Hashable] = [*range(count), "low", "high"]
    name = st.sampled_from(names)
    weight = st.integers(0, 5)
    values = draw(
        st.lists(
            st.builds(CutValue, name, st.lists(name, min_size=1, max_size=4).map(tuple), weight, weight),
            max_size=14,
        )
    )
    links = draw(st.lists(st.builds(CutLink, name, name, weight, weight), max_size=6))
    free = st.integers(0, count - 1)
    implications = draw(st.lists(st.tuples(free, name), max_size=4))
    costs = draw(st.dictionaries(free, st.tuples(weight, weight), max_size=4))
    return CutProblem(
        pins={"low": True, "high": False},
        values=values,
        links=links,
        implications=list(implications),
        costs={name: pair for name, pair in costs.items()},  # noqa: C416
        variables=dict.fromkeys(names),
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_assignment_is_cheaper_and_ties_go_to_float32(problem: CutProblem) -> None:
    low = min_cut_assignment(problem)
    cost = assignment_cost(problem, low)
    free_low = sum(side for name, side in low.items() if name not in problem.pins)
    assert (cost, free_low) == brute_force(problem)


def test_a_cast_shared_by_readers_is_paid_once() -> None:
    # x is low, three readers are pinned to float32: one cast of 4; raising x costs 5.
    problem = CutProblem(
        pins={"matmul": True, "a": False, "b": False, "c": False},
        values=[CutValue("x", ("a", "b", "c"), 4, 4), CutValue("matmul", ("x",), 5, 5)],
    )
    assert min_cut_assignment(problem)["x"] is True
    unshared = CutProblem(
        pins=problem.pins,
        values=[CutValue("matmul", ("x",), 5, 5)],
        links=[CutLink("x", reader, 4, 4) for reader in "abc"],
    )
    assert min_cut_assignment(unshared)["x"] is False


def test_contradicting_pins_are_refused() -> None:
    problem = CutProblem(pins={"a": True, "b": False}, implications=[("a", "b")])
    with pytest.raises(ValueError, match="a is pinned low and needs b low"):
        min_cut_assignment(problem)
