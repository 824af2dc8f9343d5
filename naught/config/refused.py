"""Refused: what DeepSpeed can do and Naught does not, with the reason. A key that only switches a thing off is fine."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["REFUSED", "REFUSED_OPTIMIZERS", "is_off"]

_QUANTISED = "ZeRO++ quantisation changes the mathematics; Naught trains bit for bit alike at every stage"
_MICS = "MiCS shards within groups of ranks, and DeepSpeed itself has removed it"
_GONE = "DeepSpeed itself has removed it"
_PARALLEL = "Naught splits over data-parallel ranks, beside tensor parallelism that you give"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "zero_optimization.zero_quantized_weights": _QUANTISED,
        "zero_optimization.zero_quantized_nontrainable_weights": _QUANTISED,
        "zero_optimization.zero_quantized_gradients": _QUANTISED,
        "zero_optimization.zeropp_loco_param": _QUANTISED,
        "zero_optimization.zero_hpz_partition_size": "a second copy of the weights on every node is not available",
        "zero_optimization.mics_shard_size": _MICS,
        "zero_optimization.mics_hierarchical_params_gather": _MICS,
        "zero_optimization.zenflow": "ZenFlow applies part of the gradients late, which changes the mathematics",
        "zero_optimization.legacy_stage1": "the old stage 1 is gone from DeepSpeed too",
        "fp16.fp16_master_weights_and_grads": "masters are always 32-bit",
        "bf16.bf16_master_weights_and_grads": "masters are always 32-bit",
        "bf16.bf16_optimizer_states": "optimizer states are always 32-bit",
        "aio.use_gds": "GPUDirect Storage needs compiled code",
        "checkpoint.use_node_local_storage": "a checkpoint is one folder, which all hosts must see",
        "pipeline": f"no pipeline parallelism: {_PARALLEL}",
        "tensor_parallel": "a model is not cut for you; cut it with torch's parallelize_module and give initialize its mesh",
        "sequence_parallel_size": f"no sequence parallelism: {_PARALLEL}",
        "data_parallel_size": "ranks are data-parallel but for those that mesh or mpu says have a model together",
        "expert_parallel": f"no expert parallelism: {_PARALLEL}",
        "moe": f"no expert parallelism: {_PARALLEL}",
        "use_data_before_expert_parallelism": f"no expert parallelism: {_PARALLEL}",
        "hybrid_engine": "no inference engine",
        "compile": "DeepCompile is not available; compile the blocks with torch.compile",
        "autotuning": "naught plan finds the placement without trial runs",
        "compression_training": f"no compression; {_GONE}",
        "quantize_training": f"no quantised training; {_GONE}",
        "data_efficiency": "no data sampling; use a sampler of your own",
        "curriculum_learning": f"no curriculum; {_GONE}",
        "progressive_layer_drop": f"no layer dropping; {_GONE}",
        "eigenvalue": _GONE,
        "sparse_attention": _GONE,
        "sparse_gradients": f"gradients are dense; {_GONE}",
        "elasticity": f"restart on any number of ranks instead: every checkpoint loads; {_GONE}",
        "nebula": f"checkpoints go to a file system; {_GONE}",
        "amp": f"use bf16, fp16 or torch_autocast; {_GONE}",
        "graph_harvesting": _GONE,
    }
)

_MATRIX = "it needs whole matrices or norms of layers, and a rank holds slices"
_ONE_BIT = "1-bit compression of gradients changes the mathematics"
REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "lamb": _MATRIX,
        "muon": _MATRIX,
        "adafactor": _MATRIX,
        "shampoo": _MATRIX,
        "lbfgs": _MATRIX,
        "muadam": _MATRIX,
        "muadamw": _MATRIX,
        "musgd": _MATRIX,
        "onebitadam": _ONE_BIT,
        "onebitlamb": _ONE_BIT,
        "zerooneadam": _ONE_BIT,
        "sparseadam": "gradients are dense",
    }
)

# Values by which a refused key asks for nothing.
_OFF: tuple[Any, ...] = (None, False, "", "none", "auto")
_OFF_NUMBERS = {
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.mics_shard_size": (-1, 0),
    "sequence_parallel_size": (0, 1),
    "pipeline.stages": (0, 1),
    "pipeline.activation_checkpoint_interval": (0,),
}
_SWITCHES = ("enabled", "deepcompile")
_SIZES = ("autotp_size", "autoep_size", "tp_size", "tp_grain_size")


def is_off(path: str, value: Any) -> bool:
    """Whether a refused key's value asks for nothing: no switch on, no size above one, or nothing said at all."""
    if isinstance(value, dict):
        switches = [value[key] for key in _SWITCHES if key in value]
        if switches:
            return all(switch is None or switch is False for switch in switches)
        return all(is_off(f"{path}.{key}", member) for key, member in value.items())
    if isinstance(value, list):
        return not value
    if isinstance(value, int | float) and not isinstance(value, bool):
        name = path.rpartition(".")[2]
        return value in _OFF_NUMBERS.get(path, (0, 1) if name in _SIZES else ())
    return any(value is off or (isinstance(off, str) and value == off) for off in _OFF)
