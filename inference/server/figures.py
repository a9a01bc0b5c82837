"""/metrics: the engine's counters (inference/metrics.py) and the times of requests, for Prometheus, under vLLM's names."""

import time
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..metrics import Gauge, Vector

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TIMES = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", LONG),
    "request_queue_time_seconds": ("From the arrival of a request to its seat.", LONG),
    "e2e_request_latency_seconds": ("From the arrival of a request to its last token.", LONG),
    "request_time_per_output_token_seconds": ("Mean time per token of a request, after its first.", SHORT),
    "inter_token_latency_seconds": ("From one piece of a stream to the next.", SHORT),
}
WORDS = {
    "num_requests_running": "Outputs that have a seat.",
    "num_requests_waiting": "Outputs that wait for a seat.",
    "kv_cache_usage_perc": "Share of the cache's pages in use, 1 for all.",
    "num_preemptions": "Times that an output lost its pages to an older one, and was computed again.",
    "prompt_tokens": "Tokens of the prompts of outputs that got a seat.",
    "generation_tokens": "Tokens of outputs.",
    "prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens of prompts that were found there.",
    "spec_decode_num_drafts": "Steps of an output with drafts.",
    "spec_decode_num_draft_tokens": "Depths that were drafted; on a chain, drafted tokens.",
    "headstart:spec_decode_num_draft_nodes": "Drafted nodes.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Drafted tokens that were accepted, by their depth from 0.",
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def speculation_metrics(drafts, tree):
    """vLLM's `metrics.speculative_decoding` of an answer, and num_draft_nodes; None without speculation.

    drafts: SpecDecodeMetrics; tree: the engine's. acceptance_histogram: per number of accepted tokens, the steps with it.
    """
    if not tree.max_depth:
        return None
    num_drafted = drafts.num_draft_depths
    at_least = [drafts.num_steps, *drafts.accepted_per_position]  # steps that accepted this many tokens or more
    at_least += [0] * (tree.max_depth + 2 - len(at_least))
    return {
        "mean_acceptance_length": drafts.acceptance_length,
        "draft_acceptance_rate": drafts.num_accepted_tokens / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [steps - more for steps, more in pairwise(at_least)],
        "num_spec_steps": drafts.num_steps,
        "num_accepted_draft_tokens": drafts.num_accepted_tokens,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": tree.max_depth,
        "num_draft_nodes": drafts.num_draft_tokens,
    }


class Figures:
    """Figures of one server, in a registry of its own. `follow` names the engine that is read at every scrape."""

    def __init__(self, model_name):
        self._labels = {"model_name": model_name, "engine": "0"}
        self.registry = CollectorRegistry()
        names, values = list(self._labels), list(self._labels.values())
        self._times = {
            name: Histogram(f"vllm:{name}", words, names, buckets=buckets, registry=self.registry).labels(*values)
            for name, (words, buckets) in TIMES.items()
        }
        success = Counter(
            "vllm:request_success", "Outputs that ended.", [*names, "finished_reason"], registry=self.registry
        )
        self._ended = {reason: success.labels(*values, reason) for reason in ("stop", "length", "error")}
        self._last = {}  # {job: {(prompt, sample): when its last piece came}} of streams
        self._client = None

    def follow(self, client):
        """client: EngineClient"""
        self._client = client
        self.registry.register(self)

    def observe(self, job, delta):
        """Count a Delta, in the event loop."""
        now, output, last = time.monotonic(), (delta.prompt, delta.sample), self._last.setdefault(job, {})
        if output in last:
            self._times["inter_token_latency_seconds"].observe(now - last[output])
        last[output] = now
        if delta.finish_reason is None:
            return
        times, number = delta.times, delta.times.num_generation_tokens
        self._times["time_to_first_token_seconds"].observe(times.first_token_latency)
        self._times["request_queue_time_seconds"].observe(times.scheduled_ts - times.queued_ts)
        self._times["e2e_request_latency_seconds"].observe(times.last_token_ts - times.queued_ts)
        if number > 1:
            mean = (times.last_token_ts - times.first_token_ts) / (number - 1)
            self._times["request_time_per_output_token_seconds"].observe(mean)
        if delta.finish_reason in self._ended:
            self._ended[delta.finish_reason].inc()

    def give_up(self, count):
        """Count outputs that the engine gave up, or took with it."""
        self._ended["error"].inc(count)

    def forget(self, job):
        """A job has ended or was left by its client."""
        self._last.pop(job, None)

    def collect(self):
        """What prometheus_client asks at a scrape."""
        names, values = list(self._labels), list(self._labels.values())
        metrics = {metric.name: metric for metric in self._client.metrics()}
        metrics.pop("vllm:request_success")  # counted here, with its reasons
        for name, metric in metrics.items():
            words = WORDS[name.removeprefix("vllm:")]
            if isinstance(metric, Vector):
                family = CounterMetricFamily(name, words, labels=[*names, "position"])
                for position, value in enumerate(metric.values):
                    family.add_metric([*values, str(position)], value)
            else:
                kind = GaugeMetricFamily if isinstance(metric, Gauge) else CounterMetricFamily
                family = kind(name, words, labels=names)
                family.add_metric(values, metric.value)
            yield family

    def page(self):
        """The text of /metrics."""
        return generate_latest(self.registry)
