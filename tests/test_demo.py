"""The demo: its models, what it promises about casts, and what it prints."""

from __future__ import annotations

import dataclasses
import io
import sys
from functools import partial

import pytest
import torch

pytest.importorskip("sklearn", reason="the demo's data come with scikit-learn: pip install ampfx[demo]")

from ampfx.measure import StepCounts, count_step
from ampfx.step_time import StepTime
from examples import digits
from examples.training import FLOAT32, MODES, Mode


@pytest.mark.parametrize("task", digits.TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_a_converted_step_has_no_more_casts_than_autocast(task: digits.Task, dtype: torch.dtype) -> None:
    x, y = torch.randn(4, 1, 8, 8, device=digits.DEVICE), torch.tensor([0, 1, 2, 3], device=digits.DEVICE)
    counts = {}
    for by in ("autocast", "ampfx"):
        training = digits.prepare(task, Mode(by, dtype), 0, x)
        counts[by] = count_step(partial(training.step, x, y), training.model)
    assert counts["ampfx"].casts <= counts["autocast"].casts
    assert counts["ampfx"].cast_bytes <= counts["autocast"].cast_bytes


@pytest.mark.parametrize("accuracy", [None, 0.98765, 1.0])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_the_table_fits_into_80_columns(mode: Mode, accuracy: float | None) -> None:
    counts, time = StepCounts(1234, 98_765_432_100, 10_000, 10**9), StepTime(0.1, 123.456, 101.0, 134.0)
    row = digits.Row(digits.TASKS[1], mode, counts, time, accuracy)
    assert len(str(row)) <= 80
    assert len(digits.HEADER) <= 80


def test_the_split_is_the_same_for_a_seed_and_covers_all_pictures() -> None:
    first, again, other = digits.Digits.load(0), digits.Digits.load(0), digits.Digits.load(1)
    assert torch.equal(first.test_x, again.test_x)
    assert not torch.equal(first.test_x, other.test_x)
    assert len(first.train_x) + len(first.test_x) == 1797


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [digits.learning_rate(1.0, step / 100) for step in range(101)]
    assert rates[0] == 0.0
    assert max(rates) == rates[20] == 1.0
    assert rates[100] == pytest.approx(0.0)


@pytest.mark.slow
def test_the_demo_runs_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tuple(dataclasses.replace(task, epochs=1) for task in digits.TASKS)
    monkeypatch.setattr(digits, "TASKS", short)
    monkeypatch.setattr(digits, "ROUNDS", 2)
    monkeypatch.setattr(sys, "argv", ["digits", "--seeds", "1"])
    digits.main()
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index(digits.HEADER) + 1 :][: len(short) * len(MODES)]
    assert [line.split()[0] for line in table] == [task.name for task in short for _ in MODES]
    assert all(any(mode.name in line for mode in MODES) for line in table)
    assert max(map(len, lines)) <= 100
    assert lines[-1]


def test_progress_overwrites_its_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, expected in ((Terminal(), 2), (io.StringIO(), 0)):
        monkeypatch.setattr(sys, "stdout", stream)
        progress = digits.Progress()
        progress.update("working")
        progress.done("finished")
        assert stream.getvalue().count("\r") == expected
        assert stream.getvalue().endswith("finished\n")
        assert ("working" in stream.getvalue()) == (expected > 0)


def test_float32_is_the_baseline_of_the_modes() -> None:
    assert MODES[0] == FLOAT32
    assert len({mode.name for mode in MODES}) == len(MODES)
