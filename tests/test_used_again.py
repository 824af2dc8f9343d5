"""Updates in the backward, in models that use a unit's weights more than once: it is updated after their last use, or that is
told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from test_early import EARLY, STAGES, early
from test_offload import BF16, HOST
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import DEVICE, config_of, digest_of_weights, engine_of, my_rank
from workers import WorkerError

from naught.engine import Engine
from naught.errors import NaughtError
from naught.hints import register_external_parameter

WIDTH = 64
Steps = list[tuple[float, float | None]]


class Block(nn.Module):
    """`borrows` is a block whose weights it uses, and `by` how."""

    def __init__(self, *, spare: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.zeros(4)) if spare else None  # which nobody uses
        self.borrows: list[Block] = []
        self.by: Callable[[Tensor, Tensor], Tensor] = _trained

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        for other in self.borrows:
            y = y + self.by(y, other.up.weight)
        return y


def _trained(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight))


def _detached(x: Tensor, weight: Tensor) -> Tensor:
    return _trained(x, weight.detach())


def _computed_again(x: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(lambda x: _detached(x, weight), x, use_reentrant=False)


class Stack(nn.Module):
    def __init__(self, layers: int = 4, **options: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def start(model: nn.Module, stage: int, more: dict[str, Any], **zero: Any) -> Engine:
    return engine_of(model, config_of(stage, more=more, **zero))


def stack(**options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**options)


def batch(step: int, like: Tensor) -> Tensor:
    drawn = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + my_rank()))
    return drawn.to(like.device, like.dtype)


def take_steps(engine: Engine, steps: int = 4, first: int = 0) -> Steps:
    found = []
    for step in range(first, first + steps):
        loss = engine(batch(step, torch.empty(0, device=DEVICE, dtype=next(engine.module.parameters()).dtype)))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    return found


def outcome(engine: Engine, found: Steps) -> tuple[Steps, str]:
    digest = digest_of_weights(engine)
    engine.destroy()
    return found, digest


def train_borrowing(stage: int, more: dict[str, Any], by: Callable[[Tensor, Tensor], Tensor]) -> tuple[Steps, str]:
    model = stack()
    model.blocks[1].borrows, model.blocks[1].by = [model.blocks[3]], by
    engine = start(model, stage, more)
    return outcome(engine, take_steps(engine))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("by", [_trained, _detached, _computed_again])
def test_weights_that_an_earlier_block_uses_too_are_updated_after_it(two, stage, by):
    """Also where it computes with them again in the backward, and does not train them."""
    assert two.run(train_borrowing, stage, EARLY, by) == two.run(train_borrowing, stage, {}, by)


def borrow_later(stage: int, more: dict[str, Any]) -> tuple[Steps, str] | str:
    """Once there is a plan, which does not know of it."""
    model = stack()
    engine = start(model, stage, more)
    found = take_steps(engine, 3)
    model.blocks[1].borrows, model.blocks[1].by = [model.blocks[3]], _computed_again
    try:
        found += take_steps(engine, 2, first=3)
    except NaughtError as error:
        return " ".join([str(error), *error.__notes__])
    return outcome(engine, found)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_that_are_used_again_where_no_forward_has_told_are_nan_and_not_new(two, stage):
    """Without updates in the backward they are those of the forward at these stages."""
    for found in two.run(borrow_later, stage, {}):
        assert not isinstance(found, str)
    for story in two.run(borrow_later, stage, EARLY):
        assert "read as NaN" in story
        assert "Some weights are new and some are old: load a checkpoint" in story


class Twice(nn.Module):
    """A block that is used again, once inside of a checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks, self.reentrant = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Block(), Block()]), reentrant

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.blocks
        x = checkpoint(lambda x: other(one(x)), self.first(x), use_reentrant=self.reentrant)
        return other(x).float().square().mean()


def train_twice(stage: int, more: dict[str, Any], reentrant: bool) -> tuple[Steps, str]:
    torch.manual_seed(0)
    engine = start(Twice(reentrant=reentrant), stage, more)
    return outcome(engine, take_steps(engine))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_used_twice_is_updated_after_both(two, stage, reentrant):
    assert two.run(train_twice, stage, EARLY, reentrant) == two.run(train_twice, stage, {}, reentrant)


