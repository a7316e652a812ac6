"""The report and the explanations: what they count, what they say, and how they look."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden import assert_golden
from graph_builder import PASSES, build
from torch import nn
from torch.fx import GraphModule

import ampfx
from ampfx.context import ConversionContext
from ampfx.errors import AmpfxError
from ampfx.loss_scale import LossScale
from ampfx.measure import count_step
from ampfx.passes import DEFAULT_PASSES, PassManager
from ampfx.policy import Override, Policy
from ampfx.report import Report, build_report, explain
from ampfx.text_layout import byte_count


class Gate(nn.Module):
    """A residual sum, a norm and a loss over a product."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.proj(x))
        return torch.log_softmax(self.head(h + x), -1).exp()


def lower(
    function: Any, *inputs: Any, low: torch.dtype = torch.bfloat16, passes: Any = PASSES, **options: Any
) -> tuple[GraphModule, ConversionContext]:
    gm = build(function, *inputs)
    ctx = ConversionContext(low_dtype=low, **options)
    PassManager(passes).run(gm, ctx)
    return gm, ctx


def report_of(function: Any, *inputs: Any, **options: Any) -> Report:
    return build_report(*lower(function, *inputs, **options), title=type(function).__name__)


def check_text(text: str) -> None:
    assert max(map(len, text.splitlines())) <= 80
    assert "0x" not in text


X = torch.randn(2, 8)


# --- nodes ------------------------------------------------------------------------------------------


def test_a_node_says_what_it_is_and_why() -> None:
    report = report_of(Gate(), X)
    linear = report.nodes["linear"]
    assert (linear.op, linear.dtype, linear.torch_dtype) == ("linear", "bf16", torch.bfloat16)
    assert (linear.cls, linear.kind, linear.role) == ("allow", "rule", "op")
    assert linear.shape == (2, 8)
    assert linear.reason == "matrix product, accumulated in float32"
    assert linear.rule_source
    assert linear.autocast_dtype == "bf16"
    add = report.nodes["add"]
    assert (add.dtype, add.chain, add.cause) == ("f32", ("add", "x"), "x")


def test_nodes_are_found_by_name_and_stand_in_order() -> None:
    report = report_of(Gate(), X)
    names = [node.name for node in report.nodes]
    assert names == list(report.nodes.keys())
    assert len(set(names)) == len(report.nodes) == len(list(report.nodes.values()))
    assert dict(report.nodes.items())["add"] is report.nodes["add"]
    present: object = "add"
    absent: object = "nobody"
    assert present in report.nodes
    assert absent not in report.nodes
    assert report.nodes["add"] in report.nodes
    assert report.nodes.get("nobody") is None
    with pytest.raises(KeyError):
        report.nodes["nobody"]
    assert report.nodes[0].name == names[0]
    assert len(report.nodes[:2]) == 2


def test_inserted_casts_are_marked() -> None:
    report = report_of(Gate(), X)
    cast = report.nodes["x_low"]
    assert (cast.role, cast.kind, cast.cls, cast.inserted) == ("cast", "cast", "cast", True)
    assert not report.nodes["linear"].inserted


def test_scale_nodes_are_marked_and_explained() -> None:
    scale = LossScale().module_scale()
    gm, ctx = lower(Gate(), X, low=torch.float16, passes=DEFAULT_PASSES, loss_scale=scale)
    report = build_report(gm, ctx, title="Gate")
    scales = [node for node in report.nodes if node.role == "scale"]
    assert {"unscale_cast", "scale", "getitem", ""} <= {
        node.op if node.op != "attribute" else "" for node in scales
    }
    assert all(node.inserted and node.kind == "scale" and node.cls == "scale" for node in scales)
    reasons = {node.reason for node in scales}
    assert "proj.weight enters in f16, and its gradient is divided by S" in reasons
    assert "the loss scale S" in reasons
    assert any(reason.endswith("its gradient is multiplied by S") for reason in reasons)
    assert report.loss_scale == "dynamic"
    entered = next(node.name for node in scales if node.reason.startswith("proj.weight enters"))
    assert str(explain(gm, ctx, entered)).startswith(f"{entered}: proj.weight enters in f16")


@pytest.mark.parametrize(
    ("scale", "words"),
    [(None, "none"), (LossScale.static(256.0), "static 256"), (LossScale.disabled(), "disabled")],
)
def test_the_loss_scale_in_words(scale: LossScale | None, words: str) -> None:
    gm, ctx = lower(Gate(), X)
    ctx.loss_scale = scale
    assert f"loss scale {words}" in " ".join(str(build_report(gm, ctx, title="Gate")).split())


