"""The public Python API, shaped like vLLM's: LLM, generate, chat. See LLM's docstring."""

import functools
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from ..heads.checkpoint import check_head_fits, load_head, resolve_head
from ..heads.medusa import Medusa
from ..kernels.linear import linear
from ..kernels.tree_attention import PAGE
from .cache import PagedCache, pages_that_fit
from .decoder import Decoder, check_supported
from .drafters.medusa import MedusaDrafter
from .engine import Engine
from .keywords import reject_unknown
from .metrics import SpecDecodeMetrics
from .prompt_files import render_chat
from .request import Request
from .sampling import SamplingParams
from .scheduler import Scheduler
from .stopping import StopChecker, final_text, stable_length
from .tree import MAX_NODES, ROOT_ONLY, chain, load_tree
from .verify import VERIFIERS

ARGUMENTS = (
    "model",
    "tokenizer",
    "dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "seed",
    "speculative_config",
)
SPECULATIVE_KEYS = ("model", "num_speculative_tokens", "tree", "verifier")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass
class CompletionOutput:
    """One output of a prompt. finish_reason: "stop", "length" or "abort"; stop_reason: the string or token id behind a stop."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: object = None
    logprobs: list | None = None  # per token {token id: Logprob}
    spec_decode_metrics: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)


@dataclass
class RequestOutput:
    """A prompt and its outputs (`SamplingParams.n` of them)."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True


