"""Names of settings in other tools and in earlier versions, and the setting that each is here.

A configuration with one of them is refused with the name to write instead. Read only once a
configuration has been found wrong.

Source: the configuration classes of transformers, TRL and PEFT, MaxText's base.yml, torchtitan's
job_config.py, Megatron-LM's arguments.py, NeMo's recipes, the configurations of
neuronx-distributed-training and of MindFormers.
"""

# Setting of graphtrain: names that people bring.
NAMES_OF = {
    "program.target": "hardware accelerator device platform compile_topology "
    "compile_topology_num_slices",
    "program.mesh.data": (
        "dp data_parallel data_parallel_size data_parallel_degree data_parallel_replicate_degree "
        "ici_data_parallelism dcn_data_parallelism num_replicas ddp"
    ),
    "program.mesh.fsdp": (
        "dp_shard data_parallel_shard_degree ici_fsdp_parallelism dcn_fsdp_parallelism fsdp_size "
        "sharding_strategy zero_stage"
    ),
    "program.mesh.tensor": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
        "tensor_model_parallel_size ici_tensor_parallelism model_parallel"
    ),
    "program.pipeline.schedule": "pipeline_parallel_schedule",
    "program.mesh.stage": (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size ici_pipeline_parallelism num_stages pipeline_stage"
    ),
    "program.mesh.context": (
        "cp cp_size context_parallel context_parallel_size context_parallel_degree "
        "ici_context_parallelism"
    ),
    "program.mesh.expert": (
        "ep ep_size expert_parallel expert_parallel_degree expert_model_parallel_size "
        "ici_expert_parallelism"
    ),
    "program.rules": (
        "logical_axis_rules sharding_rules strategy strategies sequence_parallel zero1 "
        "shard_optimizer_over_data enable_parallel_optimizer use_seq_parallel"
    ),
    "program.model.layers": (
        "num_layers n_layer n_layers num_hidden_layers base_num_decoder_layers num_decoder_layers"
    ),
    "program.model.embed": (
        "hidden_size n_embd d_model dim emb_dim base_emb_dim embed_dim model_dim hidden_dim width"
    ),
    "program.model.heads": (
        "num_heads n_head n_heads num_attention_heads num_query_heads base_num_query_heads"
    ),
    "program.model.kv_heads": (
        "n_kv_heads num_kv_heads num_key_value_heads num_query_groups base_num_kv_heads"
    ),
    "program.model.partial_rotary_factor": "rotary_pct rotary_percent rotary_percentage",
    "program.model.head_dim": (
        "kv_channels head_size attention_head_dim d_head qk_nope_head_dim qk_head_dim"
    ),
    "program.model.mlp": (
        "intermediate_size ffn_hidden_size n_inner ffn_dim mlp_dim base_mlp_dim d_ff inter_dim "
        "moe_intermediate_size moe_ffn_hidden_size base_moe_mlp_dim moe_inter_dim"
    ),
    "program.model.vocab": "vocab_size padded_vocab_size n_vocab",
    "program.model.positions": "position_embedding_type positional_encoding pos_emb",
    "program.model.rope_theta": "rope_base rotary_base rope_max_timescale rotary_emb_base",
    "program.model.rope_scaling.high_freq_factor": "high_frequency",
    "program.model.rope_scaling.low_freq_factor": "low_frequency",
    "program.model.rope_scaling.kind": "rope_type",
    "program.model.rope_scaling.original_max_position_embeddings": "original_length",
    "program.model.sliding_window": "window sliding_window_size window_size attention_window",
    "program.model.sliding_window_rope_theta": "window_rope_base rope_local_base_freq",
    "program.model.global_attention_every": "full_every sliding_window_pattern",
    "program.model.max_position_embeddings": "max_length n_positions n_ctx",
    "program.model.norm": "normalization normalisation norm_type",
    "program.model.norm_epsilon": (
        "rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps "
        "normalization_layer_epsilon"
    ),
    "program.model.rms_norm_offset": "scale_offset apply_layernorm_1p",
    "program.model.qk_norm": "query_key_norm use_qk_norm qk_layernorm",
    "program.model.activation": "hidden_act hidden_activation mlp_activations activation_function",
    "program.model.bias": "attention_bias add_bias_linear add_qkv_bias use_bias has_bias",
    "program.model.query_pre_attn_scalar": "score_divisor attention_multiplier",
    "program.model.attn_logit_softcap": "score_cap attn_logit_softcapping attn_logits_soft_cap",
    "program.model.final_logit_softcap": "logit_cap final_logit_softcapping final_logits_soft_cap",
    "program.model.tie_word_embeddings": (
        "tied_head tie_embeddings tied_embeddings share_embeddings_and_output_weights "
        "logits_via_embedding"
    ),
    "program.model.unit_norm_head": "normalised_head normalized_head",
    "program.model.fused_gate_up": "merged_gate fused_mlp",
    "program.model.init_std": "initial_deviation initializer_range init_method_std",
    "program.model.moe.experts": "num_experts n_routed_experts num_local_experts num_moe_experts",
    "program.model.moe.experts_per_token": (
        "per_token num_experts_per_tok top_k moe_router_topk experts_per_tok"
    ),
    "program.model.moe.normalize_topk": "normalise norm_topk_prob",
    "program.model.latent_attention": "multi_latent_attention",
    "program.model.latent_attention.qk_rope_head_dim": "qk_pos_emb_head_dim",
    "program.model.mtp_loss_weight": (
        "mtp_loss_scaling_factor mtp_loss_coef mtp_num_layers num_mtp_layers num_mtp_modules "
        "num_nextn_predict_layers"
    ),
    "program.model.moe.dense_layers": (
        "first_k_dense_replace first_num_dense_layers n_dense_layers"
    ),
    "program.model.moe.score_function": (
        "scoring_func routed_score_func moe_router_score_function score_func"
    ),
    "program.model.moe.bias_update_rate": (
        "moe_router_bias_update_rate routed_bias_update_rate load_balance_coeff"
    ),
    "program.model.moe.groups": "n_group n_routing_groups moe_router_num_groups",
    "program.model.moe.groups_per_token": "topk_group topk_routing_group moe_router_group_topk",
    "program.model.moe.routed_scaling_factor": "moe_router_topk_scaling_factor route_scale",
    "program.model.moe.shared_expert_mlp": (
        "shared shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "n_shared_experts num_shared_experts shared_experts"
    ),
    "program.model.moe.capacity_factor": "capacity moe_expert_capacity_factor",
    "program.model.moe.balance_loss": (
        "router_aux_loss_coef moe_aux_loss_coeff load_balance_loss_weight aux_loss_coef"
    ),
    "program.model.moe.router_z_loss": "moe_z_loss_coeff router_z_loss_coef",
    "program.model.moe": "mixture mixture_of_experts",
    "program.model.dropout": (
        "hidden_dropout attention_dropout resid_pdrop embd_pdrop attn_pdrop dropout_rate"
    ),
    "program.model.remat": (
        "remat_policy gradient_checkpointing activation_checkpointing activation_checkpoint "
        "recompute recompute_granularity selective_ac_option activations_checkpoint_granularity "
        "select_recompute"
    ),
    "program.model.attention": (
        "attn_implementation attention_type use_flash_attention flash_attention attention_backend"
    ),
    "program.model.unroll": "scan_layers scan_unroll",
    "program.batch.global_batch_size": (
        "sequences batch_size train_batch_size global_train_batch_size per_device_batch_size "
        "per_device_train_batch_size local_batch_size gbs mbs micro_batch_size"
    ),
    "program.batch.seq_len": (
        "length seq_length max_seq_len max_seq_length sequence_length max_target_length "
        "block_size context_length encoder_seq_length"
    ),
    "program.batch.microbatches": (
        "gradient_accumulation_steps accumulate_grad_batches num_microbatches grad_accum "
        "num_pipeline_microbatches pipeline_parallel_microbatch_size micro_batch_num"
    ),
    "program.batch.gradient_reduction": "reduce defer_gradient_reduction",
    "program.batch.cross_document_attention": (
        "documents reset_attention_mask document_mask eod_mask_loss reset_position_ids"
    ),
    "program.precision": "grad_scaler gradscaler",
    "program.precision.compute": (
        "dtype torch_dtype compute_dtype mixed_precision bf16 fp16 precision mixed_precision_param "
        "matmul_dtype quantization quantize_dtype fp8 float8 enable_fp8_linear fp8_format "
        "quant_type"
    ),
    "program.precision.recipe": "fp8_recipe float8_recipe recipe_name",
    "program.precision.exclude": "filter_fqns",
    "program.precision.loss_scale": "loss_scaling static_loss_scale dynamic_loss_scale",
    "program.precision.initial_scale": (
        "init_scale initial_loss_scale initial_scale_power loss_scale_value"
    ),
    "program.precision.growth_interval": "loss_scale_window scale_window",
    "program.precision.growth_factor": "scale_factor",
    "program.optimizer.kind": "opt_type optim optimizer_type optimizer_name optimizer_class",
    "program.optimizer.momentum": "muon_momentum muon_beta sgd_momentum",
    "program.optimizer.nesterov": "muon_use_nesterov use_nesterov",
    "program.optimizer.newton_schulz_steps": "muon_num_ns_steps ns_steps muon_ns_steps",
    "program.optimizer.consistent_rms": "muon_consistent_rms muon_extra_scale_factor rms_scale",
    "program.optimizer.precondition_frequency": "preconditioning_frequency precond_freq",
    "program.optimizer.max_precondition_dim": "max_precond_dim max_preconditioner_dim",
    "program.optimizer.beta1": "adam_beta1 adam_b1",
    "program.optimizer.beta2": "adam_beta2 adam_b2",
    "program.optimizer.epsilon": "adam_epsilon adam_eps eps",
    "program.optimizer.weight_decay": "adam_weight_decay wd",
    "program.optimizer.decay_mask": "decay",
    "program.optimizer.clip_norm": (
        "max_grad_norm clip_grad gradient_clipping gradient_clipping_threshold max_norm grad_clip "
        "gradient_clip_val"
    ),
    "program.optimizer.offload_to_host": (
        "offload cpu_offload optimizer_memory_host_offload offload_optimizer enable_cpu_offload"
    ),
    "program.optimizer.moment_dtype": "moments mu_dtype exp_avg_dtype",
    "program.loss.z_loss": "z_loss_multiplier z_loss_weight",
    "program.loss.beta": "dpo_beta",
    "program.loss.chunk": "num_vocab_tiling chunked_cross_entropy",
    "program.pipeline.virtual_stages": (
        "rounds num_pipeline_repeats virtual_pipeline_model_parallel_size "
        "num_layers_per_virtual_pipeline_stage"
    ),
    "program.pipeline.layers_per_stage": (
        "num_layers_per_pipeline_stage pipeline_parallel_layers_per_stage"
    ),
    "program.adapter": "lora peft peft_config lora_config",
    "program.adapter.rank": "r lora_r lora_rank",
    "program.adapter.alpha": "lora_alpha",
    "program.adapter.dropout": "lora_dropout",
    "program.adapter.target_modules": "targets target_parameters lora_target_modules",
    "program.adapter.use_rslora": "root_rank",
    "program.adapter.modules_to_save": "whole",
    "program.adapter.base_dtype": "base load_in_4bit load_in_8bit quantization_config",
    "program.serve.total_adapter_rank": "max_lora_rank max_loras enable_lora lora_modules",
    "run.directory": (
        "output_dir base_output_directory dump_folder save_dir log_dir run_name exp_dir "
        "explicit_log_dir resume_from_checkpoint"
    ),
    "run.steps": (
        "max_steps train_iters training_steps num_train_steps total_steps max_iters "
        "num_train_epochs epochs max_epochs"
    ),
    "run.seed": "data_seed random_seed init_weights_seed data_shuffle_seed",
    "run.learning_rate": "lr_scheduler lr_schedule",
    "run.learning_rate.peak": "lr max_lr base_lr init_lr",
    "run.learning_rate.minimum": (
        "floor min_lr lr_min cosine_learning_rate_final_fraction learning_rate_final_fraction "
        "lr_end"
    ),
    "run.learning_rate.warmup_steps": (
        "warmup lr_warmup_iters num_warmup_steps warmup_iters warmup_ratio warmup_steps_fraction"
    ),
    "run.learning_rate.schedule": (
        "shape lr_scheduler_type lr_decay_style decay_type learning_rate_schedule lr_schedule_type"
    ),
    "run.learning_rate.decay_fraction": "decay_ratio wsd_decay_steps_fraction",
    "run.learning_rate.decay_steps": "num_decay_steps lr_wsd_decay_iters",
    "run.learning_rate.decay_style": "tail lr_wsd_decay_style wsd_decay_style",
    "run.init_from": (
        "initial model_name_or_path load_parameters_path initial_load_path pretrained_checkpoint "
        "pretrained init_from_checkpoint load_checkpoint"
    ),
    "run.init_adapter_from": "initial_adapter adapter_name_or_path",
    "run.report_every": "logging_steps log_interval log_period log_freq log_every_n_steps",
    "run.checkpoints.local_every": (
        "save_every save_steps save_interval checkpoint_period checkpoint_interval "
        "every_n_train_steps save_checkpoint_steps"
    ),
    "run.checkpoints.keep_every": "keep_period keep_checkpoint_every_n_steps",
    "run.checkpoints.keep": (
        "keep_checkpoints save_total_limit keep_latest_k max_to_keep max_num_checkpoints_to_keep "
        "save_top_k keep_checkpoint_max"
    ),
    "run.evaluate_every": "eval_steps eval_interval val_check_interval eval_freq",
    "run.evaluate_batches": "eval_iters limit_val_batches max_eval_batches",
    "run.tensorboard": "enable_tensorboard tensorboard_dir",
    "run.trackers": "report_to enable_wandb use_wandb wandb_project",
    "run.data.train": (
        "dataset dataset_name dataset_path train_file data_path train_data_path data_prefix "
        "dataset_dir"
    ),
    "run.data.validation": "eval_dataset validation_file valid_data_path val_dataset",
    "run.data.packing": "pack_sequences packing_strategy grain_packing_type",
    "run.data.overlong": "longer truncation",
    "program.loss.label_smoothing": "dpo_label_smoothing",
    "program.loss.kind": "use_dpo",
}

