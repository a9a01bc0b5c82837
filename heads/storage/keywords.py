"""Refuse unknown keywords by name: keywords of vLLM that are not supported here, and misspellings. No torch."""

import difflib

# Keywords that code written for vLLM may pass. `LLM`:
VLLM_ARGUMENTS = """
task runner convert revision code_revision tokenizer_revision tokenizer_mode skip_tokenizer_init trust_remote_code
allowed_local_media_path hf_config_path hf_token hf_overrides config_format generation_config override_generation_config
served_model_name download_dir model_impl model_loader_extra_config quantization rope_scaling rope_theta
tensor_parallel_size pipeline_parallel_size data_parallel_size decode_context_parallel_size enable_expert_parallel
distributed_executor_backend disable_custom_all_reduce worker_cls
block_size kv_cache_dtype kv_cache_memory_bytes calculate_kv_scales swap_space cpu_offload_gb kv_transfer_config
prefix_caching_hash_algo disable_sliding_window sliding_window
enable_chunked_prefill max_num_partial_prefills scheduling_policy async_scheduling num_scheduler_steps
max_seq_len_to_capture compilation_config cuda_graph_sizes attention_backend disable_async_output_proc
disable_cascade_attn max_logprobs logits_processors logits_processor_pattern disable_log_stats
enable_lora max_loras max_lora_rank lora_extra_vocab_size fully_sharded_loras enable_prompt_adapter
limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb enable_prompt_embeds pooler_config override_pooler_config
guided_decoding_backend structured_outputs_config reasoning_parser enable_sleep_mode profiler_config additional_config
"""
# `SamplingParams`:
VLLM_SAMPLING = """
logits_processors logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens
include_stop_str_in_output output_kind truncate_prompt_tokens structured_outputs guided_decoding extra_args
best_of use_beam_search beam_width length_penalty early_stopping thinking_token_budget repetition_detection
"""
# `speculative_config`:
VLLM_SPECULATIVE = """
draft_tensor_parallel_size max_model_len quantization disable_padded_drafter_batch enforce_eager parallel_drafting
"""


# `LLM.chat` and `LLM.generate`:
VLLM_CALLS = """
chat_template chat_template_content_format add_generation_prompt continue_final_message tools mm_processor_kwargs lora_request
priority tokenization_kwargs
"""


# Values of vLLM's keywords that ask for what is done here anyway.
ASKS_NOTHING = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "draft_tensor_parallel_size": 1,
    "trust_remote_code": False,
    "quantization": None,
    "chat_template": None,
    "chat_template_content_format": "auto",
    "add_generation_prompt": True,
    "continue_final_message": False,
    "tools": None,
    "mm_processor_kwargs": None,
    "lora_request": None,
    "priority": None,
    "tokenization_kwargs": None,
}


def reject_unknown(given, known, what, vllm="", passed=None):
    """Raise ValueError if `given` (names) holds a name that is not in `known`.

    what: words for these keywords in the error; vllm: further keywords that vLLM takes, for which the error says so; passed:
    {name: value}, values with which a keyword of vLLM is accepted (`given` is then a dict).
    """
    for name in given:
        if name in known or (passed and name in vllm.split() and name in passed and given[name] == passed[name]):
            continue
        if name in vllm.split():
            raise ValueError(f"{what} {name!r} is vLLM's and not supported here (yet): leave it out")
        raise ValueError(f"unknown {what} {name!r}; {_hint(str(name), list(known))}")


def _hint(name, known):
    """The name that was meant, all names if they are few, else the three nearest."""
    if nearest := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        return f"did you mean {nearest[0]!r}?"
    if len(known) <= 4:
        return f"known are {', '.join(known)}"
    first, second, third = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"the nearest of {len(known)} known ones are {first!r}, {second!r} and {third!r}"
