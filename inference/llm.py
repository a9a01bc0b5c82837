"""The public Python API, shaped like vLLM's: LLM, generate, chat. See LLM's docstring."""

import inspect
import time
from dataclasses import asdict, replace
from numbers import Integral

from tqdm import tqdm

from ..heads.storage.keywords import python_value, reject_unknown
from ..kernels.numerics import Numerics
from .engine.engine import Engine
from .engine.options import EngineOptions, check_whole
from .engine.target_scores import NO_FILTERS
from .line import Call
from .metrics import counts_of, metrics_of
from .models.adapter import MERGED_KEY, choose_adapter, warn_unless_adapted
from .models.canary import check_exactness
from .models.decoder import LOAD_FORMATS, position_limit
from .models.support import check_supported
from .models.target_source import (
    at_revision,
    check_used_in_place,
    choose_device,
    eos_token_ids,
    generation_config,
    load_decoder,
    load_tokenizer,
    named_device,
    named_dtype,
    settled_dtype,
    target_config,
)
from .outputs import CompletionOutput, RequestOutput  # noqa: F401
from .prompt_files import render_chat
from .ranks.tensor_parallel import TensorParallel
from .sampling_params import SamplingParams
from .speculation.options import SpeculativeOptions
from .speculation.proposers import warn_of_missing_stop_tokens
from .speculation.speculation import choose_speculation
from .speculation.tree import MAX_NODES
from .vllm_api import CALLS, CHAT, LLM_ARGUMENTS, MISSING

# What a generation config says about sampling, and its name in SamplingParams.
GENERATION = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
GENERATION["max_new_tokens"] = "max_tokens"


