"""Every parameter gets one home: blocks are found, ties go to what contains all their uses, rules win."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from naught.units import Node, Param, SegmentKey, UnitRules, UnitSpec, find_units, segments

KEYS = iter(range(10**9))


def leaf(name: str, numel: int, *, kind: str = "Linear", key: int | None = None, dtype: str = "float32", trainable=True) -> Node:
    param = Param(f"{name}.weight", (numel,), dtype, trainable, next(KEYS) if key is None else key)
    return Node(name, kind, (param,))


def block(name: str, numel: int = 100, inner: str = "fc", kind: str = "Block") -> Node:
    return Node(name, kind, (), (leaf(f"{name}.{inner}", numel), leaf(f"{name}.norm", 2, kind="Norm")))


def row(name: str, blocks: int, **options) -> Node:
    return Node(name, "ModuleList", (), tuple(block(f"{name}.{at}", **options) for at in range(blocks)))


def names(units: tuple[UnitSpec, ...]) -> list[str]:
    return [unit.name for unit in units]


def test_repeated_blocks_heavy_layers_and_a_root_for_the_rest():
    model = Node("", "GPT", (), (leaf("tok", 500, kind="Embedding"), row("h", 3), leaf("ln", 2, kind="Norm"), leaf("head", 500)))
    units = find_units(model)
    assert names(units) == ["", "tok", "h.0", "h.1", "h.2", "head"]
    assert [param.name for param in units[0].params] == ["ln.weight"]


def test_a_tied_weight_lives_in_the_deepest_unit_that_contains_its_uses():
    model = Node("", "GPT", (), (leaf("tok", 500, key=-1), row("h", 2), leaf("head", 500, key=-1)))
    units = {unit.name: unit for unit in find_units(model)}
    assert [param.name for param in units[""].params] == ["tok.weight"]
    within = Node("h.0", "Block", (), (leaf("h.0.a", 100, key=-2), leaf("h.0.b", 100, key=-2)))
    model = Node("", "GPT", (), (Node("h", "ModuleList", (), (within, block("h.1"))),))
    units = {unit.name: unit for unit in find_units(model)}
    assert [param.name for param in units["h.0"].params] == ["h.0.a.weight"]


def test_two_stacks_are_rows_of_blocks_and_not_two_units():
    stacks = tuple(Node(side, "Stack", (), (row(f"{side}.layers", 6),)) for side in ("encoder", "decoder"))
    units = find_units(Node("", "Seq2Seq", (), stacks))
    assert names(units) == [f"{side}.layers.{at}" for side in ("encoder", "decoder") for at in range(6)]


@pytest.mark.parametrize(("layers", "experts"), [(6, 3), (3, 64), (27, 64)])
def test_experts_stay_inside_their_block(layers, experts):
    def moe(name: str) -> Node:
        return Node(name, "Block", (), (leaf(f"{name}.router", 4), row(f"{name}.experts", experts, kind="Expert")))

    model = Node("", "MoE", (), (Node("h", "ModuleList", (), tuple(moe(f"h.{at}") for at in range(layers))),))
    assert names(find_units(model)) == [f"h.{at}" for at in range(layers)]


@pytest.mark.parametrize("layers", [2, 3, 12])
def test_projections_of_a_short_model_stay_inside_their_block(layers):
    def attention(name: str) -> Node:
        inner = Node(f"{name}.attn", "Attention", (), tuple(leaf(f"{name}.attn.{part}", 50) for part in "qkvo"))
        return Node(name, "Block", (), (inner, Node(f"{name}.mlp", "Mlp", (), (leaf(f"{name}.mlp.up", 90),))))

    model = Node("", "Llama", (), (Node("h", "ModuleList", (), tuple(attention(f"h.{at}") for at in range(layers))),))
    assert names(find_units(model)) == [f"h.{at}" for at in range(layers)]


def test_blocks_of_two_classes_in_one_list_are_all_units():
    layers = tuple(block(f"h.{at}", kind="Attention" if at % 4 == 3 else "Mamba") for at in range(8))
    model = Node("", "Hybrid", (), (Node("h", "ModuleList", (), layers),))
    assert names(find_units(model)) == [f"h.{at}" for at in range(8)]


def test_small_twins_are_not_blocks():
    model = Node("", "Net", (), (leaf("a", 2, kind="Norm"), leaf("b", 2, kind="Norm"), row("h", 4)))
    assert names(find_units(model)) == ["", "h.0", "h.1", "h.2", "h.3"]


def test_rules_win_over_what_is_found_and_can_stand_alone():
    model = Node("", "GPT", (), (leaf("tok", 500, kind="Embedding"), row("h", 3), leaf("head", 500)))
    whole = find_units(model, UnitRules(names=frozenset({"h"})))
    assert names(whole) == ["tok", "h", "head"]
    only = find_units(model, UnitRules(classes=frozenset({"Block"}), automatic=False))
    assert names(only) == ["", "h.0", "h.1", "h.2"]
    ends = find_units(model, UnitRules(suffixes=frozenset({"fc"}), automatic=False))
    assert names(ends) == ["", "h.0.fc", "h.1.fc", "h.2.fc"]


def test_a_rule_may_name_a_module_inside_a_block():
    model = Node("", "GPT", (), (row("h", 3),))
    units = find_units(model, UnitRules(names=frozenset({"h.1.fc"})))
    assert names(units) == ["", "h.0", "h.1.fc", "h.2"]
    assert [param.name for param in units[0].params] == ["h.1.norm.weight"]


def test_a_model_without_parameters_has_no_units():
    assert find_units(Node("", "Nothing")) == ()


@st.composite
def trees(draw, name: str = "", depth: int = 0) -> Node:
    keys = st.integers(0, 5) if draw(st.booleans()) else st.integers(6, 10**6)
    params = []
    for at in range(draw(st.integers(0, 2))):
        key = draw(keys)
        params.append(Param(f"{name}.p{at}".removeprefix("."), (key % 7 + 1,), "float32", True, key))
    kinds = st.sampled_from(["A", "B", "C"])
    children = []
    for at in range(draw(st.integers(0, 3)) if depth < 3 else 0):
        children.append(draw(trees(f"{name}.c{at}".removeprefix("."), depth + 1)))
    return Node(name, draw(kinds), tuple(params), tuple(children))


@given(trees(), st.booleans(), st.sets(st.sampled_from(["A", "B", "C"])))
def test_every_parameter_has_exactly_one_home_that_contains_all_its_uses(tree, automatic, classes):
    units = find_units(tree, UnitRules(classes=frozenset(classes), automatic=automatic))
    homes = Counter(param.key for unit in units for param in unit.params)
    uses: dict[int, list[str]] = {}
    for node in tree.walk():
        for param in node.params:
            uses.setdefault(param.key, []).append(node.name)
    assert homes == dict.fromkeys(uses, 1)
    for unit in units:
        for param in unit.params:
            for use in uses[param.key]:
                assert not unit.name or use == unit.name or use.startswith(f"{unit.name}.")


def test_segments_part_dtypes_and_frozen_parameters():
    params = (
        Param("a", (3,), "float32", True, 0),
        Param("b", (5,), "bfloat16", True, 1),
        Param("c", (7,), "float32", False, 2),
        Param("d", (9,), "float32", True, 3),
    )
    found = segments(UnitSpec("u", params), world=2)
    assert {key: [slot.name for slot in layout.slots] for key, layout in found.items()} == {
        SegmentKey("float32", True): ["a", "d"],
        SegmentKey("bfloat16", True): ["b"],
        SegmentKey("float32", False): ["c"],
    }
