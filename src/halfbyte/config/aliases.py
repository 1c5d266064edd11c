"""Tables of the keys of Axolotl, LLaMA-Factory, TRL and others: our name for each, or why it has none.

Keys whose value needs a conversion are in `foreign`. Each foreign key is in exactly one table.
"""

from __future__ import annotations

from typing import Any

RENAMED = {
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
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "embedding_lr": "embedding_learning_rate",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "auto_resume_from_checkpoints": "resume_from_checkpoint",
    "rl_beta": "beta",
    "orpo_alpha": "beta",
    "dpo_label_smoothing": "label_smoothing",
    "dpo_use_weighting": "use_weighting",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
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
    # Surogate
    "qlora_bnb_block_size": "bnb_4bit_blocksize",
    "qlora_bnb_double_quant": "bnb_4bit_use_double_quant",
    # Unsloth
    "random_state": "seed",
    # TRL and transformers
    "max_seq_length": "max_length",
    "dataset_name": "dataset",
    "dataset_train_split": "dataset_split",
}

_SAME = "halfbyte always does this"
_BY_ITSELF = "halfbyte reads it from the checkpoint"
_SPEED = "it does not change the result"
_NO_CACHE = "each run tokenizes its data, without a cache"
_OWN_KERNELS = "halfbyte has its own fused kernels, see use_kernels"
_NO_DDP = "halfbyte reduces all adapter gradients at once, without DDP"
_BLOCKS = "halfbyte shards decoder layer by decoder layer"
HARMLESS = {
    "model_type": _BY_ITSELF,
    "task_type": "halfbyte trains causal language models",
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
    "wandb_name": "set WANDB_NAME in the environment",
    "wandb_run_id": "set WANDB_RUN_ID in the environment",
    "wandb_log_model": "set WANDB_LOG_MODEL in the environment",
    "run_name": "set WANDB_NAME in the environment",
    "eval_table_size": "generations.json and report.html show answers",
    "eval_max_new_tokens": "see sample_max_new_tokens",
    "dataset_dir": "name the files themselves in dataset",
    "resize_token_embeddings_to_32x": "halfbyte does not resize the vocabulary",
    "use_liger_kernel": _OWN_KERNELS,
    "enable_liger_kernel": _OWN_KERNELS,
    "lora_mlp_kernel": _OWN_KERNELS,
    "lora_qkv_kernel": _OWN_KERNELS,
    "lora_o_kernel": _OWN_KERNELS,
    "use_unsloth": _OWN_KERNELS,
    "unsloth_lora_mlp": _OWN_KERNELS,
}

OWN_ENGINE = "remove it; halfbyte samples answers itself, or on a vLLM server (rollout: vllm)"
NOT_BUILT = {
    "use_transformers_continuous_batching": OWN_ENGINE,
    "use_ray": "remove it, and start the run with `halfbyte train`, or torchrun on each host",
    "sync_ref_model": "remove it; the reference does not change during a run",
    "dpo_norm_loss": "set loss_type: sigmoid_norm, which averages log-probabilities over the tokens of an answer",
    "loftq_config": "remove it; init_lora_weights: true or gaussian works now",
    "pissa_init": "remove it; init_lora_weights: true or gaussian works now",
    "use_adam_mini": "remove it; optim: adamw_8bit keeps the optimizer small",
    "use_muon": "set optim: muon",
    "plugins": "remove it; halfbyte has no plugins",
    "push_to_hub": "remove it and run `hf upload` on the finished adapter/",
    "hub_model_id": "remove it and run `hf upload` on the finished adapter/",
    "hub_strategy": "remove it and run `hf upload` on the finished adapter/",
    "streaming": "remove it; the data is tokenized before training",
    "dataset_streaming": "remove it; the data is tokenized before training",
    "early_stopping_patience": "remove it, and pick a checkpoint by the eval lines of metrics.jsonl",
    "load_best_model_at_end": "remove it, and pick a checkpoint by the eval lines of metrics.jsonl",
    "loss_watchdog_threshold": "remove it; halfbyte stops on NaN and Inf only",
    "loss_watchdog_patience": "remove it; halfbyte stops on NaN and Inf only",
}

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
    "tokens": "add them to the tokenizer's files first",
    "added_tokens_overrides": "add them to the tokenizer's files first",
    "add_tokens": "add them to the tokenizer's files first",
    "add_special_tokens": "add them to the tokenizer's files first",
    "resize_vocab": "resize the checkpoint first",
    "tokenizer_config": "put the tokenizer's files into the model folder",
    "eos_token": "set it in the tokenizer's files",
    "group_by_length": "use packing: true or padding_free: true, which need no padding at all",
    "batch_size": "set per_device_train_batch_size and gradient_accumulation_steps",
    "max_samples": "shorten the file, or for a hub dataset set dataset_split: train[:1000]",
    "dataset_config": "download the data and name its file in dataset",
    "dataset_test_split": "name the held-out data in eval_dataset",
    "mask_history": "every assistant turn is trained; split the conversations into single turns",
    "cosine_min_lr_ratio": "remove it; lr_scheduler_type: cosine falls to zero",
    "lr_scheduler_kwargs": "choose an lr_scheduler_type that needs none, such as cosine or linear",
    "lora_fan_in_fan_out": "remove it; PEFT determines it from the layer",
    "overwrite_output_dir": "remove it; name another output_dir, or continue with --resume",
    "save_only_model": "remove it; checkpoints hold the optimizer so that --resume is exact",
    "cache_dir": "set HF_HOME in the environment",
    "hf_hub_token": "run `hf auth login`",
    "predict_with_generate": "remove it; sample_prompts generates answers before and after training",
    "do_predict": "use `halfbyte eval`",
    "xformers_attention": "set attn_implementation: sdpa",
    "s2_attention": "remove it",
    "upcast_layernorm": "remove it; norms are computed in float32 by the models themselves",
    "lora_bias": "remove it; adapters have no bias",
    "layers_to_transform": "name the layers in target_modules, one regular expression",
    "lora_layers_to_transform": "name the layers in target_modules, one regular expression",
}

# Refused keys that choose a training method: `import-config` refuses the whole file.
OTHER_METHODS = frozenset({"rl", "stage", "reward_model", "process_reward_model"})
# Refused keys that do not change what is trained: `import-config` leaves them out and lists them.
WITHOUT_EFFECT_ON_RESULT = frozenset(
    {
        *("push_to_hub", "hub_model_id", "hub_strategy", "hf_hub_token", "cache_dir"),
        *("overwrite_output_dir", "save_only_model", "predict_with_generate", "do_predict"),
        *("loss_watchdog_threshold", "loss_watchdog_patience", "use_ray", "streaming", "dataset_streaming"),
    }
)

HINTS = {  # common misnomers → our key
    "lr": "learning_rate",
    "rank": "r",
    "alpha": "lora_alpha",
    "model": "model_name_or_path",
    "model_id": "model_name_or_path",
    "data": "dataset",
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
    "gpus": "parallel",
    "num_gpus": "parallel",
    "nproc_per_node": "parallel",
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
}
