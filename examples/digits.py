"""Train two small models on handwritten digits in each precision, and compare.

Run it with ``make demo`` or ``python -m examples.digits``. The data are the 1,797 pictures of 8 × 8 pixels
that scikit-learn ships. For each model:

1. Count what one training step does in each mode, and time the steps of all modes in turns.
2. Train with the same data, initial weights and order of batches in each mode, once per seed.
   A mode whose step takes over ten times float32's is not trained, and a note says so.
3. Print one line per mode: test accuracy (mean over the seeds), casts per step, megabytes that they
   move, and step time as a ratio to float32 with half its interquartile range.

It runs on the GPU when PyTorch sees one.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import ampfx
from ampfx.measure import StepCounts, count_step
from ampfx.step_time import StepTime, compare_steps
from examples.models import SmallResNet, SmallTransformer
from examples.training import FLOAT32, MODES, Mode, Training, build

BATCH_SIZE = 64
NUM_TRAIN = 1200
ROUNDS = 25  # of timing
SLOWEST_TRAINED = 10.0  # times float32's step
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Task:
    """A model to train, and how long."""

    name: str
    make: Callable[[], nn.Module]
    epochs: int
    peak_lr: float
    has_convolutions: bool = False

    def policy(self, mode: Mode) -> ampfx.Policy | str:
        """What ampfx is told beyond its default.

        PyTorch has no fast float16 kernel for the gradient of a convolution's weight on CPUs: one override
        keeps the convolutions in float32 there. Under autocast the model itself would have to be changed.
        """
        if self.has_convolutions and DEVICE == "cpu" and mode.dtype == torch.float16:
            return ampfx.Policy(overrides=(ampfx.Override(op="conv2d", dtype="float32", reason=NO_KERNEL),))
        return "autocast"


NO_KERNEL = "no fast float16 kernel for the gradient of the weight on a CPU"
TASKS = (
    Task("ResNet", SmallResNet, epochs=10, peak_lr=4e-3, has_convolutions=True),
    Task("Transformer", SmallTransformer, epochs=16, peak_lr=4e-3),
)


@dataclass(frozen=True)
class Digits:
    """Training and test pictures (count, 1, 8, 8) with their labels, on the device."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @staticmethod
    def load(seed: int) -> Digits:
        """Shuffle the pictures by ``seed`` and split them."""
        data = load_digits()
        x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
        x, y = ((x - x.mean()) / x.std()).to(DEVICE), torch.tensor(data.target).to(DEVICE)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
        return Digits(x[train], y[train], x[test], y[test])


class Progress:
    """One line that is overwritten on a terminal; a line per finished piece of work elsewhere."""

    _CLEAR_LINE = "\r\033[K"

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.start = time.perf_counter()

    def update(self, text: str) -> None:
        """Show what is being done, on a terminal only."""
        if self.live:
            print(f"{self._CLEAR_LINE}{self._stamp()} {text}", end="", flush=True)

    def done(self, text: str) -> None:
        """Show what was done, and keep it."""
        print(f"{self._CLEAR_LINE if self.live else ''}{self._stamp()} {text}", flush=True)

    def _stamp(self) -> str:
        return f"[{time.perf_counter() - self.start:5.1f} s]"


@dataclass
class Row:
    """What the table says about one model in one mode; no accuracy means that it was not trained."""

    task: Task
    mode: Mode
    counts: StepCounts
    step_time: StepTime
    accuracy: float | None = None

    def __str__(self) -> str:
        accuracy = "not run" if self.accuracy is None else f"{self.accuracy:.2%}"
        ratio = f"{self.step_time.ratio:.2f}"
        if self.mode != FLOAT32:
            ratio += f" ± {self.step_time.spread:.2f}"
        return (
            f"{self.task.name:<12} {self.mode.name:<18} {accuracy:>8} {self.counts.casts:>6} "
            f"{self.counts.cast_bytes / 1e6:>8.2f}  {ratio}"
        )


HEADER = f"{'model':<12} {'mode':<18} {'accuracy':>8} {'casts':>6} {'cast MB':>8}  step time / float32's"


def prepare(task: Task, mode: Mode, seed: int, example: Tensor) -> Training:
    """A fresh model of ``task`` with the weights that ``seed`` gives, ready to train in ``mode``."""
    torch.manual_seed(seed)
    return build(mode, task.make().to(DEVICE), example, task.peak_lr, task.policy(mode))


