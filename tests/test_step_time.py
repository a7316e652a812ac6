"""The paired comparison of step times: what it calls and computes, never how fast this machine is."""

from __future__ import annotations

import itertools

import pytest

from ampfx import step_time
from ampfx.step_time import compare_steps


def test_ratios_are_paired_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    speed = itertools.cycle([1.0, 10.0])  # every second round the machine is ten times slower
    factor = 1.0
    calls: list[str] = []

    def slow_down() -> float:
        nonlocal factor
        if len(calls) % 2 == 0:
            factor = next(speed)
        return factor

    def work(name: str, seconds: float) -> None:
        nonlocal clock
        clock += seconds * slow_down()
        calls.append(name)

    monkeypatch.setattr(step_time.time, "perf_counter", lambda: clock)
    result = compare_steps(
        {"one": lambda: work("one", 1.0), "half": lambda: work("half", 0.5)}, "one", rounds=8, warmup=0
    )
    assert result["one"].ratio == 1.0
    # Unpaired medians of times that jump tenfold would say nothing; paired ratios are exact.
    assert result["half"].ratio == pytest.approx(0.5)
    assert result["half"].spread == pytest.approx(0.0)


def test_each_round_runs_every_variant_and_the_order_changes() -> None:
    calls: list[str] = []
    steps = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    compare_steps(steps, "a", rounds=6, warmup=1, steps_per_round=1)
    rounds = [tuple(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert len(rounds) == 6
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"baseline": "b"}, "'b' is not among the variants: a"), ({"rounds": 1}, "rounds must be at least 2")],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_steps({"a": lambda: None}, **{"baseline": "a", **options})  # type: ignore[arg-type]
