"""vLLM's offline API and what becomes of it here: arguments and methods that are not ours, accepted or refused by these tables.

LLM, SamplingParams and prompts are checked against them, and docs/vllm_api.md is made from them (inference/vllm_page.py). What has
the same name here needs no row. The rows of speculative_config are in inference/speculation/options.py. No torch.
"""

from ..heads.storage.keywords import ANY, Theirs

ONE_GPU = "only tensor_parallel_size divides a model: leave it out"
TEXT_ONLY = "prompts hold no images or sounds, so there is nothing to limit"
NO_LORA = "without enable_lora it limits nothing"
SHARED_GPUS = "only tensor_parallel_size divides a model"
IN_CONFIG = "write it into the model folder's config.json"
STRUCTURED = "give SamplingParams(structured_outputs=StructuredOutputsParams(json=...)), or regex, choice, grammar"
SPECULATE = "give speculative_config={'model': ..., 'num_speculative_tokens': ...}"
TEXT_PROMPTS = "give 'prompt' (text) or 'prompt_token_ids'"

LLM_ARGUMENTS = (
    Theirs("task", (None, "auto", "generate"), "only text is generated here: use vLLM for embeddings and scores"),
    Theirs("runner", ("auto", "generate"), "only text is generated here: use vLLM for embeddings and scores"),
    Theirs("convert", ("auto", "none"), "only text is generated here: use vLLM for embeddings and scores"),
    Theirs("tokenizer_mode", ("auto", "hf"), "give the tokenizer object itself as tokenizer"),
    Theirs("tokenizer_revision", (None,), "download that revision and give its folder as tokenizer"),
    Theirs("code_revision", (None,), "code is read at the model's revision: leave it out"),
    Theirs("skip_tokenizer_init", (False,), "give token ids; the tokenizer is then not used for prompts"),
    Theirs("hf_token", (None, False, True), "log in with `hf auth login`, or set HF_TOKEN"),
    Theirs("hf_config_path", (None, ""), "give the folder or Hub id of the model, which holds the config"),
    Theirs("hf_overrides", (None, {}), IN_CONFIG),
    Theirs("rope_scaling", (None, {}), IN_CONFIG),
    Theirs("rope_theta", (None,), IN_CONFIG),
    Theirs("config_format", ("auto", "hf"), "models are read in Hugging Face layout: convert it"),
    Theirs("model_impl", ("auto",), "the engine has its own models: leave it out"),
    Theirs("model_loader_extra_config", (None, {}), "weights are read in one way: leave it out"),
    Theirs(
        "generation_config",
        (None, "vllm"),
        "call generate(prompts, llm.get_default_sampling_params()) for the model's defaults",
    ),
    Theirs("override_generation_config", (None, {}), "give SamplingParams to every call"),
    Theirs("served_model_name", (None,), "nothing is served: leave it out"),
    Theirs(
        "quantization",
        (None,),
        "weights are not quantised: give the model in bfloat16 or float16; a head's, by speculative_config={'quantization': 'fp8'}",
    ),
    Theirs("kv_cache_dtype", ("auto",), "keys and values have the model's dtype: leave it out"),
    Theirs("calculate_kv_scales", (False,), "keys and values have the model's dtype: leave it out"),
    Theirs(
        "kv_cache_memory_bytes",
        (None,),
        "give num_gpu_blocks_override, in pages of 64 tokens, or gpu_memory_utilization",
    ),
    Theirs("kv_transfer_config", (None,), "the cache stays in this process: leave it out"),
    Theirs("block_size", ANY, "a page of the cache has 64 tokens; outputs do not depend on its size"),
    Theirs("swap_space", ANY, "nothing is swapped: a preempted request is computed again, and its output is the same"),
    Theirs("cpu_offload_gb", (0, 0.0), "the weights must fit into the device's memory: take a smaller model or dtype"),
    Theirs("prefix_caching_hash_algo", ANY, "pages are found by BLAKE2b digests of 32 bytes"),
    Theirs("disable_sliding_window", (False,), "windows are the model's own: leave it out"),
    Theirs("sliding_window", (None,), IN_CONFIG),
    Theirs(
        "enable_chunked_prefill",
        ANY,
        "prompts beyond max_num_batched_tokens are always computed in chunks, with equal bits",
    ),
    Theirs("max_num_partial_prefills", ANY, "as many prompts as fit max_num_batched_tokens are computed together"),
    Theirs("max_long_partial_prefills", ANY, "as many prompts as fit max_num_batched_tokens are computed together"),
    Theirs("long_prefill_token_threshold", ANY, "as many prompts as fit max_num_batched_tokens are computed together"),
    Theirs("scheduling_policy", ("fcfs",), "requests run in the order of the call: sort the prompts"),
    Theirs("async_scheduling", ANY, "the next step is always launched before the last one is read"),
    Theirs("num_scheduler_steps", (1,), "every step is scheduled: leave it out"),
    Theirs("disable_async_output_proc", ANY, "tokens are read while the next step runs"),
    Theirs(
        "compilation_config",
        (None, 0, 1, 2, 3),
        "the kernels are compiled as they are: leave it out, or say enforce_eager",
    ),
    Theirs("optimization_level", ANY, "the kernels are compiled as they are"),
    Theirs("max_seq_len_to_capture", ANY, "CUDA graphs hold steps of every length"),
    Theirs("cuda_graph_sizes", (None, []), "graphs are captured up to max_num_seqs: set that"),
    Theirs("attention_backend", (None,), "the engine has its own attention: leave it out"),
    Theirs("disable_cascade_attn", ANY, "there is no cascade attention"),
    Theirs("pipeline_parallel_size", (1,), ONE_GPU),
    Theirs("data_parallel_size", (1,), "start one process per GPU and divide the prompts"),
    Theirs("decode_context_parallel_size", (1,), ONE_GPU),
    Theirs("enable_expert_parallel", (False,), ONE_GPU),
    Theirs("distributed_executor_backend", (None, "uni"), ONE_GPU),
    Theirs("disable_custom_all_reduce", ANY, SHARED_GPUS),
    Theirs("worker_cls", ("auto",), ONE_GPU),
    Theirs("disable_log_stats", ANY, "get_metrics, get_stats and RequestOutput.metrics always count"),
    Theirs(
        "logits_processors",
        (None, []),
        "use logit_bias, allowed_token_ids, bad_words and the penalties of SamplingParams",
    ),
    Theirs("logits_processor_pattern", (None,), "leave it out"),
    Theirs("enable_lora", (False,), "give adapter=FOLDER: one LoRA adapter is merged into the weights"),
    Theirs("max_loras", ANY, NO_LORA),
    Theirs("max_lora_rank", ANY, NO_LORA),
    Theirs("lora_extra_vocab_size", ANY, NO_LORA),
    Theirs("fully_sharded_loras", ANY, NO_LORA),
    Theirs("enable_prompt_adapter", (False,), "leave it out"),
    Theirs("limit_mm_per_prompt", ANY, TEXT_ONLY),
    Theirs("disable_chunked_mm_input", ANY, TEXT_ONLY),
    Theirs("mm_processor_cache_gb", ANY, TEXT_ONLY),
    Theirs("mm_processor_kwargs", (None, {}), "prompts hold no images or sounds: leave it out"),
    Theirs("allowed_local_media_path", ANY, TEXT_ONLY),
    Theirs("enable_prompt_embeds", (False,), "prompts are text or token ids: leave it out"),
    Theirs("pooler_config", (None,), "only text is generated here: use vLLM for embeddings and scores"),
    Theirs("override_pooler_config", (None,), "only text is generated here: use vLLM for embeddings and scores"),
    Theirs("guided_decoding_backend", (None, "auto", "guidance"), "the library is llguidance: leave it out"),
    Theirs("structured_outputs_config", (None, {}), "the library is llguidance: leave it out"),
    Theirs("reasoning_parser", (None, ""), "outputs are not parsed: leave it out, and divide the text"),
    Theirs("enable_sleep_mode", (False,), "delete the LLM to free its memory"),
    Theirs("profiler_config", (None,), "use torch.profiler around generate"),
    Theirs("additional_config", (None, {}), "leave it out"),
    Theirs("speculative_model", (None,), SPECULATE),
    Theirs("num_speculative_tokens", (None,), SPECULATE),
)

