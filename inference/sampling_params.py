"""SamplingParams: how one request is sampled."""

import math
from dataclasses import dataclass, fields, replace

from ..heads.storage.keywords import python_value, reject_unknown
from .engine.target_scores import CHANGED, CUT, NO_FILTERS
from .grammar.structured_outputs import StructuredOutputsParams
from .vllm_api import SAMPLING

# Powers of ten around 1 that keep a logit in the range of fp32.
LEAST_REPETITION, GREATEST_REPETITION = 1e-5, 1e5
# Below this temperature, divided logits leave the range in which fp32 tells them apart.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class _Fields:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    bad_words: tuple[str, ...] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    speculate: bool = True


class SamplingParams(_Fields):
    """How one request is sampled; names and defaults are vLLM's.

    temperature: 0 is greedy. top_p in (0, 1]; top_k: 0 or -1 keeps all; min_p in [0, 1]: leave out tokens less likely than this
    share of the likeliest. repetition_penalty: logits of tokens of the prompt or the output are divided by it if positive, else
    multiplied. frequency_penalty, presence_penalty from -2 to 2: subtracted from the logits of the output's tokens, once per
    occurrence or once. logit_bias: {token id: from -100 to 100}, added to logits (kept as a sorted tuple of pairs).
    allowed_token_ids: no other tokens. structured_outputs: a StructuredOutputsParams, the form of the output; EOS is allowed where
    it is complete and nowhere else, and the output ends with its form, even before min_tokens, which keeps EOS and stop tokens away
    unless nothing else may follow. bad_words: strings that
    the output must not complete, with a space before them and without; the prompt may hold their beginning (in vLLM only the
    output counts). max_tokens: the most new tokens (None: up to
    max_model_len). min_tokens: number of tokens before any EOS, stop token or stop string. stop: one or more strings that end
    the output. stop_token_ids: tokens that end it, and are part of token_ids. include_stop_str_in_output: the text keeps the
    stop string, or the stop token's text, that ended it. ignore_eos: go on after EOS. seed: an int makes the output a function
    of (prompt, parameters, seed), with the default verifier; None or -1 derives one from (LLM seed, number of the request). n:
    outputs per prompt. logprobs: at every position, also return the log-probabilities of the emitted token and of this many
    likeliest tokens (-1: of all), at most the LLM's max_logprobs; its logprobs_mode chooses the distribution. prompt_logprobs: the
    same for the prompt's tokens but the first, of the raw logits. detokenize: False leaves the text empty. skip_special_tokens:
    False keeps special tokens in the text; spaces_between_special_tokens: False then joins those that stand side by side.
    speculate: False accepts no drafts: one token per step, each of which still takes the time of one with drafts.

    Fields cannot be set afterwards: `dataclasses.replace(params, n=3)` makes a changed copy. Raises ValueError for values out of
    range and for unknown keywords.
    """

    def __init__(self, *positional, **given):
        names = [field.name for field in fields(_Fields)]
        if positional:
            raise ValueError(
                f"SamplingParams takes keywords only, got {positional[0]!r}: write for example temperature=0.5"
            )
        reject_unknown(given, names, "sampling parameter", SAMPLING)
        given = {name: python_value(value) for name, value in given.items() if name in names}
        if given.get("seed") == -1:
            given["seed"] = None
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        for name, what in (
            ("stop", "a string or a list of strings"),
            ("bad_words", "a list of strings"),
            ("stop_token_ids", "a list of token ids"),
            ("allowed_token_ids", "a list of token ids"),
        ):
            value = given.get(name)
            if value is not None and not isinstance(value, list | tuple | set):
                raise ValueError(f"{name} must be {what}, got {value!r}")
            if value is not None or name != "allowed_token_ids":
                given[name] = tuple(value or ())
        bias = given.get("logit_bias")
        try:
            given["logit_bias"] = (
                () if bias is None else tuple((_token(token), value) for token, value in dict(bias).items())
            )
        except (TypeError, ValueError):
            raise ValueError(f"logit_bias must be a dictionary {{token id: bias}}, got {bias!r}") from None
        super().__init__(**given)
        self._check()
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))

    @classmethod
    def from_optional(cls, **given):
        """Parameters from optional values, as vLLM makes them: None stands for the default, but for max_tokens for no limit."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self):
        """A copy."""
        return replace(self)

    @property
    def has_penalties(self):
        """Whether a token's logit depends on the tokens before it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def filters(self):
        """Filters of the logits at every token: NO_FILTERS, CHANGED or CUT. (min_tokens changes only the first tokens' logits.)"""
        if self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0):
            return CUT
        given = self.logit_bias or self.bad_words or self.allowed_token_ids is not None or self.structured_outputs
        return CHANGED if given or self.has_penalties else NO_FILTERS

    def _check(self):
        def require(condition, name, expected):
            if not condition:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        def whole(value):
            return isinstance(value, int) and not isinstance(value, bool)

        def real(value):
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

        def token_ids(values):
            return all(whole(t) and t >= 0 for t in values)

        require(
            real(self.temperature) and (self.temperature == 0 or self.temperature >= LEAST_TEMPERATURE),
            "temperature",
            f"0 (greedy) or a finite number of at least {LEAST_TEMPERATURE}",
        )
        require(real(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(
            whole(self.top_k) and -1 <= self.top_k < 2**31,
            "top_k",
            "a whole number: 0 or -1 for all, else how many to keep",
        )
        require(real(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        require(
            real(self.repetition_penalty) and LEAST_REPETITION <= self.repetition_penalty <= GREATEST_REPETITION,
            "repetition_penalty",
            f"above 0 (from {LEAST_REPETITION} to {GREATEST_REPETITION:g}; 1 for none)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(real(value) and -2 <= value <= 2, name, "from -2 to 2")
        require(
            token_ids(token for token, _ in self.logit_bias)
            and all(real(bias) and -100 <= bias <= 100 for _, bias in self.logit_bias),
            "logit_bias",
            "a dictionary {token id: bias from -100 to 100}",
        )
        require(
            self.allowed_token_ids is None or (self.allowed_token_ids and token_ids(self.allowed_token_ids)),
            "allowed_token_ids",
            "None or a list of at least one token id",
        )
        form = self.structured_outputs
        require(
            form is None or isinstance(form, StructuredOutputsParams),
            "structured_outputs",
            "None or StructuredOutputsParams(...)",
        )
        for name in ("allowed_token_ids", "bad_words") if form else ():
            require(
                not getattr(self, name), name, "left out beside structured_outputs, which alone says what may follow"
            )
        spoken = all(isinstance(s, str) and s.strip() for s in self.bad_words)
        require(spoken, "bad_words", "a list of strings that are more than white space")
        require(
            self.max_tokens is None or (whole(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "at least 1, or None for as many as fit",
        )
        limit = math.inf if self.max_tokens is None else self.max_tokens
        require(whole(self.min_tokens) and 0 <= self.min_tokens <= limit, "min_tokens", "from 0 to max_tokens")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "a non-empty string or a list of them")
        require(token_ids(self.stop_token_ids), "stop_token_ids", "a list of token ids")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        require(
            self.seed is None or (whole(self.seed) and 0 <= self.seed < 2**63), "seed", "None or from 0 to 2^63 - 1"
        )
        require(whole(self.n) and self.n >= 1, "n", "at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(count is None or (whole(count) and count >= -1), name, "None, -1 for all tokens, or at least 0")
        for name in (
            "include_stop_str_in_output",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "speculate",
        ):
            require(isinstance(getattr(self, name), bool), name, "True or False")
        require(
            self.detokenize or not self.stop,
            "detokenize",
            "True where there are stop strings, which are found in the text",
        )

    def __repr__(self):
        return f"SamplingParams({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(_Fields))})"


def _token(key):
    """A key of logit_bias as a token id: JSON makes strings of them."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key
