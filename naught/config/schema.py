"""Schema: every key that a configuration may hold, declared once: type, range, default, meaning, and how DeepSpeed differs.

The typed object, the checks, `naught config explain`, the JSON Schema and the page of defaults all come from here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from naught.config.observation import CommsLogger, CsvMonitor, FlopsProfiler, Tensorboard, Timers, Wandb
from naught.config.optimizers import (
    Adagrad,
    Adam,
    AdamW,
    Lion,
    LRRangeTest,
    OneCycle,
    Sgd,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from naught.config.ours import Naught
from naught.config.precisions import Autocast, Bf16, DataTypes, Fp16
from naught.config.types import (
    Block,
    Count,
    Flag,
    Key,
    Names,
    Opaque,
    Positive,
    Precision,
    Real,
    Share,
    Text,
    Whole,
    any_case,
    idle,
    lower,
    never_if_infinite,
)

__all__ = ["Config"]


# --- zero_optimization ------------------------------------------------------------------------------------------------

_Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lower), any_case("none", "cpu", "nvme")]


class OffloadOptimizer(Block):
    device: Annotated[
        _Device,
        Key("where optimizer states and gradients rest: with the parameters, in host memory or on disk"),
    ] = "none"
    nvme_path: Annotated[Text | None, Key("folder for states on disk; needed when device is nvme")] = None
    pin_memory: Annotated[Flag, Key("register host slabs with the GPU driver, which makes copies about six times faster")] = True
    ratio: Annotated[Share, Key("share of the states that leaves the device; the rest is updated there")] = 1.0
    buffer_count: Annotated[Count, idle("staging is sized from the plan")] = 4
    pipeline_read: Annotated[Flag, idle("reads always run ahead of the update")] = False
    pipeline_write: Annotated[Flag, idle("writes always run behind the update")] = False
    pipeline: Annotated[Flag, idle("reads and writes always overlap the update")] = False
    fast_init: Annotated[Flag, idle("states are made where they rest")] = False
    super_offload: Annotated[Flag, idle("the update always overlaps the next forward")] = False
    cpuadam_cores_perc: Annotated[Share, idle("the update runs on the cores that the rank is bound to")] = 0.8


class OffloadParam(Block):
    device: Annotated[_Device, Key("where 16-bit parameter shards rest: on the device, in host memory or on disk")] = "none"
    nvme_path: Annotated[Text | None, Key("folder for parameters on disk; needed when device is nvme")] = None
    pin_memory: Annotated[Flag, Key("register host slabs with the GPU driver")] = True
    max_in_cpu: Annotated[
        Count, Key("elements of a rank that stay in host memory although device is nvme, those of the first units")
    ] = 10**9
    buffer_count: Annotated[Count, idle("staging is sized from the plan")] = 5
    buffer_size: Annotated[Count, idle("staging is sized from the plan, so no parameter is too large for it")] = 10**8


class LeafModule(Block):
    classes: Annotated[
        Names,
        Key(
            "classes whose modules are one unit each",
            "blocks with experts are found by their shape",
            peer="three classes of Hugging Face",
        ),
    ] = ()
    names: Annotated[Names, Key("full names of modules that are one unit each")] = ()
    name_suffixes: Annotated[Names, Key("ends of the names of modules that are one unit each")] = ()


class Zero(Block):
    stage: Annotated[
        Whole,
        Field(ge=0, le=3),
        Key("what is split over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too"),
    ] = 0
    offload_optimizer: Annotated[OffloadOptimizer | None, Key("moves optimizer states and gradients off the device")] = None
    offload_param: Annotated[OffloadParam | None, Key("moves parameter shards off the device; stage 3 only")] = None
    reduce_bucket_size: Annotated[
        Positive,
        Key("most elements that one reduce-scatter carries, where it needs memory of its own; a larger unit goes in pieces"),
    ] = 500_000_000
    allgather_bucket_size: Annotated[
        Positive, Key("elements of new weights that are under way at once after an update; stages 1 and 2")
    ] = 500_000_000
    overlap_comm: Annotated[
        Flag | None,
        Key(
            "false issues each collective only where it is needed, for debugging",
            "the plan overlaps at every stage; DeepSpeed does from stage 3",
            peer="true at stage 3 only",
        ),
    ] = None
    sub_group_size: Annotated[Count, Key("most elements that one update touches at once; 0 means one unit", also=())] = 10**9
    stage3_prefetch_bucket_size: Annotated[
        Count,
        Key(
            "elements fetched ahead of their use, rounded up to one unit; 0 turns prefetching off", also=("prefetch_bucket_size",)
        ),
    ] = 50_000_000
    stage3_param_persistence_threshold: Annotated[
        Count,
        Key(
            "units of fewer elements stay gathered",
            "a unit's parameters travel as one, so small ones cost no collective of their own",
            also=("param_persistence_threshold",),
            peer=100_000,
        ),
    ] = 0
    stage3_model_persistence_threshold: Annotated[
        Count, Key("most elements that may stay gathered in all", also=("model_persistence_threshold",))
    ] = 2**63 - 1
    stage3_max_live_parameters: Annotated[
        Count, Key("most elements that are gathered at once, rounded up to one unit", also=("max_live_parameters",))
    ] = 10**9
    stage3_max_reuse_distance: Annotated[
        Count,
        Key(
            "a unit that is used again before this many elements are gathered is not released",
            "stage 3 is chosen for memory; a value buys speed with it",
            also=("max_reuse_distance",),
            peer=10**9,
        ),
    ] = 0
    stage3_module_granularity_threshold: Annotated[
        Count, idle("the layers of a block are always one unit", also=("module_granularity_threshold",))
    ] = 0
    stage3_gather_16bit_weights_on_model_save: Annotated[
        Flag,
        Key(
            "save_16bit_model writes whole weights",
            also=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
        ),
    ] = False
    leaf_module: Annotated[LeafModule, Key("modules to treat as one unit")] = LeafModule()
    compute_grad_norm: Annotated[
        Flag, idle("the norm also tells whether a step is finite; naught.update_in_backward does not wait for it")
    ] = True
    load_from_fp32_weights: Annotated[Flag, idle("a checkpoint's weights are always the 32-bit masters")] = True
    contiguous_gradients: Annotated[Flag, idle("gradients always go into one flat buffer for each unit")] = True
    reduce_scatter: Annotated[Flag, idle("split gradients are always reduce-scattered, whole ones never")] = True
    use_multi_rank_bucket_allreduce: Annotated[Flag, idle("a unit's gradients are one collective for all owners")] = True
    allgather_partitions: Annotated[Flag, idle("weights are always all-gathered")] = True
    ignore_unused_parameters: Annotated[Flag, idle("a parameter without a gradient is always tolerated, and left untouched")] = (
        True
    )
    round_robin_gradients: Annotated[Flag, idle("every rank already owns an equal part of every unit")] = False
    parameter_alignment: Annotated[Flag, idle("every parameter is aligned")] = False
    memory_efficient_linear: Annotated[
        Flag, idle("no layer is patched; freed weights come back where autograd looks for them")
    ] = True
    override_module_apply: Annotated[Flag, idle("no module method is patched")] = True
    pipeline_loading_checkpoint: Annotated[Flag, idle("each rank reads only its own bytes")] = False
    elastic_checkpoint: Annotated[Flag, idle("every checkpoint loads at any world size")] = False
    log_trace_cache_warnings: Annotated[Flag, idle("a new order of modules is planned anew, not warned about")] = False
    enable_sanity_checks: Annotated[Flag, idle("ranks always compare models and plans")] = False
    stage3_use_all_reduce_for_fetch_params: Annotated[
        Flag, idle("weights are gathered into place", also=("use_all_reduce_for_fetch_params",))
    ] = False
    stage3_allgather_sequential: Annotated[Flag, idle("a unit is one collective", also=("allgather_sequential",))] = False
    save_muon_momentum_buffer_in_memory: Annotated[Flag, idle("there is no Muon")] = False


# --- memory of activations, disk, checkpoints -------------------------------------------------------------------------


class ActivationCheckpointing(Block):
    partition_activations: Annotated[
        Flag, Key("model-parallel ranks keep a part of each checkpoint and gather it for the recompute")
    ] = False
    cpu_checkpointing: Annotated[Flag, Key("checkpoints rest in host memory")] = False
    contiguous_memory_optimization: Annotated[Flag, Key("checkpoints share one buffer made at the start")] = False
    number_checkpoints: Annotated[
        Positive | None,
        Key("how many checkpoints that buffer holds; null: each has memory of its own, made when it is first needed"),
    ] = None
    synchronize_checkpoint_boundary: Annotated[Flag, idle("nothing waits for the device at a checkpoint")] = False
    profile: Annotated[Flag, idle("wall_clock_breakdown times every phase")] = False


class Aio(Block):
    block_size: Annotated[
        Whole, Field(ge=4096), Key("bytes of one disk request", "16 of them in flight reach a disk's rate", peer=2**20)
    ] = 2**22
    queue_depth: Annotated[Positive, Key("requests in flight; each has a thread of its own, which reads, updates and writes")] = 8
    intra_op_parallelism: Annotated[
        Positive,
        Key(
            "how many times as many; 16 at most in all",
            "while one checks a sum others move bytes",
            peer=1,
            also=("thread_count",),
        ),
    ] = 2
    single_submit: Annotated[Flag, idle("requests are system calls of threads")] = False
    overlap_events: Annotated[Flag, idle("requests are system calls of threads")] = True


class Checkpoint(Block):
    tag_validation: Annotated[
        Literal["ignore", "warn", "fail"],
        BeforeValidator(lower),
        any_case("ignore", "warn", "fail"),
        idle("ranks always agree on the name before anything is written"),
    ] = "warn"
    load_universal: Annotated[Flag, idle("every checkpoint loads at any world size, stage and tier")] = False
    checkpoint_serialization: Annotated[Flag, idle("the format is JSON and raw bytes")] = True
    writer: Annotated[Opaque, idle("large sequential writes are the only way")] = None
    parallel_write: Annotated[Opaque, idle("every rank writes its own shards")] = None


# --- the whole --------------------------------------------------------------------------------------------------------


class Config(Block):
    """A configuration, complete and frozen. `auto` names the keys that whoever starts the run still has to fill."""

    train_batch_size: Annotated[Positive | None, Key("samples in one step over all ranks")] = None
    train_micro_batch_size_per_gpu: Annotated[Positive | None, Key("samples in one forward of one rank")] = None
    gradient_accumulation_steps: Annotated[Positive | None, Key("forwards and backwards before one update")] = None
    managed_gradient_accumulation: Annotated[Flag, Key("false lets the caller say when a step is complete")] = True
    gradient_clipping: Annotated[Real, Field(ge=0), Key("largest norm of all gradients together; 0 does not clip")] = 1.0
    steps_per_print: Annotated[
        Positive | None, BeforeValidator(never_if_infinite), Key("steps between two lines of the log; null or inf is never")
    ] = None
    optimizer: Annotated[Adam | AdamW | Sgd | Lion | Adagrad | None, Key("the update rule; null expects one from the caller")] = (
        None
    )
    scheduler: Annotated[
        WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest | None, Key("the learning rate over time")
    ] = None
    zero_optimization: Annotated[Zero, Key("what is split, and where it rests")] = Zero()
    fp16: Annotated[Fp16, Key("half precision with a scaled loss")] = Fp16()
    bf16: Annotated[Bf16, Key("bfloat16 precision", also=("bfloat16",))] = Bf16()
    torch_autocast: Annotated[Autocast, Key("mixed precision by operator")] = Autocast()
    data_types: Annotated[DataTypes, Key("precision of single kinds of data")] = DataTypes()
    communication_data_type: Annotated[Precision | None, Key("precision of gradients on the wire; null is their own")] = None
    prescale_gradients: Annotated[Flag, Key("divide gradients before they are summed, not after")] = False
    gradient_predivide_factor: Annotated[Real, Field(gt=0), Key("part of the division that comes before the sum")] = 1.0
    gradient_allreduce_op: Annotated[
        Literal["mean", "sum"], BeforeValidator(lower), any_case("mean", "sum"), Key("how ranks' gradients are combined")
    ] = "mean"
    activation_checkpointing: Annotated[ActivationCheckpointing, Key("where checkpoints of activations rest")] = (
        ActivationCheckpointing()
    )
    aio: Annotated[Aio, Key("how the disk is read and written")] = Aio()
    checkpoint: Annotated[Checkpoint, Key("how training is saved")] = Checkpoint()
    dataloader_drop_last: Annotated[Flag, Key("leave out the last, smaller batch")] = False
    wall_clock_breakdown: Annotated[Flag, Key("log the time of every phase")] = False
    memory_breakdown: Annotated[Flag, Key("log the memory of every phase by category")] = False
    comms_logger: Annotated[CommsLogger, Key("a log of collectives")] = CommsLogger()
    flops_profiler: Annotated[FlopsProfiler, Key("a count of operations")] = FlopsProfiler()
    timers: Annotated[Timers, Key("timers")] = Timers()
    tensorboard: Annotated[Tensorboard, Key("a sink for scalars")] = Tensorboard()
    csv_monitor: Annotated[CsvMonitor, Key("a sink for scalars")] = CsvMonitor()
    wandb: Annotated[Wandb, Key("a sink for scalars")] = Wandb()
    naught: Annotated[Naught, Key("settings that DeepSpeed does not have")] = Naught()
    zero_allow_untested_optimizer: Annotated[
        Flag, idle("every elementwise optimizer is exact under ZeRO; others are refused with the reason")
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[Flag, idle("the CPU update is the same rule as the GPU's")] = True
    disable_allgather: Annotated[Flag, idle("weights are always all-gathered")] = False
    dump_state: Annotated[Flag, idle("naught config check prints the configuration")] = False
    disable_python_gc: Annotated[Flag, idle("the garbage collector is the program's own business")] = False
    log_level: Annotated[Opaque, idle('use logging.getLogger("naught")')] = None
    vocabulary_size: Annotated[Opaque, idle("only DeepSpeed's autotuner reads it")] = None
    seq_parallel_communication_data_type: Annotated[Opaque, idle("there is no sequence parallelism")] = None
    weight_quantization: Annotated[Opaque, idle("belongs to DeepSpeed's inference")] = None
    comet: Annotated[Opaque, idle("there is no Comet sink; metrics are always written as JSON lines")] = None
    auto: Annotated[frozenset[str], Field(exclude=True)] = frozenset()
