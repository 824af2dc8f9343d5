"""The engine as its users treat it: every way to train, and how it starts and ends."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from menagerie import DEVICE, MODELS, batch_of, my_rank
from training import config_of, digest, digest_of_weights, engine_calls, engine_of, start, take_steps

import naught
from naught.errors import ConfigError, UsageError
from naught.start import initialize

pytestmark = pytest.mark.usefixtures("one_thread")


def plain_calls(stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine, optimizer, *_ = initialize(model=MODELS["plain"]().to(DEVICE), config=config_of(stage))
    losses = []
    for step in range(3):
        loss = engine(batch_of(step, my_rank()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(4))
def test_plain_backward_and_optimizer_step_do_the_same(two, stage):
    assert two.run(plain_calls, stage) == two.run(engine_calls, stage)


def two_backwards(stage: int, *, unsynced: bool) -> str:
    """Two losses before one step: as good as their sum."""
    from contextlib import nullcontext

    engine = start(stage)
    for step in range(2):
        with engine.no_sync() if unsynced else nullcontext():
            engine(batch_of(2 * step, my_rank())).backward()
        engine(batch_of(2 * step + 1, my_rank())).backward()
        engine.optimizer.step()
    return digest_of_weights(engine)


@pytest.mark.parametrize("unsynced", [False, True])
def test_several_backwards_before_a_step_add_up_at_every_stage(two, unsynced):
    found = [two.run(two_backwards, stage, unsynced=unsynced)[0] for stage in range(4)]
    assert found[0] == found[1]
    assert found[2] == found[3]


def two_forwards(stage: int) -> str:
    engine = start(stage)
    for step in range(3):
        loss = engine(batch_of(2 * step, my_rank())) + engine(batch_of(2 * step + 1, my_rank()))
        engine.backward(loss)
        engine.step()
    return digest_of_weights(engine)


def test_two_forwards_before_one_backward(two):
    found = [two.run(two_forwards, stage)[0] for stage in range(4)]
    assert len(set(found)) == 1


def evaluates_between(stage: int) -> tuple[list[float], str]:
    engine = start(stage)
    losses = []
    for step in range(3):
        losses += take_steps(engine, 1, first=step)
        engine.eval()
        with torch.no_grad():
            for batch in range(2):
                losses.append(engine(batch_of(90 + batch, my_rank())).item())
            losses.append(float(engine.module.head(engine.module.norm(engine.module.tok(batch_of(99, 0)))).sum()))
        engine.train()
    return losses, digest_of_weights(engine)


def test_evaluation_and_calls_of_parts_between_steps_change_nothing(two):
    found = [two.run(evaluates_between, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)
    assert found[0][0][1] == two.run(engine_calls, 0)[0][1]


class Speaks(torch.nn.Module):
    """Has methods beside its forward; its embedding and head are small and belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["plain"]()
        self.small = torch.nn.Embedding(64, 4)
        self.out = torch.nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens) + self.out(self.small(tokens)).square().mean()

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.small(tokens))