class LLM:
    """A target model, and optionally a head that drafts for it.

    model: a folder or Hub id in Hugging Face layout, or a loaded *ForCausalLM (used in place, without a second copy).
    tokenizer: folder, Hub id or tokenizer object; None: the model's own.
    dtype: "auto", "bfloat16", "float16", "float32" or a torch.dtype. auto: the checkpoint's on a GPU; on the CPU bfloat16 or
        float32, whichever this machine measures faster. A loaded module keeps its own.
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1" ...
    max_model_len: longest prompt + output in tokens; None: the model's own limit.
    max_num_seqs: how many requests run at once.
    seed: requests without a seed of their own derive one from this and their number.
    speculative_config: None for plain decoding, or a dict with
        model: a head (folder, run, Hub id or module); num_speculative_tokens: depth of drafts, None for as deep as the head;
        tree: "chain", "static" (the tree measured for this head, else the one shipped for its number of heads) or a tree
        file; verifier: "strict".

    Whatever the speculative_config, the outputs are those of plain decoding. Raises ValueError for bad arguments, naming what
    was given and what was expected; unknown keywords name the nearest known one.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        dtype="auto",
        device="auto",
        max_model_len=None,
        max_num_seqs=8,
        seed=0,
        speculative_config=None,
        **unknown,
    ):
        reject_unknown(unknown, ARGUMENTS, "LLM argument")
        if not isinstance(max_num_seqs, int) or max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be a whole number of at least 1, got {max_num_seqs!r}")
        if not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {seed!r}")
        if speculative_config is not None and not isinstance(speculative_config, dict):
            raise ValueError(f"speculative_config must be a dict or None, got {speculative_config!r:.80}")
        speculative = dict(speculative_config or {})
        reject_unknown(speculative, SPECULATIVE_KEYS, "speculative_config key")
        if speculative_config is not None and not isinstance(speculative.get("model"), str | Path | nn.Module):
            raise ValueError(
                "speculative_config needs 'model': the head that drafts (a folder, a run, a Hub id or a module)"
            )
        verifier = speculative.get("verifier", "strict")
        if verifier not in VERIFIERS:
            raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")

        # Everything that can be refused is refused before the target's weights are read.
        config, self.model_name = _target_config(model)
        check_supported(config)
        head = _load_drafter_head(speculative["model"]) if speculative else None
        if head is not None:
            check_head_fits(head, config)
        tree = _choose_tree(speculative, head)
        limit = config.max_position_embeddings
        self.max_model_len = limit if max_model_len is None else max_model_len
        if not isinstance(self.max_model_len, int) or not 2 <= self.max_model_len <= limit:
            raise ValueError(f"max_model_len must be from 2 to the model's own limit of {limit}, got {max_model_len!r}")

        self.tokenizer = _load_tokenizer(tokenizer, model)
        self.module = _load_target(model, config, dtype, device)
        self.eos_token_ids = _eos_token_ids(self.module, self.tokenizer)
        decoder = Decoder(self.module, self.max_model_len + MAX_NODES)
        drafter = None
        if head is not None:
            if not isinstance(speculative["model"], nn.Module):
                head = head.to(decoder.device, decoder.dtype).eval()
            drafter = MedusaDrafter(head, decoder.lm_head)
        per_request = -(-(self.max_model_len + tree.num_nodes) // PAGE)
        shape = (len(decoder.layers), decoder.num_kv_heads, decoder.head_dim, decoder.dtype, decoder.device)
        pages = pages_that_fit(*shape, wanted=max_num_seqs * per_request)
        cache = PagedCache(shape[0], pages, *shape[1:])
        scheduler = Scheduler(pages, PAGE, max_num_seqs, tree.num_nodes)
        self.engine = Engine(decoder, cache, scheduler, self.eos_token_ids, drafter, tree)
        self.tree, self.seed, self._num_requests = tree, seed, 0
        self.dtype, self.device = decoder.dtype, decoder.device

    # --- generating ---

    def generate(self, prompts, sampling_params=None, use_tqdm=False):
        """Outputs for one or many prompts, in order.

        prompts: str, list of str, token-id list, list of those, {"prompt_token_ids": [...]} or {"prompt": str}, or lists of
        them. sampling_params: one for all, or one per prompt; None: SamplingParams(). All inputs are checked before any work.
        """
        prompts = _as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
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
        return [self._output(text, group) for (text, _, _), group in zip(checked, groups)]

    def stream(self, prompt, sampling_params=None):
        """Yield the output's text piece by piece as it is decided; returns the RequestOutput (StopIteration.value)."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"stream makes one output, got n={params.n}")
        text, ids, params = self._check(prompt, params, 0)
        (request,) = self._make_requests(text, ids, params)
        self.engine.scheduler.add(request)
        shown = 0
        try:
            while not request.finished:
                self.engine.step()
                now = final_text(request) if request.finished else request.stop_checker.text(request)
                end = len(now) if request.finished else stable_length(now, params.stop)
                if end > shown:
                    yield now[shown:end]
                    shown = end
            # The request may have ended in a step that another call made.
            if rest := final_text(request)[shown:]:
                yield rest
        finally:
            self._cancel([[request]])
        return self._output(text, [request])

    def chat(self, messages, sampling_params=None, use_tqdm=False):
        """Outputs for one conversation (a list of {"role", "content"}) or several, through the model's chat template."""
        if not messages:
            raise ValueError("chat takes a conversation: a non-empty list of {'role': ..., 'content': ...}")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = []
        for conversation in conversations:
            text = render_chat(self.tokenizer, conversation)
            ids = self.tokenizer(text, add_special_tokens=False)[
                "input_ids"
            ]  # the template writes its own special tokens
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_metrics(self):
        """Counters since the LLM was built: requests, tokens, seconds, acceptance (inference/metrics.py)."""
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
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt {number} is text, but there is no tokenizer: pass tokenizer=..., or token ids"
                )
            ids = self.tokenizer(text)["input_ids"]
        vocab = self.engine.decoder.vocab_size
        if not isinstance(ids, list | tuple) or not all(isinstance(t, int) and 0 <= t < vocab for t in ids):
            raise ValueError(f"prompt {number} must be a string or token ids from 0 to {vocab - 1}, got {prompt!r:.80}")
        if not ids:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} fit, so that one new token does: shorten it or raise max_model_len"
            )
        for token in params.stop_token_ids:
            if token >= vocab:
                raise ValueError(f"stop_token_ids of prompt {number} holds {token}; the vocabulary has {vocab} tokens")
        if params.stop and self.tokenizer is None:
            raise ValueError(
                f"stop strings of prompt {number} need a tokenizer: pass tokenizer=..., or use stop_token_ids"
            )
        return text, list(ids), params

    def _make_requests(self, text, ids, params):
        number, self._num_requests = self._num_requests, self._num_requests + 1
        room = self.max_model_len - len(ids)
        return [
            Request(
                request_id=(number, sample),
                prompt_token_ids=ids,
                params=params,
                seed=_derive_seed(self.seed, number) if params.seed is None else params.seed,
                sample_index=sample,
                max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                stop_checker=StopChecker(self.tokenizer, self.eos_token_ids, params),
            )
            for sample in range(params.n)
        ]

    def _run(self, groups, use_tqdm):
        total = sum(len(group) for group in groups)
        started, tokens = time.monotonic(), 0
        with tqdm(total=total, desc="generating", unit="output", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.engine.scheduler.has_unfinished:
                before = self.engine.metrics.num_generated_tokens
                finished = sum(request.finished for request in self.engine.step())
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

    def _output(self, text, group):
        outputs = []
        for request in group:
            if request.logprobs is not None and self.tokenizer is not None:
                for entry in request.logprobs:
                    for token, logprob in entry.items():
                        logprob.decoded_token = self.tokenizer.decode([token])
            outputs.append(
                CompletionOutput(
                    index=request.sample_index,
                    text=final_text(request),
                    token_ids=request.output_token_ids,
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason if request.stop_reason not in self.eos_token_ids else None,
                    logprobs=request.logprobs,
                    spec_decode_metrics=request.metrics,
                )
            )
        return RequestOutput(group[0].request_id[0], text, group[0].prompt_token_ids, outputs)


def _as_prompt_list(prompts):
    """One prompt or many -> list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise ValueError(
            f"prompts must be a string, token ids, a dict or a list of those, got {type(prompts).__name__}"
        )
    if prompts and all(isinstance(token, int) for token in prompts):
        return [list(prompts)]
    if not prompts:
        raise ValueError("prompts is empty: give at least one prompt")
    return list(prompts)


def _derive_seed(seed, number):
    """A 63-bit seed for request `number` of an LLM seeded with `seed` (splitmix64's finaliser over both)."""
    x = (seed * 0x9E3779B97F4A7C15 + (number + 1) * 0xD1B54A32D192ED03) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1


def _target_config(model):
    """(Hugging Face config, name) of a target, with a clear error where there is none."""
    if isinstance(model, nn.Module):
        return model.config, getattr(model.config, "_name_or_path", "") or type(model).__name__
    from transformers import AutoConfig

    name = str(model)
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{name} holds no config.json: expected a model folder in Hugging Face layout")
    elif path.exists():
        raise ValueError(f"{name} is a file: expected a model folder in Hugging Face layout, or a Hub id")
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"there is no model folder {name}")
    try:
        return AutoConfig.from_pretrained(name), name
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot read the model {name!r}: no such folder, and the Hub did not give it ({error}). "
            "Check the name, the network, HF_HUB_OFFLINE, and `hf auth login` for gated models"
        ) from error