SAMPLING = (
    Theirs("guided_decoding", (None,), STRUCTURED),
    Theirs("logits_processors", (None, []), "use logit_bias, allowed_token_ids, bad_words or the penalties"),
    Theirs("extra_args", (None, {}), "nothing reads them here: leave it out"),
    Theirs("output_kind", ANY, "generate returns finished outputs, stream yields pieces of text"),
    Theirs("stream_interval", ANY, "stream yields text as soon as it is final"),
    Theirs("skip_clone", ANY, "parameters cannot change, so none are copied"),
    Theirs("logprob_token_ids", (None,), "ask for logprobs=-1 (LLM(max_logprobs=-1)) and pick the tokens"),
    Theirs(
        "prompt_logprob_token_ids", (None,), "ask for prompt_logprobs=-1 (LLM(max_logprobs=-1)) and pick the tokens"
    ),
    Theirs("prompt_logprob_start", (None, 0), "ask for prompt_logprobs and leave out the first ones"),
    Theirs("flat_logprobs", (False,), "log-probabilities come as a list of dicts: leave it out"),
    Theirs("truncate_prompt_tokens", (None,), "cut the token ids before the call"),
    Theirs("best_of", (None, 1), "draw n outputs with logprobs=0 and keep the best by cumulative_logprob"),
    Theirs("use_beam_search", (False,), "there is no beam search: draw n outputs"),
    Theirs("beam_width", (None,), "there is no beam search: draw n outputs"),
    Theirs("length_penalty", (1.0, 1), "there is no beam search: draw n outputs"),
    Theirs("early_stopping", (False,), "there is no beam search: draw n outputs"),
    Theirs("thinking_token_budget", (None, -1), "limit the whole output with max_tokens"),
    Theirs("repetition_detection", (None,), "use repetition_penalty or max_tokens"),
    Theirs("skip_reading_prefix_cache", (None, False), "build the LLM with enable_prefix_caching=False"),
    Theirs("routed_experts_prompt_start", (0,), "leave it out"),
    Theirs("trace_decode_token_ids", (None,), "append the tokens to the prompt and ask for prompt_logprobs"),
)