class Skipping(Stack):
    """The third block's backward begins when it is told to, which the plan does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.joins = False
        self.blocks[1].borrows = [self.blocks[3]]

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.first(x)))
        y = self.blocks[2](x)
        return self.blocks[3](x + (y if self.joins else y.detach())).float().square().mean()


def leave_plan(stage: int, more: dict[str, Any]) -> tuple[Steps, str]:
    torch.manual_seed(0)
    model = Skipping()
    engine = start(model, stage, more)
    found = take_steps(engine, 3)
    model.joins = True
    return outcome(engine, found + take_steps(engine, 3, first=3))


@pytest.mark.parametrize("stage", range(4))
def test_a_plan_that_is_left_in_the_middle_of_a_backward_updates_nothing_too_soon(two, stage):
    assert two.run(leave_plan, stage, EARLY) == two.run(leave_plan, stage, {})


def leave_out_on_one_rank(stage: int, more: dict[str, Any]) -> tuple[Steps, str]:
    """Of what a block has made one rank's loss is not computed any more, which the other does not know."""
    torch.manual_seed(0)
    model = Skipping()
    model.joins = True
    engine = start(model, stage, more)
    found = take_steps(engine, 3)
    model.joins = my_rank() == 0
    return outcome(engine, found + take_steps(engine, 3, first=3))


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_that_leaves_a_block_out_of_its_loss_keeps_nobody_waiting(two, stage):
    assert two.run(leave_out_on_one_rank, stage, EARLY) == two.run(leave_out_on_one_rank, stage, {})


class Rerouted(Stack):
    """Goes through its blocks in an order that is given anew."""

    def __init__(self) -> None:
        super().__init__()
        # A pair is computed again together. What a "beside" is given wants no gradient, and nothing tells that it is over.
        self.path: list[int | str | tuple[int, int]] = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at in self.path:
            if isinstance(at, int):
                x = self.blocks[at](x)
            elif isinstance(at, str):
                how, block = at.split()
                x = x + _HOW[how](self.blocks[int(block)], x)
            else:
                one, other = (self.blocks[each] for each in at)
                x = checkpoint(lambda x, one=one, other=other: other(one(x)), x, use_reentrant=False)
        return x.float().square().mean()


_HOW: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "beside": lambda block, x: block(x.detach()),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
}


def take_another_path(stage: int, more: dict[str, Any], way: str) -> tuple[Steps, str]:
    torch.manual_seed(0)
    model = Rerouted()
    engine = start(model, stage, more)
    before, then = (ANOTHER | BESIDE)[way]
    found: Steps = []
    for at, model.path in enumerate((before, before, then, then, before)):
        found += take_steps(engine, 1, first=at)
    return outcome(engine, found)


Path = list[int | str | tuple[int, int]]
ANOTHER: dict[str, tuple[Path, Path]] = {
    "computed again": ([0, 1], [(0, 1)]),
    "turned round": ([0, 1, 2, 3], [3, 1, 2, 0]),
    "once less": ([0, 1, 0, 1], [1, 0]),
    "left out": ([0, 1, 2, 3], [0, 3]),
}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("more", [{}, EARLY], ids=["at_the_end", "early"])
@pytest.mark.parametrize("way", ANOTHER)
def test_a_plan_does_not_jump_over_the_end_of_a_unit_that_is_still_at_work(two, stage, more, way):
    """It would release, reduce or update it, in the middle of its backward or before."""
    assert two.run(take_another_path, stage, more, way) == two.run(take_another_path, 0, {}, way)


