"""Prompts and their parameters, validated before an engine sees them. It needs a tokenizer and sizes, and no engine."""

from dataclasses import dataclass, replace
from numbers import Integral

from ..heads.storage.keywords import reject_unknown
from .engine.stopping import stop_ids
from .forbidden_tokens import bad_word_sequences, check_tokens
from .grammar.library import Grammar
from .prompt_files import check_text
from .sampling_params import SamplingParams
from .vllm_api import PROMPT_KEYS


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt and its parameters, validated: only a lack of cache memory can still refuse it."""

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    bad_words: tuple
    cache_salt: str | None = None
    grammar: Grammar | None = None  # of params.structured_outputs


@dataclass(frozen=True)
class PromptChecker:
    """tokenizer: a transformers tokenizer or None; grammars: a Grammars; max_logprobs: the most to be asked for, -1: no limit"""

    tokenizer: object
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple
    max_logprobs: int
    grammars: object

    def check(self, prompt, params=None, number=0):
        """The CheckedPrompt of one prompt, in any form that LLM.generate takes, or ValueError; number: its name in errors."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"sampling_params of prompt {number} must be a SamplingParams, got {type(params).__name__}"
            )
        text, ids = self._tokenize(prompt, number)
        vocab = self.vocab_size
        if not are_tokens(ids, vocab):
            raise ValueError(
                f"prompt {number} must be a string or token ids from 0 to {vocab - 1} (whole numbers), got {prompt!r:.80}"
            )
        if not ids:
            raise ValueError(f"prompt {number} is empty: give at least one token")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt {number} has {len(ids)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} fit, so that one new token does: shorten it, or raise max_model_len "
                "if the model's own limit is above it"
            )
        for name, advice in (("stop", ", or use stop_token_ids"), ("bad_words", "")):
            if getattr(params, name) and self.tokenizer is None:
                raise ValueError(f"{name} strings of prompt {number} need a tokenizer: pass tokenizer=...{advice}")
        params = self._count_logprobs(params, vocab, number)
        bad_words = bad_word_sequences(params.bad_words, self.tokenizer)
        check_tokens(params, bad_words, stop_ids(params, self.eos_token_ids), vocab, number)
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        if salt is not None:
            if not isinstance(salt, str) or not salt:
                raise ValueError(f"cache_salt of prompt {number} must be a text that is not empty, got {salt!r:.80}")
            check_text(salt, f"cache_salt of prompt {number}")
        form = params.structured_outputs
        grammar = None if form is None else self.grammars.check(form)
        return CheckedPrompt(text, [int(token) for token in ids], params, bad_words, salt, grammar)

    def _count_logprobs(self, params, vocab, number):
        """The parameters with -1 (all tokens) replaced by the size of the vocabulary; ValueError beyond max_logprobs."""
        most, changed = self.max_logprobs, {}
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is None:
                continue
            wanted = vocab if count == -1 else count
            if wanted > most != -1:
                raise ValueError(
                    f"{name} of prompt {number} asks for {wanted} tokens, and max_logprobs is {most}: build the LLM with "
                    f"max_logprobs={wanted}, or -1 for no limit"
                )
            if count == -1:
                changed[name] = vocab
        return replace(params, **changed) if changed else params

    def _tokenize(self, prompt, number):
        """(text or None, token ids) of one prompt, in any form that LLM.generate takes."""
        text, ids = None, prompt
        if isinstance(prompt, dict):
            reject_unknown(prompt, ("prompt", "prompt_token_ids", "cache_salt"), "prompt key", PROMPT_KEYS)
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
        return text, ids


def are_tokens(ids, vocab_size):
    """Whether `ids` is a list or tuple of whole numbers from 0 to vocab_size - 1; numpy's count, too."""
    if not isinstance(ids, list | tuple) or not all(issubclass(kind, Integral) for kind in set(map(type, ids))):
        return False
    return not ids or 0 <= min(ids) <= max(ids) < vocab_size
