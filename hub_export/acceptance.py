"""Acceptance of an export: measure it with the engine, find its confidence interval, write it to a model card and read it back.

An acceptance figure is a dict: temperature, acceptance_length, per_position, num_steps; source ("engine" or "teacher_forced");
prompts (a description); num_prompts, max_tokens. A figure measured by this file also has dtype, hardware, date, and by_request:
[steps, accepted at position 1, 2, ...] per request, from which all its numbers follow.
"""

import re
from datetime import date
from pathlib import Path

import yaml
from huggingface_hub import EvalResult

from ..evaluation.acceptance import bootstrap, count_by_request, pool
from ..evaluation.compare import hardware_name
from ..inference.llm import LLM
from ..inference.models.decoder import position_limit
from ..inference.models.target_source import load_tokenizer, target_config
from ..inference.prompt_files import read_prompts, render_prompt
from ..inference.sampling_params import SamplingParams

LENGTH, POSITION = "acceptance length", "accepted at position"  # their names in a card
TEMPERATURES = (0.0, 0.8)
NUM_PROMPTS, MAX_TOKENS = 16, 96
LEAST_TOKENS = 8  # new tokens that must fit after a prompt
MIDDLE = 0.99  # share of a bootstrap inside an interval
SLACK = 0.01  # relative margin beside the interval, for the arithmetic of other machines
# Margin in tokens: of an event that happens 5.3 times on average, 0.5 % of measurements see none (exp(-5.3)), and a bootstrap over
# such a measurement has no width.
FEW = 5.3

# For targets without prompts in their folder, if the user names none.
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
    """(lists of token ids, a description of the prompts) for a target.

    file: JSONL as `read_prompts` takes it, or None: the target's own heldout.jsonl, else PROMPTS. Takes those of its first `count`
    prompts that leave room for an output. Raises ValueError naming the file, or if the target has no tokenizer.
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
    limit = position_limit(target_config(str(target), "auto")[0]) - LEAST_TOKENS
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
    head,
    target,
    prompts,
    *,
    adapter=None,
    device="auto",
    dtype="auto",
    temperatures=TEMPERATURES,
    max_tokens=MAX_TOKENS,
):
    """Decode prompts with a chain of drafts at each temperature.  -> list of acceptance figures, without `prompts`

    head: its folder; target: folder or Hub id; prompts: lists of token ids; adapter: as LLM takes it. Request number i has seed i.
    Raises ValueError if every output ends at its first token.
    """
    limit = position_limit(target_config(str(target), "auto")[0])
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
        counts = count_by_request(outputs, llm.tree.max_depth)
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


def intervals(counts):
    """(low, high) of the acceptance length and of every position: the middle 99 % of a bootstrap over the requests."""

    def figures(counts):
        found = pool(counts)
        return [found["acceptance_length"], *found["per_position"]]

    return bootstrap(counts, figures, MIDDLE)


def disagreements(figure, counts):
    """Numbers of an acceptance figure that lie outside the intervals of requests measured now: a list of sentences."""
    said = [("acceptance length", figure["acceptance_length"])]
    said += [(f"position {i}", rate) for i, rate in enumerate(figure["per_position"], start=1)]
    found, few = intervals(counts), FEW / max(sum(steps for steps, *_ in counts), 1)
    if len(found) != len(said):
        return [f"it has {len(said) - 1} positions, {len(found) - 1} were measured"]
    wrong = []
    for (name, value), (low, high) in zip(said, found):
        slack = SLACK * max(value, 0.1) + few
        if not low - slack <= value <= high + slack:
            wrong.append(f"{name} {value:.3f} is claimed, {low:.3f} to {high:.3f} were measured")
    return wrong


def short(value):
    """A figure with three digits, as a card shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "not measured" if value is None else str(value)


def acceptance_table(figures, ranges):
    """Text and table of acceptance figures, one column per temperature.

    ranges: per figure (low, high) of its acceptance length, or None
    """
    by_engine = all(one.get("source", "engine") == "engine" for one in figures)
    how = "by Headstart's engine, drafting a chain" if by_engine else "teacher-forced, not by the engine"
    steps = " and ".join(
        f"{one['num_steps']:,} steps at temperature {one['temperature']:g}" for one in figures if "num_steps" in one
    )
    lines = [
        f"Acceptance, measured {how}{f', over {steps}' if steps else ''} (acceptance length = 1 + accepted / steps). "
        f"{_settings(figures[0])}".strip(),
        "",
        _row("", [f"temperature {one['temperature']:g}" for one in figures]),
        f"|{'---|' * (1 + len(figures))}",
        _row(LENGTH, [short(one.get("acceptance_length")) for one in figures]),
    ]
    if any(ranges):
        lines.append(_row("99 % interval", [f"{one[0]:.3g} to {one[1]:.3g}" if one else "-" for one in ranges]))
    for position in range(max(len(one["per_position"]) for one in figures)):
        rates = [one["per_position"][position : position + 1] for one in figures]
        lines.append(_row(f"{POSITION} {position + 1}", [short(rate[0]) if rate else "-" for rate in rates]))
    lines += _sets_table([one for figure in figures for one in figure.get("sets") or ()])
    return "\n".join(lines)


