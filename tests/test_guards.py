"""A graph is used only where it holds: shapes, values, attributes, modes; never a silently wrong result."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_float32 import EXACT, assert_close, check, compare_runs, tensors
from torch import Tensor, nn

import ampfx

EXACTLY: tuple[dict[str, Any], ...] = ({"dtype": torch.bfloat16, "policy": EXACT},)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 4)


def pair(model: nn.Module, *example: Any, **options: Any) -> tuple[Any, Any]:
    """A model converted exactly, and a float32 reference."""
    reference = copy.deepcopy(model)
    return ampfx.convert(model, example, dtype=torch.bfloat16, policy=EXACT, **options), reference


# ---------------------------------------------------------------- shapes


SHAPE_BRANCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "size": lambda m, h: h * 2 if h.size(0) > 3 else h * 3,
    "shape": lambda m, h: h * 2 if h.shape[0] % 2 == 0 else h * 3,
    "len": lambda m, h: h * len(h),
    "range": lambda m, h: sum((h * (i + 1) for i in range(h.shape[0])), torch.zeros(())),
    "iteration": lambda m, h: torch.stack([row * (i + 1) for i, row in enumerate(h)]),
    "unbind": lambda m, h: torch.stack([row * (i + 1) for i, row in enumerate(h.unbind(0))]),
    "numel": lambda m, h: h / h.numel() if h.numel() > 24 else h,
    "python int": lambda m, h: h * int(h.shape[0]),
    "python float": lambda m, h: h * float(h.shape[0]) ** 0.5,
    "math": lambda m, h: h * __import__("math").sqrt(h.shape[0]),
    "string": lambda m, h: h * len(f"{h.shape[0]:>5}" + "x" * h.shape[0]),
    "dict key": lambda m, h: h * {2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}[h.shape[0]],
    "set": lambda m, h: h * (2 if h.shape[0] in {2, 4} else 3),
    "list index": lambda m, h: h * [0, 1, 2, 3, 4, 5, 6][h.shape[0]],
    "min max": lambda m, h: h * min(h.shape[0], 3) + max(h.shape[0], 4),
    "equality": lambda m, h: h * 2 if h.shape == (4, 8) else h * 3,
    "tuple equality": lambda m, h: h * 2 if tuple(h.shape) == (4, 8) else h * 3,
    "not": lambda m, h: h * 2 if not (h.shape[0] - 4) else h * 3,
    "chained": lambda m, h: h * 2 if 2 < h.shape[0] < 5 else h * 3,
    "floor division": lambda m, h: h * (h.shape[0] // 2) + h[: h.shape[0] // 2].sum(),
    "negative slice": lambda m, h: F.pad(h[: -(h.shape[0] // 2)].sum(0, keepdim=True), (0, 0, 0, h.shape[0] - 1)),
    "broadcast": lambda m, h: h + torch.ones(h.shape[0], 1),
    "arange": lambda m, h: h * torch.arange(h.shape[0]).unsqueeze(-1),
    "full": lambda m, h: h + torch.full((h.shape[0], 8), float(h.shape[0])),
    "expand": lambda m, h: h + h.mean(0).expand(h.size()),
    "view": lambda m, h: h.view(h.shape[0] * 2, -1).view(h.shape[0], -1) * h.shape[0],
    "split": lambda m, h: torch.cat([p * (i + 1) for i, p in enumerate(h.split(2))]),
    "chunk": lambda m, h: torch.cat([p * (i + 1) for i, p in enumerate(h.chunk(2))]),
    "zip": lambda m, h: torch.stack([a * b for a, b in zip(h, h * 2, strict=True)]),
    "reversed": lambda m, h: torch.stack(list(reversed(h))),
    "pad": lambda m, h: F.pad(h, (0, 0, 0, 5 - h.shape[0]))[: h.shape[0]] * (5 - h.shape[0]),
    "bool sum": lambda m, h: h * sum(d > 3 for d in h.shape),
    "round": lambda m, h: h * round(h.shape[0] / 3, 1),
    "is_contiguous": lambda m, h: h * 2 if h[:1].t().is_contiguous() and h.t().is_contiguous() else h * 3,
    "nested": lambda m, h: h * ((lambda n: n * (n - 1) // 2 if n > 2 else -1)(h.shape[0])),
    "while": lambda m, h: h * _halvings(h.shape[0]),
    "stride": lambda m, h: h.as_strided((h.shape[0], 4), (h.stride(0), 2)).repeat(1, 2),
    "stride of a transpose": lambda m, h: (lambda g: g.as_strided(tuple(g.shape), (g.stride(0), 1)).t() * 2)(
        h.t().contiguous()
    ),
    "tril": lambda m, h: torch.ones(h.shape[0], h.shape[0]).tril() @ h,
    "interpolate": lambda m, h: F.interpolate(h[None], size=(h.shape[0] + 8,))[0, :, :8],
    "adaptive": lambda m, h: F.adaptive_avg_pool1d(h[None], h.shape[0])[0].sum() * h,
    "size unpack": lambda m, h: (lambda b, d: h.reshape(d, b).t().reshape(b, d))(*h.shape),
    "starred": lambda m, h: h.reshape(*h.shape[:-1], 2, -1).flatten(1),
    "tensor of size": lambda m, h: h * torch.tensor(h.shape[0]) + torch.tensor([float(h.shape[0])]),
    "as_tensor": lambda m, h: h * torch.as_tensor([h.shape[0], 1] * 4),
    "new_tensor": lambda m, h: h * h.new_tensor(h.shape[0]),
    "scalar tensor": lambda m, h: h * torch.scalar_tensor(h.shape[0]),
    "linspace": lambda m, h: h * torch.linspace(0, h.shape[0], h.shape[0])[:, None],
    "sym functions": lambda m, h: h * abs(-h.shape[0]) + divmod(h.shape[0], 2)[1] - pow(h.shape[0], 2),
    "true division": lambda m, h: h * (h.shape[0] / 4) - 1 / h.shape[0],
    "comparison value": lambda m, h: h * (h.shape[0] > 3),
    "device and dtype": lambda m, h: h * torch.ones((), device=h.device, dtype=h.dtype) * h.ndim,
}


def _halvings(n: Any) -> int:
    count = 0
    while n > 1:
        n = n // 2
        count += 1
    return count


@pytest.mark.parametrize("name", SHAPE_BRANCHES)
def test_shapes_decide(name: str) -> None:
    step = SHAPE_BRANCHES[name]

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(step(self, self.lin(x)))

    check(Model, (leaf(4, 8),), (leaf(3, 8),), (leaf(5, 8),), (leaf(2, 8),), modes=("train",), settings=EXACTLY)


NO_BRANCHES = [
    "broadcast",
    "arange",
    "expand",
    "view",
    "true division",
    "starred",
    "tril",
    "size unpack",
    "linspace",
    "floor division",
    "scalar tensor",
    "interpolate",
    "sym functions",
]


@pytest.mark.parametrize("name", [name for name in NO_BRANCHES if name in SHAPE_BRANCHES])
def test_sizes_that_decide_nothing_need_no_other_graph(name: str) -> None:
    step = SHAPE_BRANCHES[name]

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(step(self, self.lin(x)))

    model, reference = pair(Model(), leaf(4, 8))
    for count in (3, 5, 2, 7):
        compare_runs(model, reference, (leaf(count, 8),), {}, 1e-5, name)
    assert model._ampfx.captures == 1, [n for n in model.graph.nodes if "guard" in str(n.target)]


def test_sequence_models_need_one_graph_for_all_lengths() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(20, 16), nn.Parameter(torch.randn(32, 16))
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 20)
            self.register_buffer("mask", torch.ones(32, 32).tril().bool(), persistent=False)

        def forward(self, tokens: Tensor) -> Tensor:
            b, t = tokens.shape
            h = self.embed(tokens) + self.position[:t]
            q, k, v = (part.view(b, t, 2, 8).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
            scores = (q @ k.transpose(-2, -1)) / 8**0.5
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
            h = h + (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 16)
            return self.out(h)

    check(Attention, *[(torch.randint(0, 20, size),) for size in ((2, 5), (3, 9), (1, 1), (4, 32))], captures=1)


@pytest.mark.parametrize("layer", ["encoder", "attention", "lstm", "gru", "transformer"])
def test_torch_layers_need_one_graph_for_all_sizes(layer: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kwargs: dict[str, Any] = {"batch_first": True}
            if layer == "encoder":
                self.net: nn.Module = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, **kwargs)
            elif layer == "attention":
                self.net = nn.MultiheadAttention(16, 2, **kwargs)
            elif layer == "transformer":
                self.net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, **kwargs)
            else:
                self.net = (nn.LSTM if layer == "lstm" else nn.GRU)(16, 16, 2, **kwargs)

        def forward(self, x: Tensor) -> Any:
            if layer == "attention":
                return self.net(x, x, x)
            if layer == "transformer":
                return self.net(x, x)
            return self.net(x)

    calls = [(leaf(*size, 16),) for size in ((2, 5), (3, 9), (5, 2))]
    check(Model, *calls, captures=1, tol=0.1)


# ---------------------------------------------------------------- values


VALUE_BRANCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bool": lambda m, h: h * 2 if h.sum() > 0 else h * 3,
    "item": lambda m, h: h * (2.0 if h.sum().item() > 0 else 3.0),
    "item value": lambda m, h: h * h.detach().abs().max().item(),
    "float": lambda m, h: h * round(float(h.detach().sum()), 2),
    "any": lambda m, h: h * 2 if (h > 1.5).any() else h * 3,
    "int": lambda m, h: h * int((h > 0).sum()),
    "tolist": lambda m, h: h * (h > 0).sum(-1).tolist()[0],
    "nonzero": lambda m, h: h * (h > 0).nonzero().shape[0],
    "masked": lambda m, h: h[h > 0].sum() * h,
    "unique": lambda m, h: h * len((h > 0).sum(-1).unique()),
    "index": lambda m, h: h * h[int(h.detach().sum() > 0)],
    "loop": lambda m, h: _shrink(h),
    "equal": lambda m, h: h * (2 if torch.equal(h > 0, h.abs() > 0) else 3),
    "numpy": lambda m, h: h * float(h.detach().numpy().mean() > 0),
    "isnan": lambda m, h: torch.nan_to_num(h) if torch.isnan(h).any() else h * 2,
    "max of item": lambda m, h: h * max(h.detach().sum().item(), 0.5),
    "contains": lambda m, h: h * (2 if 1 in (h > 0).int()[0] else 3),
    "range of item": lambda m, h: sum((h * (i + 1) for i in range((h[0] > 0).sum().item())), torch.zeros(())) + h,
    "topk": lambda m, h: h.topk(int(1 + (h[0, 0] > 0)), -1).values.sum(-1, keepdim=True) * h,
    "repeat": lambda m, h: h.repeat_interleave(torch.tensor([2, 1] * 4), dim=1)[:, :8],
    "where": lambda m, h: h * torch.where(h > 0)[0].float().sum(),
    "format": lambda m, h: h * len(f"{h.detach().sum().item():.2f}"),
    "bincount": lambda m, h: h * torch.bincount((h[0] > 0).long()).numel(),
}


def _shrink(h: Tensor) -> Tensor:
    while h.abs().max() > 0.5:
        h = h * 0.5
    return h


@pytest.mark.parametrize("name", VALUE_BRANCHES)
def test_values_decide(name: str) -> None:
    step = VALUE_BRANCHES[name]

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(step(self, self.lin(x)))

    calls = []
    for scale in (1.0, -1.0, 3.0, 0.1, -5.0):
        x = (torch.randn(4, 8) + scale).requires_grad_()
        calls.append((x.detach().requires_grad_(),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check(Model, *calls, modes=("train",), settings=EXACTLY)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VALUE_BRANCHES)
def test_values_decide_in_low_precision(name: str, dtype: torch.dtype) -> None:
    """A decision that comes out differently in low precision is taken by Python, each time anew."""
    step = VALUE_BRANCHES[name]

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(step(self, self.lin(x)))

    calls = [torch.randn(4, 8) + shift for shift in (1.0, -1.0, 3.0)]
    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = ampfx.convert(net, (calls[0],), dtype=dtype, loss_scale=None)
        for x in calls * 2:
            assert_close(model(x), reference(x), 0.05, name)


def test_strict_names_the_decision_that_low_precision_changes() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            return self.out(h * float(h.sum()))

    model = ampfx.convert(Model(), (torch.randn(4, 8),), dtype=torch.bfloat16, strict=True)
    with pytest.raises(ampfx.GuardError, match=r"Model decides at test_guards.py:\d+ by a value.*Override"):
        model(torch.randn(4, 8))


def test_a_failed_guard_leaves_nothing_behind() -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("ema", torch.zeros(8))

        def forward(self, x: Tensor, cache: Tensor) -> Any:
            h = self.norm(self.lin(x))
            self.count += 1
            self.ema = self.ema * 0.9 + x.mean(0) * 0.1
            cache.add_(1)
            h = F.dropout(h, 0.5)
            if self.ema.sum() > 0:
                return self.out(h)
            return self.out(h) * 2, self.count

    model, reference = pair(Model(), torch.ones(4, 8), torch.zeros(2))
    calls = [
        torch.ones(4, 8),
        -5 * torch.ones(4, 8) + torch.randn(4, 8),
        torch.ones(4, 8) * 20,
        -torch.ones(4, 8),
        torch.ones(3, 8),
    ]
    for seed, x in enumerate(calls * 2):
        results = []
        for current in (model, reference):
            cache = torch.zeros(2)
            torch.manual_seed(seed)
            out = current(x, cache)
            results.append((out, cache, torch.rand(2), current.state_dict()))
        torch.testing.assert_close(*results)
    assert model._ampfx.captures == 2


def test_a_failed_guard_in_training_gives_right_gradients() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            return self.out(h * 2 if h.mean() > 0 else h.tanh())

    for seed in range(3):
        torch.manual_seed(seed)
        model, reference = pair(Model(), torch.randn(4, 8))
        for factor in (1.0, -1.0, 5.0, -5.0):
            compare_runs(model, reference, (leaf(4, 8).detach() + factor,), {}, 1e-5, str(factor))
    assert model._ampfx.captures <= 2


def test_a_failed_guard_after_a_write_to_an_input_with_gradients() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            h = self.lin(x)
            return self.out(h * 2 if h.sum() > 0 else h * 3)

    model, reference = pair(Model(), torch.randn(4, 8))
    for seed in range(8):
        results = []
        for current in (model, reference):
            torch.manual_seed(seed)
            root = leaf(4, 8)
            x = root * 1
            current(x).sum().backward()
            results.append((x, root.grad))
        torch.testing.assert_close(*results)


def test_many_situations_are_bounded_and_warned_about_once() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lin(x) * x.shape[0] if str(x.shape[0]) else x)

    model, reference = pair(Model(), leaf(1, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in range(1, 14):
            compare_runs(model, reference, (leaf(count, 8),), {}, 1e-5, str(count))
    assert len([w for w in caught if "captured" in str(w.message)]) == 1
    assert len(model._ampfx.entries) <= model._ampfx.options.max_graphs


# ---------------------------------------------------------------- attributes of modules


class Configured(Base):
    def __init__(self) -> None:
        super().__init__()
        self.flag, self.factor, self.name = True, 2.0, "relu"
        self.list, self.dict, self.tuple = [1.0, 2.0], {"a": 1.0, "inner": {"b": 2.0}}, (1.0, 2.0)
        self.config = SimpleNamespace(scale=2.0, inner=SimpleNamespace(shift=1.0), list=[1.0])
        self.function: Callable[[Tensor], Tensor] = torch.sin
        self.constant = torch.ones(8)
        self.set = {"relu"}

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        h = h * self.factor if self.flag else h - self.factor
        h = getattr(torch, self.name)(h) * self.list[0] + self.list[-1] * self.dict["a"] + self.dict["inner"]["b"]
        h = h * self.tuple[1] + self.config.scale + self.config.inner.shift * self.config.list[0]
        h = self.function(h) * self.constant
        if "tanh" in self.set:
            h = h + 1
        if hasattr(self, "extra"):
            h = h * self.extra
        return self.out(h)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "bool": lambda m: setattr(m, "flag", False),
    "float": lambda m: setattr(m, "factor", 5.0),
    "string": lambda m: setattr(m, "name", "sigmoid"),
    "list replaced": lambda m: setattr(m, "list", [3.0, 4.0]),
    "list item": lambda m: m.list.__setitem__(0, 7.0),
    "list append": lambda m: m.list.append(9.0),
    "dict item": lambda m: m.dict.__setitem__("a", 7.0),
    "nested dict item": lambda m: m.dict["inner"].__setitem__("b", 7.0),
    "tuple": lambda m: setattr(m, "tuple", (1.0, 6.0)),
    "config": lambda m: setattr(m.config, "scale", 8.0),
    "nested config": lambda m: setattr(m.config.inner, "shift", 8.0),
    "list in config": lambda m: m.config.list.__setitem__(0, 8.0),
    "config replaced": lambda m: setattr(
        m, "config", SimpleNamespace(scale=1.0, inner=SimpleNamespace(shift=3.0), list=[2.0])
    ),
    "function": lambda m: setattr(m, "function", torch.relu),
    "tensor replaced": lambda m: setattr(m, "constant", torch.full((8,), 3.0)),
    "tensor written": lambda m: m.constant.mul_(3),
    "tensor of another shape": lambda m: setattr(m, "constant", torch.full((1,), 3.0)),
    "set": lambda m: m.set.add("tanh"),
    "attribute added": lambda m: setattr(m, "extra", 4.0),
    "parameter replaced": lambda m: setattr(m.lin, "weight", nn.Parameter(torch.eye(8))),
    "parameter written": lambda m: m.lin.weight.data.mul_(2),
    "parameter data": lambda m: setattr(m.lin.weight, "data", torch.eye(8)),
    "bias removed": lambda m: setattr(m.lin, "bias", None),
    "submodule replaced": lambda m: setattr(m, "lin", nn.Sequential(nn.Linear(8, 8), nn.Tanh()).apply(_ones)),
    "submodule without bias": lambda m: setattr(m, "out", nn.Linear(8, 4, bias=False).apply(_ones)),
    "submodule wider": lambda m: setattr(m, "out", nn.Linear(8, 6).apply(_ones)),
    "in_features": lambda m: setattr(m.lin, "other", 3),
    "frozen": lambda m: m.lin.requires_grad_(False),
    "forward replaced": lambda m: setattr(m.lin, "forward", lambda x: x * 2),
}


def _ones(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.1)


ON_ORIGINAL = ("parameter written", "parameter replaced", "submodule replaced", "frozen", "list item", "config")


@pytest.mark.parametrize(
    ("name", "where"), [(name, "converted") for name in CHANGES] + [(name, "original") for name in ON_ORIGINAL]
)
def test_changes_after_the_conversion_are_seen(name: str, where: str) -> None:
    net = Configured()
    original = net
    model, reference = pair(net, leaf(4, 8))
    x = leaf(4, 8)
    compare_runs(model, reference, (x,), {}, 1e-5, "before")
    CHANGES[name](model if where == "converted" else original)
    CHANGES[name](reference)
    compare_runs(model, reference, (x,), {}, 1e-5, name)
    compare_runs(model, reference, (leaf(3, 8),), {}, 1e-5, name)


def test_changes_back_and_forth() -> None:
    model, reference = pair(Configured(), leaf(4, 8))
    x = leaf(4, 8)
    for value in (True, False, True, False):
        for m in (model, reference):
            m.flag = value
            m.list[0] = 3.0 if value else 4.0
        compare_runs(model, reference, (x,), {}, 1e-5, str(value))
    assert model._ampfx.captures <= 3


def test_changes_of_classes_are_seen() -> None:
    class Model(Base):
        factor, table = 2.0, (1.0, 2.0)

        def step(self, h: Tensor) -> Tensor:
            return h * self.factor + self.table[1]

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.step(self.lin(x)))

    model, reference = pair(Model(), leaf(4, 8))
    x = leaf(4, 8)
    for name, value in (
        ("factor", 5.0),
        ("table", (1.0, 7.0)),
        ("step", lambda self, h: h.tanh()),
        ("forward", lambda self, x: self.lin(x) * 2),
    ):
        setattr(Model, name, value)
        compare_runs(model, reference, (x,), {}, 1e-5, name)


def test_shapes_of_parameters_and_buffers_that_code_branches_on() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8))
            self.register_buffer("cache", torch.randn(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.weight.t()
            h = h.sum(-1) * (2 if self.weight.shape[0] > 3 else 3)
            for row in self.cache:
                h = h + row.sum()
            return h * len(self.cache) + self.cache.shape[0]

    model, reference = pair(Model(), leaf(4, 8))
    x = leaf(4, 8)
    compare_runs(model, reference, (x,), {}, 1e-5, "before")
    torch.manual_seed(5)
    cache, weight = torch.randn(3, 8), torch.randn(5, 8)
    for m in (model, reference):
        m.cache = cache.clone()
    compare_runs(model, reference, (x,), {}, 1e-5, "longer buffer")
    for m in (model, reference):
        m.weight = nn.Parameter(weight.clone())
    compare_runs(model, reference, (x,), {}, 1e-5, "larger parameter")


def test_buffer_that_grows_in_forward() -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(0, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, self.lin(x).detach()])
            weight = 1 / len(self.seen) if self.seen.shape[0] > 6 else 1.0
            return self.out(self.seen.sum(0) * weight)

    model, reference = pair(Model(), torch.randn(4, 8))
    for count in (4, 4, 3, 1):
        x = torch.randn(count, 8)
        torch.testing.assert_close(model(x), reference(x))
        torch.testing.assert_close(model.seen, reference.seen)


def test_state_that_one_call_leaves_for_the_next() -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            if self.state is not None:
                h = h + self.state
            self.state = h.detach()
            return self.out(h)

        def reset(self) -> None:
            self.state = None

    model, reference = pair(Model(), torch.randn(4, 8))
    for number in range(7):
        if number in (3, 5):
            model.reset()
            reference.reset()
        x = torch.randn(4, 8)
        compare_runs(model, reference, (x,), {}, 1e-5, f"call {number}")
    assert model.state is not None
    assert model._ampfx.captures <= 3


class Cache:
    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.last: Tensor | None = None
        self.count = 0


def keep_in_object(m: Any, h: Tensor) -> None:
    m.cache.last = h


def keep_in_new_object(m: Any, h: Tensor) -> None:
    m.cache = Cache()
    m.cache.last = h


def keep_in_list_of_object(m: Any, h: Tensor) -> None:
    m.cache.keys.append(h)


def count_in_object(m: Any, h: Tensor) -> None:
    m.cache.count += 1


def keep_in_dict(m: Any, h: Tensor) -> None:
    m.named["h"] = h * 2


def keep_in_nested_dict(m: Any, h: Tensor) -> None:
    m.named.setdefault("inner", {})["h"] = h * 2


def keep_in_list(m: Any, h: Tensor) -> None:
    m.log.append(h)


def keep_last_of_list(m: Any, h: Tensor) -> None:
    m.log[:] = [h]


def keep_in_tuple(m: Any, h: Tensor) -> None:
    m.named = (h, (h * 2, "name"))


@pytest.mark.parametrize(
    "keep",
    [
        keep_in_object,
        keep_in_new_object,
        keep_in_list_of_object,
        count_in_object,
        keep_in_dict,
        keep_in_nested_dict,
        keep_in_list,
        keep_last_of_list,
        keep_in_tuple,
    ],
)
def test_what_forward_keeps_in_containers_is_right_or_refused(keep: Callable[[Any, Tensor], None]) -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.cache, self.log, self.named = Cache(), [], {}

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            keep(self, h)
            return self.out(h) + self.cache.count

    def kept(m: Any) -> Any:
        return vars(m.cache), m.log, m.named

    net = Model()
    reference = copy.deepcopy(net)
    before = copy.deepcopy(kept(net))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.bfloat16, policy=EXACT)
        assert kept(net) == before
        assert kept(model) == before
        for _ in range(3):
            x = torch.randn(4, 8)
            torch.testing.assert_close(model(x), reference(x), rtol=0.05, atol=0.05)
            ours, theirs = kept(model), kept(reference)
            assert str(ours).count("tensor") == str(theirs).count("tensor")
            for a, b in zip(tensors(ours), tensors(theirs), strict=True):
                torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
            assert ours[0]["count"] == theirs[0]["count"]


def test_objects_of_the_caller_are_changed_once() -> None:
    class Model(Base):
        def forward(self, x: Tensor, cache: Any) -> Tensor:
            h = self.lin(x)
            cache.keys.append(h)
            cache.count += 1
            return self.out(torch.cat(cache.keys))

    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for deferred in (True, False):
            if deferred:
                model = ampfx.convert(net, dtype=torch.bfloat16)
            else:
                example = Cache()
                model = ampfx.convert(net, (torch.randn(4, 8), example), dtype=torch.bfloat16)
                assert vars(example) == vars(Cache())
            ours, theirs = Cache(), Cache()
            for number in range(3):
                x = torch.randn(4, 8)
                assert_close(model(x, ours), reference(x, theirs), 0.05, f"call {number}")
                assert ours.count == theirs.count == number + 1
                assert len(ours.keys) == len(theirs.keys)


def test_inputs_of_a_model_that_cannot_be_recorded_are_written_once() -> None:
    class Model(Base):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y.add_(1)
            return self.out(torch.vmap(lambda row: row.softmax(-1))(self.lin(x))) + y.sum()

    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ampfx.convert(net, dtype=torch.bfloat16)
        x, ours, theirs = torch.randn(4, 8), torch.zeros(3), torch.zeros(3)
        for _ in range(2):
            assert_close(model(x, ours), reference(x, theirs), 0.05, "written input")
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("text", ["{:.3f}", "{}", "{!r}"])
def test_text_of_tensors(text: str) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Any:
            h = self.lin(x.detach())
            return self.out(h), text.format(x.detach().sum()), str(self.lin.bias.detach()[0])

    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.bfloat16)
        for _ in range(3):
            x = torch.randn(4, 8)
            assert model(x)[1:] == reference(x)[1:]
            with torch.no_grad():
                net.lin.bias.add_(1)
                reference.lin.bias.add_(1)


def test_memory_of_the_model_s_own_that_numpy_reads() -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            factor = float(self.count.numpy().sum()) + 1
            self.count.add_(1)
            return self.out(self.lin(x)) * factor

    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.bfloat16)
        for number in range(4):
            x = torch.randn(4, 8)
            assert_close(model(x), reference(x), 0.05, f"call {number}")


def test_tensor_hooks_that_hold_computed_values() -> None:
    """The hook of a run uses that run's tensors, or the model is refused as a graph."""

    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            scale = x.detach().abs().sum() + 1
            if h.requires_grad:
                h.register_hook(lambda grad: grad * scale)
            return self.out(h)

    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ampfx.convert(net, (leaf(4, 8),), dtype=torch.bfloat16, policy=EXACT)
        for _ in range(3):
            compare_runs(model, reference, (leaf(4, 8),), {}, 0.05, "hook")