def measure(task: Task, data: Digits, progress: Progress) -> list[Row]:
    """Step 1: counts and times of one training step in each mode."""
    x, y = data.train_x[:BATCH_SIZE], data.train_y[:BATCH_SIZE]
    counts: dict[Mode, StepCounts] = {}
    steps: dict[str, Callable[[], object]] = {}
    seconds: dict[str, float] = {}
    for mode in MODES:
        progress.update(f"{task.name}: counting the casts of a step, {mode.name}")
        training = prepare(task, mode, 0, x)
        step = partial(training.step, x, y)
        counts[mode] = count_step(step, training.model)
        start = time.perf_counter()
        step()
        steps[mode.name], seconds[mode.name] = step, time.perf_counter() - start
    progress.update(f"{task.name}: timing the steps of all modes in turns")
    base = FLOAT32.name
    usual = {n: step for n, step in steps.items() if seconds[n] <= SLOWEST_TRAINED * seconds[base]}
    times = compare_steps(usual, base, rounds=ROUNDS)
    slow = {n: step for n, step in steps.items() if n not in usual}
    if slow:  # two rounds are enough to see an order of magnitude
        times |= compare_steps({**slow, base: steps[base]}, base, rounds=2, warmup=0)
    milliseconds = 1e3 * times[base].median_seconds
    progress.done(f"{task.name}: steps counted and timed; float32 takes {milliseconds:.1f} ms")
    return [Row(task, mode, counts[mode], times[mode.name]) for mode in MODES]


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up over the first fifth of training, then a cosine down to zero."""
    if progress < 0.2:
        return peak * (progress / 0.2)
    return peak * 0.5 * (1 + math.cos(math.pi * (progress - 0.2) / 0.8))


def train(task: Task, mode: Mode, seed: int, progress: Progress) -> tuple[float, nn.Module]:
    """Step 2: train one model and return its test accuracy and the module that was trained."""
    data = Digits.load(seed)
    training = prepare(task, mode, seed, data.train_x[:BATCH_SIZE])
    shuffle = torch.Generator().manual_seed(seed)
    num_batches = NUM_TRAIN // BATCH_SIZE
    training.model.train()
    for epoch in range(task.epochs):
        progress.update(f"{task.name}, {mode.name}, seed {seed}: epoch {epoch + 1} of {task.epochs}")
        order = torch.randperm(NUM_TRAIN, generator=shuffle).to(DEVICE)
        for i in range(num_batches):
            training.set_lr(learning_rate(task.peak_lr, (epoch + i / num_batches) / task.epochs))
            batch = order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]
            training.step(data.train_x[batch], data.train_y[batch])
    training.model.eval()
    with torch.no_grad(), training.precision():
        predicted = training.model(data.test_x).argmax(1)
    accuracy = (predicted == data.test_y).double().mean().item()
    progress.done(f"{task.name}, {mode.name}, seed {seed}: test accuracy {accuracy:.2%}")
    return accuracy, training.model


def notes(rows: list[Row]) -> Iterator[str]:
    """What a reader of the table must know."""
    for row in rows:
        name = f"{row.task.name}, {row.mode.name}"
        if row.accuracy is None:
            yield f"{name}: not trained, a step takes {row.step_time.ratio:.0f} times float32's."
        if row.mode.by == "ampfx" and row.task.policy(row.mode) != "autocast":
            yield f"{name}: an override keeps convolutions in float32\n  ({NO_KERNEL})."


def main() -> None:
    """Run the comparison and print the table and the head of a report."""
    parser = argparse.ArgumentParser(description="Compare precisions on handwritten digits.")
    parser.add_argument("--seeds", type=int, default=2, help="trainings per model and mode")
    seeds = parser.parse_args().seeds
    if DEVICE == "cpu":
        # The models are small: more threads gain nothing, and on a busy machine they wait for each other.
        torch.set_num_threads(1)
    progress = Progress()
    print(f"device: {DEVICE}, PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    rows: list[Row] = []
    trained: dict[str, nn.Module] = {}
    for task in TASKS:
        for row in measure(task, Digits.load(0), progress):
            if row.step_time.ratio <= SLOWEST_TRAINED:
                accuracies = []
                for seed in range(seeds):
                    accuracy, trained[f"{task.name}, {row.mode.name}"] = train(task, row.mode, seed, progress)
                    accuracies.append(accuracy)
                row.accuracy = sum(accuracies) / seeds
            rows.append(row)
    print(f"\n{HEADER}", *rows, sep="\n")
    print(*notes(rows), sep="\n")
    name, model = list(trained.items())[-1]
    assert isinstance(model, ampfx.ConvertedModule)
    print(f"\nFrom the report of the last of them ({name}):\n")
    print("\n".join(str(model.report()).splitlines()[:20]))


if __name__ == "__main__":
    main()