_STEPS = "run.steps = {name} x tokens of the data / (global_batch_size x seq_len)"
_WARMUP = "warmup_steps = {name} x run.steps"
_MINIMUM = "minimum = {name} x peak"
_PER_DEVICE = "global_batch_size = {name} x devices that split the batch"
_ACCUMULATED = "global_batch_size = {name} x microbatches x devices that split the batch"
_DEPTH = "in a mixture with moe.dense_layers, layers = {name} - dense_layers"
_DENSE = "they are not among model.layers: layers = all layers - {name}"
_DENSE_MLP = "where it is of dense layers before a mixture: moe.dense_mlp"
_AHEAD = "for {name} = 1, set the weight of its loss; more are not supported"
_SHARED = "shared_expert_mlp = {name} x mlp"
_PRODUCT = "the product of the ici_ and dcn_ degrees"
# Names whose unit differs from that of the setting: how to compute it.
_CONVERSIONS = {
    "attention_multiplier": "query_pre_attn_scalar = 1 / {name} ** 2",
    "base_mlp_dim": _DENSE_MLP,
    "base_num_decoder_layers": _DEPTH,
    "batch_size": "the sequences of all devices and microbatches",
    "cosine_learning_rate_final_fraction": _MINIMUM,
    "dcn_data_parallelism": _PRODUCT,
    "dcn_fsdp_parallelism": _PRODUCT,
    "document_mask": "true is false",
    "epochs": _STEPS,
    "ffn_hidden_size": _DENSE_MLP,
    "first_k_dense_replace": _DENSE,
    "first_num_dense_layers": _DENSE,
    "initial_scale_power": "initial_scale = 2 ** {name}",
    "inter_dim": _DENSE_MLP,
    "intermediate_size": _DENSE_MLP,
    "learning_rate_final_fraction": _MINIMUM,
    "local_batch_size": _ACCUMULATED,
    "lr_min": "a rate; where it is a fraction: " + _MINIMUM,
    "max_epochs": _STEPS,
    "max_lora_rank": "total_adapter_rank = the sum of the ranks of all adapters",
    "max_loras": "total_adapter_rank = the sum of the ranks of all adapters",
    "mbs": _ACCUMULATED,
    "micro_batch_size": _ACCUMULATED,
    "mtp_num_layers": _AHEAD,
    "multi_latent_attention": "a table, with its kv_lora_rank",
    "n_dense_layers": _DENSE,
    "n_layer": _DEPTH,
    "n_layers": _DEPTH,
    "n_shared_experts": _SHARED,
    "num_decoder_layers": _DEPTH,
    "num_hidden_layers": _DEPTH,
    "num_layers": _DEPTH,
    "num_layers_per_pipeline_stage": "a list, of the layers of each stage",
    "num_layers_per_virtual_pipeline_stage": "virtual_stages = layers / (stages x {name})",
    "num_mtp_layers": _AHEAD,
    "num_mtp_modules": _AHEAD,
    "num_nextn_predict_layers": _AHEAD,
    "num_shared_experts": _SHARED,
    "num_train_epochs": _STEPS,
    "num_vocab_tiling": "positions in each chunk, not the number of chunks",
    "per_device_batch_size": _PER_DEVICE,
    "per_device_train_batch_size": _ACCUMULATED,
    "pipeline_parallel_layers_per_stage": "a list, of the layers of each stage",
    "pipeline_parallel_microbatch_size": "microbatches = global_batch_size / {name}",
    "qk_head_dim": "in Megatron-LM's words, head_dim = {name} + qk_pos_emb_head_dim",
    "qk_nope_head_dim": "head_dim = {name} + qk_rope_head_dim",
    "reset_attention_mask": "true is false",
    "save_top_k": "the newest, not the best; for the best: keep_best",
    "shared_experts": _SHARED,
    "warmup_ratio": _WARMUP,
    "warmup_steps_fraction": _WARMUP,
}

_SETTING_OF = {
    name: tuple(setting.split(".")) for setting, names in NAMES_OF.items() for name in names.split()
}
# Full paths whose last word is also the name of a setting.
_SETTING_AT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run", "schedule"): ("run", "learning_rate"),
    ("run", "keep_best"): ("run", "checkpoints", "keep_best"),
    ("program", "schedule"): ("run", "learning_rate"),
    **{
        (*table, "name"): ("program", "optimizer", "kind")
        for table in (("optim",), ("optimizer",), ("program", "optimizer"))
    },
    **{
        (*table, name): ("program", "model", "preset")
        for table in (("model",), ("program", "model"))
        for name in ("name", "flavor")
    },
}


def setting_for(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the setting that an unknown `path` names in another tool's words, or None."""
    if path in _SETTING_AT:
        return _SETTING_AT[path]
    name = _plain(path[-1])
    return ("run", "learning_rate", "peak") if name == "learning_rate" else _SETTING_OF.get(name)


def conversion(name: str) -> str:
    """Return how the setting is computed from a name whose unit differs; else nothing."""
    return _CONVERSIONS.get(_plain(name), "").format(name=name)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
