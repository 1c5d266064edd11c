"""Tables of the keys of Axolotl, LLaMA-Factory, TRL and others: our name for each, or why it has none.

Keys whose value needs a conversion are in `foreign`. Each foreign key is in exactly one table.
"""

from __future__ import annotations

from typing import Any

from . import known_keys


def _by_name(names_of: dict[str, str]) -> dict[str, str]:
    """Return name → reason for a table of reason → names."""
    return {name.partition("=")[0]: why for why, names in names_of.items() for name in names.split()}


RENAMED = {
    "tokens": "add_tokens",  # Axolotl
    "new_special_tokens": "add_special_tokens",  # ms-swift
    "peft_ensure_weight_tying": "ensure_weight_tying",  # Axolotl
    "peft_trainable_token_indices": "trainable_token_indices",
    "freeze_vit": "freeze_vision_tower",  # ms-swift
    "freeze_aligner": "freeze_multi_modal_projector",
    # TRL, rollouts
    "vllm_importance_sampling_correction": "importance_sampling_correction",
    "vllm_importance_sampling_mode": "importance_sampling_mode",
    "vllm_importance_sampling_clip_max": "importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "importance_sampling_clip_min",
    "vllm_importance_sampling_cap": "importance_sampling_clip_max",
    # Axolotl
    "base_model": "model_name_or_path",
    "revision_of_model": "model_revision",
    "lora_r": "r",
    "lora_modules_to_save": "modules_to_save",
    "lora_target_parameters": "target_parameters",
    "lora_model_dir": "adapter_path",
    "lora_rank_pattern": "rank_pattern",
    "lora_layers_to_transform": "layers_to_transform",
    "peft_layers_to_transform": "layers_to_transform",
    "peft_layers_pattern": "layers_pattern",
    "lora_alpha_pattern": "alpha_pattern",
    "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora",
    "peft_init_lora_weights": "init_lora_weights",
    "val_set_size": "eval_split_size",
    "sequence_len": "max_length",
    "excess_length_strategy": "overlong",
    "sample_packing": "packing",
    "dataset_processes": "dataset_num_proc",
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "embedding_lr": "embedding_learning_rate",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "rope_parameters": "rope_scaling",
    "s2_attention": "shift_attn",
    "nvfp4_merge_aware": "merge_aware",
    "auto_resume_from_checkpoints": "resume_from_checkpoint",
    "rl_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "dpo_beta": "beta",
    "dpo_loss_type": "loss_type",
    "dpo_loss_weights": "loss_weights",
    "dpo_padding_free": "padding_free",
    "adam_eps": "adam_epsilon",
    "streaming_multipack_buffer_size": "shuffle_buffer_size",
    "pretrain_multipack_buffer_size": "shuffle_buffer_size",
    # LLaMA-Factory
    "pref_beta": "beta",
    "kto_chosen_weight": "desirable_weight",
    "kto_rejected_weight": "undesirable_weight",
    "lora_rank": "r",
    "adapter_name_or_path": "adapter_path",
    "quantization_type": "bnb_4bit_quant_type",
    "double_quantization": "bnb_4bit_use_double_quant",
    "val_size": "eval_split_size",
    "cutoff_len": "max_length",
    "neat_packing": "packing",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "teacher_model": "teacher_model_name_or_path",
    "teacher_model_path": "teacher_model_name_or_path",
    "preprocessing_num_workers": "dataset_num_proc",
    "buffer_size": "shuffle_buffer_size",
    "early_stopping_steps": "early_stopping_patience",
    "train_dataset": "dataset",
    # Surogate
    "qlora_bnb_block_size": "bnb_4bit_blocksize",
    "qlora_bnb_double_quant": "bnb_4bit_use_double_quant",
    "adamw_beta1": "adam_beta1",
    "adamw_beta2": "adam_beta2",
    "adamw_epsilon": "adam_epsilon",
    "train_seed": "seed",
    "validation_split_ratio": "eval_split_size",
    # Unsloth
    "random_state": "seed",
    "random_seed": "seed",
    "local_dataset": "dataset",
    # ms-swift and Megatron-LM
    "model": "model_name_or_path",
    "attn_impl": "attn_implementation",
    "target_regex": "target_modules",
    "lorap_lr_ratio": "loraplus_lr_ratio",
    "val_dataset": "eval_dataset",
    "split_dataset_ratio": "eval_split_size",
    "max_epochs": "num_train_epochs",
    "early_stop_interval": "early_stopping_patience",
    "train_iters": "max_steps",
    "lr_warmup_iters": "warmup_steps",
    "moe_aux_loss_coeff": "router_aux_loss_coef",
    "overlong_filter": "mask_truncated_completions",
    "dynamic_sample": "dynamic_sampling",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "rollout_importance_sampling_mode": "importance_sampling_mode",
    "rollout_importance_sampling_threshold": "importance_sampling_clip_max",
    "off_policy_sequence_mask_delta": "off_policy_mask_threshold",
    # TRL and transformers
    "max_seq_length": "max_length",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
    "dataset_streaming": "streaming",
    "test_split_size": "eval_split_size",
    "full_determinism": "deterministic",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
    # PEFT
    "base_model_name_or_path": "model_name_or_path",
    "revision": "model_revision",
}

