"""Model states: what a placement holds on each GPU and on each node, for 16-bit training with 32-bit masters and Adam. Pure.

Only what `naught.needs` asks for: no activations, no fetching ahead, no times. `naught.estimate` has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from naught.errors import UsageError
from naught.formulas import recipe
from naught.job import Job
from naught.placement import Placement, Tier, place_stage
from naught.shapes import Run
from naught.sizes import PlacedRun, resting_bytes
from naught.working_set import whole_working_set

__all__ = ["Cluster", "Held", "Options", "hold", "runs_of"]

_JOB = Job()


class Cluster(NamedTuple):
    """Equal nodes, and the GPUs of each."""

    per_node: int
    nodes: int

    @property
    def world(self) -> int:
        return self.per_node * self.nodes

    def __str__(self) -> str:
        return f"{_count(self.nodes, 'node')} of {_count(self.per_node, 'GPU')}"


class Options(NamedTuple):
    """A stage as DeepSpeed's users choose it. Without `zero_init` every process builds the whole model on the host first."""

    stage: int
    offload_optimizer: bool
    offload_param: bool = False
    zero_init: bool = True

    @property
    def placement(self) -> Placement:
        optim, param = (Tier.HOST if offload else Tier.DEVICE for offload in (self.offload_optimizer, self.offload_param))
        return place_stage(self.stage, optim=optim, param=param)

    def __str__(self) -> str:
        optim, param = ("cpu " if offload else "none" for offload in (self.offload_optimizer, self.offload_param))
        if not self.placement.param.split:
            return f"offload_optimizer={optim}".rstrip()
        return f"offload_optimizer={optim} offload_param={param} zero_init={int(self.zero_init)}"


class Held(NamedTuple):
    """Bytes of a node's host, of a GPU, and how many of the latter come and go with the layers."""

    host_bytes: int
    device_bytes: int
    layer_bytes: int


def hold(runs: Sequence[Run], options: Options, cluster: Cluster) -> Held:
    """The states at rest, and of split parameters the largest layer in use."""
    if min(cluster) < 1:
        raise UsageError(f"{cluster} is no cluster", fix="give at least one node, and one GPU on each")
    placement = options.placement
    resting = [resting_bytes(run, placement, cluster.world, _JOB) for run in runs]
    layer = _layer_bytes(runs, placement, cluster.world) if placement.param.split else 0
    host = cluster.per_node * sum(tiers[Tier.HOST] for tiers in resting)
    return Held(
        host_bytes=host if options.zero_init else max(host, _built_bytes(runs, cluster)),
        device_bytes=sum(tiers[Tier.DEVICE] for tiers in resting) + layer,
        layer_bytes=layer,
    )


def _layer_bytes(runs: Sequence[Run], placement: Placement, world: int) -> int:
    """The largest layer and those in use around it, as a plan of these alone would hold them."""
    inner = [run._replace(repeat=1) for run in runs if not run.outer]
    largest = sorted(inner, key=lambda run: run.numel)[-1:]
    core = tuple(PlacedRun(run, placement) for run in [*(run for run in runs if run.outer), *largest])
    work = whole_working_set(core, world, _JOB)
    return work.gathered + work.device_buffers


def _built_bytes(runs: Sequence[Run], cluster: Cluster) -> int:
    """What a node's processes build if each builds the whole model, in 32 bits."""
    return cluster.per_node * recipe("fp32").weight * sum(run.numel * run.repeat for run in runs)


def runs_of(total: int, largest: int) -> tuple[Run, ...]:
    """A model of which only the size and that of its largest layer are known: as many such layers as there can be."""
    if not 1 <= largest <= total:
        raise UsageError(
            f"a model of {total} parameters has no layer of {largest}",
            fix="give the parameters of the whole model first, then those of its largest layer",
        )
    rest = Run("rest", total % largest)
    return (Run("layer", largest, total // largest), *([rest] if rest.numel else []))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
