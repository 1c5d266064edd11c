"""Names of other tools' keys that halfbyte has no key for, by the reason.

They are the fields of PEFT's, TRL's and transformers' configurations, and of Axolotl's, LLaMA-Factory's, ms-swift's,
Surogate's and Unsloth's, sections included (2026-11-28).
`name=true` is a key with this default: it is refused with any other value.
"""

# Reason to ignore them → names.
IGNORED = {
    "report_to names the experiment trackers; their other settings come from environment variables": """
        add_version aim_experiment aim_name aim_repo comet_api_key comet_experiment_config comet_experiment_key
        comet_mode comet_online comet_project_name comet_workspace hf_mlflow_log_artifacts log_gpu_util logging_dir
        mlflow_tracking_uri otel_metrics_host otel_metrics_port project_id ray_exp_name ray_run_name
        surogate_metrics_path swanlab_api_host swanlab_api_key swanlab_completion_log_interval
        swanlab_completion_max_buffer swanlab_description swanlab_email_language swanlab_lark_secret
        swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model swanlab_logdir swanlab_mode
        swanlab_notification_method swanlab_receiver_email swanlab_secret swanlab_sender_email swanlab_smtp_port
        swanlab_smtp_server swanlab_token swanlab_web_host swanlab_webhook_url swanlab_workspace tensorboard_dir
        tensorboard_queue_size use_otel_metrics wandb_log_unique_prompts wandb_mode wandb_token
    """,
    "it is about generating or evaluating, see `halfbyte generate`, `serve` and `eval`": """
        api_key api_server_count base_url bench_dataset bench_split cache_files compute_accuracy data_range
        do_bench_eval do_causal_lm_eval do_sample dp dpo_generate_during_eval easy_query_threshold
        enable_auto_tool_choice enable_lora engine_kwargs eval_backend eval_base_model eval_causal_lm_metrics
        eval_dataset_args eval_generation_config eval_iters eval_limit eval_metric eval_num_beams eval_num_proc
        eval_output_dir eval_url eval_use_evalscope extra_eval_args generate_samples generation_config
        generation_do_sample generation_max_length generation_max_new_tokens generation_num_beams
        generation_prompt_ratio generation_temperature generation_top_k generation_top_p gradio_max_new_tokens
        gradio_server_name gradio_server_port gradio_share gradio_temperature gradio_title host infer_backend
        infer_dtype is_multimodal lang length_penalty lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks
        lmdeploy_cache_max_entry_count lmdeploy_quant_policy lmdeploy_session_len lmdeploy_tp lmdeploy_vision_batch_size
        log_interval logprobs max_batch_size max_cpu_loras max_logprobs max_loras max_new_tokens metric n_best_to_keep
        n_shot num_beams num_generation_samples num_return_sequences num_sampling_batch_size num_sampling_batches
        orm_model output_file override_exist_file owned_by port prm_model prm_threshold reasoning_parser
        reranker_use_activation result_path resume sample_backend sampler_engine sampler_type save_dir served_model_name
        server_name server_port sglang_config sglang_context_length sglang_disable_cuda_graph
        sglang_disable_custom_all_reduce sglang_dp_size sglang_enable_dp_attention sglang_enable_ep_moe sglang_ep_size
        sglang_kv_cache_dtype sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_mem_fraction_static
        sglang_pp_size sglang_quantization sglang_speculative_algorithm sglang_speculative_eagle_topk
        sglang_speculative_num_draft_tokens sglang_speculative_num_steps sglang_tp_size share skip_special_tokens
        sortish_sampler ssl_certfile ssl_keyfile stop_words stream structured_outputs_regex studio_title task_dir
        tool_call_parser top_logprobs tp use_kv_cache val_dataset_sample verbose write_batch_size
    """,
    "halfbyte samples answers itself, or on a vLLM server that has its own settings": """
        all2all_backend async_generate async_prefetch bridge_backend disable_log_stats enable_eplb
        enable_expert_parallel enable_flattened_weight_sync enable_prefix_caching enable_reasoning enforce_eager
        fast_inference float8_kv_cache fork_threshold_tokens gpu_memory_utilization heartbeat_stale_after_s
        kv_cache_dtype log_entropy log_rollout_offpolicy_metrics max_concurrent max_inflight_rollouts max_inflight_tasks
        max_lora_rank max_model_len max_num_seqs max_staleness move_model_batches num_train_workers offload_bridge
        offload_model offload_teacher_model oversampling_factor prefetch_depth queue_maxsize request_timeout
        reward_num_workers router_replay_mode serve_module sleep_level streaming_min_groups streaming_partial_batch
        tasks_per_minute token_batch_size token_budget unsloth_vllm_standby use_data_producer use_token_client vllm
        vllm_config vllm_data_parallel_size vllm_disable_cascade_attn vllm_disable_custom_all_reduce
        vllm_enable_expert_parallel vllm_enable_lora vllm_enable_prefix_caching vllm_enforce_eager vllm_engine_kwargs
        vllm_gpu_util vllm_guided_decoding_regex vllm_limit_mm_per_prompt vllm_lora_sync vllm_max_lora_rank
        vllm_max_model_len vllm_max_num_seqs vllm_maxlen vllm_mm_processor_cache_gb vllm_pipeline_parallel_size
        vllm_quantization vllm_reasoning_parser vllm_server_group_port vllm_server_pass_dataset vllm_speculative_config
        vllm_sync_frequency vllm_sync_interval vllm_use_async_engine weight_sync_steps weight_sync_timeout
        worker_extension_cls
    """,
    "it is about exporting, see `halfbyte merge` and `halfbyte export`": """
        commit_message create_checkpoint_symlink exist_ok export_device export_dir export_hf_on_finish
        export_hub_model_id export_legacy_format export_quantization_bit export_quantization_dataset
        export_quantization_maxlen export_quantization_nsamples export_size hub_path llmcompressor local_repo_path
        max_shard_size mcore_adapter mcore_model mcore_ref_adapter mcore_ref_model merge_adapter merge_lora merge_method
        push_gguf push_model quant_batch_size quant_n_samples safe_serialization save_compressed save_gguf save_method
        save_missing_weights save_model save_name_prefix save_path template_mode temporary_location test_convert_dtype
        test_convert_precision thread_count to_cached_dataset to_hf to_mcore to_ollama to_peft_format
    """,
    "halfbyte has its own fused kernels, see use_kernels": """
        accumulate_allreduce_grads_in_fp32 apply_dsa_kernel_fusion apply_rope_fusion attention_backend
        attention_softmax_in_fp32 attn_bwd_chunks auto_config auto_lmhead_chunks auto_model backend
        bias_activation_fusion bias_dropout_fusion chunked_cross_entropy chunked_cross_entropy_num_chunks
        cross_entropy_fusion_impl cross_entropy_loss_fusion cut_cross_entropy deepcompile dpo_use_liger_kernel
        dpo_use_logits_to_keep dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel dsv4_shared_mlp_lora_kernel
        enable_npu_model_patch expert_backend experts_impl experts_implementation flash_attn_cross_entropy
        flash_attn_d512 flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum flex_attn_compile_kwargs
        float32_mixed_precision fp32_norm_classes fp32_norms fp4_backend fullgraph fused_attn_kernel
        gemma4_hybrid_attn_impl gradient_accumulation_fusion kernel_config large_head_attention liger_cross_entropy
        liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm liger_rms_norm_gated
        liger_rope liger_swiglu liger_use_token_scaling linear_decoupled_in_proj llama4_linearized_experts lmhead_chunks
        lmhead_drop_ignored_rows long_context lora_embedding_kernel masked_softmax_fusion matmul_backend model_patcher
        moe_bnb_fast moe_dequant_chunk_size moe_enable_deepep moe_grouped_backend moe_grouped_gemm moe_layer_recompute
        moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype moe_shared_expert_overlap
        moe_token_dispatcher_type muon_fp32_matmul_prec optimizer_cuda_graph quantize_backend return_logits sdpa_varlen
        supports_sdpa te_rng_tracker tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp torch_compile_options
        unsloth_force_compile unsloth_tiled_mlp upcast_lmhead_output use_cuda_graphs use_dsv4_kernels use_fused_mhc
        use_fused_rope use_glm_dsa_kernels use_liger_loss use_logits_to_keep use_optimized_inference
        use_precision_aware_optimizer use_reentrant_gc use_scattermoe use_sonicmoe use_swift_lora use_unsloth_gc
        use_v1_kernels vit_attn_impl
    """,
    "the memory plan decides what is recomputed, sharded and kept in host memory": """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split align_grad_reduce align_param_gather
        auto_wrap_policy batch_p2p_comm cache_block_outputs cp_comm_type cp_mode cp_partition_mode cpu_offload
        cpu_offload_pin_memory cpu_ram_efficient_loading cpu_training data_parallel_random_init
        data_parallel_sharding_strategy data_sharding ddp decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers deepspeed_autotp_size dispatch_pp dist_ckpt_optim_fully_reshardable
        dist_ckpt_save_pre_mcore_014 distrib_optim_fully_reshardable_mem_efficient embeddings_skip_upcast
        ep_load_balance_threshold ep_plan_refresh_interval ep_size ephemeral_gpu_offload exp_avg_dtype exp_avg_sq_dtype
        expert_model_parallel_size expert_parallel_backend expert_parallel_fallback_on_unsupported
        expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity
        expert_tensor_parallel_size final_state_dict_type fp4_param_gather fp8_enable_fsdp_float8_all_gather
        fp8_param_gather fsdp_final_state_dict_type gc_collect_steps gc_steps gpu_memory_limit gradient_dtype
        hyper_parallel_args layer_offloading llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight main_grads_dtype
        main_params_dtype manual_gc manual_gc_eval manual_gc_steps master_dtype max_memory megatron_bridge_args
        memcpy_all_gather memcpy_send_recv mhc_recompute_layer_num microbatch_group_size_per_vp_stage min_num_params
        mixed_precision_policy mlp_padding_free nccl_comm_warmup offload_embedding offload_folder offload_grads
        offload_master offload_params offload_quants optimizer_cpu_offload optimizer_offload_fraction
        overlap_grad_reduce overlap_p2p_comm overlap_param_gather overlap_param_gather_with_optimizer_step parallelism
        persistent_quants pipeline_model_parallel_layout qlora_selective_expert_dequant qlora_sharded_model_loading
        quantize_moe_experts recompute_granularity recompute_layer_types recompute_method recompute_modules
        recompute_num_layers relora_cpu_offload reshard_after_forward runtime_offload_base_weight
        selective_checkpointing sequence_chunks sequence_packing_scheduler sequence_parallel shard_gradients
        shard_weights skip_zero_advantage_batches state_dict_type sync_module_states tp_comm_overlap
        transformer_layer_cls_to_wrap use_all_to_all_reduce use_distributed_optimizer use_hyper_parallel use_mca
        use_megatron_bridge use_megatron_fsdp use_orig_params use_write_combined use_zero_copy
        virtual_pipeline_model_parallel_size vit_gradient_checkpointing vit_gradient_checkpointing_kwargs world_size
        zero_hpz_partition_size zero_level
    """,
    "`halfbyte train` starts a process on each visible GPU, and torchrun on several hosts": """
        ENV apply_recommended_values axolotl_config_path block_diag_attn capabilities check_model colocate_groups
        compute_dtype compute_environment data_shared_file_system deepspeed_config device_groups distributed
        distributed_type downcast_bf16 enable_cpu_affinity env_capabilities extra_config gpus_per_node ignore_args_error
        is_falcon_derived_model is_mistral_derived_model is_preprocess is_qwen_derived_model load_args load_data_args
        machine_rank main_process_ip main_process_port main_training_function master_addr master_port
        megatron_extra_kwargs model_max_length num_machines num_nodes num_processes preprocess_iterable ray_address
        ray_init_kwargs ray_num_workers rdzv_backend resources_per_worker same_network sample_packing_eff_est
        sample_packing_seq_len_multiplier skip_megatron_init test_value total_num_tokens total_supervised_tokens tpu_env
        tpu_use_cluster tpu_use_sudo tuner_backend use_flash_ckpt worker_output_dir
    """,
    "halfbyte loads the files of the model or hub by itself": """
        api_key_var async_save base_model_config base_model_ignore_patterns client cls_model_config connect_timeout
        dequantize device_map download_mode experimental_skip_move_to_device finetune fix_tokenizer gguf_file
        gptq_disable_exllama gptq_groupsize gptq_model_v1 headers hf_token hf_use_auth_token init_config lora_on_cpu
        low_cpu_mem_usage max_connections max_keepalive_connections megatron_pretrained_checkpoint model_class
        model_load_backend model_types ms_hub_token no_load_optim no_load_rng no_save_optim no_save_rng om_hub_token
        peft_autocast_adapter_dtype perform_initialization processor_kwargs processor_type run_compressed
        skip_model_check text_only timeout token tokenizer_legacy tokenizer_name tokenizer_name_or_path
        tokenizer_revision tokenizer_save_jinja_files tokenizer_use_mistral_common torchdistx_path type_of_model
        use_cpu_initialization use_exact_model_name use_hf use_persistent_ckpt_worker
    """,
    "each run tokenizes its data, without a cache": """
        dataset_keep_in_memory eval_seed ignore_pad_token_for_loss include_tkps lazy_tokenize load_from_cache_file
        max_input_id min_input_id multipack_real_batches num_dataset_shards_to_save packing_num_proc padding_side
        preprocess_shards preprocessing_batch_size push_dataset_to_hub sample_packing_bin_size sample_packing_group_size
        sample_packing_mp_start_method single_sample_bins skip_prepare_dataset tokenized_path use_packed_sequences
        val_dataset_shuffle
    """,
    "halfbyte leaves images to the model's processor, and refuses rows with audio or video": """
        aligner_lr audio_input audio_sampling_rate audio_type crop_to_patches end finetune_audio_layers
        image_do_pan_and_scan image_resize_algorithm image_size include_end
        include_start language_model_only max_pixels norm_bbox role role_boundaries start use_audio_in_video
        video_fps video_max_pixels video_maxlen video_min_pixels vision_all_linear vit_lr whisper_language whisper_task
    """,
    "it only changes what is printed or recorded": """
        debug_memory_breakdown debug_time_breakdown diagnostics_flat_tolerance diagnostics_warning_interval
        distributions dump_metrics enable_channel_loss enable_torch_profiler env_worker_logs eval_on_each_dataset file
        include_effective_tokens_per_second json_logging level log log_completions_steps log_data log_file log_frequency
        offline print_param_status profile_modules profiler_active_steps profiler_output_dir profiler_profile_memory
        profiler_record_shapes profiler_repeat profiler_steps profiler_steps_start profiler_wait_steps
        profiler_warmup_steps profiler_with_stack progressbar samples turn_diagnostics vf_level
    """,
    "checkpoints are in output_dir, see save_steps, save_total_limit and resume_from_checkpoint": """
        check_interval checkpoint_dir ckpt dynamic_checkpoint keep_interval keep_last resume_only_model resume_step
        save_first_step skip_buffer skip_progress trigger_file_path wait_for_weights_timeout
    """,
    "it fills in ms-swift's own data about the model's name": """
        model_author
    """,
}

