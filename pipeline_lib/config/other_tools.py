"""Keys of other tools: the key that does the same here, or why there is none.

They are keys of transformers' TrainingArguments, peft's LoraConfig, LLaMA-Factory, ms-swift,
Axolotl, TRL, DeepSpeed's JSON file and the launchers.
"""

# A key of this project, after a comma what differs, and the names that other tools give it.
_KEYS = {
    "experiment": "run_name exp_name wandb_name wandb_run_name swanlab_run_name",
    "model.name": "model_name_or_path base_model base_model_name_or_path model_id model_id_or_path",
    "model.revision": "revision model_revision",
    "model.rope, {type: yarn, factor: 4.0}": "rope_scaling",
    "data.train": "dataset datasets dataset_name dataset_dir dataset_path train_file",
    "data.train, a list, each with `columns`": "dataset_text_field text_column label_names",
    "data.train, a list, each with `roles`": "user_tag assistant_tag field_messages "
    "message_property_mappings",
    "data.train, a list, each with `max_rows`": "max_samples max_train_samples num_samples",
    "data.train, a list, each with `weight`": "interleave_probs interleave_prob mix_strategy",
    "data.validation": "eval_dataset test_datasets val_dataset validation_file",
    "data.validation_fraction": "val_size val_set_size split_dataset_ratio",
    "tokenize.max_tokens": "cutoff_len max_length max_seq_length model_max_length",
    "tokenize.over_long": "truncation_strategy truncation_mode excess_length_strategy",
    "tokenize.train_on, which says which answers": (
        "mask_history train_on_prompt train_on_inputs roles_to_train assistant_only_loss "
        "completion_only_loss loss_scale"
    ),
    "tokenize.prompt_thinking": "enable_thinking",
    "tokenize.system": "default_system default_system_message",
    "tokenize.chat_template_kwargs": "reasoning_effort preserve_thinking",
    "tokenize.thinking": "ignore_empty_think",
    "shard.block_tokens": "sequence_len packing_length sample_packing_bin_size",
    "cluster.nodes": "num_nodes nnodes num_machines",
    "cluster.gpus_per_node": "num_gpus nproc_per_node num_processes gpus_per_server",
    "cluster.gpus_per_node, 0 for the CPU": "use_cpu no_cuda use_mps_device",
    "train.method": "finetuning_type train_type tuner_type adapter peft_type task_type "
    "lora_task_type use_peft",
    "train.lr": "learning_rate",
    "train.epochs": "num_train_epochs num_epochs max_epochs",
    "train.max_steps": "num_iterations train_iters t_max",
    "train.adam_eps": "adam_epsilon eps epsilon",
    "train.global_batch_samples, of all GPUs and accumulated micro-batches": (
        "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu batch_size"
        " gradient_accumulation_steps global_batch_size train_batch_size"
    ),
    "train.lr_schedule": "lr_scheduler_type lr_scheduler scheduler",
    "train.min_lr_fraction, a fraction of lr": "lr_scheduler_kwargs min_lr min_lr_rate "
    "cosine_min_lr_ratio",
    "train.warmup_fraction": "warmup_ratio",
    "train.warmup_steps": "warmup_num_steps",
    "train.optimizer": "optim use_muon",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.max_grad_norm": "gradient_clipping clip_grad",
    "train.precision": "dtype torch_dtype fp16_opt_level bf16 fp16 fp8 pure_bf16 mixed_precision",
    "train.activation_checkpointing": (
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing_kwargs "
        "recompute_granularity recompute"
    ),
    "train.compile": "torch_compile",
    "train.attention": (
        "attn_implementation attn_impl flash_attn flash_attention xformers_attention sdp_attention "
        "sdpa_attention"
    ),
    "train.strategy": "deepspeed fsdp fsdp_config fsdp_version zero_optimization zero_stage",
    "train.deepspeed_json": "deepspeed_config",
    "train.context_ranks, the GPUs that share each block": "sequence_parallel_size "
    "context_parallel_size",
    "train.shard_ranks": "hybrid_shard_size data_parallel_shard_degree dp_shard_size",
    "train.reshard_after_forward": "fsdp_reshard_after_forward reshard",
    "train.offload": "optimizer_offload offload_optimizer offload_param cpu_offload",
    "train.timeout_s, in seconds": "ddp_timeout",
    "train.save_every_steps": "save_steps save_interval",
    "train.save_every_steps, a number of steps or `epoch`": "save_strategy saves_per_epoch",
    "train.keep_last": "save_total_limit",
    "train.keep_best": "load_best_model_at_end",
    "train.early_stop_validations": "early_stopping_patience",
    "train.validate_every_steps": "eval_steps eval_interval",
    "train.validate_every_steps, a number of steps or `epoch`": (
        "eval_strategy evaluation_strategy evals_per_epoch do_eval eval_on_start eval_delay"
    ),
    "train.freeze": "freeze_parameters freeze_trainable_layers unfrozen_parameters "
    "trainable_parameters",
    "train.router_aux_loss": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coef",
    "train.deterministic": "full_determinism",
    "train.seed": "data_seed",
    "train.profile_every_steps": "enable_torch_profiler",
    "train.lora.rank": "lora_rank lora_r r",
    "train.lora.alpha": "lora_alpha",
    "train.lora.dropout": "lora_dropout",
    "train.lora.targets": "lora_target target_modules lora_target_modules lora_target_linear "
    "exclude_modules",
    "train.lora.dora": "use_dora peft_use_dora lora_use_dora",
    "train.lora.rslora": "use_rslora peft_use_rslora lora_use_rslora",
    "train.lora.lr_ratio": "loraplus_lr_ratio lorap_lr_ratio",
    "tracking.to": (
        "report_to use_swanlab use_wandb use_mlflow use_tensorboard plot_loss trackio_space_id "
        "trackio_bucket_id trackio_static_space_id"
    ),
    "tracking.project": "wandb_project swanlab_project mlflow_experiment_name",
    "evaluate.max_new_tokens": "max_completion_length",
}

