"""Step times of several variants of one program, compared fairly on a machine that is not quiet.

Method:

1. All variants run in one process and take turns: every round runs each variant once, in an order
   that changes from round to round, so that a slow moment of the machine hits all of them.
2. In each round a variant's time is divided by the baseline's time of the same round. The ratios of
   all rounds give the median and the spread (lower and upper quartile).
3. On CUDA the device is synchronised before each reading of the clock.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepTime:
    """How long a step takes.

    Args:
        median_seconds: median time of one step.
        ratio: median of the times relative to the baseline's in the same round.
        ratio_low: lower quartile of those ratios.
        ratio_high: upper quartile of those ratios.
    """

    median_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the ratio."""
        return (self.ratio_high - self.ratio_low) / 2


def compare_steps(
    steps: Mapping[str, Callable[[], object]],
    baseline: str,
    *,
    rounds: int = 15,
    warmup: int = 2,
    steps_per_round: int = 1,
    seed: int = 0,
) -> dict[str, StepTime]:
    """Time several variants of a training step against one of them.

    Args:
        steps: variant name to a function that runs one step.
        baseline: the name of the variant that the others are compared with.
        rounds: how often each variant is timed.
        warmup: untimed calls of each variant before the first round.
        steps_per_round: steps timed together; raise it when a step takes less than a millisecond.
        seed: decides the order in the rounds.

    Returns:
        Variant name to its times, in the order of ``steps``.

    Raises:
        ValueError: ``baseline`` is not among ``steps``, or a number is out of range.
    """
    if baseline not in steps:
        raise ValueError(f"baseline {baseline!r} is not among the variants: {', '.join(steps)}")
    if rounds < 2 or warmup < 0 or steps_per_round < 1:
        raise ValueError("rounds must be at least 2, warmup at least 0, steps_per_round at least 1")
    for step in steps.values():
        for _ in range(warmup):
            step()
    order = list(steps)
    shuffle = random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(_elapsed_seconds(steps[name], steps_per_round))
    return {name: _summary(seconds[name], seconds[baseline]) for name in steps}


def _elapsed_seconds(step: Callable[[], object], repeat: int) -> float:
    """Time of one step, averaged over ``repeat`` of them."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    _synchronize()
    return (time.perf_counter() - start) / repeat


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _summary(seconds: list[float], baseline_seconds: list[float]) -> StepTime:
    ratios = [own / base for own, base in zip(seconds, baseline_seconds, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return StepTime(statistics.median(seconds), median, low, high)