def _load_tokenizer(tokenizer, model):
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    if tokenizer is None and isinstance(model, nn.Module):
        return None
    from transformers import AutoTokenizer

    name = str(model if tokenizer is None else tokenizer)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        if tokenizer is None and Path(name).is_dir() and not any(Path(name).glob("*token*")):
            return None  # a model folder without a tokenizer can still be fed token ids
        raise ValueError(f"cannot read the tokenizer of {name!r}: {error}") from error


def _load_target(model, config, dtype, device):
    if isinstance(dtype, str):
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be auto, {', '.join(DTYPES)} or a torch.dtype, got {dtype!r}")
        dtype = DTYPES.get(dtype)
    elif not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)} or a torch.dtype, got {dtype!r}")
    if isinstance(model, nn.Module):
        own, at = model.dtype, model.device
        if dtype not in (None, own) or (device != "auto" and torch.device(device).type != at.type):
            raise ValueError(
                f"the loaded module is {own} on {at} and is used in place: leave dtype and device at 'auto'"
            )
        return model
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch sees no GPU: use device='cpu' or 'auto'")
    if dtype is None:
        dtype = faster_cpu_dtype() if device.type == "cpu" else (getattr(config, "dtype", None) or torch.bfloat16)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        module = AutoModelForCausalLM.from_pretrained(str(model), dtype=dtype)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"cannot load the weights of {str(model)!r}, they may be cut or missing: {error}") from error
    return module.to(device).eval()


@functools.cache
def faster_cpu_dtype():
    """bfloat16 or float32, whichever runs the engine's blocks of rows faster on this machine (measured once per process)."""
    seconds = {}
    x, w = torch.randn(16, 1024), torch.randn(1024, 1024)
    for dtype in (torch.float32, torch.bfloat16):
        xd, wd, times = x.to(dtype), w.to(dtype), []
        for _ in range(25):
            start = time.perf_counter()
            linear(xd, wd)
            times.append(time.perf_counter() - start)
        seconds[dtype] = sorted(times)[len(times) // 4]
    return min(seconds, key=seconds.get)


def _eos_token_ids(module, tokenizer):
    """All tokens that end an output: the generation config's, else the config's, else the tokenizer's."""
    for source in (getattr(module, "generation_config", None), module.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def _load_drafter_head(head):
    if isinstance(head, nn.Module):
        if not isinstance(head, Medusa):
            raise ValueError(f"speculative_config['model'] must be a Medusa head, got a {type(head).__name__} module")
        return head
    return load_head(head)


def _choose_tree(speculative, head):
    """The topology that a speculative_config asks for."""
    if head is None:
        return ROOT_ONLY
    most = head.num_speculative_tokens
    depth = speculative.get("num_speculative_tokens")
    depth = most if depth is None else depth
    if not isinstance(depth, int) or not 1 <= depth <= most:
        raise ValueError(f"num_speculative_tokens must be from 1 to the head's {most}, got {depth!r}")
    name = speculative.get("tree", "chain")
    if not isinstance(name, str | Path):
        raise ValueError(f"speculative_config['tree'] must be 'chain', 'static' or a tree file, got {name!r:.80}")
    if name == "chain":
        return chain(depth)
    tree = load_tree(static_tree_file(speculative["model"], most) if name == "static" else name)
    if tree.max_depth > most and name != "static":
        raise ValueError(
            f"{name} drafts {tree.max_depth} tokens deep, the head has {most}: measure a tree for this head"
        )
    return tree.truncated(depth)


def static_tree_file(head, num_heads):
    """The tree measured for this head (tree.json in its folder or its run), else the one shipped for its number of heads."""
    if not isinstance(head, nn.Module):
        folder = Path(resolve_head(head))
        runs = [parent for parent in list(folder.parents)[:3] if (parent / "config.yaml").is_file()]
        for place in (folder, *runs):
            if (place / "tree.json").is_file():
                return place / "tree.json"
    folder = Path(__file__).parent.parent / "configs" / "trees"
    shipped = folder / f"medusa-{num_heads}.json"
    if not shipped.is_file():
        known = ", ".join(sorted(path.name for path in folder.glob("*.json"))) or "none"
        raise ValueError(
            f"no static tree for {num_heads} heads (shipped: {known}): measure one with `headstart tree RUN` and pass its path"
        )
    return shipped
