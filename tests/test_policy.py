"""Policies and overrides: what they select, and the sentences when they select nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from ampfx.errors import AmpfxError, PolicyError
from ampfx.ops import canonical_op
from ampfx.overrides import path_matches
from ampfx.policy import Override, Policy, check_matches, op_name, resolve_policy
from ampfx.rule_table import OpClass, Rule, RuleTable
from ampfx.rules import rules_for

LOW = torch.bfloat16
KNOWN = tuple(rules_for("cpu"))


class Block(torch.nn.Module):
    """A module type of the user's."""


def model_nodes() -> list[Node]:
    """Relu and softmax in layers.0.attn (attention in a Block), linear in head, add at the root."""
    graph = Graph()
    x = graph.placeholder("x")

    def call(target: Any, path: str, types: tuple[type, ...]) -> Node:
        node = graph.call_function(target, (x,))
        parts = path.split(".") if path else []
        node.meta["op"] = canonical_op(node)
        node.meta["module_path"] = path
        node.meta["module_stack"] = tuple(".".join(parts[:count]) for count in range(len(parts) + 1))
        node.meta["module_types"] = types
        return node

    attention = (Block, torch.nn.MultiheadAttention)
    call(F.relu, "layers.0.attn", attention)
    call(F.softmax, "layers.0.attn", attention)
    call(F.linear, "head", (torch.nn.Linear,))
    call(torch.add, "", ())
    return list(graph.nodes)


def selected(**selectors: Any) -> list[str]:
    override = Override(**selectors)
    return [node.name for node in model_nodes() if override.dtype_for(node, LOW) is not None]


# --- selecting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        ({"op": "relu"}, ["relu"]),
        ({"op": F.relu}, ["relu"]),
        ({"op": "torch.nn.functional.relu"}, ["relu"]),
        ({"op": "*"}, ["relu", "softmax", "linear", "add"]),
        ({"module": "layers.0.attn"}, ["relu", "softmax"]),
        ({"module": "layers"}, ["relu", "softmax"]),
        ({"module": "layers.*.attn"}, ["relu", "softmax"]),
        ({"module": "**.attn"}, ["relu", "softmax"]),
        ({"module": "*.attn"}, []),  # a star stays between two dots
        ({"module": ""}, ["relu", "softmax", "linear", "add"]),
        ({"module_type": torch.nn.Linear}, ["linear"]),
        ({"module_type": torch.nn.Module}, ["relu", "softmax", "linear"]),
        ({"module_type": "Block"}, ["relu", "softmax"]),
        ({"module_type": "torch.nn.MultiheadAttention"}, ["relu", "softmax"]),
        ({"node": "soft*"}, ["softmax"]),
        ({"predicate": lambda node: node.name == "add"}, ["add"]),
        ({"predicate": lambda node: torch.float32 if node.name == "add" else None}, ["add"]),
        ({"op": "softmax", "module": "layers"}, ["softmax"]),
        ({"op": "linear", "module": "layers"}, []),
    ],
)
def test_selectors(selectors: dict[str, Any], names: list[str]) -> None:
    assert selected(**selectors) == names


def test_in_place_form_is_selected_with_its_op() -> None:
    graph = Graph()
    node = graph.call_method("add_", (graph.placeholder("x"), 1))
    assert Override(op="add").matches(node)
    assert Override(op="add_").matches(node)


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [
        ("", "", True),
        ("a", "", False),
        ("a.b", "a.*", True),
        ("a.b.c", "a.*", False),
        ("a.b.c", "a.**", True),
        ("a", "a.**", True),
        ("a.b.c", "**.c", True),
        ("a.10.c", "a.1?.c", True),
        ("", "**", True),
    ],
)
def test_path_globs(path: str, pattern: str, matches: bool) -> None:
    assert path_matches(path, pattern) is matches


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("F.relu", "relu"),
        ("torch.Tensor.add_", "add_"),
        ("aten::mul.Tensor", "mul"),
        ("torch.fft.fft", "fft_fft"),
    ],
)
def test_op_names_in_any_spelling(given: str, name: str) -> None:
    assert op_name(given) == name


def test_dtypes() -> None:
    node = model_nodes()[1]
    assert Override(op="relu").dtype_for(node, LOW) is torch.float32
    assert Override(op="relu", dtype="low").dtype_for(node, torch.float16) is torch.float16
    assert Override(op="relu", dtype="bf16").dtype_for(node, LOW) is torch.bfloat16
    with pytest.raises(
        PolicyError,
        match=r"Override\(op='relu', dtype=float16\) asks for float16 in a conversion to bfloat16: "
        r'only bfloat16 and float32 are possible. Write dtype="low"',
    ):
        Override(op="relu", dtype=torch.float16).dtype_for(node, LOW)
    with pytest.raises(PolicyError, match="asks for float64 in a conversion"):
        Override(predicate=lambda node: torch.float64).dtype_for(node, LOW)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, "float64", "fast"])
