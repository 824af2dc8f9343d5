"""Parameters as users treat them: read, written, copied and moved outside of a pass, and used outside of their module."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from menagerie import DEVICE, MODELS, WIDTH, Plain, batch_of, my_rank
from torch import nn
from training import config_of, digest, digest_of_weights, engine_of, start, take_steps

from naught.errors import ModelError, UsageError
from naught.start import initialize
from naught.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_released_parameter_reads_as_nan_of_its_true_shape_and_refuses_writes():
    engine = start(3)
    param = engine.module.blocks[0].up.weight
    assert param.shape == (128, WIDTH)
    assert param.numel() == 128 * WIDTH
    assert bool(param.isnan().all())
    with pytest.raises(RuntimeError), torch.no_grad():
        param.add_(1)
    with engine.gathered():
        assert not bool(param.isnan().any())
    assert bool(param.isnan().all())


def test_a_write_to_a_released_parameter_of_one_element_is_noticed():
    engine = start(3, "uneven_sizes_and_users_hooks")
    with torch.no_grad():
        engine.module.blocks[1].gain.fill_(3.0)
    with pytest.raises(UsageError, match=r'"blocks\.1\.gain" was written to while it was released'):
        take_steps(engine)


def test_what_was_read_inside_gathered_stays_valid_and_what_was_written_is_kept():
    found = []
    for stage in range(4):
        engine = start(stage)
        take_steps(engine, 2)
        with engine.gathered(), engine.gathered(), torch.no_grad():
            state = engine.module.state_dict()
            array = engine.module.blocks[0].up.weight.detach().cpu().numpy()
            engine.module.blocks[0].up.weight.mul_(0.5)
        assert all(bool(tensor.isfinite().all()) for tensor in state.values())
        assert bool(torch.from_numpy(array).isfinite().all())
        found.append((take_steps(engine, 2, first=2), digest_of_weights(engine)))
    assert all(run == found[0] for run in found)


def test_calls_and_state_dicts_at_the_wrong_place_are_refused_with_the_remedy():
    engine = start(3)
    for module in (engine.module, engine.module.blocks[1]):
        with pytest.raises(UsageError, match=r"inside engine\.gathered\(\)"):
            module.state_dict()
    with engine.gathered():
        with pytest.raises(UsageError, match="Call it outside"):
            engine(batch_of(0, 0))
        for refused in (engine.step, engine.destroy):
            with pytest.raises(UsageError, match="Do it outside"):
                refused()
    assert take_steps(engine, 2) == take_steps(start(3), 2), "nothing was lost"
    start(2).module.state_dict()


def test_a_fill_of_a_released_parameter_is_noticed():
    engine = start(3)
    nn.init.constant_(engine.module.head.weight, 0.1)
    with pytest.raises(UsageError, match=r'"head\.weight" was written to while it was released'):
        take_steps(engine)


class Attending(Plain):
    """A layer whose weights are read by another module, and parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.gains = nn.ParameterList([torch.ones(WIDTH), torch.zeros(WIDTH)])

    def body(self, x):
        return super().body(self.attention(x, x, x)[0] * self.gains[0] + self.gains[1])


class Uncalled(Plain):
    """Blocks that are used without being called: no hook sees them."""

    def body(self, x):
        for block in self.blocks:
            x = block.forward(x)
        return x


class InPlace(Plain):
    def body(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1
        return x.relu_()


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x += self.fc(x.clone())
        return x


class InPlaceBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Own() for _ in range(3))

    def body(self, x):
        return super().body(x + 0)


class Penalised(Plain):
    def forward(self, ids):
        x = self.tok(ids)
        loss = self.loss(self.body(x), ids)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class Functional(Plain):
    """The head is the embedding's weight, read from the outside: tied without being tied."""

    def loss(self, x, ids):
        logits = self.norm(x) @ self.tok.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


class Hidden(Plain):
    """Weights that are used through a list that no module knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Linear(WIDTH, WIDTH)
        self.secret = [self.gains.weight]

    def body(self, x):
        return super().body(nn.functional.linear(x, self.secret[0]))


class Neighbour(nn.Module):
    """A block that reads a weight of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.other: list[nn.Module] = []

    def forward(self, x):
        weights = [module.fc.weight for module in self.other]
        return x + self.fc(x) + sum(x @ weight for weight in weights)


