"""What all tests share: fixed seeds, one thread, hypothesis without deadlines, and the `cuda` marker."""

from __future__ import annotations

import os

import pytest
import torch
from entry_point import provide_entry_point
from golden import write_renewed
from hypothesis import settings

import ampfx.loss_scale
from ampfx import LossScale

# A shared machine makes single examples slow at random; in CI the same examples run every time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure() -> None:
    """Small tensors gain nothing from threads, and results vary less with one."""
    torch.set_num_threads(1)
    provide_entry_point()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` where PyTorch sees no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; PyTorch sees none here")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_default_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a default loss scale of its own: the optimizers of others may still be attached to theirs."""
    monkeypatch.setattr(ampfx.loss_scale, "_default", LossScale())


def pytest_sessionfinish() -> None:
    """Write the expected texts that `make golden` renews."""
    for path in write_renewed():
        print(f"\nrenewed expected texts in {path.name}")
