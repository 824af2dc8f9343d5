"""Needs: DeepSpeed's estimates of the memory for model states, answered by the planner.

The bytes are those of 16-bit training with 32-bit masters and Adam: the states of each rank with their padding, and in
stage 3 the largest layer while it is in use. Activations are not among them; `naught.plan_for` counts those too.

DeepSpeed multiplies host bytes by an `additional_buffer_factor` of 1.5 for what its formula leaves out. The planner
counts, so the default changes nothing here; any other factor is a margin that the caller wants on the host bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from naught.model_states import Cluster, Held, Options, hold, runs_of
from naught.modules import model_of
from naught.quantity import show_bytes, show_count
from naught.shapes import Run
from naught.text import table

__all__ = [
    "Zero2Needs",
    "Zero3Needs",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]

_FACTOR = 1.5


class Zero2Needs(NamedTuple):
    """Bytes of a node's host, and of each GPU."""

    cpu_bytes: int
    gpu_bytes: int


class Zero3Needs(NamedTuple):
    """Bytes of a node's host, and of each GPU; `largest_layer_bytes` of the latter come and go with the layers."""

    cpu_bytes: int
    gpu_bytes: int
    largest_layer_bytes: int


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = _FACTOR,
) -> Zero2Needs:
    """What stage 2 holds, with or without its gradients and optimizer state on the host."""
    cluster = Cluster(num_gpus_per_node, num_nodes)
    held = _needs(_whole(total_params), Options(2, cpu_offload), cluster, additional_buffer_factor)
    return Zero2Needs(held.host_bytes, held.device_bytes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = _FACTOR
) -> str:
    """Print a table of what stage 2 can offload, for a model, and return it. Frozen parameters have no states."""
    return _table(model_of(model).runs, _ZERO2, Cluster(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = _FACTOR
) -> str:
    """Print a table of what stage 2 can offload, for a number of parameters, and return it."""
    return _table(_whole(total_params), _ZERO2, Cluster(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = _FACTOR,
) -> Zero3Needs:
    """What stage 3 holds. Parameters are on the host only where the optimizer is, as in DeepSpeed. Without zero.Init every
    process first builds the whole model there, in 32 bits."""
    runs, cluster = runs_of(int(total_params), int(largest_layer_params)), Cluster(num_gpus_per_node, num_nodes)
    options = Options(3, cpu_offload, cpu_offload and cpu_offload_params, zero_init)
    return Zero3Needs(*_needs(runs, options, cluster, additional_buffer_factor))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = _FACTOR
) -> str:
    """Print a table of what stage 3 can offload, for a model, and return it. A layer is what is gathered together.
    Frozen parameters have no states."""
    return _table(model_of(model).runs, _ZERO3, Cluster(num_gpus_per_node, num_nodes), additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = _FACTOR,
) -> str:
    """Print a table of what stage 3 can offload, for a number of parameters, and return it."""
    runs, cluster = runs_of(int(total_params), int(largest_layer_params)), Cluster(num_gpus_per_node, num_nodes)
    return _table(runs, _ZERO3, cluster, additional_buffer_factor)


def _whole(total: int) -> tuple[Run, ...]:
    return runs_of(int(total), int(total))


_ZERO2 = (Options(2, True), Options(2, False))
_OFFLOADS = ((True, True), (True, False), (False, False))
_ZERO3 = tuple(Options(3, *offload, zero_init) for offload in _OFFLOADS for zero_init in (True, False))


def _table(runs: Sequence[Run], options: Sequence[Options], cluster: Cluster, factor: float) -> str:
    total = show_count(sum(run.numel * run.repeat for run in runs))
    rows = []
    for chosen in options:
        held = _needs(runs, chosen, cluster, factor)
        rows.append((str(chosen), show_bytes(held.host_bytes), show_bytes(held.device_bytes)))
    title = f"model states of {total} parameters in stage {options[0].stage}, {cluster}"
    text = f"{title}\n{table(('options', 'each node', 'each GPU'), rows)}"
    print(text)
    return text


def _needs(runs: Sequence[Run], options: Options, cluster: Cluster, factor: float) -> Held:
    held = hold(runs, options, cluster)
    return held if factor == _FACTOR else held._replace(host_bytes=round(held.host_bytes * factor))