_SAME = "halfbyte always does this"
_BY_ITSELF = "halfbyte reads it from the checkpoint"
_SPEED = "it does not change the result"
_NO_CACHE = "each run tokenizes its data, without a cache"
_OWN_KERNELS = "halfbyte has its own fused kernels, see use_kernels"
_NO_DDP = "halfbyte reduces all adapter gradients at once, without DDP"
_TERMINAL = "it only changes what is printed"
_COMPLETIONS = "completions.jsonl has prompts, answers and rewards"
_ONLY_PUSHED = "it has a meaning only with push_to_hub"
_SAVED_ONLY = "it describes a saved adapter"
_TRACKIO = "set TRACKIO_* in the environment"
_BLOCKS = "halfbyte shards decoder layer by decoder layer"
HARMLESS = {
    "resize_vocab": "embeddings grow where a new token needs a row",
    "model_type": _BY_ITSELF,
    "tokenizer_type": _BY_ITSELF,
    "pad_token": "halfbyte uses the tokenizer's pad token, or chooses one if it has none",
    "is_llama_derived_model": _BY_ITSELF,
    "tokenizer_use_fast": _BY_ITSELF,
    "use_fast_tokenizer": _BY_ITSELF,
    "bnb_4bit_quant_storage": "halfbyte packs two weights per byte",
    "quantization_device_map": "each process loads its model on one device, see the keys device and parallel",
    "strict": "unknown keys are always errors",
    "debug": "use halfbyte --debug",
    "local_rank": "the launcher sets it",
    "ddp_timeout": _SPEED,
    "ddp_backend": "NCCL on GPUs, gloo on CPUs",
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "fsdp_version": "the axis shard of parallel works like FSDP2",
    "fsdp_min_num_params": _BLOCKS,
    "fsdp_transformer_layer_cls_to_wrap": _BLOCKS,
    "heads_k_stride": "attention over several GPUs exchanges all heads at once",
    "ring_attn_func": "attention over several GPUs exchanges all heads at once",
    "tf32": _SPEED,
    "dataloader_num_workers": _SPEED,
    "dataloader_pin_memory": _SPEED,
    "dataloader_prefetch_factor": _SPEED,
    "dataset_prepared_path": _NO_CACHE,
    "overwrite_cache": _NO_CACHE,
    "shuffle_merged_datasets": _SAME,
    "pad_to_sequence_len": "rows are padded to the longest row of their batch",
    "eval_sample_packing": "evaluation rows are laid out as training rows",
    "eval_packing": "evaluation rows are laid out as training rows",
    "gradient_checkpointing_kwargs": "recomputation is always the non-reentrant kind",
    "remove_unused_columns": _SAME,
    "do_train": "the command decides",
    "do_eval": "evaluation runs when there is held-out data",
    "plot_loss": "report.html has the plots",
    "include_num_input_tokens_seen": "metrics.jsonl has the tokens of each step",
    "include_tokens_per_second": "metrics.jsonl has tokens per second",
    "save_safetensors": _SAME,
    "logging_first_step": _SAME,
    "wandb_entity": "set WANDB_ENTITY in the environment",
    "wandb_watch": "halfbyte does not watch gradients",
    "wandb_run_id": "set WANDB_RUN_ID in the environment",
    "wandb_log_model": "set WANDB_LOG_MODEL in the environment",
    "eval_table_size": "generations.json and report.html show answers",
    "eval_max_new_tokens": "see sample_max_new_tokens",
    "dataset_dir": "name the files themselves in dataset",
    "resize_token_embeddings_to_32x": "see resize_token_embeddings_to_multiple_of: embeddings grow for new tokens only",
    "use_liger_kernel": _OWN_KERNELS,
    "enable_liger_kernel": _OWN_KERNELS,
    "lora_mlp_kernel": _OWN_KERNELS,
    "lora_qkv_kernel": _OWN_KERNELS,
    "lora_o_kernel": _OWN_KERNELS,
    "use_unsloth": _OWN_KERNELS,
    "unsloth_lora_mlp": _OWN_KERNELS,
    # PEFT
    "auto_mapping": _SAVED_ONLY,
    "inference_mode": _SAVED_ONLY,
    "peft_version": _SAVED_ONLY,
    "runtime_config": _SAVED_ONLY,
    "megatron_core": "it has a meaning only with megatron_config",
    "qalora_group_size": "it has a meaning only with use_qalora",
    # transformers
    "activation_checkpointing_kwargs": "recomputation is always the non-reentrant kind",
    "average_tokens_across_devices": _SAME,
    "batch_eval_metrics": _SAME,
    "bf16_full_eval": "evaluation computes in the run's dtype",
    "fp16_full_eval": "evaluation computes in the run's dtype",
    "dataloader_in_order": _SAME,
    "dataloader_multiprocessing_context": _SPEED,
    "dataloader_persistent_workers": _SPEED,
    "disable_tqdm": _TERMINAL,
    "enable_jit_checkpoint": "a signal saves a checkpoint in every run",
    "eval_accumulation_steps": _SPEED,
    "eval_do_concat_batches": "evaluation computes losses only",
    "eval_on_start": _SAME,
    "eval_use_gather_object": "evaluation computes losses only",
    "hub_always_push": _ONLY_PUSHED,
    "hub_revision": _ONLY_PUSHED,
    "include_for_metrics": "evaluation computes losses only",
    "label_names": "the label column is named labels",
    "length_column_name": "rows are not grouped by length",
    "liger_kernel_config": _OWN_KERNELS,
    "log_level": _TERMINAL,
    "log_level_replica": _TERMINAL,
    "log_on_each_node": _TERMINAL,
    "logging_nan_inf_filter": "a loss that is NaN or Inf stops the run",
    "prediction_loss_only": _SAME,
    "restore_callback_states_from_checkpoint": _SAME,
    "save_on_each_node": "one process writes, into an output_dir that all hosts share",
    "skip_memory_metrics": "metrics.jsonl has the memory of each step",
    "torch_compile": _OWN_KERNELS,
    "torch_compile_backend": _OWN_KERNELS,
    "torch_compile_mode": _OWN_KERNELS,
    "torch_empty_cache_steps": "the memory plan limits torch's cache",
    "trackio_bucket_id": _TRACKIO,
    "trackio_space_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "use_cache": "training has no KV cache",
    # TRL
    "cache_implementation": "rollouts always use a paged KV cache",
    "ds3_gather_for_generation": "rollouts read sharded weights by themselves",
    "entropy_coef_delta": "it has a meaning only with use_adaptive_entropy",
    "entropy_coef_max": "it has a meaning only with use_adaptive_entropy",
    "entropy_coef_min": "it has a meaning only with use_adaptive_entropy",
    "entropy_target": "it has a meaning only with use_adaptive_entropy",
    "generate_during_eval": "generations.json has answers before and after training",
    "ignore_bias_buffers": _NO_DDP,
    "is_encoder_decoder": _BY_ITSELF,
    "log_completions": _COMPLETIONS,
    "log_multimodal": _COMPLETIONS,
    "log_unique_prompts": _COMPLETIONS,
    "max_tool_calling_iterations": "it has a meaning only with tools",
    "num_completions_to_print": _COMPLETIONS,
    "pad_to_multiple_of": _SPEED,
    "padding_value": "padding has the tokenizer's pad token",
    "precompute_ref_batch_size": "per_device_eval_batch_size is used",
    "ref_model_mixup_alpha": "it has a meaning only with sync_ref_model",
    "ref_model_sync_steps": "it has a meaning only with sync_ref_model",
    "shuffle_dataset": "the rows of each epoch are shuffled",
    "transformers_continuous_batching_config": "it has a meaning only with use_transformers_continuous_batching",
    **_by_name(known_keys.IGNORED),
}

