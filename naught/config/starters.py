"""Starters: short configurations to begin from, each with a word on why a key is there."""

from __future__ import annotations

__all__ = ["STARTERS", "starter"]

_HEAD = """{
  // samples in one forward of one rank; the whole batch is this x accumulation x ranks
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 100, "warmup_type": "linear"}},
"""

STARTERS = {
    "stage1": _HEAD
    + """  // stage 1 splits optimizer state over the ranks: a quarter of the memory, no more communication
  "zero_optimization": {"stage": 1}
}
""",
    "stage2": _HEAD
    + """  // stage 2 splits gradients too: an eighth of the memory, no more communication
  "zero_optimization": {"stage": 2}
}
""",
    "stage3": _HEAD
    + """  // stage 3 splits parameters too: memory falls with every rank, for half as much communication again
  "zero_optimization": {
    "stage": 3,
    // smaller units stay whole on every rank
    "stage3_param_persistence_threshold": 1e5,
    "stage3_gather_16bit_weights_on_model_save": true
  }
}
""",
    "offload": _HEAD
    + """  // optimizer state and gradients rest in host memory, and the update runs on the CPU
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}
  }
}
""",
    "infinity": _HEAD
    + """  // parameters and optimizer state rest on disk: change nvme_path to a folder on a fast local disk
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}
  },
  "activation_checkpointing": {"cpu_checkpointing": true}
}
""",
}


def starter(kind: str) -> str:
    return STARTERS[kind]
