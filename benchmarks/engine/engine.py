"""`headstart bench engine`: tokens per second of the whole engine, through LLM.generate, on random weights of a named shape.

Drafts come from a random head of any method, and the verifier `synthetic` accepts them at a given acceptance length. So the figures
are those of the engine with a head of this acceptance, and the outputs mean nothing. Plain decoding is measured too. The rate is
that of the steady state: from the end of the last prompt's computation to the end of the first output. *of graph* compares it with
the step's CUDA graph replayed alone, the upper limit of the engine: what is missing is the host's time. The text after a line says
which kernels take the graph's time. With `draft_quantization` the head drafts with rounded weights, too. With `text` every line is
measured again with what costs the host most, stop strings and the log-probabilities of TEXT_LOGPROBS tokens, and once more with
both while every output is streamed, as the server does it (streamed.py).

The floor of a step (floor.py) is the sum of its phases: the target's products or reading its weights, whichever takes longer, the
keys and values, the drafts' weights. *library* is what the library's products take for the same rows and weights alone, as long
under load: a large square product reaches a rate that a few hundred rows do not. The clock and the power are those of
the step's graph alone (card_state.py): a card at its power limit lowers its clock.

Also measured: the time to the first token of one prompt; with `startup`, the time from a process's start to its first token, with a
cold and a warm Triton cache; and the greatest memory taken.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from ...evaluation.results import Report, decimals, plain, shares_text
from ...evaluation.step_recorder import NoSteadyState, record_steps
from ...evaluation.timing import Repeatable, Times, release
from ...inference.engine.seats import INTEGERS, NO_CHANGE
from ...inference.llm import LLM
from ...inference.sampling_params import SamplingParams
from ...inference.speculation.options import SpeculativeOptions
from ...inference.speculation.speculation import choose_speculation
from ..card_state import state_text, state_under
from ..floor import StepFloor, copy_bandwidth, large_product, product_rate
from ..library import library_products
from ..random_heads import bytes_with_head, empty_head, random_head
from ..shape import NUM_HEADS, check_fits, config_of_shape
from .startup import FIRST_TOKENS, first_tokens_ms, seconds_to_first_token
from .streamed import record_streamed_steps

COLUMNS = {
    "draft": ("draft", 28, plain),
    "batch": ("batch", 5, plain),
    "acceptance": ("asked", 5, decimals(2)),
    "depth": ("depth", 5, decimals(1)),
    "tokens_per_step": ("tokens/step", 11, decimals(2)),
    "tokens_per_second": ("tokens/s", 8, decimals(0)),
    "p20": ("p20 ms", 7, decimals(2)),
    "p50": ("p50 ms", 7, decimals(2)),
    "p80": ("p80 ms", 7, decimals(2)),
    "mean": ("ms/step", 7, decimals(3)),
    "graph": ("graph ms", 8, decimals(3)),
    "of_graph": ("of graph", 8, lambda value: f"{value:.1%}"),
    "floor": ("floor ms", 8, decimals(2)),
    "over_floor": ("x floor", 7, decimals(2)),
    "library": ("library ms", 10, decimals(2)),
    "over_library": ("x library", 9, decimals(2)),
    "clock": ("MHz", 5, decimals(0)),
    "watts": ("W", 4, decimals(0)),
    "peak": ("peak GiB", 8, decimals(1)),
}
LIBRARY_MS = {"cuda": 500, "cpu": 0}  # at least so long the library's products are repeated
LEAST_REPEATS = 2
TEXT_LOGPROBS = 5
TEXT_STOPS = ["no output has this", "nor this"]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of `bench engine`; see `headstart bench engine --help`."""

    shape: str
    head: str | None = "medusa"  # a method of random_heads.py; None: plain decoding alone
    num_speculative_tokens: int = NUM_HEADS
    acceptance: tuple[float, ...] = (2.0, 3.0)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    lm_head: str = "own"
    tree: str = "chain"
    adaptive: bool = False  # also measure with the engine choosing the depth of every step
    draft_quantization: str | None = None  # also measure with the head's weights rounded so
    prompt_tokens: int = 1000
    new_tokens: int = 256
    text: bool = False  # also measure with stop strings and log-probabilities, and streamed
    startup: bool = True


def word_tokenizer(vocab_size):
    """A tokenizer of `vocab_size` words, for shapes without one: random tokens have a text, and growing it takes its time."""
    backend = Tokenizer(models.WordLevel({f"word{i} ": i for i in range(vocab_size)}, unk_token="word0 "))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def ways_of_drafting(settings):
    """[(what a line's name says, keys of the speculative_config)] of a head, the plain way first."""
    rounded = settings.draft_quantization
    found = [("", {}), (f", {rounded}", {"quantization": rounded})] if rounded else [("", {})]
    return found + [(f", adaptive{way}", asked | {"adaptive": True}) for way, asked in found if settings.adaptive]


def num_steps_by_depth(plan):
    """How many steps of each depth an adaptive plan has seen: a Counter, empty for other plans."""
    found = Counter()
    if plan.measures:
        for (_, depth), average in plan.seconds.items():
            found[depth] += average.count
    return found


