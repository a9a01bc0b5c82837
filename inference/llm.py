"""The public Python API, shaped like vLLM's: LLM, generate, chat. See LLM's docstring."""

import inspect
import time
from numbers import Integral

from tqdm import tqdm

from ..heads.storage.keywords import ASKS_NOTHING, VLLM_ARGUMENTS, VLLM_CALLS, reject_unknown
from .engine.engine import Engine
from .engine.logprobs import LOGPROBS_MODES
from .engine.request import Request
from .engine.sampling import SamplingParams
from .engine.stopping import GrowingText, StopChecker, final_text, stable_length
from .forbidden_tokens import bad_word_sequences, check_tokens
from .models.adapter import MERGED_KEY, choose_adapter, warn_unless_adapted
from .models.decoder import check_supported
from .models.target_source import (
    check_used_in_place,
    eos_token_ids,
    load_decoder,
    load_tokenizer,
    named_device,
    named_dtype,
    target_config,
)
from .outputs import CompletionOutput, RequestOutput, make_output  # noqa: F401
from .prompt_files import check_text, render_chat
from .speculation.options import (
    build_drafter,
    check_speculative_config,
    check_width,
    choose_drawing,
    choose_plan,
    choose_tree,
    choose_verifier,
    find_draft_source,
    warn_of_missing_stop_tokens,
)
from .speculation.tree import MAX_NODES


