"""`headstart bench traffic`: what serving under traffic costs, on random weights of a named shape, plain and with drafts.

*Throughput*: requests of mixed lengths, handed in at once. Drafts are those of `bench engine`: a random head, and the verifier
`synthetic`, which accepts at a given length. Every draft gets the same requests. The floor is the sum of four times, as if all
seats were taken in every decode step: `products`, of the steps' nodes with the weights, or reading the weights, whichever takes
longer; `keys`, reading the context's keys and values once per step and request; `drafts`, reading the head's weights; `prompts`,
their products with the weights. Reads have the rate of a copy, products the rate of large ones over three seconds, both of the same
run. Left out: the products of attention and of drafts, and what a head computes over the prompts. An engine that reads weights
while it computes prompts could go below the floor. Drafts of a depth that the engine chooses have none.

*Stalls*: a batch that is kept full by prompts of one length, or of lengths in a span: each output that ends is replaced by a new
prompt. A step is the time between two returns of the engine, so a stream waits that long for its next tokens. `StepRecord.split`
tells steps that computed prompt tokens from others.

Percentiles are nearest ranks: p99 is the least value that at least 99 % of the values do not exceed.

Also counted: the Triton kernels made ready after the engine was built, by phase. A kernel counts whether it is compiled or read
from the cache on disk, and once per process: a later draft counts only what earlier ones did not need.
"""

import itertools
import random
import statistics
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ...evaluation.results import Report, decimals, plain
from ...evaluation.step_recorder import record_steps
from ...evaluation.timing import release
from ...inference.llm import LLM
from ...inference.sampling_params import SamplingParams
from ...inference.speculation.options import SpeculativeOptions
from ...inference.speculation.speculation import choose_speculation
from ...kernels.jit import triton
from ..floor import StepFloor, copy_bandwidth, product_rate, weight_bytes
from ..random_heads import bytes_with_head, empty_head, random_head
from ..shape import NUM_HEADS, check_fits, config_of_shape
from .engine import ways_of_drafting
from .startup import FIRST_TOKENS, first_tokens_ms

THROUGHPUT = {
    "draft": ("draft", 20, plain),
    "tokens_per_second": ("output tokens/s", 15, decimals(0)),
    "all_tokens_per_second": ("all tokens/s", 12, decimals(0)),
    "seconds": ("seconds", 8, decimals(2)),
    "preemptions": ("preemptions", 11, plain),
    "tokens_per_step": ("tokens/step", 11, decimals(2)),
    "floor": ("floor s", 8, decimals(2)),
    "over_floor": ("x floor", 7, decimals(2)),
}
STALLS = {
    "draft": ("draft", 20, plain),
    "prompt": ("prompt", 9, plain),
    "plain_p50": ("plain p50 ms", 12, decimals(2)),
    "plain_p99": ("p99", 7, decimals(2)),
    "plain_p999": ("p99.9", 7, decimals(2)),
    "admitting_p50": ("admitting p50 ms", 16, decimals(2)),
    "admitting_p99": ("p99", 7, decimals(2)),
    "admitting_p999": ("p99.9", 7, decimals(2)),
    "ratio_p50": ("x p50", 6, decimals(2)),
    "ratio_p99": ("x p99", 6, decimals(2)),
    "first_p50": ("first token p50 ms", 18, decimals(1)),
    "first_p99": ("p99", 7, decimals(1)),
}
PERMILLE = {"p50": 500, "p99": 990, "p999": 999}
STALL_OUTPUTS = (40, 120)  # tokens of an output beside stalls: short, so that prompts keep entering
WARM_PROMPT, WARM_OUTPUT = 50, 8