# --- casts ------------------------------------------------------------------------------------------


def test_casts_and_their_bytes_are_counted() -> None:
    report = report_of(Gate(), X)
    inserted = [node for node in report.nodes if node.role == "cast"]
    assert report.casts == len(inserted)
    elements = sum(torch.Size(node.shape or ()).numel() for node in inserted)
    assert report.cast_bytes == elements * (4 + 2)
    assert {cast.value for cast in report.cast_list if cast.content == "weights"} == {
        "proj.weight",
        "proj.bias",
        "head.weight",
        "head.bias",
    }


def test_fused_casts_count_as_casts_each() -> None:
    plain = report_of(Gate(), X, low=torch.float16, passes=DEFAULT_PASSES)
    scale = LossScale().module_scale()
    scaled = report_of(Gate(), X, low=torch.float16, passes=DEFAULT_PASSES, loss_scale=scale)
    assert scaled.casts == plain.casts
    assert scaled.cast_bytes == plain.cast_bytes
    fused = [cast for cast in scaled.cast_list if cast.how == "fused"]
    assert {"proj.weight", "head.bias"} <= {cast.value for cast in fused}
    assert {cast.module_path for cast in fused if cast.content == "weights"} == {"proj", "head"}


def test_dtype_arguments_and_author_casts_are_counted_apart() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.fc(x)
            mean: torch.Tensor = self.fc(h).double().mean()
            return h.sum(-1) + mean

    report = report_of(Mean(), X)
    told = [cast.node for cast in report.cast_list if cast.how == "dtype argument"]
    assert report.dtype_arguments == len(told) == 1
    assert report.nodes[told[0]].op == "sum"
    assert report.author_casts == 1
    assert report.casts == sum(node.role == "cast" for node in report.nodes)
    text = str(report)
    assert "convert while they read (dtype= arguments)" in text
    assert "were written by the model's author" in text


# --- what stands out --------------------------------------------------------------------------------


def test_unlisted_ops_are_named() -> None:
    report = report_of(torch.special.airy_ai, X)
    ((op, names),) = report.unlisted.items()
    assert op == "special_airy_ai"
    assert [report.nodes[name].op for name in names] == [op]
    assert f"{op}: {names[0]}" in str(report)


def test_unlisted_ops_of_another_graph_are_not_named() -> None:
    gm, ctx = lower(Gate(), X)
    ctx.unlisted = {"mystery": ["linear", "elsewhere"]}
    assert build_report(gm, ctx, title="Gate").unlisted == {}


def test_what_is_more_precise_than_autocast_is_listed() -> None:
    policy = Policy(overrides=(Override(op="linear", dtype=torch.float32, reason="I say so"),))
    report = report_of(Gate(), X, policy=policy)
    raised = [node.name for node in report.raised]
    assert {"linear", "linear_1"} <= set(raised)
    text = str(report)
    assert "policy autocast with 1 override" in text
    assert f"More precise than under torch.autocast: {len(raised)}" in text
    assert "linear: I say so" in text


def test_what_is_less_precise_than_autocast_is_listed() -> None:
    def residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(x) + F.linear(x, w), w)

    w = torch.randn(8, 8, requires_grad=True)
    assert report_of(residual, X, w).lowered == ()
    report = report_of(residual, X, w, policy="relaxed")
    assert "add" in [node.name for node in report.lowered]
    assert "policy relaxed allows it" in str(report)
    moved = report_of(lambda x, w: F.linear(x, w) + F.linear(x.t(), w), torch.randn(8, 8), w)
    assert [node.name for node in moved.lowered] == ["t"]
    assert "t: they only move values" in str(moved)
    override = Policy(overrides=(Override(op="exp", dtype="low"),))
    report = report_of(Gate(), X, policy=override, device_type="cuda")
    assert [node.name for node in report.lowered if node.kind == "override"] == ["exp"]
    assert "exp: overrides ask for it" in str(report)


def test_warnings_and_notes_are_shown_once() -> None:
    gm, ctx = lower(Gate(), X)
    ctx.warnings += ["take care " * 20, "take care " * 20]
    report = build_report(gm, ctx, title="Gate", notes=["a remark"])
    assert len(report.warnings) == 1
    text = str(report)
    assert "Warnings: 1" in text
    assert "- a remark" in text
    check_text(text)