class Neighbours(Plain):
    """The first reads the last one's weight before it is used itself, the last the first one's after."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Neighbour() for _ in range(3))
        self.blocks[0].other.append(self.blocks[2])
        self.blocks[2].other.append(self.blocks[0])


KINDS = (Attending, Uncalled, InPlace, InPlaceBlocks, Penalised, Functional, Hidden, Neighbours)
AWKWARD = {kind.__name__: kind for kind in KINDS}


def awkward(name: str, stage: int) -> tuple[list[float], str, int, int]:
    torch.manual_seed(0)
    engine = engine_of(AWKWARD[name](), config_of(stage))
    return take_steps(engine, 4), digest_of_weights(engine), engine.skipped_steps, len(engine.schedule.programs)


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_ways_to_use_a_module(two, name):
    found = [two.run(awkward, name, stage) for stage in range(4)]
    assert all(run == found[0] for run in found)
    losses, _, skipped, plans = found[0][0]
    assert len(set(losses)) == len(losses), "it trains"
    assert (skipped, plans) == (0, 1), "what was found is in the plan"


def test_a_use_that_begins_later_costs_one_step_and_is_then_found(caplog):
    class Late(Functional):
        late = False

        def loss(self, x, ids):
            return Functional.loss(self, x, ids) if self.late else Plain.loss(self, x, ids)

    torch.manual_seed(0)
    engine = engine_of(Late(), config_of(3, offload_param={"device": "cpu"}))  # weights that are never kept
    take_steps(engine, 2)
    engine.module.late = True
    take_steps(engine, 1)
    assert engine.skipped_steps == 1
    assert "its gradient norm is not finite" in caplog.text
    take_steps(engine, 2)
    assert (engine.skipped_steps, engine.global_steps) == (1, 5)


# --- read, written, copied and moved between steps --------------------------------------------------------------------


def reads_between(stage: int) -> bool:
    """Whoever keeps an average of the weights reads them after a step, and rank 0 alone may save them."""
    engine = start(stage)
    take_steps(engine, 2)
    state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()} if my_rank() == 0 else {}
    with engine.gathered():
        return all(bool((engine.module.state_dict()[name] == tensor).all()) for name, tensor in state.items())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_whole_weights_can_be_read_after_a_step_by_one_rank_alone(two, stage):
    assert two.run(reads_between, stage) == [True, True]


def starts_apart(stage: int) -> tuple[str, str]:
    torch.manual_seed(my_rank())
    engine = engine_of(MODELS["plain"](), config_of(stage))
    return digest_of_weights(engine), take_steps(engine, 1) and digest_of_weights(engine)


def test_ranks_start_from_the_weights_of_rank_0(two):
    torch.manual_seed(0)
    wanted = digest(list(MODELS["plain"]().parameters()))
    found = [two.run(starts_apart, stage) for stage in range(4)]
    assert all(pair == found[0][0] for run in found for pair in run)
    assert found[0][0][0] == wanted


def tampers(stage: int, how: str) -> str:
    engine = start(stage, "frozen")
    take_steps(engine, 1)
    if how == "thawed":
        engine.module.tok.requires_grad_(True)
    elif my_rank() == 1:
        engine.module.head.weight.data = engine.module.head.weight.data.clone()
    with pytest.raises(UsageError) as raised:
        take_steps(engine, 1, first=1)
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "words"),
    [("moved", '"head.weight" was moved, converted or given other data'), ("thawed", '"tok.weight" was frozen when')],
)
def test_a_parameter_that_the_engine_has_lost_is_an_error_on_every_rank(two, how, words):
    other, guilty = two.run(tampers, 1, how)
    assert words in guilty
    assert words in other


def test_converting_the_model_afterwards_is_refused():
    engine = start(2)
    engine.module.half()
    with pytest.raises((UsageError, RuntimeError), match=r"Call model\.to\(\) or model\.half\(\) before|dtype"):
        take_steps(engine, 1)


@pytest.mark.parametrize("stage", range(4))
def test_a_parameter_that_is_frozen_for_a_while_stays_as_it_is(stage):
    engine = start(stage)
    take_steps(engine, 1)
    weight = engine.module.blocks[1].up.weight
    with engine.gathered():
        before = weight.detach().clone()
    weight.requires_grad_(False)
    take_steps(engine, 1, first=1)
    with engine.gathered():
        assert bool((weight == before).all())
    weight.requires_grad_(True)
    take_steps(engine, 1, first=2)
    with engine.gathered():
        assert not bool((weight == before).all())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_copy_of_the_model_is_a_model_of_its_own(stage):
    engine = start(stage)
    take_steps(engine, 2)
    with engine.gathered():
        twin = copy.deepcopy(engine.module)
    wanted = engine(batch_of(7, 0)).item()
    assert twin(batch_of(7, 0)).item() == wanted
    twin(batch_of(7, 0)).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert take_steps(engine, 1, first=7) == [wanted]
    assert twin(batch_of(7, 0)).item() == wanted


def test_weights_are_loaded_in_place_or_inside_gathered():
    state = MODELS["plain"]().state_dict()
    wanted = digest(list(state.values()))
    for stage in (0, 1, 2):
        engine = start(stage)
        take_steps(engine, 1)
        engine.module.load_state_dict(state)
        assert digest_of_weights(engine) == wanted
    engine = start(3)
    with pytest.raises(UsageError, match=r"Load the state_dict inside engine\.gathered\(\)"):
        engine.module.load_state_dict(state)
    with engine.gathered():
        engine.module.load_state_dict(state)
    assert digest_of_weights(engine) == wanted


@pytest.mark.parametrize("stage", range(4))
def test_parameters_may_be_given_other_data_inside_gathered_but_not_outside(stage):
    engine = start(stage)
    take_steps(engine, 1)
    with engine.gathered():
        params = list(engine.module.parameters())
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params) * 0.5, params)
    kept = take_steps(engine, 1, first=1)
    again = start(stage)
    take_steps(again, 1)
    with again.gathered(), torch.no_grad():
        for param in again.module.parameters():
            param.mul_(0.5)
    assert kept == take_steps(again, 1, first=1)
    engine.module.head.weight.data = torch.zeros_like(engine.module.head.weight)
    with pytest.raises(UsageError, match=r'"head\.weight" was moved, converted or given other data'):
        take_steps(engine, 1, first=2)
    with pytest.raises(UsageError, match="data of another shape"), again.gathered():
        again.module.head.weight.data = torch.zeros(3, device=DEVICE)


def test_parameters_that_were_replaced_are_noticed():
    engine = start(1)
    with engine.gathered():
        engine.module.load_state_dict({name: tensor.clone() for name, tensor in engine.module.state_dict().items()}, assign=True)
    with pytest.raises(UsageError, match=r'"weight" of a module was replaced.*assign=False'):
        take_steps(engine, 1)


def test_a_write_inside_a_pass_is_noticed_where_it_would_be_lost():
    class Clamping(Plain):
        def forward(self, ids):
            with torch.no_grad():
                self.norm.weight.clamp_(max=0.5)
            return super().forward(ids)

    take_steps(engine_of(Clamping(), config_of(1)), 1)
    with pytest.raises(UsageError, match=r'"norm\.weight" was written to inside a pass'):
        take_steps(engine_of(Clamping(), config_of(3)), 1)


HALF = {"more": {"fp16": {"enabled": True, "loss_scale": 8}}}
BRAIN = {"more": {"bf16": {"enabled": True}}}
FOLDED = {"more": {"bf16": {"enabled": True}, "naught": {"small_masters": True}}}
OFFLOADED = {"more": {"naught": {"lazy_weights": False}}, "offload_optimizer": {"device": "cpu"}}
BESIDE = {"more": BRAIN["more"] | OFFLOADED["more"], "offload_optimizer": {"device": "cpu"}}


def writes(stage: int, how: str, options: dict) -> tuple[list[float], str]:
    """In every step but the last, as whoever clamps. Weights are made zero in part, as by pruning."""
    engine = start(stage, **options)
    found = take_steps(engine, 1)
    for step in range(1, 5):
        for weight in (engine.module.blocks[0].up.weight, engine.module.head.weight):
            if how == "gathered":
                with engine.gathered(), torch.no_grad():
                    weight.mul_(0.5)[::2].zero_()
            elif how == "data":
                weight.data.mul_(0.5)[::2].zero_()
            elif how == "no_grad":
                with torch.no_grad():
                    weight.mul_(0.5)[::2].zero_()
        found += take_steps(engine, 1, first=step)
    return found + take_steps(engine, 1, first=5), digest_of_weights(engine)


@pytest.mark.parametrize(
    ("how", "options"),
    [("data", {}), ("data", HALF), ("data", BRAIN), *[("no_grad", each) for each in ({}, HALF, BRAIN, OFFLOADED, BESIDE)]],
)
def test_what_is_written_between_steps_is_kept_at_every_stage_as_inside_gathered(two, how, options):
    stages = (1, 2) if "offload_optimizer" in options else (0, 1, 2)
    wanted = two.run(writes, stages[0], "gathered", options)
    assert wanted != two.run(writes, stages[0], "nothing", options)
    for stage in stages:
        assert two.run(writes, stage, how, options) == wanted


def test_a_small_master_of_a_weight_that_was_written_to_is_a_number():
    """Zero and the rest of another weight may not be one."""
    for how in ("no_grad", "gathered", "data"):
        losses, _ = writes(1, how, FOLDED)
        assert all(map(math.isfinite, losses))


def test_an_infinite_weight_stays_so_with_a_small_master():
    engine = start(1, **FOLDED)
    take_steps(engine, 1)
    weight = engine.module.tok.weight
    with torch.no_grad():
        weight.fill_(-math.inf)
    engine.heed_writes()
    assert bool((safe_get_full_fp32_param(weight) == -math.inf).all())


def test_whoever_writes_where_nobody_counts_is_told_once(caplog):
    writes(2, "no_grad", BRAIN)
    assert not caplog.records
    writes(2, "data", BRAIN)
    assert [record.message for record in caplog.records if "through .data" in record.message] == [caplog.records[0].message]
    assert '"blocks.0.up.weight" was written to where nobody counts' in caplog.records[0].message


def test_what_was_written_is_saved(tmp_path):
    engine = start(2, **BRAIN)
    take_steps(engine, 1)
    with torch.no_grad():
        engine.module.head.weight.fill_(0.3)
    engine.save_checkpoint(tmp_path)
    engine = start(2, **BRAIN)
    engine.load_checkpoint(tmp_path)
    assert bool((engine.module.head.weight == torch.tensor(0.3).bfloat16()).all())


def test_who_goes_on_and_who_loads_go_on_alike_whatever_was_written(tmp_path):
    engine = start(2, **BRAIN)
    for step in range(5):
        take_steps(engine, 1, first=step)
        for param in engine.module.parameters():
            param.data.clamp_(-0.05, 0.05)
    engine.save_checkpoint(tmp_path)
    loaded = start(2, **BRAIN)
    loaded.load_checkpoint(tmp_path)
    assert take_steps(engine, 2, first=5) == take_steps(loaded, 2, first=5)
    assert digest_of_masters(engine) == digest_of_masters(loaded)


def test_what_was_written_to_parameters_that_a_checkpoint_lacks_outlasts_its_load(tmp_path):
    start(1, **BRAIN).save_checkpoint(tmp_path)

    class More(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Parameter(torch.ones(3))

        def forward(self, ids):
            return super().forward(ids) * self.more.mean()

    engine = engine_of(More(), config_of(1, **BRAIN))
    with torch.no_grad():
        engine.module.more.fill_(7)
    engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    assert bool((engine.module.more == 7).all())


def test_what_a_load_replaces_is_gone(tmp_path):
    engine = start(1, **BRAIN)
    take_steps(engine, 1)
    engine.save_checkpoint(tmp_path)
    wanted = take_steps(engine, 2, first=1)
    with torch.no_grad():
        engine.module.head.weight.mul_(0.5)
    engine.load_checkpoint(tmp_path)
    assert take_steps(engine, 2, first=1) == wanted


def test_a_write_to_one_parameter_outlasts_one_to_the_master_of_another():
    engine = start(2, **BRAIN)
    take_steps(engine, 1)
    layer = engine.module.blocks[0].up
    with torch.no_grad():
        layer.weight.fill_(0.3)
    safe_set_full_fp32_param(layer.bias, torch.zeros(layer.bias.shape))
    for found in (layer.weight, safe_get_full_fp32_param(layer.weight)):
        assert bool((found == torch.tensor(0.3).bfloat16()).all())


@pytest.mark.parametrize(("stage", "options"), [(0, HALF), (2, BRAIN), (1, OFFLOADED), (1, BESIDE), (1, FOLDED)])
def test_weights_that_are_put_back_behind_an_evaluation_with_others_have_not_changed(tmp_path, stage, options):
    engine = start(stage, **options)
    take_steps(engine, 1)
    params = list(engine.module.parameters())
    with torch.no_grad():
        kept = [param.clone() for param in params]
        for param in params:
            param.mul_(0.9)
        others = engine.module_state_dict()
        engine.save_16bit_model(tmp_path)
        engine.eval()
        engine(batch_of(9, 0))
        engine.train()
        for param, value in zip(params, kept, strict=True):
            param.copy_(value)
    assert not any(torch.equal(others[name], param.cpu()) for name, param in engine.module.named_parameters() if param.any())
    untouched = start(stage, **options)
    assert take_steps(engine, 2, first=1) == take_steps(untouched, 3)[1:]
    assert digest_of_masters(engine) == digest_of_masters(untouched)


def digest_of_masters(engine) -> str:
    return digest([safe_get_full_fp32_param(param) for param in engine.module.parameters()])


def test_numpy_of_a_gathered_weight_costs_memory_and_nothing_else():
    class Looking(Plain):
        def forward(self, ids):
            self.norm.weight.detach().cpu().numpy()
            return super().forward(ids)

    torch.manual_seed(0)
    assert take_steps(engine_of(Looking(), config_of(3)), 3) == take_steps(start(3), 3)


def lazily(stage: int, lazy: bool) -> tuple[list[float], str, bool]:
    torch.manual_seed(0)
    engine = engine_of(MODELS["tied"](), config_of(stage) | {"naught": {"lazy_weights": lazy}})
    losses = take_steps(engine, 3)
    hidden = bool(engine.module.blocks[0].up.weight.isnan().all())
    if hidden:
        with pytest.raises(UsageError, match="still to come"):
            engine.module.state_dict()
    return losses, digest_of_weights(engine), hidden


@pytest.mark.parametrize("stage", [1, 2])
def test_lazy_weights_are_the_same_and_cannot_be_mistaken_until_they_are_fetched(two, stage):
    for (*eager, shown), (*lazy, hidden) in zip(two.run(lazily, stage, False), two.run(lazily, stage, True), strict=True):
        assert eager == lazy
        assert (shown, hidden) == (False, True)


def on_meta() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    with torch.device("meta"):
        return Own()


def built(name: str, stage: int, *, meta: bool) -> tuple[str, list[float]]:
    """Weights and losses of a model that was built on the meta device or not."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else DEVICE):
        model = MODELS[name]()
    if my_rank() == 1:
        torch.manual_seed(5)  # rank 0's weights are everybody's
    engine = initialize(model=model, config=config_of(stage))[0]
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return digest_of_weights(engine), take_steps(engine, 3)


