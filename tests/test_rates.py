"""Every named schedule gives the rates of its documented formula, writes them into all groups, and resumes."""

from __future__ import annotations

import math

import pytest

from naught.config import load
from naught.errors import UsageError
from naught.rates import SCHEDULES, RateSchedule


def numbers_of(kind: str, **given) -> dict:
    """The numbers of a schedule as a configuration gives them."""
    needed = {"WarmupDecayLR": {"total_num_steps": 3000}, "WarmupCosineLR": {"total_num_steps": 3000}}
    needed["OneCycle"] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2}
    params = needed.get(kind, {}) | given
    config = load({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}})
    assert config.scheduler is not None
    return config.scheduler.params.model_dump()


def rates(kind: str, steps: int, **given) -> list[float]:
    groups = [{"lr": 3e-3, "betas": (0.9, 0.999)}]
    schedule = RateSchedule(kind, groups, numbers_of(kind, **given))
    found = [groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        found.append(groups[0]["lr"])
    return found


def test_a_warm_up_rises_by_the_logarithm_or_on_a_line_and_stays():
    given = {"warmup_min_lr": 0.1, "warmup_max_lr": 1.1, "warmup_num_steps": 10}
    assert rates("WarmupLR", 13, **given) == pytest.approx(
        [0.1] + [0.1 + math.log(at + 1) / math.log(10) for at in range(10)] + [1.1] * 3
    )
    assert rates("WarmupLR", 12, warmup_type="linear", **given) == pytest.approx(
        [0.1] + [0.1 + at / 10 for at in range(10)] + [1.1] * 2
    )


def test_a_decay_falls_on_a_line_to_zero_and_no_further():
    found = rates("WarmupDecayLR", 33, warmup_max_lr=2.0, warmup_num_steps=10, warmup_type="linear", total_num_steps=30)
    assert found[1:11] == pytest.approx([at / 5 for at in range(10)])
    assert found[11:] == pytest.approx([2.0 * max(0, 30 - at) / 20 for at in range(10, 33)])


def test_a_cosine_falls_from_the_optimizers_own_rate():
    given = {"warmup_num_steps": 10, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1, "warmup_type": "linear"}
    found = rates("WarmupCosineLR", 34, total_num_steps=30, **given)
    assert found[0] == 0.0, "before the first update"
    assert found[1:11] == pytest.approx([3e-3 * (0.2 + 0.8 * at / 10) for at in range(10)])
    turns = [min(1.0, (at - 9) / 20) for at in range(10, 34)]
    assert found[11:] == pytest.approx([3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * turn)) / 2) for turn in turns])


def test_one_cycle_rises_falls_and_decays_with_the_momentum_against_it():
    groups = [{"lr": 1.0, "momentum": 0.5}]
    given = {"cycle_first_step_size": 4, "cycle_second_step_size": 2, "cycle_min_lr": 1.0, "cycle_max_lr": 3.0}
    given |= {"decay_step_size": 2, "decay_lr_rate": 1.0, "decay_mom_rate": 0.5}
    schedule = RateSchedule("OneCycle", groups, numbers_of("OneCycle", **given))
    found = [(groups[0]["lr"], groups[0]["momentum"])]
    for _ in range(9):
        schedule.step()
        found.append((groups[0]["lr"], groups[0]["momentum"]))
    lr = [1.0, 1.5, 2.0, 2.5, 3.0, 2.0, 1.0, 1.0 / 1.5, 1.0 / 2.0, 1.0 / 2.5]
    share = [0, 0.25, 0.5, 0.75, 1, 0.5, 0]
    momentum = [0.9 - 0.1 * at for at in share] + [0.9 * (1 + 0.5 * at / 2) for at in (1, 2, 3)]
    assert found == [pytest.approx(pair) for pair in zip(lr, momentum, strict=True)]
    groups = [{"lr": 1.0, "betas": (0.7, 0.99)}]
    RateSchedule("OneCycle", groups, numbers_of("OneCycle"))
    assert groups[0]["betas"] == pytest.approx((0.9, 0.99))
    groups = [{"lr": 1.0, "betas": (0.7, 0.99)}]
    RateSchedule("OneCycle", groups, numbers_of("OneCycle", cycle_momentum=False))
    assert groups[0]["betas"] == (0.7, 0.99)


def test_a_warm_up_without_a_rate_rises_to_each_groups_own():
    groups = [{"lr": 2e-2}, {"lr": 5e-3}]
    schedule = RateSchedule("WarmupLR", groups, numbers_of("WarmupLR", warmup_num_steps=2, warmup_type="linear"))
    found = []
    for _ in range(3):
        schedule.step()
        found.append([group["lr"] for group in groups])
    assert found == [[0.0, 0.0], [1e-2, 2.5e-3], [2e-2, 5e-3]]


def test_a_cycle_may_go_by_stairs():
    given = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 6, "cycle_second_step_size": 4}
    found = rates("OneCycle", 10, cycle_first_stair_count=2, cycle_second_stair_count=4, **given)
    assert found == [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    found = rates("OneCycle", 9, cycle_first_stair_count=2, **given)
    assert found == [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0]


def test_a_range_test_grows_on_a_line_or_in_stairs():
    given = {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    assert rates("LRRangeTest", 6, **given) == pytest.approx([0.5 * (1 + 2 * at / 4) for at in range(7)])
    assert rates("LRRangeTest", 8, lr_range_test_staircase=True, **given) == pytest.approx(
        [0.5 * (1 + 2 * (at // 4)) for at in range(9)]
    )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(kind):
    groups, again = ([{"lr": 3e-3, "betas": (0.9, 0.999)}] for _ in range(2))
    first = RateSchedule(kind, groups, numbers_of(kind))
    for _ in range(7):
        first.step()
    second = RateSchedule(kind, again, numbers_of(kind))
    second.load_state_dict(first.state_dict())
    assert again == groups
    first.step()
    second.step()
    assert again == groups
    assert first.get_last_lr() == second.get_lr() == [groups[0]["lr"]]


def test_a_number_may_be_given_for_each_group():
    groups = [{"lr": 1.0}, {"lr": 2.0}]
    schedule = RateSchedule("WarmupLR", groups, numbers_of("WarmupLR", warmup_max_lr=[0.1, 0.2], warmup_num_steps=2))
    for _ in range(4):
        schedule.step()
    assert [group["lr"] for group in groups] == pytest.approx([0.1, 0.2])


def test_an_unknown_schedule_is_refused():
    with pytest.raises(UsageError, match='no schedule "Cosine"'):
        RateSchedule("Cosine", [], {})
