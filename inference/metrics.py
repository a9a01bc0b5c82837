"""Metrics of an engine as vLLM's LLM.get_metrics returns them: a list of Counter, Gauge and Vector objects with vLLM's names.

Counted since the LLM was built. A prompt counts once for each of its n outputs, as in vLLM, and once if its request is preempted.
On a tree, vllm:spec_decode_num_draft_tokens counts depths, as on a chain, and headstart:spec_decode_num_draft_nodes counts nodes.
Histograms of times have no counterpart: RequestOutput.metrics has a request's times.
"""

from dataclasses import dataclass


@dataclass
class Metric:
    """A named figure; labels: model_name and engine."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number of this moment."""

    value: float


@dataclass
class Vector(Metric):
    """Counters of one kind, one per position of a draft."""

    values: list[int]


def counts_of(engine):
    """The figures of an Engine as plain data.  -> {"gauges": {name: number}, "counters": {...}, "vectors": {name: numbers}}

    A name without a colon is vLLM's. Those of speculation are there only where the engine speculates, as in vLLM.
    """
    counted, scheduler = engine.metrics, engine.scheduler
    gauges = {
        "num_requests_running": len(scheduler.active),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": 1 - scheduler.num_free_pages / scheduler.num_pages,
    }
    counters = {
        "num_preemptions": counted.num_preemptions,
        "prompt_tokens": scheduler.num_prompt_tokens,
        "generation_tokens": counted.num_generated_tokens,
        "request_success": counted.num_requests_finished,
        "prefix_cache_queries": counted.prefix_cache_queries,
        "prefix_cache_hits": counted.prefix_cache_hits,
    }
    vectors = {}
    if depth := engine.tree.max_depth:
        drafts = counted.spec_decode
        counters |= {
            "spec_decode_num_drafts": drafts.num_steps,
            "spec_decode_num_draft_tokens": drafts.num_draft_depths,
            "headstart:spec_decode_num_draft_nodes": drafts.num_draft_tokens,
            "spec_decode_num_accepted_tokens": drafts.num_accepted_tokens,
        }
        accepted = drafts.accepted_per_position
        vectors["spec_decode_num_accepted_tokens_per_pos"] = accepted + [0] * (depth - len(accepted))
    return {"gauges": gauges, "counters": counters, "vectors": vectors}


def metrics_of(counts, model_name):
    """The figures of `counts_of` as a list of Metric."""
    labels = {"model_name": model_name, "engine": "0"}
    return [
        *(Gauge(f"vllm:{name}", dict(labels), float(value)) for name, value in counts["gauges"].items()),
        *(
            Counter(name if ":" in name else f"vllm:{name}", dict(labels), value)
            for name, value in counts["counters"].items()
        ),
        *(Vector(f"vllm:{name}", dict(labels), values) for name, values in counts["vectors"].items()),
    ]
