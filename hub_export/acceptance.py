"""Acceptance of an export on prompts, per depth and temperature, as the engine decodes with it; and how sure such a figure is.

An acceptance figure is a dict: temperature, acceptance_length, per_position, num_steps; source ("engine" or "teacher_forced");
prompts (words: which); num_prompts, max_tokens; and where this file measured it dtype, hardware, date, and by_request: per request
[steps, accepted at position 1, 2, ...], from which all its numbers follow.
"""

from datetime import date
from pathlib import Path

from ..evaluation.acceptance import bootstrap
from ..evaluation.compare import hardware_name
from ..inference.llm import LLM
from ..inference.models.target_source import load_tokenizer, target_config
from ..inference.prompt_files import read_prompts, render_prompt
from ..inference.sampling_params import SamplingParams

TEMPERATURES = (0.0, 0.8)
NUM_PROMPTS, MAX_TOKENS = 16, 96
LEAST_TOKENS = 8  # new ones that must fit behind a prompt
MIDDLE = 0.99  # of a bootstrap
SLACK = 0.01  # of a figure, for arithmetic of other machines on top of its interval
# Tokens more or less: of something that happens so often on average, 0.5 % of measurements find nothing (exp(-5.3)), and those say
# nothing of how far a bootstrap may be off.
FEW = 5.3

# For targets that ship no prompts of their own and where none are named.
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the capital of France, and what is it known for?",
    "Translate into German: the train to Hamburg leaves at nine.",
    "A shirt costs 20 dollars and is reduced by 15 percent. What does it cost now? Show the steps.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List five things to check before a long bicycle tour.",
    "Summarise how a bill becomes a law in a parliament with two chambers.",
    "Write an SQL query that counts the orders of every customer in the last year.",
    "What is the difference between a virus and a bacterium?",
    "Write a polite e-mail that asks a landlord to repair the heating.",
    "Explain recursion to a ten-year-old child.",
    "Give a recipe for a vegetable soup for four people.",
    "Write a regular expression that matches dates like 2024-03-15, and explain it.",
    "Who wrote Don Quixote, and what is the book about?",
    "Write a shell command that finds the ten largest files below a folder.",
)


def choose_prompts(file, target, count=NUM_PROMPTS):
    """(lists of token ids, words that say which prompts they are) for a target.

    file: JSONL as `read_prompts` takes it, or None: the target's own heldout.jsonl, else PROMPTS. Of its first
    `count` those that leave room for an output are taken. Raises ValueError naming the file, or where the target has no tokenizer.
    """
    shipped = Path(target, "heldout.jsonl")
    tokenizer = load_tokenizer(None, str(target))
    if tokenizer is None:
        raise ValueError(f"{target} holds no tokenizer, and prompts are text: copy its tokenizer files there")
    if file or shipped.is_file():
        lines = read_prompts(file or shipped)[:count]
        words = (
            f"the first prompts of {Path(file).name}" if file else "the first held-out prompts that the target ships"
        )
    else:
        lines = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
        if not tokenizer.chat_template:
            lines = [{"prompt": text} for text in PROMPTS]
        words = "requests that Headstart ships"
    limit = target_config(str(target), "auto")[0].max_position_embeddings - LEAST_TOKENS
    prompts = [_token_ids(tokenizer, line) for line in lines]
    fitting = [ids for ids in prompts if 0 < len(ids) <= limit]
    if not fitting:
        raise ValueError(
            f"the {len(prompts)} prompts are all longer than the {limit} tokens that fit: give shorter ones"
        )
    return fitting, words


def _token_ids(tokenizer, line):
    prompt = render_prompt(tokenizer, line)
    return list(prompt.get("prompt_token_ids") or tokenizer(prompt["prompt"])["input_ids"])


def measure(
    head, target, prompts, adapter=None, device="auto", dtype="auto", temperatures=TEMPERATURES, max_tokens=MAX_TOKENS
):
    """Decode prompts with a chain of drafts at each temperature.  -> list of acceptance figures, without `prompts`

    head: its folder; target: folder or Hub id; prompts: lists of token ids; adapter: what LLM takes. Request number i has seed i.
    Raises ValueError where every output ends at its first token.
    """
    limit = target_config(str(target), "auto")[0].max_position_embeddings
    llm = LLM(
        str(target),
        device=device,
        dtype=dtype,
        adapter=adapter,
        max_model_len=min(limit, max(map(len, prompts)) + max_tokens),
        speculative_config={"model": str(head), "tree": "chain"},
    )
    found = []
    for temperature in temperatures:
        params = [SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in range(len(prompts))]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        metrics = [output.outputs[0].spec_decode_metrics for output in outputs]
        depth = llm.tree.max_depth
        counts = [
            [one.num_steps, *one.accepted_per_position, *[0] * (depth - len(one.accepted_per_position))]
            for one in metrics
        ]
        if not sum(steps for steps, *_ in counts):
            raise ValueError("every output ended at its first token, so no step was made: give other prompts")
        found.append(
            {"temperature": temperature}
            | pool(counts)
            | {
                "source": "engine",
                "num_prompts": len(prompts),
                "max_tokens": max_tokens,
                "dtype": str(llm.dtype).removeprefix("torch."),
                "hardware": hardware_name(llm.device),
                "date": date.today().isoformat(),
                "by_request": counts,
            }
        )
    return found


def pool(counts):
    """The figures of requests together.  counts: per request [steps, accepted at position 1, 2, ...]"""
    steps, *accepted = map(sum, zip(*counts))
    per_position = [count / max(steps, 1) for count in accepted]
    return {"acceptance_length": 1 + sum(per_position), "per_position": per_position, "num_steps": steps}


def intervals(counts):
    """(low, high) of the acceptance length and of every position: the middle 99 % of a bootstrap over the requests."""

    def figures(counts):
        found = pool(counts)
        return [found["acceptance_length"], *found["per_position"]]

    return bootstrap(counts, figures, MIDDLE)


def disagreements(figure, counts):
    """What of an acceptance figure lies outside the intervals of requests that were measured now: list of sentences."""
    said = [("acceptance length", figure["acceptance_length"])]
    said += [(f"position {i}", rate) for i, rate in enumerate(figure["per_position"], start=1)]
    found, few = intervals(counts), FEW / max(sum(steps for steps, *_ in counts), 1)
    if len(found) != len(said):
        return [f"it has {len(said) - 1} positions, {len(found) - 1} were measured"]
    wrong = []
    for (name, value), (low, high) in zip(said, found):
        slack = SLACK * max(value, 0.1) + few
        if not low - slack <= value <= high + slack:
            wrong.append(f"{name} {value:.3f} is said, {low:.3f} to {high:.3f} were measured")
    return wrong
