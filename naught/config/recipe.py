"""Recipe: the configuration of `naught train`: DeepSpeed's keys, and three blocks more that say what to train, and on what."""

from __future__ import annotations

from typing import Annotated, Literal

from naught.config.schema import Config
from naught.config.types import Block, Count, Flag, Key, Positive, Share, Text

__all__ = ["DEMO_MODEL", "Recipe"]

DEMO_MODEL = "gpt:layers=4,hidden=128,heads=4,vocab=256,positions=128"


class ModelChoice(Block):
    name: Annotated[Text, Key("a preset, gpt:layers=..., or a Hugging Face config.json or its folder")] = DEMO_MODEL
    weights: Annotated[
        Literal["auto"] | Text | None,
        Key("safetensors file or folder to start from; auto: those beside the config.json, if any; null: random"),
    ] = "auto"
    compile: Annotated[Flag, Key("compile each block with torch.compile")] = False
    checkpointing: Annotated[Flag, Key("keep only the input of each block, and compute the block again in the backward")] = False


class Data(Block):
    path: Annotated[
        Text | None, Key("text file, folder, glob, or .npy of token numbers; null is Python's own standard library")
    ] = None
    validation_path: Annotated[Text | None, Key("the same for validation; null sets a part of the data aside")] = None
    validation: Annotated[Share, Key("the part of the data that is set aside: by file, or the end of a single file")] = 0.05
    tokenizer: Annotated[Text, Key("bytes, or a Hugging Face tokenizer.json or its folder")] = "bytes"
    seq: Annotated[Positive, Key("tokens of a sample")] = 128


class Train(Block):
    name: Annotated[Text | None, Key("name of the run's folder; null is the model's")] = None
    steps: Annotated[Positive, Key("steps of the whole run")] = 250
    seed: Annotated[Count, Key("of the weights and of the order of the data")] = 0
    log_every: Annotated[Positive, Key("steps between two lines on the console; metrics have every step")] = 10
    eval_every: Annotated[Count, Key("steps between two evaluations; 0 evaluates at the end only")] = 100
    eval_batches: Annotated[Count, Key("batches of an evaluation on the way; 0 is all of the data, as the last one has")] = 20
    save_every: Annotated[Count, Key("steps between two checkpoints; 0 saves at the end only")] = 0
    save_last: Annotated[Flag, Key("save when the run is over")] = True
    deterministic: Annotated[Flag, Key("compute only with kernels that round alike every time; slower on a GPU")] = False
    backend: Annotated[
        Literal["auto", "gloo", "nccl"], Key("what ranks speak; auto is nccl on GPUs, and gloo where ranks share one or on CPUs")
    ] = "auto"
    trackio: Annotated[Flag, Key("send scalars to Trackio too; TensorBoard and W&B have keys of DeepSpeed's")] = False


class Recipe(Config):
    """What `naught train` is told. The rest of it is the engine's configuration."""

    model: Annotated[ModelChoice, Key("what is trained")] = ModelChoice()
    data: Annotated[Data, Key("on what")] = Data()
    train: Annotated[Train, Key("for how long, and what is said and kept of it")] = Train()