def bench_engine(settings, device, dtype, command, output=None, commit=None):
    """Measure every line of `settings`. Prints the table, then the JSON object, which is returned."""
    config = config_of_shape(settings.shape)
    length = settings.prompt_tokens + settings.new_tokens
    if length > config.max_position_embeddings:
        raise ValueError(
            f"{length} tokens of prompt and output are beyond the shape's {config.max_position_embeddings}"
        )
    if min(settings.new_tokens, settings.prompt_tokens) < 2:
        raise ValueError(
            f"--prompt-tokens and --new-tokens must be at least 2, got {settings.prompt_tokens} and {settings.new_tokens}"
        )
    shared = settings.lm_head == "shared"
    if settings.head is None:
        check_fits(settings.shape, device, dtype)
    else:
        depth = settings.num_speculative_tokens
        speculative = {"tree": settings.tree, "verifier": "synthetic", "num_speculative_tokens": depth}
        head = empty_head(settings.head, config, depth, shared)
        for acceptance in settings.acceptance:  # raises for what such drafts cannot do
            for _, way in ways_of_drafting(settings):
                asked = speculative | {"model": head, "acceptance_length": acceptance} | way
                choose_speculation(SpeculativeOptions.parse(asked), config, max(settings.batches))
        with_head = partial(bytes_with_head, method=settings.head, depth=depth, shared_lm_head=shared)
        check_fits(settings.shape, device, dtype, num_bytes=with_head, what="the weights and the head")
    report = Report("engine", COLUMNS, device, command, vars(settings), output, commit)
    most = max(settings.batches)
    if settings.startup:  # first, while this process holds no memory of the device
        name = str(dtype).removeprefix("torch.")
        found = seconds_to_first_token(settings.shape, name, str(device), most, settings.prompt_tokens)
        said = ", ".join(
            f"{which} Triton cache {seconds['first_token']:.1f} s ({seconds['built']:.1f} until built)"
            for which, seconds in found.items()
        )
        report.state(f"from the start of a process to its first token: {said}", startup=found)
    # This LLM holds the weights, which every measured engine shares; its cache is not used.
    base = LLM(
        config,
        load_format="dummy",
        dtype=dtype,
        device=str(device),
        max_model_len=length,
        max_num_seqs=1,
        enforce_eager=True,
    )
    bandwidth, rate = copy_bandwidth(base.device), product_rate(base.device, dtype, lasting=True)
    state = state_under(large_product(base.device, dtype), base.device)
    report.state(
        f"copy {bandwidth / 1e12:.3f} TB/s (bytes read and written), products {rate / 1e12:.1f} TFLOP/s over time"
        f"{state_text(state)}",
        copy_bytes_per_second=round(bandwidth),
        products_per_second=round(rate),
        products_at=state,
    )
    bench = EngineBench(settings, report, base, StepFloor(base.engine.decoder, bandwidth, rate))
    bench.measure_draft("plain", None)
    if settings.head is not None:
        release(base.device)  # a head placed in the memory of the old cache would keep all of it from the next cache
        speculative["model"] = random_head(settings.head, config, base.engine.decoder, depth, shared)
        name = f"{settings.head} {settings.tree}" + (f", {settings.lm_head}" if settings.head == "medusa" else "")
        for acceptance in settings.acceptance:
            for way, asked in ways_of_drafting(settings):
                bench.measure_draft(name + way, speculative | {"acceptance_length": acceptance} | asked)
    return report.finish()


