"""Acceptance figures in a model card: the table that people read, the model-index that the Hub reads, and both read back."""

import re

import yaml
from huggingface_hub import EvalResult

LENGTH, POSITION, STEPS = "acceptance length", "accepted at position", "steps"


def short(value):
    """A figure as a card shows it: three digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "not measured" if value is None else str(value)


def acceptance_table(figures, ranges):
    """Text and table of acceptance figures (hub_export/acceptance.py), one column per temperature.

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
    return "\n".join(lines)


def _row(name, cells):
    return f"| {' | '.join([name, *cells])} |"


def _settings(figure):
    """Which prompts, how long the outputs, in which dtype and where, as far as it is known."""
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
                dataset_args={"temperature": one["temperature"]},  # the Hub keeps results of one data set together
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
    """The acceptance figures that a model card tells: ({(temperature, name): words} of its table, the same of its model-index).

    temperature: words as the table has them. Empty where there is none. ValueError for a front matter that is no YAML, and for one
    whose figures are no numbers.
    """
    front, body = {}, text
    if text.startswith("---\n") and "\n---\n" in text:
        head, body = text[4:].split("\n---\n", 1)
        try:
            front = yaml.safe_load(head) or {}
        except (ValueError, yaml.YAMLError) as error:  # ValueError: a date that is none
            raise ValueError(f"the front matter of README.md is no YAML ({' '.join(str(error).split())})") from None
        if not isinstance(front, dict):
            raise ValueError("the front matter of README.md is no mapping of names to values")
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
                    continue  # a figure that somebody added
                name = str(metric.get("name"))
                temperature = _number(told["temperature"], f"temperature of {name}")
                value = _number(metric.get("value"), f"value of {name} at temperature {temperature:g}")
                found[f"{temperature:g}", name] = short(value)
    return found


def _mappings(found):
    """A list of the model-index as it is to be; [] where there is none."""
    if not isinstance(found or [], list) or not all(isinstance(one, dict) for one in found or ()):
        raise ValueError(f"the card's model-index holds {short(found)[:60]!r} where lists of mappings are expected")
    return found or []


def _number(found, what):
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError(f"the card's {what} is no number ({found!r})")
    try:
        return float(found)
    except OverflowError:
        raise ValueError(f"the card's {what} is no number that fits ({str(found)[:20]}...)") from None