CALLS = (
    Theirs("lora_request", (None,), "build the LLM with adapter=FOLDER: one LoRA adapter is merged into the weights"),
    Theirs("prompt_adapter_request", (None,), "leave it out"),
    Theirs("priority", (None,), "requests run in the order of the call: sort the prompts"),
    Theirs("guided_options_request", (None,), STRUCTURED),
    Theirs("tokenization_kwargs", (None, {}), "tokenise the prompt yourself and give token ids"),
    Theirs("mm_processor_kwargs", (None, {}), "prompts hold no images or sounds: leave it out"),
    Theirs("prompt_token_ids", (None,), "give them as prompts, or as {'prompt_token_ids': [...]}"),
)
CHAT = (
    *CALLS,
    Theirs("chat_template_content_format", ("auto", "string"), "parts of text are joined to one string: leave it out"),
)

PROMPT_KEYS = (
    Theirs("multi_modal_data", (None, {}), TEXT_PROMPTS),
    Theirs("mm_processor_kwargs", (None, {}), TEXT_PROMPTS),
    Theirs("multi_modal_uuids", (None, {}), TEXT_PROMPTS),
    Theirs("token_type_ids", (None,), TEXT_PROMPTS),
    Theirs("prompt_embeds", (None,), TEXT_PROMPTS),
)

# Methods and attributes of vLLM's LLM that are missing: an AttributeError says what to do instead.
MISSING = {
    "beam_search": "there is no beam search: draw n outputs",
    "encode": "only text is generated here: use vLLM for embeddings and scores",
    "embed": "only text is generated here: use vLLM for embeddings and scores",
    "classify": "only text is generated here: use vLLM for embeddings and scores",
    "reward": "only text is generated here: use vLLM for embeddings and scores",
    "score": "only text is generated here: use vLLM for embeddings and scores",
    "sleep": "delete the LLM to free its memory",
    "wake_up": "delete the LLM to free its memory, and build it again",
    "start_profile": "use torch.profiler around generate",
    "stop_profile": "use torch.profiler around generate",
    "collective_rpc": "one process runs the model: llm.engine is the engine",
    "apply_model": "llm.engine.decoder is the model",
    "set_tokenizer": "give tokenizer to the LLM",
    "preprocess_chat": "call llm.get_tokenizer().apply_chat_template",
    "enqueue": "call generate, or OpenBatch of inference/open_batch.py",
    "wait_for_completion": "call generate, or OpenBatch of inference/open_batch.py",
    "llm_engine": "llm.engine is the engine; its names are other ones",
    "model_config": "llm.config is the model's config of transformers",
}
