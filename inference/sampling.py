"""SamplingParams, and the way from logits to the target's own token.

The target's token at a node is argmax(logits' + G): logits' are the logits after min_tokens, temperature, top-k and top-p, G
is Gumbel noise keyed by (seed, sample index, position, token), so it is a draw from softmax(logits') that depends on the
request and the position alone (Gumbel-max). At temperature 0 there is no G. Ties go to the lowest token id.
"""

import math
from dataclasses import dataclass, fields

from .keywords import VLLM_SAMPLING, reject_unknown

# Below it, logits divided by the temperature leave the range in which fp32 tells them apart.
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class _Fields:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
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


class SamplingParams(_Fields):
    """How one request is sampled; names and defaults are vLLM's.

    temperature: 0 is greedy. top_p in (0, 1]; top_k: 0 or -1 keeps all. max_tokens: at most so many new tokens (None: up to
    max_model_len). min_tokens: no EOS, stop token or stop string before. stop: a string or several that end the output.
    stop_token_ids: tokens that end it, and are part of token_ids. include_stop_str_in_output: the text keeps the stop string,
    or the stop token's text, that ended it. ignore_eos: go on behind EOS. seed: an int makes the output a function of (prompt,
    parameters, seed); None derives one from (LLM seed, number of the request). n: outputs per prompt.
    logprobs: also return the log-probabilities of the emitted token and of the so many likeliest, at every position
    (LLM's logprobs_mode says of which law). prompt_logprobs: the same for the prompt's tokens but the first, of the raw logits.

    Raises ValueError for values out of range and for unknown keywords.
    """

    def __init__(self, *positional, **given):
        names = [field.name for field in fields(_Fields)]
        if positional:
            raise ValueError(
                f"SamplingParams takes keywords only, got {positional[0]!r}: write for example temperature=0.5; "
                f"Known: {', '.join(names)}"
            )
        reject_unknown(given, names, "sampling parameter", VLLM_SAMPLING)
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        for name, what in (("stop", "a string or a list of strings"), ("stop_token_ids", "a list of token ids")):
            value = given.get(name)
            if value is not None and not isinstance(value, list | tuple | set):
                raise ValueError(f"{name} must be {what}, got {value!r}")
            given[name] = tuple(value or ())
        super().__init__(**given)
        self._check()

    def _check(self):
        def require(condition, name, expected):
            if not condition:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

        def whole(value):
            return isinstance(value, int) and not isinstance(value, bool)

        def real(value):
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

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
        require(
            self.max_tokens is None or (whole(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            "at least 1, or None for as many as fit",
        )
        limit = math.inf if self.max_tokens is None else self.max_tokens
        require(whole(self.min_tokens) and 0 <= self.min_tokens <= limit, "min_tokens", "from 0 to max_tokens")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "a non-empty string or a list of them")
        require(all(whole(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", "a list of token ids")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        require(
            self.seed is None or (whole(self.seed) and 0 <= self.seed < 2**63), "seed", "None or from 0 to 2^63 - 1"
        )
        require(whole(self.n) and self.n >= 1, "n", "at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(count is None or (whole(count) and 0 <= count <= 100), name, "None or from 0 to 100")
        require(isinstance(self.include_stop_str_in_output, bool), "include_stop_str_in_output", "True or False")

    def __repr__(self):
        return f"SamplingParams({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(_Fields))})"
