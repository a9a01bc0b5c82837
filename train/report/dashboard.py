"""The one description of a run's dashboard: its sections, their panels, and the W&B key of each panel.

train/report/workspace.py makes a W&B workspace from it, train/report/report.py draws the same panels from the run folder, and
train/run/tracking.py logs the keys: a line of metrics.jsonl of kind K gives K/<name> for each of its figures (`curves`). Nothing
here knows W&B.
"""

import re
from dataclasses import dataclass

KINDS = ("line", "lines", "heat map", "table", "bars", "recipes")


@dataclass(frozen=True)
class Panel:
    """One drawing.

    kind: line: a figure over the training steps; lines: several figures, one per number or name in their keys; heat map: a drawing
    per measurement; table; bars: a run's last figure, runs of a family side by side; recipes: the keys in which runs differ
    key: W&B's; for lines, a regular expression whose only group is the number, or without a `series` the name
    label: of the axis; start, largest: its beginning and its greatest end (None: chosen from the figures)
    only: the runs that log such figures: heads of the family "EAGLE", the stage "joint", named "sets", "teacher-forced sets";
    "": every run
    series, first: a line is named by this word and its number, counted from `first`; "": by its name alone
    """

    title: str
    kind: str
    key: str = ""
    label: str = ""
    start: float | None = None
    largest: float | None = None
    only: str = ""
    series: str = "head"
    first: int = 0

    def find(self, keys):
        """[(name of the line, key)] of the keys that the panel shows, in the order of their numbers."""
        if self.kind != "lines":
            return [("", key) for key in keys if key == self.key]
        if not self.series:
            named = {key: match[1] for key in sorted(keys) if (match := re.fullmatch(self.key, key))}
            return [(name.replace("/", ", "), key) for key, name in named.items()]
        found = {int(match[1]): match[0] for key in keys if (match := re.fullmatch(self.key, key))}
        return [(f"{self.series} {number + self.first}", found[number]) for number in sorted(found)]


DASHBOARD = {
    "Training": (
        Panel("Training loss", "line", "train/loss", "loss"),
        Panel("Loss of each head", "lines", "train/head([0-9]+)_loss", "loss"),
        Panel("Feature loss of each head", "lines", "train/head([0-9]+)_feature_loss", "loss", 0, only="EAGLE"),
        Panel("Loss of the confidence", "lines", "train/head([0-9]+)_confidence_loss", "loss", only="confidence"),
        Panel("Loss of the selector", "lines", "train/head([0-9]+)_selector_loss", "loss", only="selector"),
        Panel(
            "First choice of the selector correct",
            "lines",
            "train/head([0-9]+)_selector_top1",
            "top-1",
            0,
            1,
            "selector",
        ),
        Panel("Label among the candidates", "lines", "train/head([0-9]+)_selector_recall", "share", 0, 1, "selector"),
        Panel("Loss of the adapted target", "line", "train/target_loss", "loss", only="joint"),
        Panel("First choice correct", "lines", "train/head([0-9]+)_top1", "top-1", 0, 1),
        Panel("Among the first five", "lines", "train/head([0-9]+)_top5", "top-5", 0, 1),
        Panel("Chance that a draft is accepted", "lines", "train/head([0-9]+)_alpha", "alpha", 0, 1),
        Panel("Learning rate", "line", "train/lr", "learning rate", 0),
        Panel("Length of the gradient", "line", "train/grad_norm", "norm", 0),
        Panel("Steps left out, not finite", "line", "train/skipped_steps", "steps", 0),
    ),
    "Acceptance while training": (
        Panel("Acceptance length", "line", "acceptance/acceptance_length", "tokens per step", 1),
        Panel(
            "Acceptance per drafted token",
            "lines",
            "acceptance/position([0-9]+)",
            "share of steps",
            0,
            1,
            series="token",
            first=1,
        ),
        Panel("Held-out loss of the head", "line", "acceptance/head_loss", "nats per token"),
        Panel("Sets at temperature 0", "lines", "acceptance/t0/(.+)", "tokens per step", 1, only="sets", series=""),
        Panel("Sets at temperature 1", "lines", "acceptance/t1/(.+)", "tokens per step", 1, only="sets", series=""),
        Panel(
            "Sets, teacher-forced",
            "lines",
            "acceptance/teacher_forced/(.+)",
            "tokens per step",
            1,
            only="teacher-forced sets",
            series="",
        ),
        Panel("Held-out loss on each set", "lines", "acceptance/loss/(.+)", "nats per token", only="sets", series=""),
        Panel("Held-out loss of the adapted target", "line", "acceptance/heldout_loss", "nats per token", only="joint"),
        Panel(
            "Held-out loss of the frozen target",
            "line",
            "acceptance/frozen_heldout_loss",
            "nats per token",
            only="joint",
        ),
    ),
    "Acceptance by depth and rank": (
        Panel("Acceptance rate per depth and rank", "heat map", "acceptance/heat_map"),
        Panel("Rates as a table", "table", "acceptance/rates"),
    ),
    "Throughput and memory": (
        Panel("Training speed", "line", "train/tokens_per_second", "tokens per second", 0),
        Panel("Peak memory", "line", "train/peak_memory_gib", "GiB", 0),
    ),
    "Samples": (Panel("Sample generations", "table", "samples"),),
    "Comparison across heads": (
        Panel("Acceptance length at the end", "bars", "acceptance/acceptance_length", "tokens per step"),
        Panel("First drafted token accepted", "bars", "acceptance/position0", "share of steps"),
        Panel("Training speed at the end", "bars", "train/tokens_per_second", "tokens per second"),
        Panel("Peak memory at the end", "bars", "train/peak_memory_gib", "GiB"),
        Panel("What the runs were told differently", "recipes"),
    ),
}


def curves(line):
    """{W&B key: number} of a line of metrics.jsonl; shares per position, and figures of named sets, become one key each."""
    numbers = {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if isinstance(value, int | float) and name != "step"
    }
    for one in line.get("sets", []):
        turns = (
            f"t{one['temperature']:g}/{one['set']}/{one['turns']}" if "turns" in one else f"teacher_forced/{one['set']}"
        )
        numbers[f"{line['kind']}/{turns}"] = one["acceptance_length"]
    numbers |= {f"{line['kind']}/loss/{name}": loss for name, loss in line.get("set_losses", {}).items()}
    return numbers | {f"{line['kind']}/position{i}": rate for i, rate in enumerate(line.get("per_position", []))}