# --- text and data ----------------------------------------------------------------------------------


def test_the_text_of_a_report() -> None:
    gm, ctx = lower(Gate(), X)
    report = build_report(gm, ctx, title="Gate", inputs="x: f32[2, 8]")
    check_text(str(report))
    assert_golden(
        str(report),
        """
        Mixed precision of Gate, train graph
          low dtype bf16 on cpu, policy autocast, objective casts, loss scale none
          recorded with x: f32[2, 8]
          100% of the operations stand in the graph

        Operations: 6
          dtype  3 bf16, 3 f32
          class  3 infer, 2 allow, 1 clear

        Casts in one forward pass: 6, 840 B read and written
              4  weights to bf16               648 B
              2  activations to bf16           192 B
              1  more convert while they read (dtype= arguments)

        Operations in float32, by reason: 3
              1  reads a value in float32
                 e.g. add, because of x: an input has the dtype that it arrives in
              1  float32 as its reader is: bfloat16 would move no fewer bytes in casts
                 e.g. log_softmax
              1  its result leaves in float32, and a cast before it would move no fewer
                 bytes
                 e.g. exp

        More precise than under torch.autocast: 2
          log_softmax: float32 as its reader exp is: bfloat16 would move no fewer bytes
            in casts
          exp: its result leaves in float32, and a cast before it would move no fewer
            bytes
        """,
    )


def test_lines_stay_short_whatever_the_names() -> None:
    gm, ctx = lower(Gate(), X)
    for node in gm.graph.nodes:
        node.meta["module_path"] = ".".join(f"a_rather_long_block_name_{i}" for i in range(9))
        node.meta["source"] = (
            "a_file_with_a_name_that_never_ends_and_goes_on_and_on_and_on_and_on_to_here.py:12345"
        )
    report = build_report(gm, ctx, title="M" * 100, inputs="x" * 200)
    check_text(str(report))
    for name in ("add", "a_rather_long_block_name_0", ""):
        check_text(str(explain(gm, ctx, name)))


def test_a_report_is_data() -> None:
    report = report_of(Gate(), X)
    data = json.loads(report.to_json())
    assert data == report.to_dict()
    assert data["casts"] == report.casts
    assert [node["name"] for node in data["nodes"]] == [node.name for node in report.nodes]
    (linear,) = (node for node in data["nodes"] if node["name"] == "linear")
    assert (linear["dtype"], linear["class"], linear["inserted"]) == ("bf16", "allow", False)


def test_reports_and_explanations_survive_pickling() -> None:
    gm, ctx = lower(Gate(), X)
    report = build_report(gm, ctx, title="Gate")
    twin = pickle.loads(pickle.dumps(report))
    assert twin == report
    assert str(twin) == str(report)
    explanation = explain(gm, ctx, "add")
    assert pickle.loads(pickle.dumps(explanation)) == explanation


def test_the_module_table_is_cut_to_the_largest() -> None:
    gm, ctx = lower(nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))), X)
    for index, node in enumerate(n for n in gm.graph.nodes if n.meta["op"] == "linear"):
        node.meta["module_path"] = str(index)
    text = str(build_report(gm, ctx, title="Deep"))
    assert "and 21 smaller modules" in text
    check_text(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (20_300_000, "20.3 MB")]
)
def test_byte_counts(count: int, text: str) -> None:
    assert byte_count(count) == text


# --- explanations -----------------------------------------------------------------------------------


def test_a_float32_node_is_followed_to_its_cause() -> None:
    gm, ctx = lower(lambda x: x.exp() + torch.relu(x), X, device_type="cuda")
    explanation = explain(gm, ctx, "add")
    assert [step.name for step in explanation.steps] == ["add", "exp"]
    assert explanation.cause is not None
    assert explanation.cause.kind == "rule"
    text = str(explanation)
    assert text.startswith("add runs in f32 (infer): reads exp in float32.")
    assert "The cause is the rule for exp" in text
    data = explanation.to_dict()
    assert [step["node"] for step in data["steps"]] == ["add", "exp"]
    assert data["steps"][-1]["kind"] == "rule"
    json.dumps(data)