@dataclass(frozen=True)
class TrafficSettings:
    """Settings of `bench traffic`; see `headstart bench traffic --help`."""

    shape: str
    head: str | None = None  # a method of random_heads.py; None: plain decoding alone
    num_speculative_tokens: int = NUM_HEADS
    acceptance: float = 3.0
    requests: int = 256
    prompts: tuple[int, int] = (100, 2000)  # shortest and longest
    outputs: tuple[int, int] = (32, 512)
    seats: int = 64
    stalls: tuple[tuple[int, int], ...] = (
        (20, 20),
        (256, 256),
        (1000, 1000),
        (3000, 3000),
    )  # lengths; empty: none measured
    stall_seats: int = 16
    stall_requests: int = 256
    first_prompt: int = 1000
    adaptive: bool = False  # also measure with the engine choosing the depth of every step
    draft_quantization: str | None = None  # also measure with the head's weights rounded so


def bench_traffic(settings, device, dtype, command, output=None, commit=None):
    """Measure every line of `settings`. Prints both tables, then the JSON object, which is returned."""
    config = config_of_shape(settings.shape)
    length = longest_sequence(settings)
    if length > (most := config.max_position_embeddings):
        raise ValueError(f"{length} tokens of prompt and output are beyond the shape's {most}")
    if settings.seats > settings.requests:
        raise ValueError(f"--seats {settings.seats} is above --requests {settings.requests}: some would never be taken")
    if settings.stalls and settings.stall_seats >= settings.stall_requests:
        raise ValueError(
            f"--stall-requests {settings.stall_requests} must be above --stall-seats {settings.stall_seats}: others enter a "
            "full batch"
        )
    depth, speculative = settings.num_speculative_tokens, None
    if settings.head is None:
        check_fits(settings.shape, device, dtype)
    else:
        speculative = {"tree": "chain", "verifier": "synthetic", "num_speculative_tokens": depth}
        speculative |= {"acceptance_length": settings.acceptance, "model": empty_head(settings.head, config, depth)}
        for _, way in ways_of_drafting(settings):  # raises for what such drafts cannot do
            choose_speculation(SpeculativeOptions.parse(speculative | way), config, settings.seats)
        with_head = partial(bytes_with_head, method=settings.head, depth=depth)
        check_fits(settings.shape, device, dtype, num_bytes=with_head, what="the weights and the head")
    report = Report("traffic", THROUGHPUT, device, command, vars(settings), output, commit)
    # This LLM holds the weights, which every measured engine shares; its cache is not used.
    where = dict(dtype=dtype, device=str(device), load_format="dummy", enforce_eager=True)
    base = LLM(config, max_model_len=length, max_num_seqs=1, **where)
    drafts = {"plain": None}
    if speculative is not None:
        speculative["model"] = random_head(settings.head, config, base.engine.decoder, depth)
        for way, asked in ways_of_drafting(settings):
            name = settings.head if "adaptive" in asked else f"{settings.head} chain of {depth}"
            drafts[name + way] = speculative | asked
    rates = copy_bandwidth(base.device), product_rate(base.device, dtype, lasting=True)
    bench = TrafficBench(settings, report, base, *rates)
    for draft, speculative in drafts.items():
        bench.measure_throughput(draft, speculative)
    report.note("")
    report.table(STALLS)
    for draft, speculative in drafts.items() if settings.stalls else ():
        bench.measure_stalls(draft, speculative)
    bench.state()
    return report.finish()


def longest_sequence(settings):
    """Tokens of the longest prompt with its output."""
    lengths = [settings.prompts[1] + settings.outputs[1], settings.first_prompt + 1, WARM_PROMPT + WARM_OUTPUT]
    return max(*lengths, *(longest + STALL_OUTPUTS[1] for _, longest in settings.stalls))


def random_requests(vocab_size, seed, count, prompts, outputs):
    """(prompts, their SamplingParams): lengths between the pairs `prompts` and `outputs`, both included. The same for a seed."""
    dice, found, params = random.Random(seed), [], []
    for _ in range(count):
        found.append([dice.randrange(vocab_size) for _ in range(dice.randint(*prompts))])
        params.append(SamplingParams(temperature=0, max_tokens=dice.randint(*outputs), ignore_eos=True))
    return found, params


