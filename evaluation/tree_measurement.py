"""Choose the draft tree that decodes fastest on this machine at a batch size: time the engine's steps, choose, and try the choice.

1. Steps over trees of a few sizes and depths are timed in the engine, with all requests of the batch decoding.
2. tree_choice.py finds the tree with the most expected tokens per second. If its shape was not timed, it is timed and the choice is
   repeated, until the chosen shape is a timed one.
3. This tree, plain decoding and dynamic trees decode the same prompts; the best dynamic tree is
   also tried with half and twice its nodes. The fastest tree is kept.

Every engine is built, measured and freed before the next, so only one at a time takes memory beside the target's weights. On a CPU,
whose speed drifts, all of them take several turns. Decoding is greedy.
"""

import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import fmean, median

from tqdm import tqdm

from ..inference.engine.metrics import SpecDecodeMetrics
from ..inference.llm import LLM
from ..inference.sampling_params import SamplingParams
from ..inference.speculation.tree import MAX_NODES, save_tree
from ..kernels.attention.tree_attention import PAGE
from .compare import hardware_name
from .step_recorder import NoSteadyState, record_steps
from .timing import Times, release
from .tree_choice import StepCosts, Timing, best_static_trees, choose_promise, dynamic_candidates, other_sizes, promises

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes to time, with trees of their best depth
LEVEL_SIZES = (8, 32)  # numbers of nodes to time with trees half as deep as well, for the cost of a level
MAX_RETRIES = 4  # times that the choice may fall on an untimed shape
TIMED_STEPS = 14  # at least; the first and last three do not count
MAX_TOKENS = 64  # new tokens per prompt of a trial
MIN_TOKENS = 32  # of these, at least
PROMPT_TOKENS_PER_STEP = 2048
NUM_PROMPTS = 9  # prompts that every way of drafting decodes; twice the batch per round if that is more
CPU_ROUNDS = 3


@dataclass(frozen=True)
class Trial:
    """The result of one way of drafting on prompts.  draft: "none", "static" or "dynamic" """

    draft: str
    depth: int
    num_nodes: int
    acceptance_length: float
    tokens_per_second: float  # over all requests of the batch