class LLM:
    """A target model, and optionally a head that drafts for it.

    model: a folder or Hub id in Hugging Face layout; a loaded *ForCausalLM (used in place, without a second copy); a Hugging Face
        config, with load_format "dummy"; or another LLM, whose weights are shared.
    tokenizer: folder, Hub id or tokenizer object; None: the model's own.
    dtype: "auto", "bfloat16", "float16" or "half", "float32" or "float", or a torch.dtype. auto: the checkpoint's on a GPU; on the
        CPU bfloat16 if it has instructions for it, else float32. A loaded model keeps its own.
    device: "auto" or None (a GPU if there is one), "cpu", "cuda", "cuda:1" ... or a torch.device.
    max_model_len: longest prompt + output in tokens; None: the model's own limit, with linear and YaRN rope the scaled one.
    max_num_seqs: number of requests that can run at once.
    max_num_batched_tokens: prompt tokens computed per step; longer prompts are computed in chunks.
    gpu_memory_utilization: share of the GPU's memory that weights, activations and cache may take together; the cache takes no
        more than max_num_seqs requests of max_model_len tokens need.
    num_gpu_blocks_override: cache pages (of 64 tokens) to allocate instead, on any device.
    enable_prefix_caching: keep full pages of KV by content, and use them again for prompts that begin alike.
    enforce_eager: launch kernels one by one on a GPU instead of replaying CUDA graphs (for debugging; the outputs are equal).
    load_format: "auto" reads the weights; "dummy" makes random ones of the model's shape.
    seed: requests without a seed of their own derive one from this and their number; None: 0.
    revision: branch, tag or commit of a model on the Hub. download_dir: where its files go, instead of the Hub's cache.
    max_logprobs: the most that SamplingParams.logprobs may ask for; -1: no limit.
    trust_remote_code: True allows to run Python code that the model or its tokenizer brings along, where the library has no class
        of its own for the model type; a warning then says what is run. Without it no such code is ever run.
    speculative_config: None for plain decoding, or a dict with
        model: a head of any family (folder, run, Hub id or module), or a smaller model of the same vocabulary (folder, Hub id with
        method "draft_model", or loaded); revision: branch, tag or commit of a head on the Hub (as in model "OWNER/NAME@REVISION");
        method: vLLM's name of the drafter, found from the model if not given: "medusa", "mlp_speculator", "eagle" (EAGLE-1 and 2),
        "eagle3", "block" (vLLM's "dflash" and "dspark"), "draft_model", or "ngram", which needs no model: it copies the tokens
        that followed an earlier occurrence of the newest prompt_lookup_min to prompt_lookup_max (1 to 4) tokens;
        num_speculative_tokens: depth of drafts, None for the head's own; tree: "chain", "static" (the tree measured for this head,
        else the one shipped for its method and depth), "dynamic" (grown in every step from the draft's confidence) or a tree file;
        verifier: "strict" (the tokens of plain decoding, bit by bit), "token" or "block" on a chain, "recursive" or "traversal" on
        any tree (tokens of the same distribution), or "synthetic", which accepts by given rates whatever the tokens are (to measure
        speed; the outputs mean nothing), with acceptance_rates (unconditional, per position) or acceptance_length (tokens a step);
        rejection_sample_method: vLLM's name of a verifier instead; draft_sample_method: how drafts are drawn: "shared_noise" (the
        default of "strict"), "probabilistic" (the default of the ratio rules), "greedy" or "top_and_one"; adaptive: True cuts the
        tree in every step to the depth with the most tokens per second measured so far, down to no drafts at all;
        num_speculative_tokens_per_batch_size: gives the depth instead, {smallest batch size: tokens};
        draft_tensor_parallel_size: 1: each rank has a head's own lm_heads whole; tensor_parallel_size: divided; None: by size;
        quantization: "fp8" rounds the weights that a head's drafts read most to 8 bits (docs/engine.md); the target stays as it is.
    adapter: a LoRA adapter of the target in peft's format (a folder or a Hub id, or a run or head that was trained with one): it is
        merged into the weights while they are loaded, in fp32, rounded once. The target is then the adapted one, in every respect.
    tensor_parallel_size: number of ranks, each a process, that divide the weights (docs/engine.md).
    tensor_parallel_invariant: 2, 4 or 8: cut products so that all tensor_parallel_sizes that divide it give the same bits, 1
        included. None: the default of the device.
    logprobs_mode: "raw_logprobs" (of the target's logits) or "processed_logprobs" (of the distribution that a token
        was drawn from, after temperature and filters). prompt_logprobs are always raw.

    Several threads may call one LLM: their requests share its batch, and each call returns or raises in its own thread. Requests
    are numbered in the order of arrival, so give them seeds where a run of several threads must repeat (docs/engine.md, Threads).

    By default the outputs are those of plain decoding, whatever the head and the tree: see docs/lossless.md. Raises ValueError for
    bad arguments, naming the value and what was expected; for a misspelled keyword it names the nearest known one. Raises
    RuntimeError if the check at start-up finds that bits would depend on the batch.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        dtype="auto",
        device="auto",
        max_model_len=None,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.9,
        num_gpu_blocks_override=None,
        enable_prefix_caching=True,
        enforce_eager=False,
        load_format="auto",
        seed=0,
        speculative_config=None,
        logprobs_mode="raw_logprobs",
        adapter=None,
        revision=None,
        download_dir=None,
        max_logprobs=100,
        trust_remote_code=False,
        tensor_parallel_size=1,
        tensor_parallel_invariant=None,
        **unknown,
    ):
        given = {
            name: value for name, value in locals().items() if name not in ("self", "unknown", "tensor_parallel_size")
        }
        names = [name for name in inspect.signature(LLM.__init__).parameters if name not in ("self", "unknown")]
        reject_unknown(unknown, names, "LLM argument", LLM_ARGUMENTS)
        trust_remote_code = python_value(trust_remote_code)
        if trust_remote_code not in (False, True, None):
            raise ValueError(f"trust_remote_code must be True or False, got {trust_remote_code!r}")
        max_num_seqs = 8 if max_num_seqs is None else python_value(max_num_seqs)
        max_model_len, seed = python_value(max_model_len), 0 if seed is None else python_value(seed)
        options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048 if max_num_batched_tokens is None else max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            num_gpu_blocks_override=num_gpu_blocks_override,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            logprobs_mode=logprobs_mode,
            max_logprobs=max_logprobs,
        )
        check_whole("seed", seed, 0)
        if load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
        named_dtype(dtype), named_device(device)  # they raise for unknown ones
        speculative = SpeculativeOptions.parse(speculative_config)
        parallel = TensorParallel.parse(tensor_parallel_size, tensor_parallel_invariant)
        if parallel.size > 1:
            device = parallel.device_of(choose_device(device))
        if speculative is not None:
            parallel.check_drafts(speculative.draft_tensor_parallel_size)

        # Everything that can be refused is refused before the target's weights are read.
        model = at_revision(model, revision, download_dir, trust_remote_code)
        shared = model if isinstance(model, LLM) else None
        if shared:
            config, self.model_name = shared.config, shared.model_name
        else:
            config, self.model_name = target_config(model, load_format, trust_remote_code)
        check_supported(config)
        if shared:
            parallel.check_shared(shared.engine.decoder)
        else:
            parallel.check(model, config, choose_device(device))
        in_use = shared.adapter if shared else getattr(config, MERGED_KEY, "")
        merged = choose_adapter(adapter, model, load_format, config)
        self.adapter = merged.fingerprint if merged else in_use
        choice = choose_speculation(speculative, config, max_num_seqs)
        warn_unless_adapted(choice.head, self.adapter)
        limit = position_limit(config)
        if max_model_len is None:
            max_model_len = shared.max_model_len if shared else limit
        self.max_model_len = max_model_len
        if not isinstance(self.max_model_len, int) or not 2 <= self.max_model_len <= limit:
            raise ValueError(f"max_model_len must be from 2 to the model's own limit of {limit}, got {max_model_len!r}")

        if shared:
            own = shared.tokenizer
            self.tokenizer = own if tokenizer is None else load_tokenizer(tokenizer, None, trust_remote_code)
            eos_ids, self.generation_config = shared.eos_token_ids, shared.generation_config
        else:
            self.tokenizer = load_tokenizer(tokenizer, model, trust_remote_code)
            eos_ids = eos_token_ids(model, config, self.tokenizer)
            self.generation_config = generation_config(model)
        warn_of_missing_stop_tokens(choice.head, eos_ids)
        options = replace(options, max_model_len=self.max_model_len)
        if parallel.divides:  # what is chosen by measuring, or fetched, is the same on all ranks
            dtype = settled_dtype(config, dtype, choose_device(device))
        given |= dict(model=model, dtype=dtype, revision=None, download_dir=None)
        with parallel.joined(config, choose_device(device), given) as division:
            if shared:
                decoder = self._share(shared, dtype, device)
            else:
                decoder = load_decoder(
                    model,
                    config,
                    dtype=dtype,
                    device=device,
                    max_positions=self.max_model_len + MAX_NODES,
                    load_format=load_format,
                    adapter=merged,
                    division=division,
                )
                check_exactness(decoder)  # before the cache takes the memory
            speculation = parallel.led(choice.build(decoder, self.max_model_len + MAX_NODES))
            engine = Engine.build(decoder, eos_ids, options, speculation, filters=self._expected_filters())
        self.session = parallel.session(engine, self.tokenizer, self.max_model_len, seed)
        self.config, self.tree, self.seed = config, choice.tree, seed
        self.dtype, self.device = decoder.dtype, decoder.device

    @property
    def engine(self):
        """The Engine that its session drives."""
        return self.session.engine

    @property
    def numerics(self):
        """What decides its bits: numerics version, digest, torch, Triton, device, dtype (a dict; kernels/numerics.py)."""
        return asdict(Numerics.of(self.device, self.dtype))

    @property
    def eos_token_ids(self):
        """Tokens that end an answer, by the model's generation config."""
        return self.engine.eos_token_ids

    def _share(self, other, dtype, device):
        """The decoder of another LLM, if it fits these options."""
        decoder = other.engine.decoder
        check_used_in_place(decoder, dtype, device)
        if self.max_model_len > other.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len} is beyond the {other.max_model_len} of the LLM whose weights are "
                "shared: build that one with the larger max_model_len"
            )
        return decoder

    # --- generating ---

    def generate(self, prompts, sampling_params=None, use_tqdm=False, **others):
        """Outputs for one or many prompts, in order.

        prompts: str, list of str, token-id list, list of those, {"prompt_token_ids": [...]} or {"prompt": str}, or lists of
        them. sampling_params: one for all, or one per prompt; None: SamplingParams(). All inputs are checked before any work.
        others: further arguments of vLLM, accepted only at values that change nothing.
        """
        reject_unknown(others, ("prompts", "sampling_params", "use_tqdm"), "argument", CALLS)
        prompts = _as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, list | tuple):
            raise ValueError(
                f"sampling_params must be a SamplingParams or a list of them, got {type(sampling_params).__name__}"
            )
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts: give one, or one per prompt"
            )
        checked = [self.session.check(*given) for given in zip(prompts, sampling_params, range(len(prompts)))]
        call = Call()
        try:
            submissions = self.session.submit_all(checked, call)
            self._run(call, sum(len(submission.requests) for submission in submissions), use_tqdm)
        except BaseException:
            self.session.leave(call)
            raise
        return self.session.outputs(submissions)

    def stream(self, prompt, sampling_params=None):
        """Yield the output's text in pieces as they become final; returns the RequestOutput (StopIteration.value)."""
        checked = self.session.check(prompt, sampling_params)
        if checked.params.n != 1:
            raise ValueError(f"stream makes one output, got n={checked.params.n}")
        call = Call(is_stream=True)
        try:
            submission = self.session.submit(checked, call=call)
            yield from self.session.subscribe(submission, call)
        except BaseException:  # GeneratorExit, too: nobody reads on
            self.session.leave(call)
            raise
        return self.session.output(submission)

    def chat(
        self,
        messages,
        sampling_params=None,
        use_tqdm=False,
        chat_template_kwargs=None,
        *,
        tools=None,
        chat_template=None,
        add_generation_prompt=True,
        continue_final_message=False,
        **others,
    ):
        """Outputs for one conversation (a list of {"role", "content"}) or several, through the tokenizer's chat template.

        chat_template_kwargs: further arguments of the template, such as {"enable_thinking": False}; tools, chat_template,
        add_generation_prompt, continue_final_message: as in `render_chat` (prompt_files.py); others: as in `generate`.
        """
        known = [name for name in inspect.signature(LLM.chat).parameters if name not in ("self", "others")]
        reject_unknown(others, known, "argument", CHAT)
        several = isinstance(messages, list | tuple) and messages and all(isinstance(m, list | tuple) for m in messages)
        conversations = messages if several else [messages]
        prompts = []
        for conversation in conversations:
            text = render_chat(
                self.tokenizer,
                conversation,
                chat_template_kwargs,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            # The template writes its own special tokens.
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self):
        """The transformers tokenizer, or None."""
        return self.tokenizer

    def get_default_sampling_params(self):
        """The SamplingParams of the model's generation config. `generate` does not take them by itself."""
        return SamplingParams(**self.generation_defaults)

    @property
    def generation_defaults(self):
        """What the model's generation config says about sampling, by the names of SamplingParams."""
        said = self.generation_config.to_diff_dict() if self.generation_config else {}
        return {ours: said[name] for name, ours in GENERATION.items() if said.get(name) is not None}

    def _expected_filters(self):
        """What requests with the model's own parameters need for their first steps: graphs for it are captured at the start."""
        try:
            params = self.get_default_sampling_params()
        except ValueError:  # raised again where somebody asks for them
            return NO_FILTERS
        return (
            NO_FILTERS if params.has_penalties else params.filters
        )  # penalties need tables, which no request has made yet

    def reset_prefix_cache(self):
        """Forget the cached prompts. False, and nothing happens, while requests run."""
        return self.session.reset_prefix_cache()

    def __getattr__(self, name):
        """What only vLLM's LLM has: an AttributeError that says what to do instead."""
        missing = f"; it is vLLM's and not supported here: {MISSING[name]}" if name in MISSING else ""
        raise AttributeError(f"LLM has no attribute {name!r}{missing}")

    def get_stats(self):
        """Counters since the LLM was built: requests, tokens, cache hits, seconds, acceptance (inference/engine/metrics.py)."""
        return self.engine.metrics.as_dict()

    def get_metrics(self):
        """The same as vLLM returns it: a list of Counter, Gauge and Vector objects with vLLM's names (inference/metrics.py)."""
        return metrics_of(counts_of(self.engine), self.model_name)

    def _run(self, call, num_outputs, use_tqdm):
        """Step until this call's outputs have ended; those of others, such as open streams, advance in the same steps."""
        started, before = time.monotonic(), self.engine.metrics.num_generated_tokens
        with tqdm(total=num_outputs, desc="generating", unit="output", disable=not use_tqdm, dynamic_ncols=True) as bar:

            def enough(_):
                ended = len(call.ended)
                new = ended - bar.n
                bar.update(new)
                if use_tqdm and new:
                    rate = (self.engine.metrics.num_generated_tokens - before) / (time.monotonic() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s")
                return ended == num_outputs

            if num_outputs:
                self.session.drive(call, enough)


def _as_prompt_list(prompts):
    """One prompt or many -> list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(
            f"prompts must be a string, token ids, a dict or a list of those, got {type(prompts).__name__}"
        )
    if prompts and all(isinstance(token, Integral) for token in prompts):
        return [list(prompts)]
    return list(prompts)