def quantiles(name, values):
    """{name_p50, name_p99, name_p999}: nearest ranks of the values; empty if there are none."""
    ordered = sorted(values)
    ranks = {f"{name}_{which}": -(-permille * len(ordered) // 1000) for which, permille in PERMILLE.items()}
    return {which: ordered[rank - 1] for which, rank in ranks.items()} if ordered else {}


@contextmanager
def prepared_kernels():
    """A Counter of the Triton kernels that are compiled, or read from the cache on disk, in this context. Empty without Triton."""
    found = Counter()
    if triton is None:
        yield found
        return
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def count(**details):
        found[details["fn"].name] += 1
        if before is not None:
            before(**details)

    runtime.jit_post_compile_hook = count
    try:
        yield found
    finally:
        runtime.jit_post_compile_hook = before


class TrafficBench:
    """Builds an engine per draft and table, sends it the traffic and writes the lines."""

    def __init__(self, settings, report, base, bandwidth, rate):
        self.settings, self.report, self.base, self.bandwidth, self.rate = settings, report, base, bandwidth, rate
        self.decoder, self.vocab_size = base.engine.decoder, base.engine.decoder.vocab_size
        self.first_tokens, self.prepared = {}, {}  # {draft: median ms}, {draft: {phase: {kernel: count}}}

    def build(self, draft, speculative, seats):
        """An LLM that has run one short batch."""
        release(self.base.device)
        llm = LLM(self.base, max_model_len=self.base.max_model_len, max_num_seqs=seats, speculative_config=speculative)
        with self.counting(draft, "warm-up"):
            llm.generate(*random_requests(self.vocab_size, "warm-up", seats, (WARM_PROMPT,) * 2, (WARM_OUTPUT,) * 2))
        return llm

    @contextmanager
    def counting(self, draft, phase):
        """Add the kernels made ready in this context to a phase of a draft."""
        with prepared_kernels() as found:
            yield
        phases = self.prepared.setdefault(draft, {})
        phases[phase] = dict(Counter(phases.get(phase, {})) + found)

    def measure_throughput(self, draft, speculative):
        """The line of one draft, and the time to the first token of a prompt alone."""
        settings = self.settings
        llm = self.build(draft, speculative, settings.seats)
        sizes = settings.requests, settings.prompts, settings.outputs
        prompts, params = random_requests(self.vocab_size, "traffic", *sizes)
        metrics, preemptions = llm.engine.metrics, llm.engine.metrics.num_preemptions
        with self.counting(draft, "throughput"):
            start = time.perf_counter()
            outputs = [found.outputs[0] for found in llm.generate(prompts, params)]
            seconds = time.perf_counter() - start
        lengths = [(len(prompt), len(output.token_ids)) for prompt, output in zip(prompts, outputs)]
        num_steps = [new - 1 for _, new in lengths]
        if speculative is not None:
            num_steps = [output.spec_decode_metrics.num_steps for output in outputs]
        num_prompt, num_new = map(sum, zip(*lengths))
        floor = {"floor": None}  # unknown where the depth of drafts changes
        if not llm.engine.plan.measures:
            floor = self.floor(lengths, num_steps, llm.tree.num_nodes, speculative, llm.engine.drafter.saved_bytes)
        row = {
            "draft": draft,
            "tokens_per_second": num_new / seconds,
            "all_tokens_per_second": (num_prompt + num_new) / seconds,
            "seconds": seconds,
            "preemptions": metrics.num_preemptions - preemptions,
            "tokens_per_step": (num_new - len(outputs)) / sum(num_steps) if sum(num_steps) else None,
            "over_floor": floor["floor"] and seconds / floor["floor"],
            "prompt_tokens": num_prompt,
            "output_tokens": num_new,
        }
        self.report.add(row | floor)
        with self.counting(draft, "first token"):
            self.first_tokens[draft] = self.first_token(llm)

    def first_token(self, llm):
        """Median time to the first token, in milliseconds, of prompts that come one by one after a pause."""
        length = (self.settings.first_prompt,) * 2
        prompts = random_requests(self.vocab_size, "first token", FIRST_TOKENS, length, (1, 1))[0]
        return statistics.median(first_tokens_ms(llm, prompts))

    def floor(self, lengths, num_steps, nodes, speculative, saved=None):
        """Seconds that the run takes at least: {"floor", and its parts}. See the module.

        lengths: (prompt, output) tokens of each request; num_steps: its decode steps; nodes: of the tree; saved: see StepFloor.
        """
        decoder, settings = self.decoder, self.settings
        num_passes = max(-(-sum(num_steps) // settings.seats), max(num_steps))
        context = sum(round(steps * (prompt + new / 2)) for steps, (prompt, new) in zip(num_steps, lengths))
        head = speculative and speculative["model"]
        parts = StepFloor(decoder, self.bandwidth, self.rate).of(
            num_passes, nodes * sum(num_steps), context, head, settings.num_speculative_tokens, saved
        )
        layers = weight_bytes(decoder, 1) - decoder.lm_head.nbytes
        read = layers * sum(prompt for prompt, _ in lengths) + decoder.lm_head.nbytes * len(lengths)
        parts["floor_prompts"] = 2 * read / decoder.dtype.itemsize / self.rate
        return {"floor": sum(parts.values())} | parts

    def measure_stalls(self, draft, speculative):
        """A line per length or span of the prompts that enter."""
        settings, seats = self.settings, self.settings.stall_seats
        llm = self.build(draft, speculative, seats)
        for low, high in settings.stalls:
            tokens = str(low) if low == high else f"{low}-{high}"
            sizes = settings.stall_requests, (low, high), STALL_OUTPUTS
            prompts, params = random_requests(self.vocab_size, f"stalls {tokens}", *sizes)
            filling = llm.engine.metrics.num_prompt_tokens + sum(map(len, prompts[:seats]))
            with self.counting(draft, f"stalls {tokens}"):
                record = record_steps(llm.session, prompts, params, at_once=seats)
            steps = record.split(filling, llm.engine.steps_late)
            row = {"draft": draft, "prompt": tokens}
            for kind, samples in steps.items():
                row |= {f"{kind}_steps": len(samples), **quantiles(kind, samples)}
            if steps["plain"] and steps["admitting"]:
                row |= {f"ratio_{p}": row[f"admitting_{p}"] / row[f"plain_{p}"] for p in PERMILLE}
            entered = [one.requests[0].times.first_token_latency * 1e3 for one in record.submissions[seats:]]
            self.report.add(row | quantiles("first", entered))

    def state(self):
        """The facts about all lines."""
        report, prompt = self.report, self.settings.first_prompt
        report.note("")
        for draft, found in self.first_tokens.items():
            report.note(f"{draft}: first token of a prompt of {prompt} tokens alone: {found:.1f} ms")
        for draft, phases in self.prepared.items():
            said = ", ".join(f"{sum(kernels.values())} in {phase}" for phase, kernels in phases.items())
            names = ", ".join(sorted(set(itertools.chain(*phases.values()))))
            report.note(f"{draft}: kernels compiled after start-up: {said}" + (f" ({names})" if names else ""))
        report.state(
            f"copy {self.bandwidth / 1e12:.3f} TB/s (bytes read and written), products {self.rate / 1e12:.1f} TFLOP/s",
            copy_bytes_per_second=round(self.bandwidth),
            products_per_second=round(self.rate),
            weight_bytes=weight_bytes(self.decoder),
            dtype=str(self.decoder.dtype).removeprefix("torch."),
            first_token_ms={draft: float(f"{found:.5g}") for draft, found in self.first_tokens.items()},
            kernels_after_startup=self.prepared,
        )