def test_an_override_is_the_cause() -> None:
    policy = Policy(overrides=(Override(op="linear", dtype=torch.float32, reason="overflows here"),))
    gm, ctx = lower(lambda x, w: torch.relu(F.linear(x, w)), X, torch.randn(8, 8), policy=policy)
    explanation = explain(gm, ctx, "relu")
    assert [(step.name, step.kind) for step in explanation.steps][-1] == ("linear", "override")
    assert "overflows here" in str(explanation)
    assert "The cause is an override of the policy." in str(explanation)
    assert "torch.autocast would run it in bf16." in str(explain(gm, ctx, "linear"))


def test_a_low_node_and_a_cast_are_explained() -> None:
    gm, ctx = lower(Gate(), X)
    assert "torch.autocast does the same." in str(explain(gm, ctx, "linear"))
    cast = explain(gm, ctx, "x_low")
    assert str(cast).startswith("x_low is a cast to bf16: linear reads x in bfloat16.")
    assert [step.name for step in cast.steps] == ["x_low", "linear"]


def test_a_parameter_is_found_by_its_name() -> None:
    gm, ctx = lower(Gate(), X)
    explanation = explain(gm, ctx, "proj.weight")
    assert explanation.nodes[0].role == "attribute"
    assert "parameters and buffers stay float32" in str(explanation)
    assert [cast.to_dtype for cast in explanation.casts] == ["bf16"]


def test_a_long_chain_is_followed_in_data_and_cut_in_text() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        for _ in range(30):
            h = h + 1
        return h

    gm, ctx = lower(deep, X, device_type="cuda")
    explanation = explain(gm, ctx, "add_29")
    assert len(explanation.steps) == 31
    assert explanation.steps[-1].name == "exp"
    text = str(explanation)
    assert "... 19 more steps" in text
    assert "- exp is f32" in text
    assert len(text.splitlines()) < 20


def test_an_unknown_name_lists_near_ones() -> None:
    gm, ctx = lower(Gate(), X)
    with pytest.raises(AmpfxError, match=r"is named 'liner'\. Did you mean 'linear'"):
        explain(gm, ctx, "liner")
    with pytest.raises(LookupError, match=r"named '~'\. report\(\)\.nodes lists"):
        explain(gm, ctx, "~")


# --- converted models -------------------------------------------------------------------------------


def test_a_converted_mlp() -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softmax(-1))
    model = ampfx.convert(net, (X,), dtype=torch.bfloat16)
    report = model.report()
    assert report.casts == 5
    assert report.cast_bytes == 6 * (X.numel() + sum(p.numel() for p in net.parameters()))
    assert report.nodes["linear"].module_path == "0"
    assert report.nodes["linear"].dtype == "bf16"
    assert report.coverage == 1.0
    assert "Sequential" in str(report)
    check_text(str(report))
    first = model.explain("0")
    assert first.found == "module"
    assert str(first).startswith("0 has 1 operation: 1 in bf16, 0 in f32; 3 casts.")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_a_converted_transformer(low: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    x = torch.randn(2, 5, 16)
    model = ampfx.convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (x,), dtype=low)
    report = model.report()
    check_text(str(report))
    by_path = {module.path: module for module in report.modules}
    attention = by_path["layers.1.self_attn"]
    assert attention.nodes > attention.low > 0
    assert attention.casts >= 4
    assert by_path[""].casts == report.casts
    assert by_path[""].nodes == by_path["layers.0"].nodes + by_path["layers.1"].nodes
    assert json.loads(report.to_json())["nodes"]
    for node in report.nodes:
        explanation = model.explain(node.name)
        assert explanation.steps[0] == node
        if node.is_float32:
            assert explanation.cause is not None
            assert explanation.cause.kind in ("rule", "input", "hazard", "cut", "author", "override")
        check_text(str(explanation))
    text = str(model.explain("layers.0"))
    assert text.startswith("layers.0 has ")
    assert "- add" in text
    check_text(text)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_the_counts_are_what_a_forward_pass_dispatches(low: torch.dtype) -> None:
    # With dropout, attention runs on the CPU in several kernels that cast between them.
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    model = ampfx.convert(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (x,), dtype=low)
    counted = count_step(lambda: model(x))
    report = model.report()
    assert report.dtype_arguments == report.author_casts == 0
    assert (report.casts, report.cast_bytes) == (counted.casts, counted.cast_bytes)


def test_train_and_eval_have_reports_of_their_own() -> None:
    model = ampfx.convert(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), (X,), dtype=torch.bfloat16)
    assert "train graph" in str(model.report())
    model.eval()
    model(X)
    report = model.report()
    assert report.mode == "eval"
    assert "eval graph" in str(report)
