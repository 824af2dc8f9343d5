"""Ours: the block of a configuration that DeepSpeed does not have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from naught.config.types import (
    Block,
    Flag,
    Key,
    Positive,
    Real,
    Size,
    Text,
    Whole,
)

__all__ = ["Naught"]


class Naught(Block):
    placement: Annotated[
        Literal["stage", "auto", "pooled"],
        Key(
            "stage: as zero_optimization says; auto (or pooled, the same), at stage 3: each unit's states go to the nearest tier "
            "with room"
        ),
    ] = "stage"
    gpu_memory: Annotated[
        Size | None,
        Key('device memory that a rank may have, in bytes or such as "32GB"; null: no limit, and in a pool what is free'),
    ] = None
    host_memory: Annotated[
        Size | None,
        Key(
            'host memory that the ranks of a host may have for states, in bytes or such as "100GB"; null: no limit, and in a '
            "pool what is free less a tenth"
        ),
    ] = None
    activation_memory: Annotated[
        Size | None, Key("device memory that no states may have; null: a tenth of what a rank may have")
    ] = None
    gradients: Annotated[
        Literal["follow", "device", "host", "disk"],
        Key("tier of split gradients; follow: host when the optimizer has left the device"),
    ] = "follow"
    activations: Annotated[
        Literal["device", "host", "disk"],
        Key(
            "where activations rest between forward and backward; host is what activation_checkpointing.cpu_checkpointing is. "
            "The result is the same"
        ),
    ] = "device"
    saved_tensors: Annotated[
        Literal["checkpoints", "all"],
        Key("which ones rest there: the inputs of checkpoints, or all that autograd saves, for models without checkpoints"),
    ] = "checkpoints"
    tiles: Annotated[
        Whole,
        Field(ge=1, le=4096),
        Key("pieces into which large linear layers and embeddings are split, to gather one at a time; stage 3"),
    ] = 1
    nvme_path: Annotated[Text | None, Key("folder for what the pool puts on disk")] = None
    reduce_every_micro_batch: Annotated[
        Flag, Key("sum gradients over the ranks after every micro-batch, at every stage: then all stages round alike")
    ] = False
    lazy_weights: Annotated[
        Flag | None,
        Key(
            "stages 1 and 2 gather new weights where the next forward uses them, not in step(); they read as NaN until then; "
            "null: where the optimizer rests on the host, so that its update is hidden",
        ),
    ] = None
    ranks_may_differ: Annotated[
        Flag,
        Key(
            "ranks may run other modules than their peers in any step: they agree on each collective before it, as in a first "
            "step, and follow no plan. Each takes an exchange more, every forward is looked at, and nothing is fetched ahead; "
            "the result is the same"
        ),
    ] = False
    private_pool: Annotated[
        Flag,
        Key(
            "flats that come and go have a pool of GPU memory of their own, which leaves fewer gaps where sequences differ in "
            "length; others may use it when memory is short"
        ),
    ] = False
    small_masters: Annotated[
        Flag,
        Key(
            "bf16 weights are rounded half up, and 16-bit rests beside them restore the masters bit for bit: 2 bytes less for "
            "every parameter whose states are on the device"
        ),
    ] = False
    small_moments: Annotated[
        Flag,
        Key(
            "what AdamW, Adam, Lion and SGD remember of a gradient is kept in 8 bits, in blocks of 64 with a scale each: for "
            "AdamW 2.1 bytes of a parameter instead of 8. This changes the mathematics, and the same way in every placement"
        ),
    ] = False
    wide_gradients: Annotated[
        Flag | None,
        Key(
            "gradients that wait on the host have 32 bits, as its update needs them: faster, for 2 bytes more of every parameter "
            "there; the result is the same; null: yes, in a pool only where that pushes nothing away",
        ),
    ] = None
    delay_update_after: Annotated[
        Whole | None,
        Field(ge=0),
        Key(
            "after so many steps weights whose optimizer rests on the host follow an update one step late, so that it runs "
            "beside the whole of the next step (40: step 41 is the first of these). This changes the mathematics; null: never"
        ),
    ] = None
    update_in_backward: Annotated[
        Flag,
        Key(
            "each unit is updated in the backward, as soon as its gradients are summed, and these are let go: none rest on the "
            "device or the host. For one backward a step, without clipping and fp16; the result is the same as without"
        ),
    ] = False
    async_save: Annotated[Flag, Key("save_checkpoint() copies, and writes while training goes on")] = False
    keep_last: Annotated[
        Positive | None, Key("how many of the newest checkpoints stay when one more has been saved; null and no keep_every: all")
    ] = None
    keep_every: Annotated[Positive | None, Key("checkpoints of steps that this divides stay as well")] = None
    watchdog_s: Annotated[
        Real,
        Field(ge=0),
        Key("seconds without progress after which one rank says where each of them is, and all write their stacks; 0 is never"),
    ] = 60.0

    @property
    def host_sums(self) -> int:
        """How many sums of the same gradients the host has room for: an update that is delayed reads one while the next comes."""
        return 1 if self.delay_update_after is None else 2