OWN_ENGINE = "remove it; halfbyte samples answers itself, or on a vLLM server (rollout: vllm)"
NOT_BUILT = {
    "use_transformers_continuous_batching": OWN_ENGINE,
    "use_ray": "remove it, and start the run with `halfbyte train`, or torchrun on each host",
    "sync_ref_model": "remove it; the reference does not change during a run",
    "dpo_norm_loss": "set loss_type: sigmoid_norm, which averages log-probabilities over the tokens of an answer",
    "use_adam_mini": "remove it; optim: adamw_8bit keeps the optimizer small",
    "loss_watchdog_threshold": "remove it; halfbyte stops on NaN and Inf only",
    "loss_watchdog_patience": "remove it; halfbyte stops on NaN and Inf only",
}

_PLAIN_LORA = "remove it; halfbyte trains LoRA, rsLoRA and DoRA"
_OF_SERVER = "remove it; give it to the vLLM server"

NO_EQUIVALENT = {
    "vllm_gpu_memory_utilization": "set rollout_memory_gib, or remove it: the memory plan decides",
    "use_transformers_paged": "remove it; rollouts always use a paged KV cache",
    "tools": "remove it; rollouts have one turn, without tools",
    "environment_factory": "remove it; rollouts have one turn, without an environment",
    "max_prompt_length": "remove it; max_length limits a prompt plus its answer",
    "rpo_alpha": "set loss_type: [sigmoid, sft] and loss_weights: [1, rpo_alpha]",
    "ref_model": "remove it; the reference is the model without its adapter, or with the adapter of adapter_path",
    "pref_bco_weight": "set loss_type: [sigmoid, bco_pair] and loss_weights: [1, pref_bco_weight]",
    "deepspeed": "remove it, and set parallel: auto, or {shard: N} instead of ZeRO-3",
    "default_system_message": "put a system message into the data",
    "default_system": "put a system message into the data",
    "added_tokens_overrides": "add them to the tokenizer's files first",
    "tokenizer_config": "put the tokenizer's files into the model folder",
    "eos_token": "set it in the tokenizer's files",
    "group_by_length": "use packing: true or padding_free: true, which need no padding at all",
    "batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "dataset_config": "download the data and name its file in dataset",
    "dataset_test_split": "name the held-out data in eval_dataset",
    "lora_fan_in_fan_out": "remove it; PEFT determines it from the layer",
    "overwrite_output_dir": "remove it; name another output_dir, or continue with --resume",
    "save_only_model": "remove it; checkpoints hold the optimizer so that --resume is exact",
    "cache_dir": "set HF_HOME in the environment",
    "hf_hub_token": "run `hf auth login`",
    "predict_with_generate": "remove it; sample_prompts generates answers before and after training",
    "do_predict": "use `halfbyte eval`",
    "xformers_attention": "set attn_implementation: sdpa",
    "upcast_layernorm": "remove it; norms are computed in float32 by the models themselves",
    # PEFT
    "fan_in_fan_out": "remove it; PEFT determines it from the layer",
    "alora_invocation_tokens": _PLAIN_LORA,
    "arrow_config": _PLAIN_LORA,
    "kasa_config": _PLAIN_LORA,
    "layer_replication": "remove it; build the deeper model first, as a checkpoint with more layers",
    "megatron_config": "remove it, and set parallel: {tensor: N}",
    "monteclora_config": _PLAIN_LORA,
    "use_bdlora": _PLAIN_LORA,
    "use_qalora": "remove it; no tool merges such an adapter. merge_aware: true trains one that a merge keeps entirely",
    "velora_config": _PLAIN_LORA,
    # transformers
    "accelerator_config": "remove it; parallel divides a run over processes",
    "auto_find_batch_size": "set per_device_train_batch_size; `halfbyte check` predicts the memory",
    "data_seed": "remove it; seed is the seed of the data, too",
    "dataloader_drop_last": "remove it; every row is trained",
    "eval_delay": "remove it; eval_steps sets the interval of evaluations",
    "ignore_data_skip": "remove it; a resumed run continues with the next row",
    "label_smoothing_factor": "remove it; label_smoothing is for pairs of answers (method: dpo)",
    # TRL
    "cast_lm_head_to_fp32": "remove it; losses are computed in float32 from the head's logits",
    "chat_template_kwargs": "write the values into a chat template, and name its file in chat_template_path",
    "dataset_kwargs": "remove it; the data's format is detected, or set dataset_format",
    "generation_batch_size": "set steps_per_generation",
    "generation_kwargs": "set temperature, top_p, top_k, min_p or max_completion_length themselves",
    "log_completions_hub_repo": "remove it; completions.jsonl has prompts, answers and rewards",
    "model_init_kwargs": "set dtype, attn_implementation and model_revision themselves",
    "repetition_penalty": "remove it, or reward answers without repetition: reward_funcs: [repetition]",
    "use_adaptive_entropy": "remove it",
    "vllm_enable_sleep_mode": _OF_SERVER,
    "vllm_group_port": _OF_SERVER,
    "vllm_max_model_length": _OF_SERVER,
    "vllm_model_impl": _OF_SERVER,
    "vllm_structured_outputs_regex": "remove it, or reward answers that match: reward_funcs: [{regex: PATTERN}]",
    "vllm_tensor_parallel_size": _OF_SERVER,
    **_by_name(known_keys.REFUSED),
}
# Keys that are on by default where they come from.
ON_BY_DEFAULT = frozenset(
    name.removesuffix("=true") for names in known_keys.REFUSED.values() for name in names.split() if "=" in name
)