# A reason why this project has no such key, and the keys.
_NO_KEY = {
    "results are in results/NAME, where NAME is `experiment`": (
        "add_version create_checkpoint_symlink "
        "output_dir overwrite_output_dir logging_dir export_dir save_safetensors save_only_model "
        "dataset_prepared_path"
    ),
    "the same command continues an unfinished run from its newest whole checkpoint, after "
    "`qwen3 rewind` from an earlier one": (
        "resume_from_checkpoint auto_resume_from_checkpoints ignore_data_skip enable_jit_checkpoint"
        " restore_callback_states_from_checkpoint"
    ),
    "`snakemake` runs every stage whose result is missing, and `snakemake train` ends after that "
    "stage": ("do_train do_predict stage rlhf_type overwrite_cache load_from_cache_file"),
    "adapters are merged by the next stage; training begins from whole models only": (
        "adapter_name_or_path adapters resume_adapter lora_model_dir resume_only_model"
    ),
    "the model's own chat template is used": (
        "chat_template_jinja use_chat_template conversation "
        "template chat_template chat_template_path tool_format agent_template model_type "
        "response_prefix"
    ),
    "the tokenizer's own special tokens are used, and the vocabulary stays as it is": (
        "special_tokens tokens added_tokens_overrides tokenizer_type tokenizer_config "
        "tokenizer_use_fast eot_tokens eos_token pad_token add_special_tokens resize_vocab "
        "new_special_tokens add_tokens"
        " new_special_tokens_config init_special_tokens split_special_tokens use_fast_tokenizer"
    ),
    "samples are always packed, and none attends to another": (
        "packing neat_packing sample_packing eval_sample_packing eval_packing packing_strategy "
        "padding_free pad_to_sequence_len pad_to_multiple_of padding_side batch_flattening "
        "multipack_real_batches group_by_length train_sampling_strategy length_column_name "
        "shuffle_dataset"
    ),
    "ranks read their blocks from memory-mapped files, without loader processes": (
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor"
        " dataloader_multiprocessing_context dataloader_in_order accelerator_config streaming"
    ),
    "every sample is used in each epoch; an epoch's last step may be smaller": "dataloader_drop_last drop_last",
    "tokenize takes all the cores that Snakemake gives it: `snakemake --cores N`": (
        "lazy_tokenize packing_num_proc preprocessing_num_workers dataset_num_proc dataset_processes dataset_kwargs"
    ),
    "columns that are not used are left out": "remove_unused_columns",
    "every optimizer step is recorded, and the progress line is always shown": (
        "logging_steps logging_strategy logging_first_step log_on_each_node "
        "logging_nan_inf_filter log_level log_level_replica disable_tqdm "
        "include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics log_interval "
        "steps_per_print debug"
    ),
    "validation and evaluation always take the loss of the supervised tokens, in batches that they "
    "choose": (
        "per_device_eval_batch_size prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics "
        "bf16_full_eval fp16_full_eval eval_batch_size"
    ),
    "the loss on the held-out blocks decides which step is best": "metric_for_best_model "
    "greater_is_better",
    "the loss is the cross-entropy, averaged over all supervised tokens of the step": (
        "label_smoothing_factor average_tokens_across_devices loss_type neftune_noise_alpha "
        "enable_dft_loss eaft_k use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha compute_accuracy "
        "ignore_pad_token_for_loss"
    ),
    "train.optimizer lists the optimizers; these settings have no key here": (
        "optim_args optim_target_modules use_galore use_badam use_apollo use_adam_mini "
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
        "galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale "
        "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front "
        "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
        "badam_mask_mode badam_verbose loraplus_lr_embedding"
    ),
    "kernels are chosen by the GPU and by what is installed": (
        "use_liger_kernel liger_kernel_config enable_liger_kernel use_unsloth use_kernels tf32 "
        "torch_compile_backend torch_compile_mode liger_rms_norm_gated use_sonicmoe use_scattermoe "
        "fused_attn_kernel flex_attn_compile_kwargs use_cache use_cce plugins liger_rope "
        "liger_rms_norm liger_glu_activation liger_layer_norm liger_cross_entropy "
        "liger_fused_linear_cross_entropy cut_cross_entropy lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel lora_embedding_kernel chunked_cross_entropy flash_attn_cross_entropy "
        "flash_attn_rms_norm flash_attn_fuse_mlp experts_implementation experts_impl s2_attention "
        "unsloth_cross_entropy_loss tuner_backend dynamo_config dynamo_backend dynamo_mode"
    ),
    "`strategy: auto` takes the micro-batch, the offload and the activation checkpointing that fit "
    "the memory": ("auto_find_batch_size torch_empty_cache_steps activation_offloading"),
    "the strategy chooses gradient buckets, buffers and the backend": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend use_orig_params allgather_bucket_size reduce_bucket_size "
        "auto_wrap_policy fsdp_auto_wrap_policy backward_prefetch fsdp_backward_prefetch "
        "forward_prefetch fsdp_forward_prefetch cpu_ram_efficient_loading "
        "fsdp_cpu_ram_efficient_loading state_dict_type fsdp_state_dict_type "
        "final_state_dict_type fsdp_final_state_dict_type sync_module_states "
        "fsdp_sync_module_states fsdp_use_orig_params transformer_layer_cls_to_wrap "
        "fsdp_transformer_layer_cls_to_wrap min_num_params fsdp_min_num_params limit_all_gathers "
        "fsdp_limit_all_gathers mixed_precision_policy cpu_offload_pin_memory "
        "activation_checkpointing_reentrant zero3_init_flag zero3_save_16bit_model "
        "zero_hpz_partition_size use_deepspeed use_fsdp multi_gpu ddp"
    ),
    "models are split over data-parallel ranks only (train.strategy), not over tensors or stages": (
        "tensor_parallel tensor_parallel_size tensor_model_parallel_size pipeline_parallel_size"
        " pipeline_model_parallel_size expert_parallel_size parallelism_config pipeline_parallel"
        " device_map max_memory"
    ),
    "several nodes are a SLURM job or a list of hosts (docs/two-machines.md), which tells each "
    "rank its place": (
        "hostfile master_addr master_port node_rank machine_rank local_rank main_process_ip "
        "main_process_port rdzv_endpoint ray_init_kwargs rdzv_backend rdzv_id rdzv_conf "
        "same_network standalone deepspeed_multinode_launcher deepspeed_hostfile"
    ),
    "for a base in 4 bits (QLoRA) set train.lora.base: nf4; other quantizations do not exist here": (
        "gptq bnb_config_kwargs load_in_4bit load_in_8bit quantization_bit quantization_method quant_method quant_bits "
        "double_quantization"
        " bnb_4bit_compute_dtype bnb_4bit_quant_type quantization_type quantization_device_map"
    ),
    "the model is taken as it is, apart from adapters and frozen parameters": (
        "type_of_model overrides_of_model_config base_model_config is_qwen_derived_model "
        "model_init_kwargs upcast_layernorm freeze_vision_tower freeze_vit "
        "vit_gradient_checkpointing"
        " image_max_pixels max_pixels trust_remote_code layer_replication resize_token_embeddings"
        " shift_attn mixture_of_depths train_from_scratch low_cpu_mem_usage upcast_lmhead_output"
    ),
    "nothing is uploaded; the model folder is results/NAME/model": (
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision"
    ),
    "a config holds no secrets; set HF_TOKEN or MODELSCOPE_API_TOKEN, or log in with the hub's own "
    "command": (
        "hub_token hf_token use_auth_token hf_hub_token ms_hub_token om_hub_token swanlab_api_key "
        "swanlab_lark_secret"
    ),
    "`source` says which hub: huggingface or modelscope": "use_hf use_modelscope_hub hub use_ms",
    "the first rank writes, into a folder that all nodes share": "save_on_each_node",
    "adapters have one rank, are of linear modules, and begin without an effect; only they are "
    "trained": (
        "bias lora_bias lora_dtype lora_on_cpu lora_fan_in_fan_out target_regex "
        "lora_target_parameters peft_layers_to_transform peft_init_lora_weights "
        "lora_rank_pattern modules_to_save lora_modules_to_save additional_target "
        "trainable_token_indices layers_to_transform layers_pattern rank_pattern alpha_pattern "
        "init_lora_weights init_weights loftq_config eva_config corda_config lora_ga_config "
        "velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config "
        "megatron_config megatron_core runtime_config target_parameters use_bdlora arrow_config "
        "kasa_config ensure_weight_tying fan_in_fan_out pissa_init pissa_iter pissa_convert "
        "use_llama_pro"
    ),
    "preference and reward training do not exist here; conversations are examples to follow": (
        "pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight "
        "kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
        "ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model "
        "reward_model_adapters reward_model_type ld_alpha reward_model_quantization_bit"
    ),
    "only text is trained on: rows with pictures, sounds or videos are refused": (
        "media_dir image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels "
        "video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate "
        "freeze_multi_modal_projector freeze_language_model freeze_aligner freeze_llm processor_type "
        "vit_lr aligner_lr"
    ),
    "it says how a model answers or is served, not how it is trained": (
        "do_sample temperature top_p top_k num_beams repetition_penalty length_penalty "
        "skip_special_tokens predict_with_generate generation_max_length generation_num_beams "
        "eval_num_beams infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util "
        "vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction "
        "sglang_tp_size sglang_config sglang_lora_backend"
    ),
    "the merged model is in results/NAME, in Hugging Face format": (
        "export_size export_device export_legacy_format export_hub_model_id"
    ),
    "hubs' own caches are used, and tokens are kept in the store": (
        "cache_dir tokenized_path preprocessing_batch_size buffer_size data_shared_file_system"
    ),
    "trackers take their settings from their own environment variables": (
        "swanlab_workspace swanlab_mode swanlab_logdir swanlab_lark_webhook_url wandb_entity "
        "wandb_watch wandb_mode wandb_run_id wandb_log_model mlflow_tracking_uri "
        "hf_mlflow_log_artifacts swanlab_notification_method"
    ),
    "it says how accelerate starts its processes": (
        "compute_environment main_training_function downcast_bf16 gpu_ids enable_cpu_affinity "
        "num_cpu_threads_per_process tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_env "
        "mpirun_config max_restarts monitor_interval module no_python quiet"
    ),
    "the rows of swift/self-cognition are taken as they are: put the names into a file of your own": (
        "model_name model_author"
    ),
    "samples are drawn in an order of our own, from the seed": (
        "shuffle_merged_datasets dataset_shuffle train_dataloader_shuffle val_dataset_shuffle "
        "sample_packing_sequentially curriculum_sampling"
    ),
    "guards refuse a step whose loss is not finite or a spike (train.guards)": (
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    "peft writes it into the adapter by itself": "auto_mapping peft_version inference_mode",
}

# By the other tool's key: the key of this project, or the reason why there is none.
OUR_KEY = {word: key for key, words in _KEYS.items() for word in words.split()}
NO_KEY = {word: reason for reason, words in _NO_KEY.items() for word in words.split()}
HINTS = {word: f"here it is {key}" for word, key in OUR_KEY.items()} | {
    word: f"leave it out: {reason}" for word, reason in NO_KEY.items()
}


# Other tools' launchers, which `cluster.launcher` had once.
_SPAWN = (
    "leave it out, or set spawn, which starts the same ranks without a port that others reach "
    "(docs/security.md)"
)
LAUNCHERS = dict.fromkeys(("torchrun", "accelerate", "deepspeed"), _SPAWN)


def hint_for(word: str) -> str | None:
    """Return what to use for another tool's key: `here it is train.lora.rank`.

    None for a key that no table has.
    """
    return HINTS.get(spelled(word))


def spelled(word: str) -> str:
    """Return a key in the spelling of the tables: `Learning-Rate` as `learning_rate`."""
    return word.lower().replace("-", "_")
