"""Optimizers: the update rules and learning-rate schedules that a configuration can name, with their numbers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from naught.config.types import Betas, Block, Count, Flag, Key, Opaque, Positive, Rates, Real, Share, Whole, idle, true_or_false

__all__ = ["OPTIMIZERS", "SCHEDULERS"]


class _Params(Block):
    lr: Annotated[Real, Field(ge=0), Key("learning rate")] = 1e-3
    weight_decay: Annotated[Real, Field(ge=0), Key("decay of weights towards zero")] = 0.0
    max_grad_norm: Annotated[Annotated[Real, Field(ge=0)] | None, Key("old place of gradient_clipping")] = None
    fused: Annotated[Flag | None, idle("the fused kernel is always used")] = None
    foreach: Annotated[Flag | None, idle("the fused kernel is always used")] = None


class AdamParams(_Params):
    betas: Annotated[Betas, Key("decay of the two moments")] = (0.9, 0.999)
    eps: Annotated[Real, Field(ge=0), Key("added to the root of the second moment")] = 1e-8
    adam_w_mode: Annotated[Flag, Key("decoupled weight decay (AdamW) also under the name Adam", also=("adamw_mode",))] = True
    bias_correction: Annotated[
        Literal[True],
        BeforeValidator(true_or_false),
        Key("correct the moments for their start at zero", "torch's kernel always does"),
    ] = True
    amsgrad: Annotated[Literal[False], BeforeValidator(true_or_false), Key("a third moment", "it is not available")] = False
    torch_adam: Annotated[Flag, idle("the update is torch's own kernel")] = False
    fp32_optimizer_states: Annotated[Flag, idle("states are always 32-bit")] = True
    freeze_step: Annotated[Opaque, idle("belongs to 1-bit Adam")] = None


class SgdParams(_Params):
    momentum: Annotated[Share, Key("share of the last step that goes on")] = 0.0
    dampening: Annotated[Share, Key("share by which the gradient is damped")] = 0.0
    nesterov: Annotated[Flag, Key("look ahead along the momentum")] = False


class LionParams(_Params):
    betas: Annotated[Betas, Key("weights of the old moment in the step and in the new moment")] = (0.9, 0.99)


class AdagradParams(_Params):
    lr: Annotated[Real, Field(ge=0), Key("learning rate")] = 1e-2
    lr_decay: Annotated[Real, Field(ge=0), Key("decay of the learning rate")] = 0.0
    eps: Annotated[Real, Field(ge=0), Key("added to the root of the sum of squares")] = 1e-10
    initial_accumulator_value: Annotated[Real, Field(ge=0), Key("what the sum of squares starts from")] = 0.0


class _Optimizer(Block):
    legacy_fusion: Annotated[Flag, idle("there is one implementation")] = False


class Adam(_Optimizer):
    type: Annotated[Literal["Adam"], Key("Adam; decoupled decay unless adam_w_mode is false")] = "Adam"
    params: Annotated[AdamParams, Key("hyperparameters")] = AdamParams()


class AdamW(_Optimizer):
    type: Annotated[Literal["AdamW"], Key("Adam with decoupled weight decay")] = "AdamW"
    params: Annotated[AdamParams, Key("hyperparameters")] = AdamParams()


class Sgd(_Optimizer):
    type: Annotated[Literal["SGD"], Key("gradient descent with momentum")] = "SGD"
    params: Annotated[SgdParams, Key("hyperparameters")] = SgdParams()


class Lion(_Optimizer):
    type: Annotated[Literal["Lion"], Key("sign descent with one moment")] = "Lion"
    params: Annotated[LionParams, Key("hyperparameters")] = LionParams()


class Adagrad(_Optimizer):
    type: Annotated[Literal["Adagrad"], Key("descent scaled by the sum of squares")] = "Adagrad"
    params: Annotated[AdagradParams, Key("hyperparameters")] = AdagradParams()


class WarmupParams(Block):
    warmup_min_lr: Annotated[Rates, Key("learning rate at the start")] = 0.0
    warmup_max_lr: Annotated[Rates | None, Key("learning rate after the warm-up; null is the optimizer's")] = None
    warmup_num_steps: Annotated[Count, Key("steps of the warm-up")] = 1000
    warmup_type: Annotated[Literal["log", "linear"], Key("shape of the warm-up")] = "log"
    last_batch_iteration: Annotated[Whole, Field(ge=-1), Key("step to start from")] = -1


class WarmupDecayParams(WarmupParams):
    total_num_steps: Annotated[Positive | None, Key("step at which the rate is zero again; needed")] = None


class WarmupCosineParams(Block):
    total_num_steps: Annotated[Positive | None, Key("step at which the cosine ends; needed")] = None
    warmup_min_ratio: Annotated[Share, Key("share of the rate at the start")] = 0.0
    warmup_num_steps: Annotated[Count, Key("steps of the warm-up")] = 1000
    cos_min_ratio: Annotated[Share, Key("share of the rate at the end")] = 1e-4
    warmup_type: Annotated[Literal["log", "linear"], Key("shape of the warm-up")] = "log"
    last_batch_iteration: Annotated[Whole, Field(ge=-1), Key("step to start from")] = -1


class OneCycleParams(Block):
    cycle_min_lr: Annotated[Rates | None, Key("lowest rate of the cycle; needed")] = None
    cycle_max_lr: Annotated[Rates | None, Key("highest rate of the cycle; needed")] = None
    decay_lr_rate: Annotated[Real, Field(ge=0), Key("decay of the rate after the cycle")] = 0.0
    cycle_first_step_size: Annotated[Positive, Key("steps of the rise")] = 2000
    cycle_second_step_size: Annotated[Positive | None, Key("steps of the fall; null is as many as the rise")] = None
    cycle_first_stair_count: Annotated[Count, Key("stairs of the rise; 0 is a slope")] = 0
    cycle_second_stair_count: Annotated[Count | None, Key("stairs of the fall")] = None
    decay_step_size: Annotated[Count, Key("steps between decays")] = 0
    cycle_momentum: Annotated[Flag, Key("cycle the momentum too")] = True
    cycle_min_mom: Annotated[Share, Key("lowest momentum")] = 0.8
    cycle_max_mom: Annotated[Share, Key("highest momentum")] = 0.9
    decay_mom_rate: Annotated[Real, Field(ge=0), Key("decay of the momentum after the cycle")] = 0.0
    last_batch_iteration: Annotated[Whole, Field(ge=-1), Key("step to start from")] = -1


class RangeTestParams(Block):
    lr_range_test_min_lr: Annotated[Rates, Key("rate to start from")] = 1e-3
    lr_range_test_step_size: Annotated[Positive, Key("steps between increases")] = 2000
    lr_range_test_step_rate: Annotated[Real, Field(gt=0), Key("increase")] = 1.0
    lr_range_test_staircase: Annotated[Flag, Key("increase in stairs")] = False
    last_batch_iteration: Annotated[Whole, Field(ge=-1), Key("step to start from")] = -1


class WarmupLR(Block):
    type: Annotated[Literal["WarmupLR"], Key("rise, then stay")] = "WarmupLR"
    params: Annotated[WarmupParams, Key("its numbers")] = WarmupParams()


class WarmupDecayLR(Block):
    type: Annotated[Literal["WarmupDecayLR"], Key("rise, then fall to zero on a line")] = "WarmupDecayLR"
    params: Annotated[WarmupDecayParams, Key("its numbers")] = WarmupDecayParams()


class WarmupCosineLR(Block):
    type: Annotated[Literal["WarmupCosineLR"], Key("rise, then fall along a cosine")] = "WarmupCosineLR"
    params: Annotated[WarmupCosineParams, Key("its numbers")] = WarmupCosineParams()


class OneCycle(Block):
    type: Annotated[Literal["OneCycle"], Key("one rise and fall, then decay")] = "OneCycle"
    params: Annotated[OneCycleParams, Key("its numbers")] = OneCycleParams()


class LRRangeTest(Block):
    type: Annotated[Literal["LRRangeTest"], Key("an ever higher rate, to find the limit")] = "LRRangeTest"
    params: Annotated[RangeTestParams, Key("its numbers")] = RangeTestParams()


OPTIMIZERS: dict[str, type[Block]] = {"adam": Adam, "adamw": AdamW, "sgd": Sgd, "lion": Lion, "adagrad": Adagrad}
SCHEDULERS: dict[str, type[Block]] = {
    "warmuplr": WarmupLR,
    "warmupdecaylr": WarmupDecayLR,
    "warmupcosinelr": WarmupCosineLR,
    "onecycle": OneCycle,
    "lrrangetest": LRRangeTest,
}