# Fix in the error's message → names of refused keys.
REFUSED = {
    "remove it; halfbyte loads no plugins": """
        custom_register_path external_plugins hatchery
    """,
    "remove it; packed documents never attend to each other": """
        doc_masking=true pretrain_multipack_attn=true
    """,
    "set options of PEFT's types in peft_config, with their peft_type; halfbyte has no other adapters": """
        ab_svd_init act_fn adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r adalora_orth_reg_weight
        adalora_target_r adalora_tfinal adalora_tinit adapter_act adapter_folder adapter_init_mode adapter_layers
        adapter_len adapter_length apply_GS asa_importance_beta asa_schedule_exponent asa_target_subspaces
        asa_uncertainty_beta auxiliary_loss_weight beta1 beta2 block_share block_size block_size_pattern boft_block_num
        boft_block_size boft_dropout boft_n_butterfly_factor cayley_neumann_eps coft config_A_B config_C config_D_E
        cpt_mask cpt_token_ids cpt_tokens_type_mask create_new_adapter d_initial decompose_both decompose_factor
        decomposition_method deft_dropout delora_lambda deltaT dense_mixer depth dirichlet_prior effective_rank
        enable_softmax enable_softmax_topk encoder_dropout encoder_hidden_size encoder_num_layers
        encoder_reparameterization_type eps feedforward_modules final_warmup finetune_last_n_layers fourier_n_frequency
        fourier_scaling frod_dropout generator_seed gks_adapter_names global_scaling_weight gralora_dropout gralora_k
        hidden_size hira_dropout hybrid_r init_ia3_weights init_logits_std init_r init_scale init_theta_d_bound
        init_type init_v_bound init_vector_bank_bound init_warmup jagged_restart_anneal_steps jagged_restart_steps
        jagged_restart_warmup_steps kl_loss_weight kt_config kt_cpu_activation kt_expert_checkpoint_path
        kt_lora_expert_intermediate_size kt_lora_expert_num kt_non_expert_weight_path kt_use_lora_experts kt_weight_path
        lambda_pattern layerwise_scalings lisa_activated_layers lisa_layers_attribute lisa_n_layers lisa_step_interval
        llamapro_num_groups llamapro_num_new_blocks lora_adapter mask_interval mask_type match_strict mini_r
        miss_dropout mixture_of_depths module_dropout mora mora_type n_frequency n_frequency_pattern n_skills n_splits
        n_tasks nblocks num_B num_attention_heads num_cayley_neumann_terms num_frozen_tokens num_groups num_layers
        num_ranks num_samples num_subspaces num_tasks num_transformer_submodules num_vectors num_virtual_tokens
        oft_block_size oft_rank oft_target opt_loss_decay_factor opt_projection_epsilon opt_projection_format_epsilon
        opt_weighted_loss_type orth_reg_weight para peft_layer_replication
        poly_type prefix_projection proj_seed projection_prng_key
        projection_seed prompt_tuning_init prompt_tuning_init_state_dict_path prompt_tuning_init_task
        prompt_tuning_init_text proportional_parameters psoft_alpha psoft_dropout psoft_mag_a psoft_mag_b psoft_orth
        psoft_svd psoft_svd_lowrank_niter pvera_dropout randlora_alpha randlora_dropout random_loc_seed rank_dropout
        rank_dropout_scale reft_args reft_intervention_type reft_layer_key reft_layers reft_rank regularization_alpha
        relora relora_prune_method relora_prune_ratio rng_seed router_temperature sample_at_inference sample_scaler
        save_indices save_only_topk_weights save_precomputed_indices save_projection scaling scaling_pass_value
        select_top shadow_alpha shadow_dropout shadow_hidden_size shadow_intermediate_size shadow_model
        shadow_num_attention_heads shadow_num_hidden_layers share_embeddings softmax_temperature sparse sparse_rate
        sparsity spectrum_model_name spectrum_top_fraction stride_A subspace_rank svd_threshold target_modules_bd_a
        target_modules_bd_b target_r target_svd_config task_adapter_names tfinal theta_d_length tinit tinylora_dropout
        token_dim token_indices tokenizer_kwargs top_k_lora topk total_step u unilora_dropout update_hidden_size use_asa
        use_cayley_neumann use_dynamic_rank use_effective_conv2d use_entropy use_gks use_idwt use_kt use_llama_pro
        use_mora use_onebitllms use_trainable_adapters variant vblora_dropout vector_length vector_lens vera_d_initial
        vera_dropout vera_projection_prng_key vera_rank very_sparse wavelet_family weight_tying xlora_depth
        xlora_dropout_p xlora_size
    """,
    "put it into loftq_config": """
        loftq_bits loftq_iter
    """,
    "put it into eva_config": """
        adjust_scaling_factors rho tau use_label_mask whiten
    """,
    "put it into lora_ga_config, without lora_ga_ before its name": """
        direction lora_ga_direction lora_ga_scale lora_ga_stable_gamma scale stable_gamma
    """,
    "remove it; init_lora_weights: lora_ga reads rows until the gradient's direction stands": """
        lora_ga_batch_size lora_ga_iters lora_ga_max_length
    """,
    "remove it; see the values of init_lora_weights": """
        gamma init_projections_to_zero init_strategy label_mask_value
    """,
    "remove it; halfbyte trains target_modules and modules_to_save, or with use_peft: false all weights": """
        fix_untrained_tokens freeze_extra_modules freeze_language_model freeze_llm freeze_mm_modules=true
        freeze_parameters freeze_parameters_ratio freeze_parameters_regex freeze_trainable_layers
        freeze_trainable_modules lr_groups modules train_attn train_mlp train_router train_unembed trainable_parameters
        trainable_parameters_regex unfrozen_parameters
    """,
    "remove it; halfbyte trains on text, with the language layers": """
        train_vision
    """,
    "remove it; halfbyte starts from a checkpoint": """
        from_scratch reinit_weights train_from_scratch
    """,
    "remove it; the loss is the cross-entropy of the trained tokens, or the loss_type of a method": """
        acc_strategy adaptive_max_tokens alignment_coef asft_alpha calculate_per_token_loss ce_coef
        chord_enable_phi_function chord_mu_decay_steps chord_mu_peak chord_mu_valley chord_mu_warmup_steps
        chord_sft_dataset chord_sft_per_device_train_batch_size csa_dense_mode diffusion diversity_coef
        dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss eaft_alpha eaft_k ebft embed_method enable_dft_loss
        feature_layers generate_max_len generation_interval generation_steps gt_length_multiplier importance_weighting
        is_binary_loss_scale kd_alpha kd_beta kd_ce_alpha kd_dir kd_normalize_topk kd_online_server
        kd_online_server_base_url kd_online_timeout kd_online_topk kd_temperature kd_temperature_min kd_trainer
        kd_weight kl_in_reward length_norm loss loss_fn loss_fn_config mask_token_id mask_token_str max_mask_ratio
        min_completion_prefix min_mask_ratio moe_expert_capacity_factor moe_router_load_balancing_type
        moe_token_drop_policy moe_z_loss_coeff mrl_dims mtp_decoder_input_detach mtp_loss_scaling_factor mtp_num_layers
        mtp_shared_weights n_samples_per_prompt noise_schedule num_diffusion_steps pose_max_context_len pose_num_chunks
        pose_split_on_token_ids reference_free rl_coef router_z_loss_coef scaling_softmax scaling_softmax_bias
        scaling_softmax_factor sft_alpha span_mask stride target_margin tpo_alpha tpo_l_gamma use_asft_loss use_dft_loss
        use_eaft use_eaft_loss use_pose use_whitening
    """,
    "remove it; method: gkd distils from teacher_model_name_or_path, see beta, lmbda and temperature": """
        add_tail_bucket ce_weight distillation distillation_add_tail distillation_alpha distillation_is_clip
        distillation_mode distillation_objective distillation_topk distillation_weight dont_reprompt_on_self_success
        environment_feedback_only_without_solution feedback_template generate_from_teacher gkd_logits_topk
        include_environment_feedback iw_opd_epsilon iw_opd_gamma loss_add_tail loss_top_k max_reprompt_len
        num_loss_tokens_to_skip remove_thinking_from_demonstration reprompt_template reverse_kl_top_1_mode seq_kd
        solution_template success_reward_threshold teacher teacher_adapters teacher_api_base teacher_api_concurrency
        teacher_api_key_var teacher_api_timeout teacher_batch_size teacher_deepspeed teacher_kl_coef
        teacher_model_init_kwargs teacher_model_kind teacher_model_server teacher_model_server_url teacher_model_type
        teacher_prompt_template teacher_server_urls teacher_sync_steps teacher_tag_key teacher_tau teacher_temperature
        teacher_tokenizer_name_or_path teacher_top_k teacher_update_rate uld_crossentropy_weight uld_distillation_weight
        uld_hybrid_matched_weight uld_hybrid_unmatched_weight uld_skip_student_eos uld_skip_teacher_eos
        uld_student_temperature uld_teacher_temperature uld_token_merge_strategy uld_use_hybrid_loss use_extended_uld
        use_successful_as_teacher use_teacher_server use_uld_loss
    """,
    "remove it, and set method: grpo or rloo with reward_funcs; halfbyte has no PPO": """
        cliprange cliprange_value kl_coef lam local_rollout_forward_batch_size missing_eos_penalty num_mini_batches
        num_ppo_epochs num_sample_generations ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards
        response_length reward_adapters reward_model_adapters reward_model_path reward_model_plugin
        reward_model_quantization_bit reward_model_revision reward_model_type reward_template vf_coef whiten_rewards
    """,
    "remove it; the reference is the model without its adapter, or with the adapter of adapter_path": """
        calculate_KL ref_adapter_name ref_adapters ref_model_adapters ref_model_quantization_bit ref_model_revision
        ref_model_type
    """,
    "remove it; the keys of method: grpo and rloo are in docs/configuration.md": """
        adv_tau advantage_reweight cosine_max_len cosine_max_len_value_correct cosine_max_len_value_wrong
        cosine_min_len_value_correct cosine_min_len_value_wrong filter_all_incorrect fipo_clip_high_only fipo_clip_range
        fipo_decay_rate fipo_safety_threshold ipo_mask_high ipo_mask_low kl_tau max_resample_times noise_scheduler
        num_stages num_value_samples opd_beta opd_tau ratio_clip real_tau repetition_max_penalty repetition_n_grams
        replay_buffer_size replay_recompute_logps replay_tau reroll_max_groups reroll_start_fraction rlsd_lambda
        rlsd_lambda_decay_steps rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range sdar_gate_beta
        sdar_loss_coef sigma_end sigma_start soft_cache_length soft_max_length
    """,
    "remove it; rollouts have one turn, without tools, environment or orchestrator, see reward_funcs": """
        address advantage args bench buffer callbacks cancel_inflight_rollouts_on_eval completion_length_limit_scope
        context_manager cost easy_fraction easy_threshold ema enabled end_temperature enforce env env_ratios eval
        extra_body extra_env_kwargs filters future_timeout gym_env hard_fraction hard_threshold hash_keys hwm id
        import_path input_per_million interval judge judge_model kwargs length_weighted_mean logprob_offset
        max_async_level max_concurrent_judges max_depth max_off_policy_steps max_retries max_retries_on_parse_error
        max_sample_tokens max_tokens max_turns min_depth min_observations min_tokens multi_turn_scheduler
        nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths nemo_gym_datasets nemo_gym_dir nemo_gym_enabled
        nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name nemo_gym_multi_turn nemo_gym_run_timeout
        nemo_gym_server_timeout nemo_gym_verify_timeout normal_pool_min_examples num_examples
        online_difficulty_filtering output_per_million pipeline prob_threshold probe_interval quantile reasoning_effort
        recycle_easy_fraction recycle_hard_fraction rollout_depth rollout_func rollout_transport rollouts_per_example
        rubric ruler sample_temperature sample_without_replacement sampling skip_eval_on_resume skip_first
        start_temperature strict_async_level swallow_exceptions temp_scheduler token_id_threshold total_steps train
        transport_type use_gym_env val verification weight weight_broadcast weight_broadcast_type window
    """,
    "change the tokenizer's files, and resize the checkpoint, first": """
        additional_special_tokens bos_token eot_tokens init_special_tokens mean_resizing_embeddings
        new_special_tokens_config pad_token_id resize_model_vocab shrink_embeddings split_special_tokens tokenizer
        unk_token
    """,
    "write it into the data, or into a chat template that chat_template_path names": """
        add_non_thinking_prefix=true agent_template disable_ignore_empty_think enable_thinking=true no_input_format
        preserve_thinking prompt_format prompt_format_no_input response_prefix split_thinking system system_format
        system_prompt system_prompt_field system_prompt_type template_backend template_thinking_key tool_format
        train_on_eot
    """,
    "change it in the checkpoint's config.json": """
        apply_query_key_layer_scaling apply_wd_to_qk_layernorm model_config model_kwargs
        overrides_of_model_kwargs rms_norm_eps sage_attention use_rms_norm
    """,
    "remove it, and choose the training by method or task": """
        trainer_cls
    """,
    "give it in optim_args if the optimizer has that option, see docs/optimizers.md": """
        adam_beta3 adam_epsilon2 clip_grad cos_threshold dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of
        end_weight_decay galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits
        galore_proj_group_size galore_proj_quant galore_quantization galore_queue_size galore_target_modules
        galore_update_proj_gap galore_with_embedding gamma_proj grokfast_alpha grokfast_lamb muon_coefficient_type
        muon_extra_scale_factor muon_momentum muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv
        muon_tp_mode muon_use_nesterov normuon_beta2 normuon_cautious_wd normuon_momentum proj_quant
        proj_quant_group_size proj_quant_n_bit qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits
        qgalore_proj_group_size qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale
        qgalore_update_proj_gap queue_size sgd_momentum start_weight_decay stochastic_round update_proj_gap
        weight_decay_incr_style weight_group_size weight_quant
    """,
    "choose lr_scheduler_type and lr_scheduler_kwargs as in transformers": """
        auto_lr_reduction cooldown_steps cosine_constant_lr_ratio early_stop epoch_adjustment eta_min lr_decay_iters
        lr_div_factor lr_quadratic_warmup lr_warmup_init lr_wsd_decay_iters lr_wsd_decay_style
    """,
    "set recipe: fp8-hybrid or nvfp4 for the arithmetic, and quantization: for the stored weights": """
        fp4_format fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_backend fp8_format fp8_recipe
    """,
    "set quantization to a format's name; a quantized checkpoint is loaded as it is stored": """
        act_group_aware activation_dtype activation_scale_rule activation_scale_ub activation_scheme activations axis
        backward_dtype bits block_name_to_quantize config_for_layers config_groups damp_percent desc_act dsv4_bf16_all
        dsv4_fp8_nonexpert_mode dynamic_config enable_norm enable_perm enable_proxy_error expert_dtype
        fake_quant_after_n_steps format forward_dtype forward_method gemma4_fp8_nonexpert gemma4_nf4_nonexpert
        global_compression_ratio gradient_scale_rule group_num group_size hadamard_group_size hadamard_size hqq_axis
        ignore in_features in_group_size include_input_output_embeddings indices_as_float is_indice_packed
        keep_master_weights kv_cache_scheme linear_class linear_weights_not_to_quantize llm_int8_skip_modules
        llm_int8_threshold max_input_length meta model_quantization_config model_quantization_config_kwargs model_seqlen
        module_config_overrides module_name_preceding_first_block module_quant_configs modules_in_block_to_quantize
        modules_to_convert modules_to_not_convert nbits nbits_per_codebook nonexpert_quantization num_bits num_centroids
        num_codebooks num_res_centroids nvfp4_merge_aware_start_step out_features out_group_size
        outlier_size output_dtype p pseudoquantization quantization_mode quantization_status quantize_embedding
        quantize_embeddings scale_fmt scale_rule shapes shared_layer_config skip_modules store_master_weights sym
        tiling_mode transform_init true_sequential tune_metadata untie_embedding_weights view_as_float weight_block_size
        weight_dtype weight_scale_2d weight_scale_rule weights zero_point
    """,
    "set gradient_accumulation_steps: it divided by per_device_train_batch_size and by the number of GPUs": """
        global_batch_size
    """,
    "prepare the rows in the data's files; see dataset, dataset_format and column_mapping": """
        batch_flattening cached_dataset cached_val_dataset chosen_field chosen_format chunk_size columns
        completion_field completion_format conversation curriculum_sampling custom_dataset_info data_files
        dataset_exact_deduplication dataset_shard_idx dataset_shard_num dataset_shuffle=true disable_auto_column_mapping
        disable_shuffling drop_system_message ds_type enable_thinking_field eval_sequence_len field field_chosen
        field_completion field_human field_input field_instruction field_label field_messages field_model field_output
        field_prompt field_rejected field_system field_thinking field_tools input_field input_format input_transform
        instruction_field length logprobs_field max_packed_sequence_len max_prompt_len message_field_content
        message_field_role message_field_training message_field_training_detail message_property_mappings messages_field
        min_sample_len mode name offload output_field packing_length path pretraining_sample_concatenation prompt_field
        raw_text_file rejected_field rejected_format roles sample_packing_sequentially save save_sliding_window
        sequence_length shards shards_idx shuffle_before_merging_datasets skip split subset system_field text_column
        text_field tools_field train_dataloader_shuffle=true train_on_last_step_only type
    """,
}
