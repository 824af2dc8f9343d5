"""Configurations in the manner of those people use with DeepSpeed, Hugging Face, accelerate, Lightning and the
fine-tuning tools: their keys, spellings, number formats and habits, in our own words."""

from __future__ import annotations

AUTO_BATCH = '"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"'
AUTO_ADAMW = '"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}'
AUTO_WARMUP = (
    '"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}'
)
AUTO_FP16 = (
    '"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, '
    '"hysteresis": 2, "min_loss_scale": 1}'
)

REAL: dict[str, str] = {
    "empty": "{}",
    "smallest": '{"train_batch_size": 8}',
    "cifar": """{
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
        "gradient_clipping": 1.0,
        "prescale_gradients": false,
        "bf16": {"enabled": false},
        "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
                 "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
        "wall_clock_breakdown": false,
        "zero_optimization": {"stage": 1, "allgather_partitions": true, "reduce_scatter": true,
            "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true,
            "contiguous_gradients": true, "cpu_offload": false}
    }""",
    "bert pretraining": """{
        "train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "steps_per_print": 1000,
        "prescale_gradients": false,
        "optimizer": {"type": "Adam", "params": {"lr": 6e-3, "betas": [0.9, 0.99], "weight_decay": 0.01, "bias_correction": true}},
        "gradient_clipping": 1.0, "wall_clock_breakdown": false,
        "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16}
    }""",
    "squad with the old clipping key": """{
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": true, "max_grad_norm": 1.0}},
        "gradient_clipping": 1.0, "fp16": {"enabled": true}
    }""",
    "very old zero": '{"train_batch_size": 4, "zero_optimization": true, "fp16": {"enabled": true}}',
    "hugging face stage 2": f"""{{
        {AUTO_FP16}, {AUTO_ADAMW}, {AUTO_WARMUP},
        "zero_optimization": {{
            "stage": 2,
            "offload_optimizer": {{"device": "cpu", "pin_memory": true}},
            "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
            "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true
        }},
        "gradient_clipping": "auto", {AUTO_BATCH}, "steps_per_print": 2000, "wall_clock_breakdown": false
    }}""",
    "hugging face stage 3": f"""{{
        {AUTO_FP16}, "bf16": {{"enabled": "auto"}}, {AUTO_ADAMW}, {AUTO_WARMUP},
        "zero_optimization": {{
            "stage": 3,
            "offload_optimizer": {{"device": "cpu", "pin_memory": true}},
            "offload_param": {{"device": "cpu", "pin_memory": true}},
            "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": true
        }},
        "gradient_clipping": "auto", {AUTO_BATCH}, "steps_per_print": 2000, "wall_clock_breakdown": false
    }}""",
    "hugging face nvme": f"""{{
        "bf16": {{"enabled": "auto"}},
        "zero_optimization": {{
            "stage": 3,
            "offload_optimizer": {{"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4, "fast_init": false}},
            "offload_param": {{"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}},
            "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9
        }},
        "aio": {{"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true}},
        {AUTO_BATCH}
    }}""",
    "accelerate as it hands over": """{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "nvme_path": null},
            "offload_param": {"device": "none", "nvme_path": null}, "stage3_gather_16bit_weights_on_model_save": false},
        "gradient_clipping": 1.0, "steps_per_print": Infinity, "bf16": {"enabled": true}, "fp16": {"enabled": false},
        "zero_allow_untested_optimizer": true
    }""",
    "accelerate with everything auto": f"""{{
        {AUTO_BATCH}, "gradient_clipping": "auto",
        "zero_optimization": {{"stage": "auto", "offload_optimizer": {{"device": "auto", "nvme_path": "auto"}},
            "offload_param": {{"device": "auto", "nvme_path": "auto"}}, "overlap_comm": true, "contiguous_gradients": true,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"}},
        "bf16": {{"enabled": "auto"}}, "fp16": {{"enabled": "auto"}}, "steps_per_print": inf
    }}""",
    "fine-tuning stage 0": f"""{{
        {AUTO_BATCH}, "gradient_clipping": "auto", "zero_allow_untested_optimizer": true, {AUTO_FP16},
        "bf16": {{"enabled": "auto"}},
        "zero_optimization": {{"stage": 0, "allgather_partitions": true, "allgather_bucket_size": 5e8, "overlap_comm": false,
            "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true, "round_robin_gradients": true}}
    }}""",
    "fine-tuning stage 2": f"""{{
        {AUTO_BATCH}, "gradient_clipping": "auto", "zero_allow_untested_optimizer": true, {AUTO_FP16},
        "bf16": {{"enabled": "auto"}},
        "zero_optimization": {{"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 5e8, "overlap_comm": true,
            "reduce_scatter": true, "reduce_bucket_size": 5e8, "contiguous_gradients": true, "round_robin_gradients": true}}
    }}""",
    "fine-tuning stage 3 with bare names": """{
        "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 0,
            "reduce_bucket_size": "auto", "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto",
            "max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": true},
        "bf16": {"enabled": true},
        "fp16": {"enabled": "auto", "auto_cast": false, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
            "hysteresis": 2, "min_loss_scale": 1},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }""",
    "fine-tuning stage 1 with autocast": f"""{{
        "zero_optimization": {{"stage": 1, "overlap_comm": true}}, "bf16": {{"enabled": false}},
        "torch_autocast": {{"enabled": true, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}},
        {AUTO_BATCH}, "gradient_clipping": "auto", "wall_clock_breakdown": false
    }}""",
    "old spelling of saving": """{
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": true, "cpu_offload": true,
            "cpu_offload_param": true, "cpu_offload_use_pin_memory": true}
    }""",
    "old offload at stage 2": """{
        "train_batch_size": 32, "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "cpu_offload": true, "contiguous_gradients": true, "overlap_comm": true},
        "fp16": {"enabled": true}
    }""",
    "comments everywhere": """
    // the run of last week
    {
        /* batch */
        "train_batch_size": 64, # global
        "gradient_accumulation_steps": 2, // two
        "_comment": "keys that begin with an underscore are remarks",
        "_comment_2": {"even": ["objects"]},
        "zero_optimization": {
            "stage": 3, "_comment": "as in the paper",
        },
    }""",
    "megatron-like": """{
        "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000},
        "gradient_clipping": 1.0, "prescale_gradients": false, "zero_allow_untested_optimizer": true,
        "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}, "wall_clock_breakdown": false,
        "communication_data_type": "fp32"
    }""",
    "vision-language stage 2": f"""{{
        "fp16": {{"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}},
        "bf16": {{"enabled": "auto"}}, {AUTO_BATCH},
        "zero_optimization": {{"stage": 2, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto"}}
    }}""",
    "vision-language stage 3 offload": f"""{{
        "bf16": {{"enabled": "auto"}}, {AUTO_BATCH}, "gradient_clipping": "auto",
        "zero_optimization": {{"stage": 3, "offload_optimizer": {{"device": "cpu", "pin_memory": true}},
            "offload_param": {{"device": "cpu", "pin_memory": true}}, "overlap_comm": true, "contiguous_gradients": true,
            "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9, "gather_16bit_weights_on_model_save": true}},
        "steps_per_print": 1e5, "wall_clock_breakdown": false
    }}""",
    "vision-language stage 1": """{
        "zero_optimization": {"stage": 1, "allgather_partitions": true, "allgather_bucket_size": 1e9, "overlap_comm": true,
            "reduce_scatter": true, "reduce_bucket_size": 1e9, "contiguous_gradients": true},
        "fp16": {"enabled": "auto", "auto_cast": true, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
            "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": true
    }""",
    "reinforcement learning": """{
        "steps_per_print": 100, "train_batch_size": 128, "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none", "pin_memory": true}, "sub_group_size": "auto",
            "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_prefetch_bucket_size": "auto",
            "reduce_bucket_size": "auto", "zero_hpz_partition_size": 1, "zero_quantized_weights": false,
            "zero_quantized_gradients": false},
        "bf16": {"enabled": true}, "gradient_clipping": 1.0, "prescale_gradients": false, "wall_clock_breakdown": false,
        "data_types": {"grad_accum_dtype": "bf16"}
    }""",
    "reference model of reinforcement learning": """{
        "steps_per_print": 100, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": "auto",
            "offload_param": {"device": "cpu", "pin_memory": true}},
        "bf16": {"enabled": true}, "gradient_clipping": 1.0, "prescale_gradients": false, "wall_clock_breakdown": false,
        "train_batch_size": 128, "train_micro_batch_size_per_gpu": 8
    }""",
    "lightning": """{
        "zero_allow_untested_optimizer": true,
        "zero_optimization": {"stage": 2, "contiguous_gradients": true, "overlap_comm": true, "allgather_partitions": true,
            "reduce_scatter": true, "allgather_bucket_size": 200000000, "reduce_bucket_size": 200000000, "sub_group_size": 1000000000000},
        "activation_checkpointing": {"partition_activations": false, "cpu_checkpointing": false,
            "contiguous_memory_optimization": false, "synchronize_checkpoint_boundary": false},
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": false, "overlap_events": true, "thread_count": 1},
        "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0,
        "bf16": {"enabled": true}
    }""",
    "activation checkpointing": """{
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2,
        "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true, "contiguous_memory_optimization": true,
            "number_checkpoints": 24, "synchronize_checkpoint_boundary": false, "profile": false}
    }""",
    "one cycle": """{
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true, "weight_decay": 1e-4}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_first_step_size": 1000, "cycle_first_stair_count": 500,
            "cycle_second_step_size": 1000, "cycle_second_stair_count": 500, "decay_step_size": 1000, "cycle_min_lr": 0.0001,
            "cycle_max_lr": 0.0010, "decay_lr_rate": 0.001, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0}}
    }""",
    "range test": """{
        "train_batch_size": 256, "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00001, "torch_adam": true, "adam_w_mode": false}},
        "scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 200,
            "lr_range_test_step_rate": 5, "lr_range_test_staircase": false}}
    }""",
    "warm-up and decay": """{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
        "scheduler": {"type": "WarmupDecayLR", "params": {"last_batch_iteration": -1, "total_num_steps": "auto",
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    }""",
    "warm-up and cosine": """{
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
        "optimizer": {"type": "adamw", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10000, "warmup_num_steps": 300, "cos_min_ratio": 0.1}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}
    }""",
    "lion": """{
        "train_batch_size": 64, "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.3}},
        "zero_optimization": {"stage": 1}
    }""",
    "adagrad": '{"train_batch_size": 64, "optimizer": {"type": "Adagrad", "params": {"lr": 0.01, "eps": 1e-10}}}',
    "monitoring": """{
        "train_batch_size": 64,
        "tensorboard": {"enabled": true, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": false, "group": "my_group", "team": "my_team", "project": "my_project"},
        "csv_monitor": {"enabled": true, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "comms_logger": {"enabled": true, "verbose": false, "prof_all": false, "debug": false, "prof_ops": ["all_reduce", "all_gather"]},
        "flops_profiler": {"enabled": true, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": true, "output_file": null},
        "wall_clock_breakdown": true, "memory_breakdown": true, "dump_state": true
    }""",
    "twin-flow": """{
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true, "ratio": 0.3}}
    }""",
    "bfloat16 under its old name": '{"train_batch_size": 8, "bfloat16": {"enabled": true}, "zero_optimization": {"stage": 1}}',
    "everything that ZeRO-3 can be told": """{
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 3e9, "stage3_max_reuse_distance": 3e9,
            "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e6,
            "stage3_model_persistence_threshold": 9223372036854775807, "stage3_module_granularity_threshold": 0,
            "stage3_use_all_reduce_for_fetch_params": false, "stage3_allgather_sequential": false,
            "sub_group_size": 1e14, "ignore_unused_parameters": true, "round_robin_gradients": false,
            "memory_efficient_linear": false, "override_module_apply": true, "log_trace_cache_warnings": true,
            "leaf_module": {"classes": ["MixtralSparseMoeBlock"], "names": [], "name_suffixes": ["mlp"]},
            "legacy_stage1": false, "elastic_checkpoint": false, "load_from_fp32_weights": true}
    }""",
    "checkpoint settings": """{
        "train_batch_size": 8, "checkpoint": {"tag_validation": "Warn", "load_universal": false, "use_node_local_storage": false,
            "parallel_write": {"pipeline_stage": false}, "writer": {"type": "fast", "io_buffer_size": 67108864}}
    }""",
    "removed features switched off": """{
        "train_batch_size": 8, "amp": {"enabled": false, "opt_level": "O1"}, "elasticity": {"enabled": false},
        "compression_training": {}, "autotuning": {"enabled": false, "fast": true}, "sparse_gradients": false,
        "curriculum_learning": {"enabled": false, "curriculum_type": "seqlen"}, "progressive_layer_drop": {"enabled": false},
        "zero_optimization": {"stage": 2, "mics_shard_size": -1, "mics_hierarchical_params_gather": false},
        "tensor_parallel": {"autotp_size": 1}, "data_efficiency": {"enabled": false}, "pipeline": {}, "compile": {"deepcompile": false}
    }""",
    "gradient arithmetic": """{
        "train_batch_size": 32, "prescale_gradients": true, "gradient_predivide_factor": 8, "gradient_allreduce_op": "mean",
        "communication_data_type": "bfp16", "zero_optimization": {"stage": 2}
    }""",
    "static loss scale": '{"train_batch_size": 4, "fp16": {"enabled": true, "loss_scale": 128.0, "min_loss_scale": 0.5}}',
    "bf16 without the overflow check": """{
        "train_batch_size": 4, "bf16": {"enabled": true, "check_grad_overflow": false, "immediate_grad_update": true}
    }""",
    "caller owns the boundary": '{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "managed_gradient_accumulation": false}',
    "null blocks": """{
        "train_batch_size": 4, "optimizer": null, "scheduler": null, "steps_per_print": null, "communication_data_type": null,
        "zero_optimization": {"stage": 1, "offload_param": null, "offload_optimizer": null, "overlap_comm": null}
    }""",
    "integers written as floats": """{
        "train_batch_size": 32.0, "gradient_accumulation_steps": 4.0, "steps_per_print": 1e1,
        "zero_optimization": {"stage": 2.0, "reduce_bucket_size": 5E+8, "allgather_bucket_size": 2e8}
    }""",
    "a byte order mark and windows lines": '\ufeff{\r\n  "train_batch_size": 8,\r\n  "zero_optimization": {"stage": 1}\r\n}\r\n',
    "unicode in names": '{"train_batch_size": 8, "wandb": {"enabled": false, "project": "실험 – 测试", "group": "\\u00e9t\\u00e9"}}',
    "super offload": """{
        "train_batch_size": 8, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": true, "cpuadam_cores_perc": 0.9, "pin_memory": true, "ratio": 0.9}}
    }""",
    "gradients and pool of ours": """{
        "train_batch_size": 8, "zero_optimization": {"stage": 3}, "naught": {"placement": "pooled", "gradients": "disk", "nvme_path": "/scratch", "tiles": 4}
    }""",
}