# ---------------------------------------------------------------- what cannot be captured


def refused(forward: Callable[[Any, Tensor], Tensor], *, match: str) -> None:
    class Model(Base):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.out(forward(self, self.lin(x)))

    net = Model()
    net.count = 0
    with pytest.raises(ampfx.CaptureError, match=match):
        ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.bfloat16, strict=True)
    assert net.count == 0


def test_python_randomness_is_refused() -> None:
    import random

    import numpy

    refused(lambda m, h: h * random.random(), match="random numbers.*torch.rand")
    refused(lambda m, h: h * 2 if random.random() < 0.5 else h, match="random numbers")
    refused(lambda m, h: h * float(numpy.random.rand()), match="random numbers")


def test_python_counters_are_refused() -> None:
    def count(m: Any, h: Tensor) -> Tensor:
        m.count += 1
        return h * m.count

    refused(count, match="changes the attribute count of Model from 1 to 2.*register_buffer")


def test_refused_models_still_give_right_results_when_not_strict() -> None:
    import random

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            h = self.lin(x) * self.count
            if random.random() < 0.5:
                h = h.relu()
            return self.out(h)

    net = Model()
    reference = copy.deepcopy(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = ampfx.convert(net, (torch.randn(4, 8),), dtype=torch.bfloat16)
    assert any("Model" in str(w.message) and "strict=True" in str(w.message) for w in caught)
    assert model.count == net.count == 0
    for seed in range(4):
        x = leaf(4, 8)
        results = []
        for current in (model, reference):
            random.seed(seed)
            current.zero_grad()
            out = current(x)
            out.sum().backward()
            results.append((out, [p.grad for p in current.parameters()]))
        torch.testing.assert_close(*results, rtol=0.05, atol=0.05)
    assert model.count == reference.count