class EngineBench:
    """Builds an engine per way of drafting, runs it at every batch size and writes the lines."""

    def __init__(self, settings, report, base, floor):
        self.settings, self.report, self.base, self.floor, self.dice = settings, report, base, floor, random.Random(0)

    def measure_draft(self, draft, speculative):
        """The lines of one way of drafting; with plain decoding the first token too."""
        settings, device = self.settings, self.base.device
        release(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        llm = LLM(
            self.base,
            max_model_len=self.base.max_model_len,
            max_num_seqs=max(settings.batches),
            speculative_config=speculative,
            tokenizer=word_tokenizer(self.base.engine.decoder.vocab_size) if settings.text else None,
        )
        if speculative is None:
            self.first_token(llm)
        text = dict(stop=TEXT_STOPS, logprobs=TEXT_LOGPROBS)
        ways = [(draft, {}, record_steps)]
        if settings.text:
            ways += [(f"{draft}, text", text, record_steps), (f"{draft}, streamed", text, record_streamed_steps)]
        for name, asked, record in ways:
            for batch in settings.batches:
                row = {"draft": name, "batch": batch, "nodes": llm.tree.num_nodes}
                row["acceptance"] = speculative and speculative["acceptance_length"]
                try:
                    row |= self.measure(llm, batch, asked, record)
                    self.report.add(row | self.floors(llm, row, speculative))
                    if row["shares"]:
                        self.report.note(f"         the graph's time: {shares_text(row['shares'])}")
                except NoSteadyState as error:
                    self.report.note(f"{name}, batch {batch}: left out, {error}")

    def prompts(self, llm, count):
        """Prompts without common beginnings, so that no page of an earlier prompt is found in the cache."""
        vocab = llm.engine.decoder.vocab_size
        return [[self.dice.randrange(vocab) for _ in range(self.settings.prompt_tokens)] for _ in range(count)]

    def first_token(self, llm):
        times = Times.of(first_tokens_ms(llm, self.prompts(llm, FIRST_TOKENS)))
        self.report.state(
            f"first token of a prompt of {self.settings.prompt_tokens} tokens, after a pause: {times.p50:.1f} ms "
            f"(p20 {times.p20:.1f}, p80 {times.p80:.1f})",
            first_token_ms=times.as_dict(),
        )

    def measure(self, llm, batch, asked, record):
        """The figures of one line.  asked: what SamplingParams ask for beside a length; record: record_steps or its like"""
        params = SamplingParams(max_tokens=self.settings.new_tokens, ignore_eos=True, **asked)
        plan = llm.engine.plan
        if plan.measures:  # first it learns the cost and the acceptance of each depth
            llm.generate(self.prompts(llm, batch), params)
        before = num_steps_by_depth(plan)
        recorded = record(llm.session, self.prompts(llm, batch), params)
        try:
            tokens, seconds, steps = recorded.steady(batch)
        except NoSteadyState:
            pages, needed = llm.engine.scheduler.num_pages, batch * llm.engine.seats.block_table.shape[1]
            if pages >= needed:
                raise
            raise NoSteadyState(
                f"no steady state with {batch} requests: they need {needed} pages of the cache, which holds {pages}, so some "
                "waited for others to end; lower --batch, --prompt-tokens or --new-tokens"
            ) from None
        mean = seconds * 1e3 / len(steps)
        chosen = num_steps_by_depth(plan) - before
        # The step of the whole tree alone: an engine that cuts the tree has several steps, and none to compare with.
        alone = None if plan.measures else self.step_alone(llm, batch)
        graph = alone and alone.time(len(steps)).p50
        return {
            "depth": sum(depth * count for depth, count in chosen.items()) / chosen.total()
            if chosen
            else llm.tree.max_depth,
            "tokens_per_step": tokens / len(steps) / batch,
            "tokens_per_second": tokens / seconds,
            **Times.of(steps).as_dict(),
            "mean": mean,
            "graph": graph,
            "of_graph": graph and graph / mean,
            "steps": len(steps),
            "shares": alone and alone.shares(),
            **(state_under(alone, llm.device) if alone else {}),
            "peak": torch.cuda.max_memory_allocated(llm.device) / 2**30 if llm.device.type == "cuda" else None,
        }

    def floors(self, llm, row, speculative):
        """What a line's step is compared with: {} where the engine chooses its depth."""
        settings, batch = self.settings, row["batch"]
        if llm.engine.plan.measures:
            return {}
        rows, context = batch * llm.tree.num_nodes, batch * (settings.prompt_tokens + settings.new_tokens // 2)
        head = speculative and speculative["model"]
        depth, saved = settings.num_speculative_tokens, llm.engine.drafter.saved_bytes
        parts = self.floor.of(1, rows, context, head, depth, saved)
        milliseconds = {name: seconds * 1e3 for name, seconds in parts.items()}
        floor = sum(milliseconds.values())
        found = milliseconds | {
            "floor": floor,
            "over_floor": row["mean"] / floor,
            "library": None,
            "over_library": None,
        }
        if llm.engine.decoder.is_packed:
            products = Repeatable(library_products(llm.engine.decoder, rows), llm.device)
            # Under load, as the engine's steps were.
            repeats = max(row["steps"], math.ceil(LIBRARY_MS[llm.device.type] / products.time(LEAST_REPEATS).p50))
            found["library"] = library = products.time(repeats).p50
            found["over_library"] = row["mean"] / (floor - found["floor_products"] + library)
        return found

    def step_alone(self, llm, batch):
        """The engine's own step without the engine, for requests in the middle of their outputs: a Repeatable.

        Time it as often as the engine has stepped: a card at its power limit slows down in the first second.
        """
        engine, settings = llm.engine, self.settings
        seats, device = engine.seats, llm.device
        context = settings.prompt_tokens + settings.new_tokens // 2
        pages = seats.block_table.shape[1]
        values = {"committed": context, "remaining": 1 << 20}
        state = torch.tensor([values.get(name, 0) for name in INTEGERS], device=device)
        table = torch.arange(batch * pages, device=device).view(batch, pages) % engine.cache.num_pages + 1
        seats.block_table[:batch] = table
        # As in the steps that it is compared with: draws of the whole distribution.
        seats.floats[:batch] = torch.tensor((SamplingParams().temperature, *NO_CHANGE[1:]), device=device)
        rows = list(range(batch))

        def step():
            seats.integers[:batch] = state  # each step would advance the requests
            engine.graphs.run(rows, False)

        return Repeatable(step, device, captured=False)