def test_impossible_dtype_is_an_error(dtype: Any) -> None:
    with pytest.raises(
        PolicyError, match=r"a node runs either in float32 or in the low dtype. Give torch.float32"
    ):
        Override(op="relu", dtype=dtype)


def test_override_without_selector_is_an_error() -> None:
    with pytest.raises(PolicyError, match=r"An Override selects nothing. Give at least one of op=, module="):
        Override(dtype=torch.float32)


def test_unknown_torch_function_lists_near_ones() -> None:
    with pytest.raises(
        PolicyError, match=r"Op 'torch.sofmax' does not exist: torch has no 'sofmax'. Did you mean 'softmax'"
    ):
        Override(op="torch.sofmax")
    with pytest.raises(PolicyError, match="An op is named by a string or a function, not by 3"):
        Policy(deny=(3,))  # type: ignore[arg-type]


# --- policies ----------------------------------------------------------------------------------------


def test_resolve_policy() -> None:
    assert resolve_policy(None) == Policy(name="autocast")
    assert resolve_policy("relaxed").name == "relaxed"
    mine = Policy(deny=("gelu",))
    assert resolve_policy(mine) is mine
    with pytest.raises(PolicyError, match=r"policy= takes a name or an ampfx.Policy, not int"):
        resolve_policy(3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"Unknown policy 'autocats'. Did you mean 'autocast'\? Known: 'autocast', 'relaxed'"
    ):
        resolve_policy("autocats")
    assert issubclass(PolicyError, AmpfxError)


def test_an_op_in_two_lists_is_an_error() -> None:
    with pytest.raises(
        PolicyError, match=r"Op 'relu' stands twice in the policy: in allow= and in deny=. Remove one"
    ):
        Policy(allow=("relu",), deny=(F.relu,))  # type: ignore[arg-type]


def test_a_bare_string_is_no_list() -> None:
    with pytest.raises(PolicyError, match=r"deny= takes a list of ops. Write deny=\('relu',\)"):
        Policy(deny="relu")  # type: ignore[arg-type]


def test_overrides_must_be_overrides() -> None:
    with pytest.raises(PolicyError, match=r"overrides= takes ampfx.Override objects, not 'relu'"):
        Policy(overrides=("relu",))  # type: ignore[arg-type]


def test_lists_and_rows_lie_over_the_rules_of_the_device() -> None:
    policy = Policy(
        allow=("pow",),
        deny=("pad", "relu"),
        infer=("mymodule.fused",),
        rules=RuleTable([Rule("relu", OpClass.INFER, "r", "s"), Rule("tanh", OpClass.DENY, "mine", "s")]),
    )
    table = policy.apply_to(rules_for("cpu"))
    assert table["pow"].cls is OpClass.ALLOW
    assert table["pow"].fp16_hazard is None  # who allows it by name takes the hazard
    assert table["pad"].cls is table["pad_reflect"].cls is OpClass.DENY
    assert table["relu"].cls is OpClass.DENY
    assert not table["relu"].moves
    assert table["relu"].reason == "the policy puts it under deny"
    assert table["mymodule.fused"].cls is OpClass.INFER
    assert table["tanh"].reason == "mine"
    assert rules_for("cpu")["pow"].cls is OpClass.INFER
    assert Policy().apply_to(rules_for("cpu")) is rules_for("cpu")


def test_policy_survives_a_file() -> None:
    policy = Policy(
        name="relaxed",
        overrides=(
            Override(module="layers.*", op="softmax", dtype=torch.float32, reason="overflows"),
            Override(module_type="torch.nn.LayerNorm", dtype="low"),
            Override(node="add_3", dtype="float16"),
        ),
        allow=("gelu",),
        rules=RuleTable([Rule("my::op", OpClass.INFER, "r", "s", keep=("w",), params=("x", "w"))]),
    )
    data = policy.to_dict()
    assert Policy.from_dict(data) == policy
    assert data["overrides"][0] == {
        "op": "softmax",
        "module": "layers.*",
        "dtype": "float32",
        "reason": "overflows",
    }
    assert Policy().to_dict() == {"name": "autocast"}
    assert Override.from_dict(Override(module_type=torch.nn.Linear).to_dict()).matches(model_nodes()[3])