def speaks(stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    engine = engine_of(Speaks(), config_of(stage))
    assert "small" not in engine.schedule.units
    said = []
    for step in range(3):
        with torch.no_grad():
            said.append(engine.encode(batch_of(50 + step, my_rank())).sum().item())
        engine.backward(engine(batch_of(step, my_rank())) + engine.encode(batch_of(step, my_rank())).square().mean())
        engine.step()
    with engine.gathered(), torch.no_grad():
        said.append(engine(batch_of(99, my_rank())).item())
        said.append(engine.encode(batch_of(99, my_rank())).sum().item())
    return said, digest_of_weights(engine)


def test_other_methods_than_forward_find_their_weights_and_so_does_who_has_gathered_all(two):
    found = [two.run(speaks, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)


def one_rank_evaluates(stage: int) -> tuple[list[float], str]:
    engine = start(stage)
    if my_rank() == 0:
        engine.eval()
        with torch.no_grad():
            engine(batch_of(90, 0))
        engine.train()
        with engine.gathered([engine.module.head.weight]):
            pass
    return take_steps(engine, 3), digest_of_weights(engine)


@pytest.mark.parametrize("stage", range(3))
def test_one_rank_alone_may_evaluate_where_weights_are_whole(two, stage):
    assert two.run(one_rank_evaluates, stage) == two.run(engine_calls, stage)


def test_a_module_that_is_put_in_later_is_told():
    engine = start(1)
    take_steps(engine, 1)
    engine.module.head = torch.nn.Linear(64, 64).to(DEVICE)
    engine.backward(engine(batch_of(1, 0)))
    with pytest.raises(UsageError, match='the module "head" of a module was replaced'):
        engine.step()


def test_a_callers_own_autocast_holds():
    engine = start(0)
    plain = engine(batch_of(0, 0)).item()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert engine(batch_of(0, 0)).item() != plain


def test_an_input_of_another_precision_gets_a_hint():
    engine = engine_of(torch.nn.Linear(4, 4), config_of(0, more={"bf16": {"enabled": True}}))
    with pytest.raises(RuntimeError) as caught:
        engine(torch.ones(2, 4, device=DEVICE))
    assert "fp16.auto_cast" in caught.value.__notes__[0]


def test_after_a_backward_of_the_engines_no_gradient_is_left_outside():
    engine = start(2)
    engine.backward(engine(batch_of(0, 0)))
    assert all(param.grad is None for param in engine.module.parameters())


def two_engines(stage: int) -> tuple[list[float], list[float]]:
    one, other = start(stage), start(3 - stage, "tied")
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(3):
        losses[0].extend(take_steps(one, 1, first=step))
        losses[1].extend(take_steps(other, 1, first=step))
    return losses


def test_two_engines_live_beside_each_other(two):
    both = two.run(two_engines, 3)
    assert both[0][0] == two.run(engine_calls, 3)[0][0]
    assert both[0] == two.run(two_engines, 0)[0]


def changing_rate(stage: int) -> str:
    engine = start(stage)
    for step in range(3):
        engine.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        take_steps(engine, 1, first=step)
    return digest_of_weights(engine)


def test_the_learning_rate_can_be_changed_between_steps(two):
    assert len({two.run(changing_rate, stage)[0] for stage in range(4)} | {two.run(engine_calls, 0)[0][1]}) == 2


def compiled(stage: int, how: str) -> list[float]:
    import warnings

    torch.manual_seed(0)
    model = MODELS["plain"]()
    engine = engine_of(model, config_of(stage))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "functions":
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager")
        elif how == "blocks":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        else:
            model.compile(backend="aot_eager")
        return take_steps(engine, 3)


@pytest.mark.parametrize("how", ["functions", "blocks", "model"])
def test_a_users_own_compile(two, how):
    assert two.run(compiled, 3, how)[0] == two.run(compiled, 0, how)[0] == pytest.approx(two.run(engine_calls, 3)[0][0], rel=1e-5)


def every_micro_batch(stage: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    config = config_of(stage, accumulation=3, clip=0.5) | {"naught": {"reduce_every_micro_batch": True}}
    engine = engine_of(MODELS["tied"](), config)
    return take_steps(engine, 9), digest_of_weights(engine)


def test_all_stages_are_alike_under_accumulation_when_every_micro_batch_is_reduced(two):
    found = [two.run(every_micro_batch, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)


def phases(stage: int) -> dict[str, float]:
    engine = start(stage)
    take_steps(engine, 3)
    return engine.report()["seconds"]


def test_the_report_tells_the_time_of_each_phase(two):
    for seconds in two.run(phases, 3):
        assert set(seconds) == {"forward", "backward", "step"}
        assert all(spent > 0 for spent in seconds.values())


def test_destroy_gives_the_model_back_and_leaves_nothing_behind():
    torch.manual_seed(0)
    model = MODELS["plain"]()
    engine = engine_of(model, config_of(3))
    take_steps(engine, 2)
    wanted = digest_of_weights(engine)
    engine.destroy()
    assert digest(list(model.parameters())) == wanted
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model(batch_of(0, 0)).backward()
    assert all(param.grad is not None for param in model.parameters())
    copy.deepcopy(model)
    again = engine_of(model, config_of(2))
    take_steps(again, 1)
    ghost = weakref.ref(engine)
    del engine
    gc.collect()
    assert ghost() is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_clipping": "auto"}, '"auto" is left in gradient_clipping'),
        (
            {"checkpoint": {"use_node_local_storage": True}},
            "checkpoint.use_node_local_storage.*one folder, which all hosts must see",
        ),
    ],
)
def test_what_the_engine_cannot_do_it_refuses(changes, words):
    with pytest.raises((ConfigError, UsageError), match=words):
        initialize(model=MODELS["plain"](), config=config_of(2) | changes)


def test_the_package_has_the_engine():
    assert naught.initialize is initialize