# Refused keys that choose a training method: `import-config` refuses the whole file.
OTHER_METHODS = frozenset({"rl", "stage", "rlhf_type", "reward_model", "process_reward_model"})
# Refused keys that do not change what is trained: `import-config` leaves them out and lists them.
WITHOUT_EFFECT_ON_RESULT = frozenset(
    {
        *("hf_hub_token", "cache_dir"),
        *("overwrite_output_dir", "save_only_model", "predict_with_generate", "do_predict"),
        *("loss_watchdog_threshold", "loss_watchdog_patience", "use_ray"),
    }
)

# Keys of ours that other tools switch off with 0: what halfbyte does then.
OFF_AT_ZERO = {
    "eval_steps": "held-out data is evaluated after each epoch; without held-out data nothing is",
    "save_steps": "a run saves a checkpoint after each epoch",
}

HINTS = {  # common misnomers → our key
    "lr": "learning_rate",
    "rank": "r",
    "alpha": "lora_alpha",
    "model_id": "model_name_or_path",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "quant_type": "bnb_4bit_quant_type",
    "blocksize": "bnb_4bit_blocksize",
    "max_seq_len": "max_length",
    "seq_len": "max_length",
    "context_length": "max_length",
    "4bit": "load_in_4bit",
    "warmup": "warmup_steps",
    "scheduler": "lr_scheduler_type",
    "output": "output_dir",
    "num_gpus": "parallel",
    "nproc_per_node": "parallel",
}