BESIDE: dict[str, tuple[Path, Path]] = {
    "beside it first": ([0, "beside 0"], ["beside 0", 0]),
    "beside it now": ([0, 0], ["beside 0", 0]),
    "between others": ([1, 0, "beside 0", 2], [1, "beside 0", 0, 2]),
    "reentrant": (["reentrant 0", "beside 0"], ["beside 0", "reentrant 0"]),
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("way", BESIDE)
def test_a_unit_waits_for_each_of_its_uses_that_a_gradient_has_still_to_reach(worlds, stage, way):
    """Also where the hooks say the same as in the plan. On a rank alone a unit is updated at once when it is done."""
    one = worlds[1]
    assert one.run(take_another_path, stage, EARLY, way) == one.run(take_another_path, stage, {}, way)


class Words(nn.Module):
    """Computes with one block, up to where nobody wants gradients, and then twice with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.also = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.words((8 * x.float().sigmoid()).long().flatten())
        if self.also:
            with torch.no_grad():
                x = self.blocks[0](x)
        return self.blocks[1](self.blocks[1](x)).float().square().mean()


def leave_out_what_nobody_trains(more: dict[str, Any]) -> tuple[Steps, str]:
    torch.manual_seed(0)
    model = Words()
    engine = start(model, 3, more)
    found = take_steps(engine, 1)
    model.also = False
    return outcome(engine, found + take_steps(engine, 2, first=1))


def test_an_update_of_weights_that_are_still_gathered_is_no_write_by_a_user(worlds):
    assert worlds[1].run(leave_out_what_nobody_trains, EARLY) == worlds[1].run(leave_out_what_nobody_trains, {})


def use_outside(stage: int, told: bool) -> tuple[Steps, str]:
    """A weight is used outside of its own module when there is a plan already."""
    torch.manual_seed(0)
    model = Skipping()
    model.blocks[1].borrows = []
    if told:
        register_external_parameter(model, model.blocks[0].up.weight)
    engine = start(model, stage, EARLY)
    found = take_steps(engine, 2)
    model.first.register_forward_hook(lambda _module, _inputs, made: made + F.linear(made, model.blocks[0].up.weight))
    return outcome(engine, found + take_steps(engine, 1, first=2))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_use_that_comes_too_late_is_told_with_what_to_do_and_trains_once_that_is_done(worlds, stage):
    with pytest.raises(WorkerError, match=r"needs weights that it has updated already.*register_external_parameter"):
        worlds[1].run(use_outside, stage, False)
    worlds[1].run(use_outside, stage, True)


# --- memory -----------------------------------------------------------------------------------------------------------


def gradients_of(spare: bool, place: str) -> tuple[int, int]:
    """The most bytes of gradients that there were, and those that were planned."""
    stage, zero = STAGES[place]
    engine = start(stack(layers=12, spare=spare), stage, early(BF16), **zero)
    take_steps(engine)
    found = [{k: v for k, v in each.items() if "grad" in k} for each in (engine.report()["peak"], engine.planned())]
    engine.destroy()
    return sum(found[0].values()), sum(found[1].values())


@pytest.mark.parametrize("place", ["stage2", "stage2-offload"])
def test_a_parameter_that_nobody_uses_keeps_no_gradients_waiting(two, place):
    for (held, planned), (bare, _) in zip(two.run(gradients_of, True, place), two.run(gradients_of, False, place), strict=True):
        assert held <= planned
        assert held < 1.1 * bare


def rooms_after_each_step(limit: int | None) -> tuple[list[int], int] | str:
    """On the host for sums of gradients, where every block is used twice: without a plan all of them wait for the end. And the
    bytes there in the end."""
    model = stack(layers=6)
    model.blocks = nn.ModuleList([*model.blocks, *model.blocks])
    more = early(BF16 | {"naught": {} if limit is None else {"host_memory": limit}})
    engine = start(model, 2, more, offload_optimizer=HOST)
    shared = next(segment.home.host for unit in engine.schedule.units.values() for segment in unit.trained).shared_rooms
    rooms = []
    try:
        for step in range(3):
            take_steps(engine, 1, first=step)
            rooms.append(len(shared.rooms))
        return rooms, sum(nbytes for name, nbytes in engine.planned().items() if name.startswith("host "))
    except NaughtError as error:
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    finally:
        engine.destroy()


def test_rooms_on_the_host_that_a_first_step_wants_are_given_back_and_refused_beyond_a_limit(two):
    found = two.run(rooms_after_each_step, None)
    assert [rooms for rooms, _ in found] == [[7, 2, 2]] * 2
    one_more = WIDTH * WIDTH * 4
    for story in two.run(rooms_after_each_step, found[0][1] + one_more):
        assert "of host memory are held" in story