class LLM:
    """A target model, and optionally a head that drafts for it.

    model: a folder or Hub id in Hugging Face layout; a loaded *ForCausalLM (used in place, without a second copy); a Hugging Face
        config, with load_format "dummy"; or another LLM, whose weights are shared.
    tokenizer: folder, Hub id or tokenizer object; None: the model's own.
    dtype: "auto", "bfloat16", "float16", "float32" or a torch.dtype. auto: the checkpoint's on a GPU; on the CPU bfloat16 or
        float32, whichever this machine measures faster. A loaded model keeps its own.
    device: "auto" or None (a GPU if there is one), "cpu", "cuda", "cuda:1" ... or a torch.device.
    max_model_len: longest prompt + output in tokens; None: the model's own limit.
    max_num_seqs: how many requests run at once.
    max_num_batched_tokens: prompt tokens computed per step; longer prompts are computed in chunks.
    gpu_memory_utilization: share of the GPU's memory that weights, activations and cache may take together; the cache takes no
        more than max_num_seqs requests of max_model_len tokens need.
    num_gpu_blocks_override: cache pages (of 64 tokens) to allocate instead, on any device.
    enable_prefix_caching: keep full pages of KV by content, and use them again for prompts that begin alike.
    enforce_eager: launch kernels one by one on a GPU instead of replaying CUDA graphs (for debugging; the outputs are equal).
    load_format: "auto" reads the weights; "dummy" makes random ones of the model's shape.
    seed: requests without a seed of their own derive one from this and their number.
    speculative_config: None for plain decoding, or a dict with
        model: a head of any family (folder, run, Hub id or module), or a smaller model of the same vocabulary (folder, Hub id with
        method "draft_model", or loaded); revision: branch, tag or commit of a head on the Hub (as in model "OWNER/NAME@REVISION");
        method: vLLM's name of what it is, found out where it is not given: "medusa",
        "mlp_speculator", "eagle" (EAGLE-1 and 2), "eagle3", "draft_model", or "ngram", which needs no model and copies what
        followed the newest prompt_lookup_min to prompt_lookup_max (1 to 4) tokens before; num_speculative_tokens: depth of drafts,
        None for what the head was made for; tree: "chain", "static" (the tree measured for this head, else the one shipped for its
        method and depth), "dynamic" (grown in every step from the draft's confidence) or a tree file; verifier: "strict" (the
        tokens of plain decoding, bit by bit), "token" or "block" on a chain, "recursive" or "traversal" on any tree (tokens of the
        same law), or "synthetic" to accept by given rates whatever the tokens are (for measuring speed: the outputs mean nothing),
        with acceptance_rates (unconditional, per position) or acceptance_length (tokens per step); rejection_sample_method: vLLM's
        name of a verifier instead; draft_sample_method: how drafts are drawn: "shared_noise" (the default of "strict"),
        "probabilistic" (that of the ratio rules), "greedy" or "top_and_one"; adaptive: True cuts the tree in every step to the
        depth that gives most tokens per second by what was measured so far, none at all where that is best;
        num_speculative_tokens_per_batch_size: tells the depth instead, {smallest batch size: tokens}.
    adapter: a LoRA adapter of the target in peft's format (a folder or a Hub id, or a run or head that was trained with one): it is
        merged into the weights while they are loaded, in fp32, rounded once. The target is then the adapted one, in every respect.
    logprobs_mode: "raw_logprobs" (of the target's logits) or "processed_logprobs" (of the law a token was drawn from, behind
        temperature and filters). prompt_logprobs are always raw.

    By default the outputs are those of plain decoding, whatever the head and the tree: see docs/lossless.md. Raises ValueError for
    bad arguments, naming what was given and what was expected; unknown keywords that are nearly spelled like a known one name it.
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
        **unknown,
    ):
        names = [name for name in inspect.signature(LLM.__init__).parameters if name not in ("self", "unknown")]
        reject_unknown(unknown, names, "LLM argument", VLLM_ARGUMENTS, ASKS_NOTHING)
        _check_whole("max_num_seqs", max_num_seqs, 1)
        _check_whole("max_num_batched_tokens", max_num_batched_tokens, 1)
        _check_whole("seed", seed, 0)
        if num_gpu_blocks_override is not None:
            _check_whole("num_gpu_blocks_override", num_gpu_blocks_override, 2)
        is_share = isinstance(gpu_memory_utilization, int | float) and not isinstance(gpu_memory_utilization, bool)
        if not is_share or not 0 < gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {gpu_memory_utilization!r}")
        for name, value in (("enable_prefix_caching", enable_prefix_caching), ("enforce_eager", enforce_eager)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {logprobs_mode!r}")
        named_dtype(dtype), named_device(device)  # refuse what they do not know
        speculative = check_speculative_config(speculative_config)

        # Everything that can be refused is refused before the target's weights are read.
        shared = model if isinstance(model, LLM) else None
        config, self.model_name = (shared.config, shared.model_name) if shared else target_config(model, load_format)
        check_supported(config)
        in_use = shared.adapter if shared else getattr(config, MERGED_KEY, "")
        merged = choose_adapter(adapter, model, load_format, config)
        self.adapter = merged.fingerprint if merged else in_use
        source = find_draft_source(speculative, config)
        warn_unless_adapted(source.head if source else None, self.adapter)
        tree = choose_tree(speculative, source)
        check_width(tree, config.get_text_config().vocab_size)
        rule, drawing = choose_drawing(speculative, tree)
        plan = choose_plan(speculative, tree, max_num_seqs)
        limit = config.max_position_embeddings
        if max_model_len is None:
            max_model_len = shared.max_model_len if shared else limit
        self.max_model_len = max_model_len
        if not isinstance(self.max_model_len, int) or not 2 <= self.max_model_len <= limit:
            raise ValueError(f"max_model_len must be from 2 to the model's own limit of {limit}, got {max_model_len!r}")

        if shared:
            self.tokenizer = shared.tokenizer if tokenizer is None else load_tokenizer(tokenizer, None)
            decoder = self._share(shared, dtype, device)
            self.eos_token_ids = shared.eos_token_ids
        else:
            self.tokenizer = load_tokenizer(tokenizer, model)
            positions = self.max_model_len + MAX_NODES
            decoder = load_decoder(model, config, dtype, device, positions, load_format, merged)
            self.eos_token_ids = eos_token_ids(model, config, self.tokenizer)
        warn_of_missing_stop_tokens(source, self.eos_token_ids)
        verifier = choose_verifier(rule, speculative, tree, decoder.device)
        self.config = config
        drafter = build_drafter(source, speculative, tree, drawing, decoder, self.max_model_len + MAX_NODES)
        self.engine = Engine.build(
            decoder,
            self.eos_token_ids,
            self.max_model_len,
            max_num_seqs,
            drafter,
            tree,
            verifier,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            captured=not enforce_eager,
            num_pages=num_gpu_blocks_override,
            logprobs_mode=logprobs_mode,
            plan=plan,
        )
        self.tree, self.seed, self._num_requests = tree, seed, 0
        self.dtype, self.device = decoder.dtype, decoder.device

    def _share(self, other, dtype, device):
        """The decoder of another LLM, if it serves."""
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
        others: what vLLM takes besides, where it asks for nothing else than is done here.
        """
        reject_unknown(others, ("prompts", "sampling_params", "use_tqdm"), "argument", VLLM_CALLS, ASKS_NOTHING)
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
        checked = [self._check(prompt, params, i) for i, (prompt, params) in enumerate(zip(prompts, sampling_params))]
        groups = [self._make_requests(*one) for one in checked]
        try:
            for group in groups:
                for request in group:
                    self.engine.scheduler.add(request)
            self._run(groups, use_tqdm)
        except BaseException:
            self._cancel(groups)
            raise
        return [
            make_output(text, group, self.tokenizer, self.eos_token_ids) for (text, _, _), group in zip(checked, groups)
        ]

    def stream(self, prompt, sampling_params=None):
        """Yield the output's text piece by piece as it is decided; returns the RequestOutput (StopIteration.value)."""
        text, ids, params = self._check(prompt, SamplingParams() if sampling_params is None else sampling_params, 0)
        if params.n != 1:
            raise ValueError(f"stream makes one output, got n={params.n}")
        (request,) = self._make_requests(text, ids, params)
        self.engine.scheduler.add(request)
        shown, growing = 0, GrowingText(request.stop_checker.decode)
        try:
            while not request.finished:  # which may come in a step that another call makes
                self.engine.step()
                if not request.finished:
                    now = growing.of(request.output_token_ids)
                    end = stable_length(now, params.stop)
                    if end > shown:
                        yield now[shown:end]
                        shown = end
            if rest := final_text(request)[shown:]:
                yield rest
        finally:
            self._cancel([[request]])
        return make_output(text, [request], self.tokenizer, self.eos_token_ids)

    def chat(self, messages, sampling_params=None, use_tqdm=False, chat_template_kwargs=None, **others):
        """Outputs for one conversation (a list of {"role", "content"}) or several, through the tokenizer's chat template.

        chat_template_kwargs: what the template takes besides, as {"enable_thinking": False}; others: as in `generate`.
        """
        known = ("messages", "sampling_params", "use_tqdm", "chat_template_kwargs")
        reject_unknown(others, known, "argument", VLLM_CALLS, ASKS_NOTHING)
        several = isinstance(messages, list | tuple) and messages and all(isinstance(m, list | tuple) for m in messages)
        conversations = messages if several else [messages]
        prompts = []
        for conversation in conversations:
            text = render_chat(self.tokenizer, conversation, chat_template_kwargs)
            # The template writes its own special tokens.
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self):
        """The transformers tokenizer, or None."""
        return self.tokenizer

    def get_metrics(self):
        """Counters since the LLM was built: requests, tokens, cache hits, seconds, acceptance (inference/engine/metrics.py)."""
        return self.engine.metrics.as_dict()

    # --- the steps of generate ---

    def _check(self, prompt, params, number):
        """(text or None, token ids, params) of one prompt, or ValueError."""
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params of prompt {number} must be a SamplingParams, got {type(params).__name__}"
            )
        text, ids = None, prompt
        if isinstance(prompt, dict):
            reject_unknown(prompt, ("prompt", "prompt_token_ids"), "prompt key")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, ids = prompt, None
        if ids is None and isinstance(text, str):
            check_text(text, f"prompt {number}")
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt {number} is text, but there is no tokenizer: pass tokenizer=..., or token ids"
                )
            ids = self.tokenizer(text)["input_ids"]
        vocab = self.engine.decoder.vocab_size
        if not isinstance(ids, list | tuple) or not all(isinstance(t, Integral) and 0 <= t < vocab for t in ids):
            raise ValueError(
                f"prompt {number} must be a string or token ids from 0 to {vocab - 1} (whole numbers), got {prompt!r:.80}"
            )
        if not ids:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} fit, so that one new token does: shorten it or raise max_model_len"
            )
        for name, advice in (("stop", ", or use stop_token_ids"), ("bad_words", "")):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name} strings of prompt {number} need a tokenizer: pass tokenizer=...{advice}")
        bad_words = bad_word_sequences(params.bad_words, self.tokenizer)
        stop_ids = StopChecker(self.tokenizer, self.eos_token_ids, params).stop_ids
        check_tokens(params, bad_words, stop_ids, vocab, number)
        return text, [int(token) for token in ids], params

    def _make_requests(self, text, ids, params):
        number, self._num_requests = self._num_requests, self._num_requests + 1
        room = self.max_model_len - len(ids)
        bad_words = bad_word_sequences(params.bad_words, self.tokenizer)
        return [
            Request(
                request_id=(number, sample),
                prompt_token_ids=ids,
                params=params,
                seed=_derive_seed(self.seed, number) if params.seed is None else params.seed,
                sample_index=sample,
                max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_checker=StopChecker(self.tokenizer, self.eos_token_ids, params),
                # Once per prompt: its other outputs find the pages that this one computes.
                prompt_logprobs=[None] if params.prompt_logprobs is not None and sample == 0 else None,
                bad_words=bad_words,
            )
            for sample in range(params.n)
        ]

    def _run(self, groups, use_tqdm):
        """Step until these have ended; what others have asked for (open streams) advances beside them."""
        unfinished = {request for group in groups for request in group}
        started, tokens = time.monotonic(), 0
        with tqdm(
            total=len(unfinished), desc="generating", unit="output", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            while unfinished:
                before = self.engine.metrics.num_generated_tokens
                finished = len(unfinished)
                unfinished.difference_update(request for request in self.engine.step() if request.finished)
                finished -= len(unfinished)
                tokens += self.engine.metrics.num_generated_tokens - before
                bar.update(finished)
                if use_tqdm and finished:
                    rate = tokens / (time.monotonic() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s")

    def _cancel(self, groups):
        for group in groups:
            for request in group:
                if not request.finished:
                    self.engine.cancel(request)


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


def _derive_seed(seed, number):
    """A 63-bit seed for request `number` of an LLM seeded with `seed` (splitmix64's finaliser over both)."""
    x = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1


def _check_whole(name, value, least):
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
