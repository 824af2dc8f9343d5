"""Units: which parameters travel together. Pure; works on a description of the module tree, not on modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from naught.layout import Layout, lay_out

__all__ = ["UNIT", "Node", "Param", "SegmentKey", "UnitRules", "UnitSpec", "find_units", "segments"]

# Groups of like children are rows of blocks if they hold this share of their parent's parameters together, and each
# a part of it: two small norms beside the blocks are none.
_BLOCK_SHARE = 1 / 4
_GROUP_SHARE = 1 / 16
# A module is a stack if one list of blocks holds at least this share of it.
_STACK_SHARE = 1 / 2
_LISTS = ("ModuleList", "Sequential")
# Modules whose parameters others read without calling them: they belong to whoever does.
_NEVER_CALLED = ("ParameterList", "ParameterDict", "NonDynamicallyQuantizableLinear")
UNIT = "a unit"  # the kind of a module that is one wherever it is, also inside of another; layers in it are none
# A single layer outside the blocks (an embedding, a head) is a unit of its own from this share of a block.
_LAYER_SHARE = 1 / 8


@dataclass(frozen=True)
class Param:
    """A parameter under one of its names; two names with one key are one tied parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    key: int
    repeated: bool = False  # all ranks that have a model together have it; without such ranks, nothing is

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Node:
    """A module: its full name, its class, its own parameters and its children, in definition order."""

    name: str
    kind: str
    params: tuple[Param, ...] = ()
    children: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    def numel(self) -> int:
        """Elements below this module, tied parameters once."""
        return sum({param.key: param.numel for node in self.walk() for param in node.params}.values())


@dataclass(frozen=True)
class UnitRules:
    """Modules that the user wants as units, by class, full name or end of the name. They win over what is found."""

    classes: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    suffixes: frozenset[str] = frozenset()
    automatic: bool = True

    def match(self, node: Node) -> bool:
        return (
            node.kind in self.classes
            or node.name in self.names
            or any(node.name == suffix or node.name.endswith(f".{suffix}") for suffix in self.suffixes)
        )


@dataclass(frozen=True)
class UnitSpec:
    """A unit: the module it is named after ("" is the root) and the parameters that live in it."""

    name: str
    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


def find_units(root: Node, rules: UnitRules | None = None) -> tuple[UnitSpec, ...]:
    """Assign each parameter to one unit: the deepest one that contains all of its uses.

    Units are the modules that the rules name, else the model's repeated blocks, else layers that weigh
    as much as a good part of a block; what is left belongs to the root.
    """
    rules = rules or UnitRules()
    blocks = _blocks(root, rules)
    tiles = {node.name for node in root.walk() if node.kind == UNIT}
    homes = {"", *blocks, *_layers(root, blocks, rules), *tiles}
    uses: dict[int, list[str]] = defaultdict(list)
    params: dict[int, Param] = {}
    for node in root.walk():
        for param in node.params:
            uses[param.key].append(node.name)
            params.setdefault(param.key, param)
    members: dict[str, list[Param]] = defaultdict(list)
    for key, param in params.items():
        members[_home(uses[key], homes)].append(param)
    return tuple(UnitSpec(node.name, tuple(members[node.name])) for node in root.walk() if node.name in members)


def _blocks(root: Node, rules: UnitRules) -> set[str]:
    """The modules that a rule names, and the outermost ones that stand in a row of like siblings around none of those."""
    found: set[str] = set()

    def visit(node: Node) -> None:
        row = _row(node) if rules.automatic else ()
        for child in node.children:
            named_within = any(rules.match(inner) for inner in child.walk() if inner is not child)
            if rules.match(child) or (not named_within and any(child is block for block in row)):
                found.add(child.name)
            else:
                visit(child)

    visit(root)
    return found


def _row(node: Node) -> tuple[Node, ...]:
    """The children that have siblings of their class and make up much of a module."""
    kinds: dict[str, list[Node]] = defaultdict(list)
    for child in node.children:
        kinds[child.kind].append(child)
    whole = node.numel()
    groups = [
        group
        for group in kinds.values()
        if len(group) > 1 and sum(child.numel() for child in group) >= max(1, _GROUP_SHARE * whole)
    ]
    row = tuple(child for group in groups for child in group)
    if not row or sum(child.numel() for child in row) < _BLOCK_SHARE * whole:
        return ()
    return () if any(_is_stack(child, siblings=len(row)) for child in row) else row


def _is_stack(node: Node, *, siblings: int) -> bool:
    """Whether a module is mostly a list of blocks, as an encoder is. Two encoders of twelve layers are twenty-four
    blocks, but a block with eight experts is one: experts are made of layers, blocks mostly of modules."""
    lists = [child for child in node.children if child.kind in _LISTS and len(child.children) > 1]
    heaviest = max(lists, key=Node.numel, default=None)
    if heaviest is None or heaviest.numel() < _STACK_SHARE * node.numel():
        return False
    composite = all(any(inner.children for inner in block.children) for block in heaviest.children)
    return composite or siblings <= 2 < len(heaviest.children)


def _layers(root: Node, blocks: set[str], rules: UnitRules) -> set[str]:
    """Layers outside the blocks that are heavy enough to be worth a unit."""
    if not rules.automatic:
        return set()
    heaviest = max((node.numel() for node in root.walk() if node.name in blocks), default=root.numel() // 8)
    found: set[str] = set()

    def visit(node: Node) -> None:
        for child in node.children:
            if child.name in blocks or child.kind == UNIT:
                continue
            called = child.kind not in _NEVER_CALLED
            if called and not child.children and child.params and child.numel() >= max(1, _LAYER_SHARE * heaviest):
                found.add(child.name)
            visit(child)

    visit(root)
    return found


def _home(uses: list[str], homes: set[str]) -> str:
    """The deepest unit on the path that all uses share."""
    paths = [name.split(".") if name else [] for name in uses]
    shared = 0
    while all(len(path) > shared for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    for depth in range(shared, -1, -1):
        name = ".".join(paths[0][:depth])
        if name in homes:
            return name
    raise AssertionError("the root is always a unit")


@dataclass(frozen=True)
class SegmentKey:
    """What the parameters of one flat must share."""

    dtype: str
    trainable: bool
    repeated: bool = False


def segments(unit: UnitSpec, *, world: int) -> dict[SegmentKey, Layout]:
    """One layout for each of what parameters of a unit must share, in order of first appearance."""
    members: dict[SegmentKey, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for param in unit.params:
        members[SegmentKey(param.dtype, param.trainable, param.repeated)].append((param.name, param.shape))
    return {key: lay_out(params, world=world) for key, params in members.items()}
