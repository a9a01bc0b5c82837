"""Measure a head's acceptance on prompts, in the engine's own run and without teacher forcing: acceptance length and per-position
acceptance of a chain, and the conditional rates per depth and rank that static trees are built from.
"""

import random
from dataclasses import replace

from ..inference.engine.engine import RECORDED_WIDTH
from ..inference.sampling_params import SamplingParams

NUM_SAMPLES = 4
RESAMPLES = 2000  # draws of a bootstrap


def measure_acceptance(llm, prompts, sampling_params=None, use_tqdm=False):
    """Run `prompts` on an LLM that drafts chains, and count accepted drafts.

    llm: LLM with a head and tree "chain"; prompts: as LLM.generate takes them; sampling_params: default greedy, 96 tokens.
    Returns a dict:
        acceptance_length, per_position (unconditional), num_steps, num_emitted   of the chain
        rates: per depth, per rank (0..9): how often the target's token at this depth is the head's candidate of this rank,
            given that the tokens before it are the target's own; num_rates: number of places counted. An autoregressive
            drafter has candidates only after its first choices: its rates are conditional on their acceptance
        samples: a few {"prompt", "output"}
        by_request: of `count_by_request`
    """
    engine = llm.engine
    if not engine.tree.max_depth or not engine.tree.tree.is_chain:
        raise ValueError("measure_acceptance needs an LLM with a speculative_config whose tree is 'chain'")
    params = sampling_params or SamplingParams(temperature=0.0, max_tokens=96)
    before = replace(
        engine.metrics.spec_decode, accepted_per_position=[*engine.metrics.spec_decode.accepted_per_position]
    )
    with engine.recording() as recorded:
        outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    after = engine.metrics.spec_decode
    steps = after.num_steps - before.num_steps
    if not steps:
        raise ValueError(
            "no verify step was made: the outputs are one token long; give other prompts or a larger max_tokens"
        )
    depth = engine.tree.max_depth
    earlier = before.accepted_per_position or [0] * depth
    accepted = [now - then for now, then in zip(after.accepted_per_position, earlier)]
    drafter = engine.drafter
    hits, places = rank_hits(recorded, drafter.num_speculative_tokens, first_choices_only=drafter.autoregressive)
    return {
        "acceptance_length": 1 + sum(accepted) / steps,
        "per_position": [count / steps for count in accepted],
        "num_steps": steps,
        "num_emitted": sum(len(o.token_ids) for out in outputs for o in out.outputs),
        "rates": [[count / max(total, 1) for count in ranks] for ranks, total in zip(hits, places)],
        "num_rates": places,
        "samples": [{"prompt": _show(llm, out), "output": out.outputs[0].text} for out in outputs[:NUM_SAMPLES]],
        "by_request": count_by_request(outputs, depth),
    }


def count_by_request(outputs, depth):
    """[steps, accepted at position 1, 2, ... depth] of the first output of each RequestOutput."""
    metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
    missing = [[0] * (depth - len(one.accepted_per_position)) for one in metrics]
    return [[one.num_steps, *one.accepted_per_position, *zeros] for one, zeros in zip(metrics, missing)]


def pool(counts):
    """The pooled figures of several requests.  counts: of `count_by_request`"""
    steps, *accepted = map(sum, zip(*counts))
    per_position = [count / max(steps, 1) for count in accepted]
    return {"acceptance_length": 1 + sum(per_position), "per_position": per_position, "num_steps": steps}


def acceptance_interval(outputs):
    """Tokens per step of RequestOutputs, pooled, and the middle 95 % of a bootstrap over the requests.

    Returns a dict: acceptance_length, low, high, steps.
    """
    pairs = []  # (steps, emitted tokens) of each request
    for output in outputs:
        for one in output.outputs:
            metrics = one.spec_decode_metrics
            pairs.append((metrics.num_steps, metrics.num_steps * metrics.acceptance_length))

    def length(pairs):
        steps, tokens = map(sum, zip(*pairs))
        return [tokens / max(steps, 1)]

    [(low, high)] = bootstrap(pairs, length, 0.95)
    return {
        "acceptance_length": length(pairs)[0],
        "low": low,
        "high": high,
        "steps": int(sum(steps for steps, _ in pairs)),
    }


def bootstrap(requests, figures, middle):
    """Bootstrap intervals [(low, high)] of figures: the middle (0.95: 95 %) of their values over resampled requests.

    figures: function from a list of requests to a list of numbers. Requests are resampled, not steps, because the steps of one
    request are not independent.
    """
    dice = random.Random(0)
    drawn = [figures(dice.choices(requests, k=len(requests))) for _ in range(RESAMPLES)]
    cut = int((1 - middle) / 2 * RESAMPLES)
    return [(values[cut], values[-1 - cut]) for values in map(sorted, zip(*drawn))]


def rank_hits(recorded, num_depths, first_choices_only=False):
    """Count the ranks of the target's tokens among the recorded candidates.

    recorded: list of (request, index of the root in its output, candidates per depth); first_choices_only: the candidates of a
    depth follow the first choices of the depths above, so places after another token do not count
    Returns (hits [depth][rank], places [depth]); depth d counts if the output is long enough.
    """
    hits = [[0] * RECORDED_WIDTH for _ in range(num_depths)]
    places = [0] * num_depths
    for request, root, candidates in recorded:
        for depth in range(num_depths):
            at = root + 1 + depth
            if at >= len(request.output_token_ids):
                break
            places[depth] += 1
            token = request.output_token_ids[at]
            if token not in candidates[depth]:
                break  # rates are conditional on the parent: nothing below a miss
            rank = candidates[depth].index(token)
            hits[depth][rank] += 1
            if first_choices_only and rank:
                break
    return hits, places


def _show(llm, output):
    if output.prompt is not None:
        return output.prompt
    return llm.tokenizer.decode(output.prompt_token_ids) if llm.tokenizer else str(output.prompt_token_ids)
