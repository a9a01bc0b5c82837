"""Write the page of the headline, benchmarks.md in docs/, and the chart beside it, from the results of several seeds.

    python benchmarks/headline/page.py benchmarks/results/*-headline-seed-*.json

Every figure on the page is of these files; what is not in them is said to be missing. The last line printed is the line of Markdown
that shows the chart in the README.
"""

import argparse
import json
import sys
from pathlib import Path

from headstart.benchmarks.headline.families import SOURCES
from headstart.benchmarks.headline.page_tables import (
    CHAIN,
    SUBJECTS,
    TREE,
    Figures,
    acceptance_table,
    claims,
    seeds_text,
    speed_table,
    table,
    without,
)
from headstart.benchmarks.headline.page_words import (
    CLAIMS,
    EQUAL,
    INTRODUCTION,
    LIBRARY,
    LIMITS,
    OWN_SPEED,
    SPEED,
    SPEED_OF_TARGET,
    TOKENS,
    TRAINED,
    fill,
)
from headstart.evaluation.charts import as_file, bar_chart
from headstart.evaluation.results import RESULTS
from headstart.heads.storage.atomic_write import write_whole
from headstart.heads.storage.user_errors import exit_status

PAGE, CHART = "benchmarks.md", "benchmarks.svg"
DOCS = Path(__file__).resolve().parents[2] / "docs"
DIFFERENT = {"seed", "device", "math", "speed_minutes"}  # settings that results of one page need not share


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", help="what benchmarks/headline/headline.py wrote, one file per seed")
    parser.add_argument(
        "--folder", default=str(DOCS), help="where benchmarks.md and benchmarks.svg go (default: docs/)"
    )
    options = parser.parse_args(arguments)
    figures = Figures(read_results(options.results))
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CHART, as_file(draw(figures)))
    write_whole(folder / PAGE, write_page(figures, options.results))
    print(f"written to {folder / PAGE} and {folder / CHART}")
    if folder.resolve() == DOCS:
        print(f"for the README: ![Tokens a step of each family of heads](docs/{CHART})")
    return 0


def read_results(paths):
    """The results, by seed. ValueError if one is no headline's, is not finished, or was made with other settings."""
    found = []
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}: name what benchmarks/headline/headline.py wrote with --output")
        result = json.loads(Path(path).read_text())
        if result.get("name") != "headline":
            raise ValueError(
                f"{path} is no result of the headline (it is of {result.get('name')!r}): name what "
                "benchmarks/headline/headline.py wrote"
            )
        missing = [stage for stage in ("target", "answers") if stage not in result["facts"]]
        if missing or not any(row["table"] == "acceptance" for row in result["rows"]):
            raise ValueError(
                f"{path} has no figures of the stage {(missing or ['acceptance'])[0]}: finish that run first"
            )
        other = [
            name
            for name, value in result["settings"].items()
            if found and name not in DIFFERENT and found[0]["settings"].get(name) != value
        ]
        if other:
            raise ValueError(
                f"{path} was made with {other[0]} {result['settings'][other[0]]!r}, {paths[0]} with "
                f"{found[0]['settings'].get(other[0])!r}: results of one page have the same settings but the seed"
            )
        found.append(result)
    seeds = [result["settings"]["seed"] for result in found]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"the results have the seeds {seeds}: name each seed once")
    return sorted(found, key=lambda result: result["settings"]["seed"])


def draw(figures):
    """The chart: tokens a step on held-out code at temperature 0, chain and best tree of every source."""
    bars, kinds = [], []
    for source in figures.sources:
        for draft in (CHAIN, TREE):
            cell = figures.cell(source, SUBJECTS[0], 0.0, draft, figures.batch)
            if cell:
                bars.append((f"{source}, {draft}{without(cell.lacking)}", cell.mean, cell.low, cell.high))
                kinds.append(int(draft == TREE))
    given = {"title": "Held-out Python code at temperature 0", "unit": "tokens a step; 1 is plain decoding"}
    return bar_chart(bars, kinds=kinds, **given)