# Other tools' names for values of our keys.
VALUES: dict[str, dict[str, str]] = {
    "pooling": {"lasttoken": "last", "last_token": "last"},
    "loss_type": {"mnrl": "multiple_negatives_ranking", "infonce": "multiple_negatives_ranking"},
    "recipe": {"fp8_hybrid": "fp8-hybrid"},
    "amax_compute_algo": {"MAX": "max", "MOST_RECENT": "most_recent"},
    "quantization": {"eetq": "int8"},
    "target_modules": {"all": "all-linear"},
    "optim_target_modules": {"all_linear": "all-linear"},
    "dataset_format": {"chatml": "messages"},
    "lr_scheduler_type": {
        "wsd": "warmup_stable_decay", "WSD": "warmup_stable_decay", "inverse-square-root": "inverse_sqrt",
    },
    "attn_implementation": {
        **dict.fromkeys(("flash", "flash_attn", "flash_attention", "fa2"), "flash_attention_2"),
        "fa3": "flash_attention_3", "flex": "flex_attention", "sdp": "sdpa",
    },
    "optim": {
        "adamw_hf": "adamw_torch", "adamw_torch_xla": "adamw_torch", "adamw_torch_npu_fused": "adamw_torch_fused",
        "adamw_apex_fused": "adamw_torch_fused", "dist_muon": "muon", "ao_adamw_8bit": "adamw_torch_8bit",
        "ao_adamw_4bit": "adamw_torch_4bit", "rmsprop_32bit": "rmsprop_bnb_32bit", "rmsprop_8bit": "rmsprop_bnb_8bit",
    },
}  # fmt: skip
_WEIGHTS_ONLY = (
    "activations would be rounded, too, and halfbyte rounds weights only",
    "set qat_scheme: int4, int8 or fp8",
)
_NO_OPTIMIZER = "halfbyte does not have this optimizer", "set optim: adamw_8bit, adamw or muon, see docs/optimizers.md"
_NO_ATTENTION = "halfbyte does not have this attention", "set attn_implementation: sdpa or flash_attention_2"
_NO_SCHEDULE = (
    "neither transformers nor halfbyte has it",
    "set lr_scheduler_type: cosine, linear or warmup_stable_decay",
)
# Values of other tools without an equivalent: the reason, and what to do instead.
REFUSED_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "pooling": dict.fromkeys(
        ("cls", "first"), ("the first token of a decoder attends to no other", "set pooling: last or mean")
    ),
    "qat_scheme": dict.fromkeys(("int8-int4", "fp8-int4", "fp8-fp8", "int8-int8", "cactus"), _WEIGHTS_ONLY),
    "attn_implementation": dict.fromkeys(("xformers", "sage", "fp8"), _NO_ATTENTION),
    "lora_bias": {  # ms-swift's key of this name is PEFT's `bias`
        "none": ("it is true or false", "set lora_bias: false"),
        "all": ("the base's biases are not trained with an adapter", "set lora_bias: true, or remove it"),
    },
    "lr_scheduler_type": dict.fromkeys(("rex", "one_cycle"), _NO_SCHEDULE),
    "optim": dict.fromkeys(
        (
            *(
                "optimi_adamw",
                "ao_adamw_fp8",
                "adopt_adamw",
                "came_pytorch",
                "dion",
                "sinkgd",
                "normuon",
                "flash_adamw",
            ),
            *("flash_adam", "flash_sgd", "flash_sgdw", "flash_lion", "galore_adafactor", "galore_adafactor_layerwise"),
        ),
        _NO_OPTIMIZER,
    ),
    "overlong": {
        "raise": ("rows that are too long do not stop a run", "set overlong: drop, which reports their number")
    },
    "importance_sampling_level": {
        "sequence_token": ("halfbyte has token and sequence", "set importance_sampling_level: sequence")
    },
    "scale_rewards": {
        "gdpo": (
            "it is a way to sum several rewards",
            "set multi_objective_aggregation: normalize_then_sum, and remove scale_rewards",
        )
    },
}


# Defaults of other tools that differ from halfbyte's.
DEFAULTS: dict[str, dict[str, Any]] = {
    "Axolotl": {"max_length": 512},
    "LLaMA-Factory": {
        "max_length": 2048,
        "per_device_train_batch_size": 8,
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.0,
    },
    "Surogate": {
        "max_length": 1024,
        "packing": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.0,
        "optim": "adamw_8bit",
        "lora_alpha": 32.0,
        "load_in_4bit": False,
    },
    "ms-swift": {
        "num_train_epochs": 3.0,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.0,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "r": 8,
        "lora_alpha": 32.0,
        "lora_dropout": 0.05,
        "load_in_4bit": False,
    },
}