def _sets_table(sets):
    """Lines of a table of the prompt sets' acceptance lengths, a row per set and turns; [] without sets."""
    rows = {}
    for one in sets:
        column = f"temperature {one['temperature']:g}" if "temperature" in one else "teacher-forced"
        name = f"{one['set']}, {one['turns']} turns" if "turns" in one else one["set"]
        rows.setdefault(name, {})[column] = short(one["acceptance_length"])
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    if not rows:
        return []
    head = [
        "",
        "Acceptance length of each set of prompts:",
        "",
        _row("prompts", columns),
        f"|{'---|' * (1 + len(columns))}",
    ]
    return head + [_row(name, [cells.get(column, "-") for column in columns]) for name, cells in rows.items()]


def _row(name, cells):
    return f"| {' | '.join([name, *cells])} |"


def _settings(figure):
    """The settings of a figure in words, as far as they are known: prompts, length of outputs, dtype, hardware."""
    parts = [figure.get("prompts")]
    if figure.get("num_prompts"):
        parts[0] = f"{figure['num_prompts']} prompts ({figure.get('prompts')})"
    if figure.get("max_tokens"):
        parts.append(f"at most {figure['max_tokens']} new tokens each")
    if figure.get("dtype"):
        parts.append(f"{figure['dtype']} on {figure.get('hardware')}, {figure.get('date')}")
    said = ", ".join(filter(None, parts))
    return f"{said[0].upper()}{said[1:]}." if said else ""


def eval_results(figures):
    """The acceptance figures as the Hub's EvalResult objects."""
    found = []
    for one in figures:
        words = one.get("prompts") or "prompts that are not named"
        told = {"temperature": one["temperature"], "draft": "chain", "source": one.get("source", "engine")}
        told |= {name: one[name] for name in ("num_prompts", "max_tokens", "num_steps") if name in one}
        named = [("acceptance_length", LENGTH, one.get("acceptance_length"))]
        named += [
            (f"accepted_at_position_{i}", f"{POSITION} {i}", rate)
            for i, rate in enumerate(one["per_position"], start=1)
        ]
        found += [
            EvalResult(
                task_type="text-generation",
                dataset_type="prompts",
                dataset_name=words,
                dataset_args={"temperature": one["temperature"]},  # the Hub groups results of one data set
                metric_type=kind,
                metric_name=name,
                metric_value=float(short(value)),
                metric_args=told,
            )
            for kind, name, value in named
            if value is not None
        ]
    return found


def read_card(text):
    """The acceptance figures in a model card: ({(temperature, name): text} from its table, the same from its model-index).

    temperature: text as in the table. A dict is empty if its figures are missing. ValueError for a front matter that is not YAML,
    or whose figures are not numbers.
    """
    front, body = {}, text
    if text.startswith("---\n") and "\n---\n" in text:
        head, body = text[4:].split("\n---\n", 1)
        try:
            front = yaml.safe_load(head) or {}
        except (ValueError, yaml.YAMLError) as error:  # ValueError: an impossible date
            raise ValueError(f"the front matter of README.md is not YAML ({' '.join(str(error).split())})") from None
        if not isinstance(front, dict):
            raise ValueError("the front matter of README.md is not a mapping of names to values")
    return _of_table(body), _of_index(front)


def _of_table(body):
    found, columns = {}, []
    for line in body.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and not cells[0] and all(cell.startswith("temperature ") for cell in cells[1:]):
            columns = [cell.removeprefix("temperature ") for cell in cells[1:]]
        elif not cells:
            columns = []
        elif columns and (cells[0] == LENGTH or re.fullmatch(rf"{POSITION} \d+", cells[0])):
            found |= {(column, cells[0]): cell for column, cell in zip(columns, cells[1:]) if cell != "-"}
    return found


def _of_index(front):
    found = {}
    for model in _mappings(front.get("model-index")):
        for result in _mappings(model.get("results")):
            for metric in _mappings(result.get("metrics")):
                told = metric.get("args")
                if not isinstance(told, dict) or "temperature" not in told:
                    continue  # a figure added by somebody else
                name = str(metric.get("name"))
                temperature = _number(told["temperature"], f"temperature of {name}")
                value = _number(metric.get("value"), f"value of {name} at temperature {temperature:g}")
                found[f"{temperature:g}", name] = short(value)
    return found


def _mappings(found):
    """A list of mappings in the model-index; [] if it is missing. ValueError for anything else."""
    if not isinstance(found or [], list) or not all(isinstance(one, dict) for one in found or ()):
        raise ValueError(f"the card's model-index holds {short(found)[:60]!r} where lists of mappings are expected")
    return found or []


def _number(found, what):
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"the card's {what} is not a number ({found!r})")
    try:
        return float(found)
    except OverflowError:
        raise ValueError(f"the card's {what} is not a number that fits ({str(found)[:20]}...)") from None
