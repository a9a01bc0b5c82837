"""Sections of the page that compares runs. They show the panels of a run's report, with all runs in one drawing where possible.

names: short and distinct names of the runs; runs: their RunFiles, in the same order. A panel leaves out runs that lack its figures.
"""

from html import escape

import yaml

from ...evaluation.charts import bar_chart, heat_map
from .dashboard import DASHBOARD, curves
from .page import caption, charts, missing, named
from .sections import curve_chart, panel_series

LONGEST_NAME = 16  # letters of a run's name in a drawing
UNTOLD = "–"


def run_names(runs):
    """A name per run: its folder's, with as many parent folders as tell the runs apart; a long name is cut.

    Raises ValueError for a run that is given twice.
    """
    places = [run.path.resolve().parts for run in runs]
    twice = [run.path for run, place in zip(runs, places) if places.count(place) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice: a comparison needs different runs")
    depth, names = 0, [""]
    while len(set(names)) < len(runs):
        depth += 1
        names = ["/".join(place[-depth:]) for place in places]
    short = [name if len(name) <= LONGEST_NAME else f"{name[:8]}…{name[9 - LONGEST_NAME :]}" for name in names]
    return short if len(set(short)) == len(names) else names


def compare_ends(names, runs):
    """Each run's last figures as bars, and the keys in which the recipes differ."""
    *bars, recipes = DASHBOARD["Comparison across heads"]
    labels = [f"{name}, {family}" if (family := _family(run)) else name for name, run in zip(names, runs)]
    ends = [_last_figures(run) for run in runs]
    drawings = [
        bar_chart(
            [(label, end[panel.key]) for label, end in zip(labels, ends) if panel.key in end],
            title=panel.title,
            unit=panel.label,
        )
        for panel in bars
    ]
    if not any(drawings):
        return missing("None of these runs holds figures in its metrics.jsonl yet: they are written while it trains.")
    return (
        charts(drawings)
        + caption("The last figures of every run. Lengths compare only where the prompts and the target are the same.")
        + named(recipes.title, _recipe_table(recipes.title, names, runs))
    )


def compare_acceptance(names, runs):
    """Acceptance length of all runs in one drawing; acceptance per position in one drawing per run."""
    return _drawings("Acceptance while training", names, runs) or missing(
        "No acceptance was measured in these runs yet."
    )


def compare_curves(section, names, runs):
    """The panels of a section of curves over the steps of the training."""
    return _drawings(section, names, runs) or missing("metrics.jsonl of these runs holds no figures of this kind yet.")


def compare_rates(names, runs):
    """A heat map per run."""
    panel = DASHBOARD["Acceptance by depth and rank"][0]
    maps = [
        f'{caption(name)}<div class="scroll">{heat_map(run.rates, title=f"{panel.title}: {name}")}</div>'
        for name, run in zip(names, runs)
        if run.rates
    ]
    return "".join(maps) or missing("None of these runs holds rates per depth and rank: only the engine measures them.")


def compare_samples(names, runs):
    """Outputs of the runs for their first prompts. The target alone decides them, so they differ only if the prompts do."""
    (panel,) = DASHBOARD["Samples"]
    cards = [
        f'<figure class="sample"><figcaption>{escape(name)}: prompt</figcaption><pre>{escape(str(sample["prompt"]).strip())}</pre>'
        f'<figcaption>output</figcaption><pre class="output">{escape(str(sample["output"]).strip())}</pre></figure>'
        for name, run in zip(names, runs)
        for sample in (run.acceptance or {}).get("samples", [])[:1]
    ]
    return named(panel.title, "".join(cards)) if cards else missing("None of these runs holds samples.")


def _drawings(section, names, runs):
    """All runs in one drawing if each has one line, else a drawing per run."""
    drawings = []
    for panel in DASHBOARD[section]:
        series = [panel_series(panel, run.train + run.measured) for run in runs]
        if panel.kind == "line":
            lines = [(name, points) for name, found in zip(names, series) for _, points in found]
            drawings.append(curve_chart(panel, lines))
        else:
            drawings += [curve_chart(panel, found, more=f": {name}") for name, found in zip(names, series)]
    return charts(drawings) if any(drawings) else ""


def _last_figures(run):
    """{W&B key: value} of the last lines of metrics.jsonl."""
    return {
        key: value for lines in (run.train, run.measured) for line in lines[-1:] for key, value in curves(line).items()
    }


def _family(run):
    return (run.acceptance or {}).get("family", "")


def _recipe_table(title, names, runs):
    told = [{"family": _family(run)} | (yaml.safe_load(run.config or "") or {}) for run in runs]
    keys = dict.fromkeys(key for values in told for key in values)
    differ = [key for key in keys if key != "output" and len({str(values.get(key, UNTOLD)) for values in told}) > 1]
    if not differ:
        return caption("The runs were told the same.")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{escape(key)}</th>'
        + "".join(f"<td>{escape(str(values.get(key, UNTOLD)))}</td>" for values in told)
        + "</tr>"
        for key in differ
    )
    table = f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<p>{escape(title)}:</p><div class="scroll">{table}</div>'