class TreeMeasurement:
    """See above.

    llm: an LLM with the drafter that the trees are for; model: speculative_config["model"] of other engines for the same drafter;
    prompts: as LLM.generate takes them; batch_size: requests that decode at once. Raises ValueError if no prompt leaves room for
    an output.
    """

    def __init__(self, llm, model, prompts, batch_size, use_tqdm=True):
        self.llm, self.model, self.batch_size, self.use_tqdm = llm, model, batch_size, use_tqdm
        self.rounds = 1 if llm.device.type == "cuda" else CPU_ROUNDS
        encoded = [_token_ids(llm.tokenizer, prompt) for prompt in prompts]
        self.prompts = [ids for ids in encoded if len(ids) + MIN_TOKENS <= llm.max_model_len]
        if not self.prompts:
            raise ValueError(
                f"the shortest of the {len(prompts)} prompts has {min(map(len, encoded))} tokens and the model's limit is "
                f"{llm.max_model_len}: {MIN_TOKENS} new ones must fit after it for steps to be timed; give shorter prompts"
            )

    def choose(self, rates):
        """The fastest tree.

        rates: conditional acceptance per depth and rank.  -> (Tree or GrowingTree, the measurement as save_tree takes it)
        """
        trees = best_static_trees(rates)
        plain, timings = self.time(list(_shapes_to_time(trees).values()), "timing steps")
        for attempts_left in range(MAX_RETRIES, -1, -1):
            costs, timed = StepCosts.fit(timings), {(timing.depth, timing.num_nodes) for timing in timings}
            curve = promises(trees, rates, costs, self.batch_size)
            if not attempts_left:
                trees = {shape: tree for shape, tree in trees.items() if shape in timed}
            best = choose_promise(promises(trees, rates, costs, self.batch_size))
            if (best.depth, best.num_nodes) in timed:
                break
            now, further = self.time([trees[best.depth, best.num_nodes]], f"timing {best.num_nodes} nodes")
            # The machine's speed may have changed by now, and plain decoding's with it.
            timings += [replace(timing, seconds=timing.seconds * plain / now) for timing in further]
        most = self.llm.engine.drafter.max_candidates
        dynamic = dynamic_candidates(best.depth, best.num_nodes, len(rates), most)
        candidates = [trees[best.depth, best.num_nodes], *dynamic]
        trials = self.try_out(candidates)
        grown = [pair for pair in zip(candidates, trials[1:]) if pair[1].draft == "dynamic"]
        if grown:  # the best of them in other sizes: the best size of a static tree is not theirs
            further = other_sizes(max(grown, key=lambda pair: pair[1].tokens_per_second)[0])
            plain_now, *tried = self.try_out(further)
            drift = trials[0].tokens_per_second / plain_now.tokens_per_second
            candidates += further
            trials += [replace(one, tokens_per_second=one.tokens_per_second * drift) for one in tried]
        tree, trial = max(zip(candidates, trials[1:]), key=lambda pair: pair[1].tokens_per_second)
        return tree, {
            "batch_size": self.batch_size,
            "hardware": hardware_name(self.llm.device),
            "dtype": str(self.llm.dtype).removeprefix("torch."),
            "date": date.today().isoformat(),
            "mean_prompt_tokens": round(fmean(map(len, self.prompts))),
            "plain_step_seconds": plain,
            "timed_steps": [asdict(timing) for timing in timings],
            "seconds_per_level": costs.seconds_per_level,
            "curve": [asdict(promise) for promise in curve],
            "best_static": asdict(best),
            "trials": [asdict(one) for one in trials],
            "chosen": asdict(trial),
        }

    def time(self, trees, what):
        """Time a step with each tree, beside plain decoding.  -> (seconds of plain decoding, list of Timing)

        Other work of the machine only adds time, so the 20th percentile of all steps counts.
        """
        prompts = self._take(self.batch_size)
        # The first requests already decode while the last prompts are computed.
        passes = sum(map(len, prompts)) // PROMPT_TOKENS_PER_STEP

        def num_tokens(tree):
            longest = (TIMED_STEPS + passes) * ((tree.max_depth if tree else 1) + 1)
            return min(longest, self.llm.max_model_len - max(map(len, prompts)))

        def measure(llm, tree, _):
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens(tree), ignore_eos=True)
            try:
                return record_steps(llm.session, prompts, params).steady(self.batch_size)[2]
            except NoSteadyState as error:
                raise ValueError(
                    f"steps of {self.batch_size} requests cannot be timed: with {params.max_tokens} new tokens each, outputs end "
                    "before enough steps were made by all; lower --batch-size, or give shorter prompts"
                ) from error

        tokens = max(map(num_tokens, [None, *trees]))
        plain, *seconds = (
            Times.of(chain.from_iterable(turns)).p20 / 1e3
            for turns in self._in_turn([None, *trees], what, prompts, tokens, measure)
        )
        return plain, [Timing(tree.max_depth, tree.num_nodes, one) for tree, one in zip(trees, seconds)]

    def try_out(self, trees):
        """Decode prompts without drafts and with each tree.  -> list of Trial, plain decoding first

        A tree's rate is plain decoding's times the tree's speed-up, the median over the turns.
        """
        prompts = self._take(max(NUM_PROMPTS, 2 * self.batch_size * self.rounds))
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

        def measure(llm, _, turn):
            llm.generate(prompts[:1], replace(params, max_tokens=8))  # the first calls include allocations
            metrics = llm.engine.metrics
            metrics.num_decoded_tokens, metrics.decode_seconds, metrics.spec_decode = 0, 0.0, SpecDecodeMetrics()
            llm.generate(prompts[turn :: self.rounds], params)
            if not metrics.num_decoded_tokens:
                raise ValueError("every output ended at its first token, so no step was made: give other prompts")
            return metrics.num_decoded_tokens / metrics.decode_seconds, metrics.spec_decode

        plain, *found = self._in_turn([None, *trees], "trying the choice", prompts, MAX_TOKENS, measure)
        rate = median(one for one, _ in plain)
        trials = [Trial("none", 0, 1, 1.0, rate)]
        for tree, turns in zip(trees, found):
            kind = "dynamic" if tree.grows else "static"
            faster = median(one / other for (one, _), (other, _) in zip(turns, plain))
            accepted, steps = (
                sum(getattr(spec, name) for _, spec in turns) for name in ("num_accepted_tokens", "num_steps")
            )
            trials.append(Trial(kind, tree.max_depth, tree.num_nodes, 1 + accepted / steps, rate * faster))
        return trials

    def _take(self, count):
        """Token ids of `count` prompts, from the first on, repeated if there are fewer."""
        return list(islice(cycle(self.prompts), count))

    def _in_turn(self, trees, what, prompts, max_tokens, measure):
        """measure(LLM, tree, turn) with an engine for each tree, all of them once in every turn.  -> per tree a list of results"""
        found = [[] for _ in trees]
        with (
            tempfile.TemporaryDirectory() as folder,
            tqdm(
                total=len(trees) * self.rounds, desc=what, unit="run", disable=not self.use_tqdm, dynamic_ncols=True
            ) as bar,
        ):
            for turn in range(self.rounds):
                for results, tree in zip(found, trees):
                    results.append(measure(self._engine(tree, Path(folder), prompts, max_tokens), tree, turn))
                    release(self.llm.device)
                    bar.update()
        return found

    def _engine(self, tree, folder, prompts, max_tokens):
        """An LLM on the same weights for `batch_size` of these prompts at once, drafting this tree."""
        speculative, levels = None, 0
        if tree is not None:
            file, levels = folder / "tree.json", tree.max_depth
            save_tree(tree, file)
            speculative = {"model": self.model, "tree": str(file), "num_speculative_tokens": levels}
        # Room after the tokens: the tree's nodes, the nodes that a dynamic tree expands, and a step's emitted tokens.
        most = max(map(len, prompts)) + max_tokens + MAX_NODES + 10 * (levels + 2)
        return LLM(
            self.llm,
            max_num_seqs=self.batch_size,
            num_gpu_blocks_override=self.batch_size * -(-most // PAGE) + 1,
            enable_prefix_caching=False,  # prompts are repeated and must cost the same
            max_num_batched_tokens=PROMPT_TOKENS_PER_STEP,
            speculative_config=speculative,
        )


def _shapes_to_time(trees):
    """{(depth, nodes): tree} of the trees whose steps are timed first, among those of `best_static_trees`."""
    largest, chosen = max(size for _, size in trees), {}
    for size in sorted({*(size for size in SIZES if size < largest), largest}):
        depths = [depth for depth, nodes in trees if nodes == size]
        deepest = max(depths)
        chosen[deepest, size] = trees[deepest, size]
        if size in LEVEL_SIZES:
            shallow = min(depths, key=lambda depth: abs(depth - deepest / 2))
            chosen[shallow, size] = trees[shallow, size]
    return chosen


def _token_ids(tokenizer, prompt):
    """A prompt as LLM.generate reads it."""
    if "prompt_token_ids" in prompt:
        return list(prompt["prompt_token_ids"])
    return tokenizer(prompt["prompt"])["input_ids"]