def write_page(figures, paths):
    """The page as Markdown."""
    first = figures.results[0]
    settings, training = first["settings"], first["facts"]["target"]["training"]
    parameters = f"{training['num_parameters'] / 1e6:.3g}"
    parts = [
        "# What each family of heads is worth",
        fill(
            INTRODUCTION,
            names=names_of(paths),
            parameters=parameters,
            hardware=", ".join(sorted({result["facts"]["target"]["hardware"] for result in figures.results})),
            seeds=seeds_text(figures.seeds),
            commit=first["commit"],
        ),
        "\n".join(f"    {command}" for result in figures.results for command in result["facts"]["commands"]),
        f"![Tokens a step]({CHART})",
        "## What was trained",
        trained_table(figures),
        fill(
            TRAINED,
            answers=" or ".join(dict.fromkeys(f"{one['facts']['answers']['answered']:,}" for one in figures.results)),
        ),
        f"## Tokens a step, {figures.batch} requests at once",
        fill(TOKENS, depth=figures.depth, most=figures.depth + 1, nodes=settings["nodes"], prompts=settings["prompts"]),
    ]
    for subject in SUBJECTS:
        parts += [f"### Held-out {subject}", acceptance_table(figures, subject, figures.batch)]
    parts += [f"## Tokens a step, one request, the first {settings['alone']} of the prompts"]
    for subject in SUBJECTS:
        parts += [f"### Held-out {subject}, one request", acceptance_table(figures, subject, 1)]
    parts += ["## Equal tokens", equality(figures), "## What papers and theory give", fill(CLAIMS)]
    parts += [table(["claim", "above", "below", "verdict"], [claim.line() for claim in claims(figures)])]
    own = settings["shape"] == "target"
    title = "the trained target" if own else "a large shape"
    parts += [f"## Speed: these acceptances replayed on {title}", *speed_parts(figures, settings, own)]
    minutes = {"minutes": f"{training['seconds'] / 60:.1f}", "head_minutes": f"{settings['head_minutes']:g}"}
    parts += [
        "## What does not transfer to large models",
        fill(LIMITS, parameters=parameters, own_speed=OWN_SPEED[own], **minutes),
    ]
    return "\n\n".join(parts) + "\n"


def names_of(paths):
    """The files of results in words."""
    paths = sorted(map(Path, paths))
    if all(path.resolve().parent == DOCS.parent / RESULTS for path in paths):
        return ", ".join(f"`{path.name}`" for path in paths) + f" of `{RESULTS}`"
    return ", ".join(f"`{path}`" for path in paths)


def trained_table(figures):
    """The target, the heads and the draft model of every seed."""
    lines = []
    for seed, result in zip(figures.seeds, figures.results):
        target = result["facts"]["target"]
        bits = ", ".join(f"{name} {one['answer_bits_per_byte']:.3f}" for name, one in target["bits_per_byte"].items())
        training = target["training"]
        line = [str(seed), "target", f"{training['seconds'] / 60:.2f}", f"{training['num_steps']:,}"]
        lines.append([*line, f"{training['num_steps'] * tokens_of_step(training):,.0f}", bits])
        heads = result["facts"]["heads"]
        for source in (one for one in SOURCES if one.slug in heads):
            head = heads[source.slug]
            if "training" in head:
                training = head["training"]
                bits = ", ".join(
                    f"{subject} {one['answer_bits_per_byte']:.3f}" for subject, one in head["bits_per_byte"].items()
                )
                words = f"{source.name}, {training['num_parameters'] / 1e6:.1f} M parameters"
                line = [str(seed), words, f"{training['seconds'] / 60:.2f}", f"{training['num_steps']:,}"]
                lines.append([*line, f"{training['num_steps'] * tokens_of_step(training):,.0f}", bits])
            else:
                line = [str(seed), head["name"], f"{head['minutes']:.2f}", f"{head['steps']:,}", f"{head['tokens']:,}"]
                lines.append([*line, ""])
    return table(["seed", "what", "minutes", "steps", "tokens seen", "bits per byte"], lines)


def tokens_of_step(training):
    """Tokens of a step of the target's or the draft model's training."""
    return training["passes"] * training["num_tokens"] / max(training["num_steps"], 1)


def equality(figures):
    """A sentence on equal tokens."""
    rows = [row for rows in figures.acceptance for row in rows]
    other = sum(row["other_outputs"] for row in rows)
    parts = [part for result in figures.results for part in result["facts"]["acceptance"].values()]
    alone = max(part["plain_other_outputs"] for part in parts)
    text = fill(
        EQUAL,
        outputs=f"{sum(row['prompts'] for row in rows):,}",
        tokens=f"{sum(row['tokens'] for row in rows):,}",
        found=f"**{other} differ{'s' * (other == 1)} from**" if other else "none differs from",
    )
    return text + (f" **Plain decoding alone and beside others differ in {alone}.**" if alone else "")


def speed_parts(figures, settings, own):
    """The second table and what it is.  own: whether the steps are the trained target's"""
    if not any(figures.speed):
        return ["Not measured in these runs (the stage `speed`)."]
    hardware = {part["hardware"] for result in figures.results for part in result["facts"]["speed"].values()}
    given = {"shape": settings["shape"], "hardware": ", ".join(sorted(hardware))}
    given |= {"prompt": f"{settings['speed_prompt']:,}", "new": settings["speed_tokens"]}
    parts = [fill(SPEED_OF_TARGET if own else SPEED, **given), speed_table(figures)]
    library = [result["facts"]["speed"].get("transformers") for result in figures.results]
    plain = sorted(f"{one['plain_ms']:.1f}" for one in library if one)
    if plain:
        parts.append(fill(LIBRARY, plain=" to ".join(dict.fromkeys((plain[0], plain[-1])))))
    return parts


if __name__ == "__main__":
    sys.exit(exit_status("page.py", main))