@pytest.mark.parametrize("name", ["plain", "tied", "frozen", "buffers", "skip_connections"])
def test_a_model_on_the_meta_device_is_filled_as_if_it_had_been_built_in_place(two, name):
    in_place = two.run(built, name, 0, meta=False)
    for stage in range(4):
        assert two.run(built, name, stage, meta=True) == in_place


def test_a_model_on_the_meta_device_is_never_whole():
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Plain(layers=12)
    engine = initialize(model=model, config=config_of(3, offload_param={"device": "cpu"}))[0]
    sizes = [unit.sizes().weights for unit in engine.schedule.units.values()]
    assert engine.report()["peak"]["gathered weights"] < sum(sizes) / 4


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)), '"0" has sparse gradients'),
        (lambda: nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 1)), '"0" rewrites its weights in its forward'),
        (on_meta, r'"the model" \(Own\) was built on the meta device and cannot fill itself'),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameters to train"),
    ],
)
def test_models_that_cannot_be_trained_are_refused_at_the_start(model, words):
    with pytest.raises(ModelError, match=words):
        initialize(model=model(), config=config_of(3))


def test_types_that_the_engine_does_not_train_are_refused():
    with pytest.raises(UsageError, match=r'"weight" is torch\.float64, which is not trained'):
        initialize(model=nn.Linear(4, 4).double(), config=config_of(0))
