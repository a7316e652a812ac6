"""Models that stay Python and are converted in parts, and block-wise conversion."""

from __future__ import annotations

import copy
import io
import json
import pickle
import warnings
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampfx
from ampfx.coverage import Coverage
from ampfx.parts import parts_below

X = torch.randn(6, 8)


class Glue(nn.Module):
    """Python that multiplies, calls one part three times, and has a part that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.cell = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Parameter(torch.randn(16, 4) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        np.random.rand()
        hidden = self.stem(x)
        for _ in range(3):
            hidden = self.cell(hidden)
        return self.experts[0](hidden) @ self.head


def in_parts(model: nn.Module, *args: Any, **options: Any) -> ampfx.ConvertedModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options.setdefault("dtype", torch.bfloat16)
        return ampfx.convert(model, args or None, **options)


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


def assert_gradients(model: nn.Module, reference: nn.Module, tol: float) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            assert ours.grad.dtype == torch.float32
            assert error(ours.grad, theirs.grad) < tol, name


# ---------------------------------------------------------------------- what becomes of the model


def test_the_largest_modules_that_can_be_graphs_are() -> None:
    model = in_parts(Glue(), X)
    assert [path for path, _ in parts_below(model, ampfx.ConvertedModule)] == ["stem", "cell", "experts.0", "experts.1"]
    assert "linear" in [node.name for node in model.cell.graph.nodes]
    assert not isinstance(model.cell[0], ampfx.ConvertedModule)
    assert isinstance(model, Glue)
    assert isinstance(model.experts, nn.ModuleList)


def test_the_warning_names_the_reason_and_points_at_the_call() -> None:
    with pytest.warns(UserWarning, match="Glue is converted in parts: .*numpy's generator.*strict=True") as caught:
        ampfx.convert(Glue(), (X,), dtype=torch.bfloat16)
    assert [warning.filename for warning in caught] == [__file__]
    model = ampfx.convert(Glue(), dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="in parts") as caught:
        model(X)
    assert [warning.filename for warning in caught] == [__file__]


def test_strict_raises_instead() -> None:
    with pytest.raises(ampfx.CaptureError, match="numpy's generator"):
        ampfx.convert(Glue(), (X,), dtype=torch.bfloat16, strict=True)
    model = ampfx.convert(Glue(), dtype=torch.bfloat16, strict=True)
    with pytest.raises(ampfx.CaptureError, match="numpy's generator"):
        model(X)


def test_the_model_itself_is_left_alone() -> None:
    original = Glue()
    children = dict(original.named_modules())
    keys, parameters = list(original.state_dict()), list(original.parameters())
    model = in_parts(original, X)
    assert all(dict(original.named_modules())[path] is module for path, module in children.items())
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_parts_of_parts_are_converted_in_the_first_run() -> None:
    model, inputs = models.build("TreeReader")
    converted = in_parts(model, *inputs(4)[0])
    states = {path: part.state for path, part in converted.report().parts.items()}
    assert states == {
        "": "python",
        "encoder": "python",
        "encoder.leaf": "captured",
        "encoder.join": "captured",
        "out": "captured",
    }
    nested = converted.encoder.report()
    assert nested.title == "Encoder"
    assert set(nested.parts) == {"", "leaf", "join"}


def test_a_shared_child_stays_one_part() -> None:
    class Shared(Glue):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.cell

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.alias(self.stem(x)) @ self.head

    model = in_parts(Shared(), X)
    assert model.alias is model.cell
    assert model.report().parts["cell"].calls == 4
    assert "alias" not in model.report().parts


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("dtype", "tol"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_outputs_and_gradients_are_those_of_float32(dtype: torch.dtype, tol: float) -> None:
    reference = Glue()
    model = in_parts(copy.deepcopy(reference), X, dtype=dtype, loss_scale=512.0 if dtype == torch.float16 else None)
    for batch in (6, 3):
        model.zero_grad()
        reference.zero_grad()
        x = torch.randn(batch, 8)
        out, want = model(x), reference(x)
        assert out.dtype == torch.float32
        assert error(out, want) < tol
        out.square().mean().backward()
        want.square().mean().backward()
        assert_gradients(model, reference, 2 * tol)
    assert model.stem._ampfx.captures == 1


def test_python_code_may_hand_low_tensors_to_a_part() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.part = nn.Parameter(torch.randn(8, 8)), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            np.random.rand()
            return self.part(x @ self.weight)

    model = in_parts(Mixed(), X)
    spec = next(iter(model.part.graph.nodes)).meta["val"]
    assert spec.dtype == torch.float32
    model(X).sum().backward()
    assert model.weight.grad is not None


def test_tiny_gradients_survive_between_float16_parts() -> None:
    """The loss is so small that float16 gradients would be zero without scaling, in parts and between them."""
    reference = Glue()
    model = in_parts(copy.deepcopy(reference), X, dtype=torch.float16, loss_scale=2.0**14)
    (model(X).mean() * 1e-6).backward()
    (reference(X).mean() * 1e-6).backward()
    assert_gradients(model, reference, 0.02)


def test_training_in_float16_with_the_optimizer() -> None:
    torch.manual_seed(3)
    target = torch.randn(6, 4)
    reference = Glue()
    model = in_parts(copy.deepcopy(reference), X, dtype=torch.float16)
    losses = {}
    for name, net in (("model", model), ("reference", reference)):
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
        if net is model:
            optimizer = ampfx.LossScaleOptimizer(optimizer, net)
        for _ in range(8):
            optimizer.zero_grad()
            loss = F.mse_loss(net(X), target)
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["model"] == pytest.approx(losses["reference"], rel=1e-2)


def test_float16_glue_runs_in_float32_even_inside_autocast() -> None:
    model = in_parts(Glue(), X, dtype=torch.float16, loss_scale=512.0)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(X)
    assert out.dtype == torch.float32
    assert torch.equal(out, model(X))


def test_train_and_eval_have_graphs_of_their_own() -> None:
    class Dropped(Glue):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))

    model = in_parts(Dropped(), X)
    model.eval()
    assert torch.equal(model(X), model(X))
    model.train()
    assert not torch.equal(model(X), model(X))


# ---------------------------------------------------------------------- copies


def test_deepcopy_and_pickle() -> None:
    model = in_parts(Glue(), X)
    want = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(X), want)
        assert isinstance(twin.cell, ampfx.ConvertedModule)
        assert next(twin.parameters()) is not next(model.parameters())
        assert twin.report().coverage > 0.5
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(X), want)


def test_a_copy_of_a_float16_model_trains() -> None:
    reference = Glue()
    model = copy.deepcopy(in_parts(copy.deepcopy(reference), X, dtype=torch.float16))
    optimizer = ampfx.LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(X).square().mean().backward()
    reference(X).square().mean().backward()
    optimizer.step()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    plain.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(ours, theirs) < 1e-2


# ---------------------------------------------------------------------- the report


def test_coverage_is_a_share_of_the_flops() -> None:
    report = in_parts(Glue(), X).report()
    coverage = report.coverage
    assert isinstance(coverage, float)
    stem, cell, expert, glue = 8 * 16, 3 * 16 * 16, 16 * 16, 16 * 4
    flops = {path: part.flops for path, part in report.parts.items()}
    batch = 2 * len(X)
    assert (flops["stem"], flops["cell"]) == (batch * stem, batch * cell)
    assert flops[""] == batch * glue
    total = sum(flops.values())
    assert coverage == pytest.approx((total - flops[""] - flops["experts.1"]) / total)
    assert report.parts["cell"].calls == 3
    # What never ran counts by its parameters.
    matrices = stem + 16 * 16 + expert
    assert flops["experts.1"] == pytest.approx(batch * (stem + cell + expert) / matrices * expert, rel=1e-3)
    elements = sum(parameter.numel() for parameter in Glue().parameters())
    assert coverage.parameters == pytest.approx(1 - (glue + 16 * 17) / elements)
    assert coverage.modules == pytest.approx(5 / 7)
    assert set(coverage.reasons) == {"", "experts.1"}
    assert "numpy" in coverage.reasons[""]
    assert "not been called" in coverage.reasons["experts.1"]


def test_coverage_behaves_as_a_float_and_can_be_copied() -> None:
    coverage = Coverage(0.5, 0.25, 0.75, {"a": "why"})
    assert (coverage + 1, f"{coverage:.0%}", coverage < 0.6, hash(coverage)) == (1.5, "50%", True, hash(0.5))
    for twin in (copy.deepcopy(coverage), pickle.loads(pickle.dumps(coverage))):
        assert twin == 0.5
        assert twin.to_dict() == coverage.to_dict()
    with pytest.raises(AttributeError):
        coverage.modules = 1.0  # type: ignore[misc]


def test_a_whole_capture_is_covered_entirely() -> None:
    report = ampfx.convert(nn.Linear(8, 4), (X,), dtype=torch.bfloat16).report()
    assert report.coverage == report.coverage.modules == report.coverage.parameters == 1.0
    assert report.coverage.reasons == {}
    assert list(report.parts) == [""]
    assert report.parts[""].state == "captured"
    assert report.parts[""].flops == 2 * 6 * 8 * 4


def test_the_report_is_over_all_parts() -> None:
    model = in_parts(Glue(), X)
    report = model.report()
    own = [model.get_submodule(path).report() for path in ("stem", "cell", "experts.0")]
    assert report.casts == sum(part.casts for part in own)
    assert report.cast_bytes == sum(part.cast_bytes for part in own)
    assert len(report.nodes) == sum(len(part.nodes) for part in own)
    assert report.nodes["cell:linear"].module_path == "cell.0"
    assert report.nodes["cell:linear"].dtype == "bf16"
    assert {node.target for node in report.nodes if node.target} >= {"stem.weight", "cell.0.bias"}
    assert json.loads(report.to_json())["coverage"]["flops"] == report.coverage
    assert pickle.loads(pickle.dumps(report)) == report
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "train mode, converted in parts" in words
    assert "of the matrix-product FLOPs run converted" in words
    assert "Parts: 3 graphs, 2 without" in words
    assert "not called yet" in words
    assert "cell, 2 operations, 3 calls" in words


def test_explanations_find_nodes_modules_and_what_is_no_graph() -> None:
    model = in_parts(Glue(), X)
    assert str(model.explain("cell.0")).startswith("cell.0 has 1 operation: 1 in bf16")
    assert model.explain("cell:linear").steps[0].name == "cell:linear"
    assert model.explain("stem.weight").nodes[0].dtype == "f32"
    (note,) = model.explain("experts").notes
    assert note == "experts.1 is no graph: it has not been called yet, so there is no graph of it"
    assert "not been called" in str(model.explain("experts.1"))
    assert "stays Python" in str(model.explain(""))
    with pytest.raises(ampfx.AmpfxError, match="Did you mean 'cell"):
        model.explain("cel")


def test_a_root_in_python_has_no_graph_and_says_where_graphs_are() -> None:
    model = in_parts(Glue(), X)
    for look in (lambda: model.graph, model.format_graph, lambda: model.code):
        with pytest.raises(ampfx.NotCapturedError, match=r"stem, cell, experts\.0, experts\.1"):
            look()


def test_watching_the_python_code_changes_nothing() -> None:
    class Sums(nn.Module):
        """Batched products, views and writes between the parts, in inference mode too."""

        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            np.random.rand()
            out = torch.zeros(len(x), 8)
            out[:] = self.part(x)
            out += F.linear(out.clone(), torch.eye(8))
            return torch.einsum("bi,bj->bij", out, x).sum(2)

    original = Sums()
    model = in_parts(copy.deepcopy(original), dtype=torch.float16, loss_scale=8.0)
    with torch.inference_mode(), pytest.warns(UserWarning, match="in parts"):
        first, second, want = model(X), model(X), original(X)
    assert torch.equal(first, second)
    assert error(first, want) < 5e-3
    assert model.report().parts[""].flops > 0
    assert 0 < model.report().coverage < 1


class Products(nn.Module):
    """Every kind of product; the first argument says whether numpy keeps it from being a graph."""

    def __init__(self, as_graph: bool) -> None:
        super().__init__()
        self.as_graph = as_graph
        self.w, self.k = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(6, 2, 3, 3))
        self.t, self.b = nn.Parameter(torch.randn(6, 2, 2, 2)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        if not self.as_graph:
            np.random.rand()
        total = F.linear(x, self.w, self.b).sum() + (x @ self.w).sum() + torch.einsum("bhqd,...bhkd->bhqk", x, x).sum()
        flat = x.flatten(0, 1)
        total = total + torch.baddbmm(torch.zeros(1, 4, 4), flat.mT, flat).sum()
        total = total + torch.addmm(self.b, x[0, 0], self.w).sum() + torch.einsum("ij,jk", self.w, self.w).sum()
        total = total + F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3]).sum()
        image = F.conv2d(x, self.k, padding=1)
        total = total + F.conv1d(flat, self.w.repeat(1, 2)[:, :6, None]).sum()
        return total + F.conv_transpose2d(image, self.t).sum()


def test_flops_of_graphs_and_of_python_code_agree() -> None:
    x = torch.randn(3, 2, 6, 4)
    graph = in_parts(Products(as_graph=True), x).report().parts[""]
    python = in_parts(Products(as_graph=False), x).report().parts[""]
    assert (graph.state, python.state) == ("captured", "python")
    assert graph.flops == python.flops > 0


def test_flops_of_recurrent_layers() -> None:
    x = torch.randn(3, 5, 8)
    gates = 4 * 16 * (8 + 16 + 16 + 16)
    report = in_parts(nn.LSTM(8, 16, num_layers=2, batch_first=True), x).report()
    assert report.parts[""].flops == 2 * 3 * 5 * gates
    assert in_parts(nn.GRUCell(8, 16), X).report().parts[""].flops == 2 * 6 * 3 * 16 * (8 + 16)


def test_an_error_of_the_model_leaves_no_watch_behind() -> None:
    class Failing(Glue):
        failing = True

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if self.failing:
                raise KeyError("the model's own")
            return out

    model = in_parts(Failing())
    with pytest.raises(KeyError, match="the model's own"):
        model(X)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    Failing.failing = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(X)
    assert model.report().parts["cell"].calls == 3


# ---------------------------------------------------------------------- block by block


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(models.Block() for _ in range(3))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


SEQUENCE = torch.randn(2, 5, 8)


@pytest.mark.parametrize("blocks", [models.Block, "blocks.*", ["blocks.0", "blocks.1", "blocks.2"], "Block"])
def test_each_block_becomes_a_graph_in_the_kept_tree(blocks: Any) -> None:
    reference = Stack()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for, so nothing to warn of
        model = ampfx.convert(copy.deepcopy(reference), (SEQUENCE,), dtype=torch.bfloat16, blocks=blocks)
    states = {path: part.state for path, part in model.report().parts.items()}
    assert states == {
        "": "python",
        "embed": "captured",
        "blocks.0": "captured",
        "blocks.1": "captured",
        "blocks.2": "captured",
    }
    assert model.report().coverage == 1.0
    assert "block by block" in model.report().coverage.reasons[""]
    assert error(model(SEQUENCE), reference(SEQUENCE)) < 2e-2


def test_blocks_can_be_hooked_checkpointed_and_frozen() -> None:
    model = ampfx.convert(Stack(), (SEQUENCE,), dtype=torch.bfloat16, blocks=models.Block)
    want = model(SEQUENCE)
    seen: list[torch.dtype] = []
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert torch.equal(model(SEQUENCE), want)
    assert seen == [torch.float32]
    handle.remove()
    model(SEQUENCE).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.recompute = True
    assert torch.equal(model(SEQUENCE), want)
    model(SEQUENCE).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))
    model.zero_grad()
    model.blocks[0].requires_grad_(False)
    model(SEQUENCE).sum().backward()
    assert all(parameter.grad is None for parameter in model.blocks[0].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[2].parameters())


def test_a_block_that_does_not_exist() -> None:
    with pytest.raises(ampfx.PolicyError, match=r"no module of Stack is 'block\.0'.*blocks\.0"):
        ampfx.convert(Stack(), (SEQUENCE,), dtype=torch.bfloat16, blocks="block.0")
    with pytest.raises(ampfx.PolicyError, match="GRUCell"):
        ampfx.convert(Stack(), (SEQUENCE,), dtype=torch.bfloat16, blocks=[nn.GRUCell])
    with pytest.raises(ampfx.PolicyError, match="neither a module type nor a glob"):
        ampfx.convert(Stack(), (SEQUENCE,), dtype=torch.bfloat16, blocks=[3])


def test_block_by_block_without_inputs() -> None:
    model = ampfx.convert(Stack(), dtype=torch.bfloat16, blocks=models.Block)
    assert model.report().coverage == 0.0
    assert {part.state for part in model.report().parts.values()} == {"python", "not called yet"}
    model(SEQUENCE)
    assert model.report().coverage == 1.0


def test_float16_blocks_train_with_the_optimizer() -> None:
    reference = Stack()
    model = ampfx.convert(copy.deepcopy(reference), (SEQUENCE,), dtype=torch.float16, blocks=models.Block)
    optimizer = ampfx.LossScaleOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(SEQUENCE).square().mean().backward()
    reference(SEQUENCE).square().mean().backward()
    assert_gradients(model, reference, 1e-2)
    optimizer.step()
    assert error(model(SEQUENCE), reference(SEQUENCE)) > 1e-4
