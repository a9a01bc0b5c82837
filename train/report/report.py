"""Self-contained HTML pages about training runs.

    headstart report runs/NAME                       writes runs/NAME/report.html
    headstart report runs/A runs/B --output FILE     writes one page that compares them

A page shows only what the run folders hold: the panels of the dashboard (train/report/dashboard.py) from metrics.jsonl and
acceptance.json, the draft tree (tree.json), the speed table (benchmark.json) and the resolved configuration (config.yaml). A
section whose data are missing says which command makes them. The page loads nothing from outside.

It runs no model and measures nothing: every figure was written by the tool that measured it.
"""

from pathlib import Path

import yaml

from ...heads.storage.atomic_write import write_whole
from .comparison import compare_acceptance, compare_curves, compare_ends, compare_rates, compare_samples, run_names
from .files import read_run
from .page import render_page
from .sections import (
    acceptance_section,
    choice_section,
    config_section,
    rates_section,
    samples_section,
    source_of,
    speed_section,
    throughput_section,
    tiles,
    training_section,
    tree_section,
)


def write_report(run, output=None):
    """Write the report of the run folder `run` and return its path.

    output: the file to write, `report.html` in the run folder by default; an existing file is replaced.
    Raises ValueError if `run` is not a run folder, or a file in it cannot be read (naming the file and, if known, the line).
    """
    run = Path(run)
    files = read_run(run)
    page = render_page(
        files.name,
        tiles(run, files.train, files.measured, files.ended, files.acceptance, files.tree, files.benchmark),
        [
            ("Acceptance while training", acceptance_section(files.measured)),
            ("Training", training_section(files.train)),
            ("Throughput and memory", throughput_section(files.train)),
            ("Acceptance by depth and rank", rates_section(files.acceptance, files.tree)),
            ("The draft tree", tree_section(files.tree, files.acceptance, run)),
            ("Why this tree", choice_section(files.tree, run)),
            ("Speed", speed_section(files.benchmark, run, yaml.safe_load(files.config or ""))),
            ("Samples", samples_section(files.acceptance)),
            ("Configuration", config_section(files.config)),
        ],
    )
    return _write(page, run / "report.html" if output is None else Path(output))


def write_comparison(runs, output):
    """Write one page about several run folders to `output`, replacing an existing file, and return its path.

    Raises ValueError like write_report.
    """
    found = [read_run(run) for run in runs]
    names = run_names(found)
    ends = [
        (
            f"{run.measured[-1]['acceptance_length']:.2f}",
            f"tokens per step, {name}",
            f"chain, {source_of(run.measured[-1])}",
        )
        for name, run in zip(names, found)
        if run.measured
    ]
    page = render_page(
        " · ".join(names),
        ends,
        [
            ("Comparison across heads", compare_ends(names, found)),
            ("Acceptance while training", compare_acceptance(names, found)),
            ("Training", compare_curves("Training", names, found)),
            ("Throughput and memory", compare_curves("Throughput and memory", names, found)),
            ("Acceptance by depth and rank", compare_rates(names, found)),
            ("Samples", compare_samples(names, found)),
        ],
    )
    return _write(page, Path(output))


def _write(page, output):
    if output.is_dir():
        raise ValueError(f"{output} is a folder: give the name of the HTML file to write")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, page)
    return output