def test_files_with_mistakes() -> None:
    with pytest.raises(
        PolicyError, match=r"'overides' is no setting of a policy. Did you mean 'overrides'\? Known: allow"
    ):
        Policy.from_dict({"overides": []})
    with pytest.raises(PolicyError, match=r"'modul' is no setting of an override. Did you mean 'module"):
        Policy.from_dict({"overrides": [{"modul": "a"}]})
    with pytest.raises(
        PolicyError, match=r"A rule needs op, cls \(allow, deny, infer, clear\), reason and source"
    ):
        Policy.from_dict({"rules": [{"op": "x", "cls": "white", "reason": "r", "source": "s"}]})
    with pytest.raises(PolicyError, match="has a predicate: code cannot be written to a file"):
        Policy(overrides=(Override(predicate=lambda node: True),)).to_dict()


# --- what matches nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selectors", "sentence"),
    [
        ({"op": "sofmax"}, r"No node has the op 'sofmax'. Did you mean 'softmax'"),
        ({"module": "layer.0"}, r"inside a module 'layer.0'. Did you mean 'layers.0'"),
        (
            {"module": "attn"},
            r"Did you mean 'layers.0.attn'\? Parts are matched from the root; '\*\*' skips parts.",
        ),
        (
            {"module_type": "Linaer"},
            r"No operation runs inside a module of type 'Linaer'. Did you mean 'Linear'\?",
        ),
        ({"module_type": torch.nn.LSTM}, r"No operation runs inside a module of type 'LSTM'"),
        ({"node": "softmax_1"}, r"No node is named 'softmax_1'. Did you mean 'softmax'\?"),
        (
            {"op": "linear", "module": "layers"},
            r"Each of op, module selects nodes, but no node has them all.",
        ),
        ({"predicate": lambda node: False}, r"The predicate was false for every node."),
    ],
)
def test_an_override_that_selects_nothing(selectors: dict[str, Any], sentence: str) -> None:
    policy = Policy(overrides=(Override(op="relu"), Override(**selectors)))
    with pytest.raises(
        PolicyError, match=r"\(number 2 in the policy\) selects no node of this model. .*" + sentence
    ):
        check_matches(policy, model_nodes(), KNOWN)


def test_an_op_that_nobody_knows() -> None:
    with pytest.raises(
        PolicyError,
        match=r"The policy's deny= names the op 'layernorm', which is neither known nor in this model. "
        r"Did you mean .*'layer_norm'",
    ):
        check_matches(Policy(deny=("layernorm",)), model_nodes(), KNOWN)


def test_a_known_op_that_the_model_does_not_use_is_a_warning() -> None:
    warnings = check_matches(Policy(deny=("gelu", "relu")), model_nodes(), KNOWN)
    assert warnings == ["The policy's deny= names 'gelu', but this model does not use it."]


def test_the_wrong_low_dtype_is_found_before_any_node() -> None:
    policy = Policy(overrides=(Override(op="relu", dtype=torch.float16),))
    with pytest.raises(PolicyError, match="asks for float16 in a conversion to bfloat16"):
        check_matches(policy, model_nodes(), KNOWN, low=torch.bfloat16)
    assert check_matches(policy, model_nodes(), KNOWN, low=torch.float16) == []


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"module_type": 5}, "module_type= is a class of modules or its name, not 5"),
        ({"module_type": int}, "module_type= is a class of modules, which int is not"),
        ({"module_type": torch.nn.Linear(2, 2)}, "not an instance of Linear.*module_type=Linear"),
        ({"module": 5}, "module= is a glob such as 'layers.\\*', not 5"),
        ({"module": torch.nn.Linear}, "module_type=Linear"),
        ({"module": torch.nn.Linear(2, 2)}, "module_type=Linear"),
        ({"node": 5}, "node= is a glob"),
        ({"op": torch.nn.Linear}, "is a module type, not an op. Write Override.module_type=Linear"),
        ({"op": 5}, "named by a string or a function, not by 5"),
        ({"op": ""}, "op= is empty"),
        ({"node": ""}, "node= is empty"),
        ({"module_type": ""}, "module_type= is empty"),
        ({"predicate": "x"}, "predicate= is a function of a node, not 'x'"),
        ({"predicate": lambda: True}, "does not take: too many positional arguments"),
        ({"predicate": lambda a, b: True}, "does not take: missing a required argument: 'b'"),
        ({"op": "add", "reason": 5}, "reason= is a string, not 5"),
    ],
)
def test_arguments_of_the_wrong_type(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        Override(**wrong)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"overrides": Override(op="add")}, r"Write overrides=\(Override\(...\),\)"),
        ({"overrides": 5}, "overrides= takes a list of ampfx.Override objects, not 5"),
        ({"overrides": ("add",)}, "overrides= takes ampfx.Override objects, not 'add'"),
        ({"deny": 5}, "deny= takes a list of ops, not 5"),
        ({"deny": (torch.nn.Linear,)}, "is a module type, not an op"),
    ],
)
def test_a_policys_arguments_of_the_wrong_type(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        Policy(**wrong)


def test_a_module_path_may_be_empty() -> None:
    assert Override(module="").module == ""  # the whole model
