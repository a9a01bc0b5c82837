"""SamplingParams, and the way from logits to the target's own token.

The target's token at a node is argmax(logits' + G): logits' are the logits after min_tokens, temperature, top-k and top-p, G
is Gumbel noise keyed by (seed, sample index, position, token), so it is a draw from softmax(logits') that depends on the
request and the position alone (Gumbel-max). At temperature 0 there is no G. Ties go to the lowest token id.
"""

import math
from dataclasses import dataclass, fields

import torch

from ..kernels.philox import gumbel
from .keywords import reject_unknown

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


class SamplingParams(_Fields):
    """How one request is sampled; names and defaults are vLLM's.

    temperature: 0 is greedy. top_p in (0, 1]; top_k: 0 or -1 keeps all. max_tokens: at most so many new tokens (None: up to
    max_model_len). min_tokens: no EOS or stop token before. stop: a string or several that end the output (not part of
    it). stop_token_ids: tokens that end it (part of token_ids). ignore_eos: go on behind EOS. seed: an int makes the output a
    function of (prompt, parameters, seed); None derives one from (LLM seed, number of the request). n: outputs per prompt.
    logprobs: also return the log-probabilities of the emitted token and of the so many likeliest (of the raw logits).

    Raises ValueError for values out of range and for unknown keywords (naming the nearest known).
    """

    def __init__(self, **given):
        reject_unknown(given, [field.name for field in fields(_Fields)], "sampling parameter")
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
            whole(self.top_k) and self.top_k >= -1, "top_k", "a whole number: 0 or -1 for all, else how many to keep"
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
        require(
            self.logprobs is None or (whole(self.logprobs) and 0 <= self.logprobs <= 100),
            "logprobs",
            "None or from 0 to 100",
        )

    def __repr__(self):
        return f"SamplingParams({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(_Fields))})"


class SamplingBatch:
    """The sampling parameters of the requests in one pass, as tensors.

    requests: list of Request; device: where the logits lie. Rows are [B] in the order of the requests.
    """

    def __init__(self, requests, device):
        params = [request.params for request in requests]
        self.requests, self.device = requests, device
        self.any_random = any(p.temperature > 0 for p in params)
        self.any_filter = any(p.temperature > 0 and (p.top_p < 1 or p.top_k > 0) for p in params)
        if self.any_random:
            self.random = torch.tensor([p.temperature > 0 for p in params], device=device)
            # Greedy rows divide by 1 and add no noise: exactly the logits themselves.
            self.temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device)
            self.seed = torch.tensor([request.seed for request in requests], device=device)
            self.sample = torch.tensor([request.sample_index for request in requests], device=device)

    def noise(self, positions, vocab_size):
        """Gumbel noise of the tokens drawn at `positions`; zero for greedy requests, None if all are.

        positions [B, J] int64: the index of the drawn token in the sequence  ->  [B, J, V] fp32
        """
        if not self.any_random:
            return None
        seed, sample = (x[:, None].expand_as(positions) for x in (self.seed, self.sample))
        return gumbel(seed, sample, positions, vocab_size) * self.random[:, None, None]

    def target_scores(self, logits, num_before, eos_token_ids):
        """Logits after min_tokens, temperature, top-k and top-p; what is excluded is -inf.

        logits [B, N, V]; num_before [B] host lists of N: how many tokens the request has emitted before each node's own.
        """
        rows = [
            (b, n, list(stops))
            for b, request in enumerate(self.requests)
            if (stops := set(request.params.stop_token_ids) | set(() if request.params.ignore_eos else eos_token_ids))
            for n, before in enumerate(num_before[b])
            if before < request.params.min_tokens
        ]
        if rows:
            logits = logits.clone()
            for b, n, stops in rows:
                logits[b, n, stops] = -torch.inf
        if self.any_random:
            logits = logits / self.temperature[:, None, None]
        if self.any_filter:
            logits = torch.stack([_keep_top(x, r.params) for x, r in zip(logits, self.requests)])
        return logits


def _keep_top(scores, params):
    """Exclude what top-k and top-p leave out.  [N, V] -> [N, V]; ties go to the lowest token id"""
    if params.temperature == 0 or (params.top_k <= 0 and params.top_p == 1):
        return scores
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k > 0:
        keep[:, params.top_k :] = False
    if params.top_p < 1:
        probability = ordered.masked_fill(~keep, -torch.inf).double().softmax(-1)
        # A token stays if those before it do not yet make up top_p: the first one always does.
        keep &= probability.cumsum(-1) - probability < params.top_p
    return scores.masked_fill(~torch.zeros_like(keep).scatter(-1, order, keep), -torch.inf)


def draw(scores, noise):
    """The target's own token of every row: argmax(scores + noise), lowest id on ties.  [..., V] -> [...]"""
    return (scores if noise is None else scores + noise).argmax(-1)
