"""Copies of converted models: deepcopy, copy, pickle, torch.save in this process and in a fresh one."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from against_float32 import EXACT, compare_runs
from torch import Tensor, nn

import ampfx


class Net(nn.Module):
    """Tied weights, a buffer that is not saved, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("offset", torch.ones(8), persistent=False)
        self.config = {"scale": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu() + self.offset) * self.config["scale"]


def converted(**options: Any) -> tuple[Any, Net]:
    net = Net()
    options = options or {"dtype": torch.bfloat16, "policy": EXACT}
    return ampfx.convert(net, (torch.randn(4, 8),), **options), net


def through_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_save(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, through_pickle, through_save])
def test_a_copy_stands_alone(make: Any) -> None:
    # A policy with a lambda cannot be pickled: a plain one is used, and a loose tolerance.
    options: dict[str, Any] = {} if make is copy.deepcopy else {"dtype": torch.bfloat16}
    tol = 1e-5 if make is copy.deepcopy else 0.1
    model, net = converted(**options)
    model(torch.randn(4, 8)).sum().backward()
    twin = make(model)
    assert isinstance(twin, Net)
    assert isinstance(twin, ampfx.ConvertedModule)
    assert type(twin) is type(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in net.named_parameters()]
    assert twin.last.weight is twin.first.weight
    assert twin.first.weight is not net.first.weight
    assert twin.config == net.config
    assert twin.config is not net.config
    assert torch.equal(twin.offset, net.offset)
    reference = copy.deepcopy(net)
    compare_runs(twin, reference, (torch.randn(4, 8),), {}, tol, "train")
    twin.eval()
    reference.eval()
    compare_runs(twin, reference, (torch.randn(4, 8),), {}, tol, "eval")
    before = net.first.weight.detach().clone()
    with torch.no_grad():
        twin.first.weight.mul_(0)
        twin.config["scale"] = 3.0
    assert torch.equal(net.first.weight, before)
    assert net.config["scale"] == 2.0
    assert model.training
    compare_runs(model.train(), copy.deepcopy(net).train(), (torch.randn(4, 8),), {}, tol, "the model itself")


def test_a_shallow_copy_shares() -> None:
    model, net = converted()
    twin = copy.copy(model)
    assert twin.first.weight is net.first.weight
    reference = copy.deepcopy(net)
    compare_runs(twin, reference, (torch.randn(4, 8),), {}, 1e-5)


def test_a_copy_of_a_model_that_is_not_captured() -> None:
    net = Net()
    model = ampfx.convert(net, dtype=torch.bfloat16)
    for twin in (copy.deepcopy(model), through_pickle(model)):
        compare_runs(twin, copy.deepcopy(net), (torch.randn(4, 8),), {}, 0.1)


def test_a_deep_copy_keeps_training_with_a_loss_scale() -> None:
    model, _ = converted(dtype=torch.float16)
    twin = copy.deepcopy(model)
    optimizer = ampfx.LossScaleOptimizer(torch.optim.SGD(twin.parameters(), lr=0.01), twin, init_scale=256.0)
    x = torch.randn(4, 8)
    reference = copy.deepcopy(model)
    for _ in range(2):
        twin.zero_grad()
        twin(x).square().mean().backward()
        assert twin.first.weight.grad.isfinite().all()
        optimizer.step()
    assert not optimizer.last_step_skipped
    assert not torch.equal(twin.first.weight, reference.first.weight)
    for parameter in model.parameters():
        assert parameter.grad is None


def test_copies_of_a_model_with_a_static_scale() -> None:
    for make in (copy.deepcopy, through_pickle):
        model, net = converted(dtype=torch.float16, loss_scale=64.0)
        compare_runs(make(model), copy.deepcopy(net), (torch.randn(4, 8),), {}, 0.02)


def test_exponential_moving_average_of_weights() -> None:
    model, net = converted()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    x = torch.randn(4, 8)
    torch.testing.assert_close(average(x), copy.deepcopy(net)(x))


def test_instance_forward_follows_the_copy() -> None:
    net = Net()
    net.forward = types.MethodType(lambda self, x: self.first(x) * 3, net)  # type: ignore[method-assign]
    model = ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.bfloat16, policy=EXACT)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.weight.mul_(2)
    x = torch.randn(4, 8)
    torch.testing.assert_close(twin(x), 2 * model(x))


def test_state_dict_both_directions_and_assign() -> None:
    model, net = converted()
    other = Net()
    x = torch.randn(4, 8)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model.eval()(x), other.eval()(x))
    assert torch.equal(net.first.weight, other.first.weight)
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(x), other(x))
    third = Net().eval()
    model.load_state_dict(third.state_dict(), assign=True)
    torch.testing.assert_close(model(x), third(x))
    model.train()
    model(x).sum().backward()
    assert model.first.weight.grad is not None


def test_deep_copies_of_parts_of_python_models() -> None:
    class Python(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.count = nn.Linear(8, 8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.lin(x) * self.count

    with pytest.warns(UserWarning, match="in parts"):
        model = ampfx.convert(Python(), (torch.randn(2, 8),), dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 8)
    torch.testing.assert_close(twin(x), model(x))
    assert twin.lin.weight is not model.lin.weight
    with torch.no_grad():
        twin.lin.weight.zero_()
        twin.lin.bias.zero_()
    assert float(twin(x).abs().max()) == 0.0
    assert float(model(x).abs().max()) > 0.0


PROGRAM = """
import sys, torch, pickle
import copied_model
model = torch.load(sys.argv[1], weights_only=False)
x, want = torch.load(sys.argv[2])
model.eval()
got = model(x)
assert torch.equal(got, want), (got - want).abs().max()
model.train()
model(x).sum().backward()
assert all(p.grad is not None for p in model.parameters())
print(type(model).__name__, len(model.graph.nodes) > 3)
"""
MODEL = """
import torch
from torch import nn

class Saved(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x):
        return self.net(x)
"""


def test_a_saved_model_in_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "copied_model.py").write_text(MODEL)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    import copied_model

    model = ampfx.convert(copied_model.Saved(), (torch.randn(4, 8),), dtype=torch.float16)
    x = torch.randn(4, 8)
    torch.save(model, tmp_path / "model.pt")
    torch.save((x, model.eval()(x).detach()), tmp_path / "data.pt")
    root = str(Path(ampfx.__file__).parent.parent)
    path = os.pathsep.join([root, str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py", "model.pt", "data.pt"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Saved", "True"]
