"""``torch.compile`` of a converted module: one graph, the same numbers, the loss scale seen when it changes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampfx

INNER = ["eager", "aot_eager"]
LOW = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, inner: str = "eager", **more: Any) -> Any:
    return torch.compile(model, backend=inner, fullgraph=True, **more)


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            close(found[name], value, tolerance)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected)
        for mine, theirs in zip(found, expected, strict=True):
            close(mine, theirs, tolerance)
    elif dataclasses.is_dataclass(expected):
        assert type(found) is type(expected)
        close(vars(found), vars(expected), tolerance)
    else:
        assert found == expected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        return self.last(self.drop(x.softmax(-1) + x))


def pair(net: nn.Module, *args: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Any, Any]:
    """Two converted modules over copies of a net: one to compile, one to compare with."""
    options = {"dtype": dtype, **options}
    return (ampfx.convert(copy.deepcopy(net), args, **options), ampfx.convert(copy.deepcopy(net), args, **options))


def compare(
    model: Any,
    mine: nn.Module,
    theirs: Any,
    *args: Any,
    tolerance: float = 1e-4,
    gradients: float = 0.02,
    **kwargs: Any,
) -> None:
    found, expected = model(*args, **kwargs), theirs(*args, **kwargs)
    close(found, expected, tolerance)
    if not torch.is_grad_enabled():
        return
    torch.autograd.backward([t.sum() for t in _tensors(found)])
    torch.autograd.backward([t.sum() for t in _tensors(expected)])
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            largest = float(b.grad.abs().max())
            assert float((a.grad - b.grad).abs().max()) <= gradients * largest, name
    for a, b in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if dataclasses.is_dataclass(value):
        value = vars(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", LOW)
def test_training_and_evaluation(dtype: torch.dtype, inner: str) -> None:
    x = torch.randn(6, 8)
    mine, theirs = pair(Net(), x, dtype=dtype, loss_scale=64.0 if dtype == torch.float16 else None)
    mine.eval()(x), theirs.eval()(x)
    mine.train(), theirs.train()
    model = compiled(mine, inner)
    for _ in range(2):
        compare(model, mine, theirs, torch.randn(6, 8), tolerance=0.01)
    model.eval(), theirs.eval()
    compare(model, mine, theirs, torch.randn(6, 8), tolerance=0.01)
    model.train(), theirs.train()
    compare(model, mine, theirs, torch.randn(6, 8), tolerance=0.01)
    with torch.no_grad():
        compare(model, mine, theirs, torch.randn(6, 8), tolerance=0.01)


@pytest.mark.parametrize("inner", INNER)
def test_changes_of_the_loss_scale_are_seen(inner: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(8, 16)
    converted = ampfx.convert(copy.deepcopy(net), (x,), dtype=torch.float16)
    model = compiled(converted, inner)
    optimizer = ampfx.LossScaleOptimizer(
        torch.optim.SGD(converted.parameters(), 0.1), model, init_scale=2.0**12, growth_interval=2
    )
    (model(x).sum() * 1e-7).backward()
    (net(x).sum() * 1e-7).backward()
    for mine, theirs in zip(converted.parameters(), net.parameters(), strict=True):
        assert theirs.grad is not None
        assert mine.grad is not None
        assert float((mine.grad - theirs.grad).norm()) <= 0.02 * float(theirs.grad.norm())
    (model(x) * float("inf")).sum().backward()
    optimizer.step()
    assert optimizer.last_step_skipped
    assert optimizer.get_scale() == 2.0**11
    for _ in range(2):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        assert not optimizer.last_step_skipped
    assert optimizer.get_scale() == 2.0**12


@pytest.mark.parametrize("inner", INNER)
def test_a_dynamic_batch_is_one_graph(inner: str) -> None:
    mine, theirs = pair(Net(), torch.randn(6, 8))
    counter = torch._dynamo.testing.CompileCounterWithBackend(inner)
    model = torch.compile(mine, backend=counter, fullgraph=True)
    for batch in (6, 3, 9, 12):
        x = torch.randn(batch, 8)
        torch._dynamo.mark_dynamic(x, 0)
        compare(model, mine, theirs, x, tolerance=0.01)
    assert counter.frame_count == 1


@dataclasses.dataclass
class Result:
    value: Tensor
    parts: tuple[Tensor, ...]
    name: str = "result"


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(8, 8)

    def forward(
        self, batch: dict[str, Tensor], extra: list[Tensor] | None = None, *, scale: float = 1.0, flag: bool = False
    ) -> Any:
        y = self.layer(batch["x"]) * scale + batch["bias"]
        for item in extra or []:
            y = y + item
        y = y.relu() if flag else y
        if self.kind == "dict":
            return {"y": y, "parts": [y * 2, y + 1], "none": None}
        if self.kind == "tuple":
            return y, (y * 2, "text"), 3
        return Result(y, (y * 2, y + 1)) if self.kind == "dataclass" else y


@pytest.mark.parametrize("kind", ["tensor", "dict", "tuple", "dataclass"])
@pytest.mark.parametrize("inner", INNER)
def test_structures_in_and_out(kind: str, inner: str) -> None:
    args = ({"x": torch.randn(3, 8), "bias": torch.randn(8)}, [torch.randn(3, 8), torch.randn(8)])
    options: dict[str, Any] = {"dtype": torch.bfloat16, "example_kwargs": {"scale": 0.5, "flag": True}}
    net = Structured(kind)
    mine, theirs = (ampfx.convert(copy.deepcopy(net), args, **options) for _ in range(2))
    model = compiled(mine, inner)
    compare(model, mine, theirs, *args, scale=0.5, flag=True, tolerance=0.01)
    compare(model, mine, theirs, *args, scale=0.25, flag=True, tolerance=0.01)


@pytest.mark.parametrize("inner", INNER)
def test_arguments_in_another_order_or_way(inner: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x) - 2 * y

    x, y = torch.randn(3, 8), torch.randn(3, 8)
    net = Two()
    mine = ampfx.convert(net, (x, y), dtype=torch.bfloat16)
    model = compiled(mine, inner)
    expected = net(x, y)
    for found in (model(x, y), model(x, y=y), model(y=y, x=x)):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("inner", INNER)
def test_another_branch_is_never_silently_wrong(inner: str) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, factor: int = 1) -> Tensor:
            y = self.layer(x)
            if x.shape[0] > 4:
                y = y * 2
            for _ in range(factor):
                y = y + 1
            return y

    net = Branching()
    mine = ampfx.convert(copy.deepcopy(net), (torch.randn(3, 8),), dtype=torch.bfloat16)
    model = compiled(mine, inner)
    for batch in (3, 2, 4):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(model(x), net(x), rtol=0.03, atol=0.03)
    with pytest.raises(Exception, match=r"captured where test_compile\.py:\d+ gave False"):
        model(torch.randn(8, 8))
    with pytest.raises(Exception, match="captured for others"):
        model(torch.randn(3, 8), 3)


@pytest.mark.parametrize("inner", INNER)
def test_flags_that_the_capture_fixed_are_not_silently_wrong(inner: str) -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gain = nn.Linear(8, 8), 1

        def forward(self, x: Tensor, *, double: bool = False) -> Tensor:
            y = self.layer(x) * self.gain
            return y * 2 if double else y

    net = Flagged()
    x = torch.randn(3, 8)
    mine = ampfx.convert(copy.deepcopy(net), (x,), dtype=torch.bfloat16)
    model = compiled(mine, inner)
    torch.testing.assert_close(model(x), net(x), rtol=0.03, atol=0.03)
    with pytest.raises(Exception, match="captured for others"):
        model(x, double=True)
    mine.gain = 3
    with pytest.raises(Exception, match="captured for others"):
        model(x)
    mine.gain = 1
    torch.testing.assert_close(model(x), net(x), rtol=0.03, atol=0.03)


def test_without_fullgraph_what_was_not_captured_runs_uncompiled() -> None:
    net = Structured("tensor")
    batch = {"x": torch.randn(3, 8), "bias": torch.randn(8)}
    mine = ampfx.convert(copy.deepcopy(net), (batch,), dtype=torch.bfloat16)
    model = torch.compile(mine, backend="eager")
    for flag in (False, True):
        torch.testing.assert_close(model(batch, flag=flag), net(batch, flag=flag), rtol=0.03, atol=0.03)
    model.eval()
    torch.testing.assert_close(model(batch), net(batch), rtol=0.03, atol=0.03)


def test_a_second_capture_serves_the_other_branch() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * 2 if x.shape[0] > 4 else y

    net = Branching()
    mine = ampfx.convert(copy.deepcopy(net), (torch.randn(3, 8),), dtype=torch.bfloat16)
    mine(torch.randn(8, 8))
    model = compiled(mine)
    for batch in (3, 8, 2, 9):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(model(x), net(x), rtol=0.03, atol=0.03)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(8, 8), nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        with torch.no_grad():
            peak = x.abs().max()
        # Added, not multiplied: PyTorch's aot_eager gives wrong gradients for a factor that forward writes to.
        return checkpoint(self.layer, x, use_reentrant=False) / peak + self.count


class Scripted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Scripted.apply(self.first(x) * 4))


@pytest.mark.parametrize("kind", [Attention, Stateful, Custom])
@pytest.mark.parametrize("inner", INNER)
def test_kinds_of_models(kind: type[nn.Module], inner: str) -> None:
    x = torch.randint(20, (2, 5)) if kind is Attention else torch.randn(4, 8)
    mine, theirs = pair(kind(), x, dtype=torch.float16, loss_scale=16.0)
    compare(compiled(mine, inner), mine, theirs, x, tolerance=0.01)


@pytest.mark.parametrize("inner", INNER)
def test_guards_on_values_become_assertions(inner: str) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return y * 2 if (x > 0).all() else y

    x = torch.rand(4, 8) + 0.1
    mine, theirs = pair(Deciding(), x)
    model = compiled(mine, inner)
    compare(model, mine, theirs, x, tolerance=0.01)
    with pytest.raises(RuntimeError, match=r"captured for True at test_compile\.py"):
        model(-x)


def test_a_mode_that_was_not_captured_is_an_error_that_says_what_to_do() -> None:
    mine, _ = pair(Net(), torch.randn(6, 8))
    model = compiled(mine)
    model.eval()
    with pytest.raises(Exception, match="call the converted module once"):
        model(torch.randn(6, 8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
def test_with_inductor(dtype: torch.dtype) -> None:
    x = torch.randn(6, 8)
    mine, theirs = pair(Net(), x, dtype=dtype, loss_scale=64.0 if dtype == torch.float16 else None)
    compare(compiled(mine, "inductor"), mine, theirs, torch.randn(6, 8), tolerance=0.02, gradients=0.1)
