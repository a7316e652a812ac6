"""Counts and paired step times of small models in float32, under ``torch.autocast`` and with ampfx.

``python -m bench.steps [--batch-size N] [--rounds N] [--threads N]`` prints, per model and mode:

* casts and the megabytes they move, kernels, and megabytes saved for backward, of one training step
  (exact counts, see ``ampfx.measure``);
* the median step time, and its ratio to float32's with the quartiles of that ratio, all modes taking
  turns in one process (see ``ampfx.step_time``).

Ratios belong to the machine they were measured on, which the first line names. The optimizer is
AdamW, with gradient clipping; float16 has loss scaling (GradScaler under autocast).
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ampfx.measure import count_step
from ampfx.step_time import compare_steps
from examples.models import SmallResNet, SmallTransformer
from examples.training import FLOAT32, MODES, build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "ResNet, width 16": SmallResNet,
    "transformer, width 64": SmallTransformer,
    "transformer, width 256": partial(SmallTransformer, width=256, depth=4),
}


def machine() -> str:
    """One line that says where the times come from."""
    if DEVICE == "cuda":
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    amx = "with AMX" if torch.cpu._is_amx_tile_supported() else "without AMX"
    threads = torch.get_num_threads()
    cores = os.cpu_count()
    return f"{platform.machine()} CPU {amx}, {cores} cores, {threads} threads, PyTorch {torch.__version__}"


def measure(name: str, batch_size: int, rounds: int) -> None:
    """Print the table of one model."""
    x = torch.randn(batch_size, 1, 8, 8, device=DEVICE)
    y = torch.arange(batch_size, device=DEVICE) % 10
    steps: dict[str, Callable[[], object]] = {}
    counts = {}
    for mode in MODES:
        torch.manual_seed(0)
        training = build(mode, MODELS[name]().to(DEVICE), x, lr=1e-3)
        steps[mode.name] = partial(training.step, x, y)
        counts[mode.name] = count_step(steps[mode.name], training.model)
    times = compare_steps(steps, FLOAT32.name, rounds=rounds)
    print(f"\n{name}, batch {batch_size}")
    print(f"{'mode':<18} casts  cast MB  kernels  saved MB      ms  ratio (quartiles)")
    for mode_name, time in times.items():
        count = counts[mode_name]
        print(
            f"{mode_name:<18} {count.casts:>5} {count.cast_bytes / 1e6:>8.2f} {count.kernels:>8} "
            f"{count.saved_bytes / 1e6:>9.2f} {1e3 * time.median_seconds:>7.2f}  "
            f"{time.ratio:.2f} ({time.ratio_low:.2f} to {time.ratio_high:.2f})",
            flush=True,
        )


def main() -> None:
    """Measure every model."""
    parser = argparse.ArgumentParser(description="Counts and paired step times of small models.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="on CPU; with more, be alone on the machine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine())
    for name in MODELS:
        measure(name, args.batch_size, args.rounds)


if __name__ == "__main__":
    main()
