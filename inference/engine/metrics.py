"""Counters of speculative decoding. No torch.

acceptance length = 1 + accepted / steps, pooled over steps (the definition of vLLM and SGLang); per-position acceptance is
unconditional: accepted at position i / steps.
"""

import time
from dataclasses import dataclass, field


@dataclass
class SpecDecodeMetrics:
    """Counters of drafts, for one output or for all outputs of an engine."""

    num_steps: int = 0
    num_draft_tokens: int = 0  # nodes
    num_draft_depths: int = 0  # depths of these, which vLLM counts as draft tokens
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def record(self, num_drafted, num_depths, num_accepted, max_depth):
        """Count one verify step: `num_drafted` nodes drafted at `num_depths` depths, the first `num_accepted` depths accepted."""
        self.num_steps += 1
        self.num_draft_tokens += num_drafted
        self.num_draft_depths += num_depths
        self.num_accepted_tokens += num_accepted
        self.accepted_per_position += [0] * (max_depth - len(self.accepted_per_position))
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    @property
    def acceptance_length(self):
        """Tokens per step; 1.0 before the first step."""
        return 1.0 + (self.num_accepted_tokens / self.num_steps if self.num_steps else 0.0)

    @property
    def acceptance_per_position(self):
        return [accepted / self.num_steps for accepted in self.accepted_per_position] if self.num_steps else []


@dataclass
class RequestStateStats:
    """Times of a request, by vLLM's names: arrival_time since 1970, first_token_latency in seconds, others of time.monotonic().

    0.0: not yet.
    """

    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self):
        return self.first_token_ts - self.queued_ts if self.first_token_ts else 0.0

    def count(self, num_tokens):
        """Note that this many tokens were handed back just now."""
        self.last_token_ts = time.monotonic()
        self.first_token_ts = self.first_token_ts or self.last_token_ts
        self.num_generation_tokens += num_tokens


@dataclass
class EngineMetrics:
    """Counters of one engine since it was built."""

    num_requests_finished: int = 0
    num_prompt_tokens: int = 0  # computed ones, without those found in the cache
    # prompt tokens looked up in the cache (names and units are vLLM's); a preemption adds none
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0  # of prefix_cache_queries, tokens found
    num_generated_tokens: int = 0
    num_prefill_passes: int = 0
    num_decode_passes: int = 0
    num_preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_decoded_tokens: int = 0  # emitted by decode passes: all but the first token of each output
    spec_decode: SpecDecodeMetrics = field(default_factory=SpecDecodeMetrics)

    def as_dict(self):
        spec = self.spec_decode
        return {
            "num_requests_finished": self.num_requests_finished,
            "num_prompt_tokens": self.num_prompt_tokens,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "num_generated_tokens": self.num_generated_tokens,
            "num_prefill_passes": self.num_prefill_passes,
            "num_decode_passes": self.num_decode_passes,
            "num_preemptions": self.num_preemptions,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "decode_tokens_per_second": self.num_decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0,
            "num_spec_steps": spec.num_steps,
            "num_draft_tokens": spec.num_draft_tokens,
            "num_accepted_tokens": spec.num_accepted_tokens,
            "acceptance_length": spec.acceptance_length,
            "acceptance_per_position": spec.acceptance_per_position,
        }
