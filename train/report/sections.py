"""The sections of the report: each function turns a part of a run folder into one piece of HTML.

An argument that is None or empty stands for a missing file; the section then says which command makes it. The text on the page is
for a reader who has not seen the code: every drawing has a caption that explains it.
"""

import math
from html import escape
from pathlib import Path

from ...evaluation.acceptance_lines import breaks
from ...evaluation.charts import heat_map, line_chart, tree_drawing
from ...evaluation.tree_text import choice_sentence, choice_table
from .dashboard import DASHBOARD, curves
from .page import caption, charts, code, missing, named

MAX_SAMPLES = 6
BAR_WIDTH = 72  # pixels of the fastest row's bar


def tiles(run, train, measured, ended, acceptance, tree, benchmark):
    """The few figures that tell whether the training worked: (figure, its meaning, its source) each.

    The speed is that of this run's own heads if benchmark.json holds several.
    """
    found = []
    chain = acceptance or (measured[-1] if measured else None)
    if chain:
        how = "measured by the engine" if acceptance else source_of(chain)
        if acceptance and _is_number(acceptance.get("num_steps")):
            how += f", {acceptance['num_steps']:,} steps"
        found.append((f"{chain['acceptance_length']:.2f}", "tokens per step, chain", how))
    if chain and _is_number(chain.get("heldout_loss")) and _is_number(chain.get("frozen_heldout_loss")):
        frozen = chain["frozen_heldout_loss"]
        found.append(
            (f"{chain['heldout_loss']:.3f}", "held-out loss, adapted target", f"{frozen:.3f} of the frozen one")
        )
    if tree and "dynamic" in tree and "choice" in tree:
        chosen = tree["choice"]["chosen"]
        figure = f"{chosen['acceptance_length']:.2f}"
        found.append((figure, f"tokens per step, dynamic tree of {chosen['num_nodes']}", "measured by headstart tree"))
    elif tree and _is_number(tree.get("expected_acceptance_length")):
        figure = f"{tree['expected_acceptance_length']:.2f}"
        found.append((figure, f"tokens per step, tree of {len(tree['parents'])}", "expected from the measured rates"))
    drafted = [row for row in (benchmark or {}).get("rows", []) if _is_drafted(row) and _is_number(row.get("speedup"))]
    own = [row for row in drafted if Path(row["head"]).resolve().is_relative_to(run.resolve())]
    if drafted:
        best = max(own or drafted, key=lambda row: row["speedup"])
        where = f"{best['head']}, {best['draft']}, temperature {best['temperature']:g}"
        found.append((f"{best['speedup']:.2f}×", "the speed of plain decoding", where))
    if train:
        tokens = train[-1].get("tokens")
        told = [f"{tokens:,} tokens"] if _is_number(tokens) else []
        told += [f"ended by {line.get('reason')}" for line in ended[-1:]]
        found.append((f"{train[-1]['step']:,}", "training steps", "; ".join(told)))
    return found


def acceptance_section(records):
    """Acceptance over the steps of the training.  records: the acceptance lines of metrics.jsonl"""
    if not records:
        return missing("No acceptance was measured in this run yet: the trainer does it every so many steps.")
    steps = breaks(records)
    drawings = curve_charts(DASHBOARD["Acceptance while training"], records, steps)
    sources = " and ".join(sorted({source_of(record) for record in records}))
    return charts(drawings) + caption(
        f"Chains drafted on held-out prompts, {sources}. Acceptance length: tokens emitted per step of the target, pooled "
        "over all steps; plain decoding has 1. Acceptance per drafted token: the share of all steps in which the first, "
        "second, … drafted token was accepted."
        + (
            " Dashed: from here on other prompts, or measured in another way, so what comes before does not compare."
            if steps
            else ""
        )
        + (
            " Held-out loss of the head: forward KL from the target's distribution on held-out answers."
            if any("head_loss" in record for record in records)
            else ""
        )
        + (
            " Sets: the prompt files by name, of first turns and of later ones."
            if any("sets" in record for record in records)
            else ""
        )
        + (
            " Held-out loss of adapted and frozen target: cross entropy of the target itself against held-out answers, with its "
            "adapter and without."
            if any("heldout_loss" in record for record in records)
            else ""
        )
    )


def training_section(records):
    """Loss, accuracy per head, learning rate.  records: the train lines of metrics.jsonl"""
    if not records:
        command = "accelerate launch train/medusa.py --config configs/quickstart.yaml"
        return missing("metrics.jsonl holds no training steps of this run: they are written while it trains.", command)
    drawings = curve_charts(DASHBOARD["Training"], records)
    return charts(drawings) + caption(
        "Loss per supervised token. Head k is the k-th of Medusa heads, and the k-th step of a head that drafts step by step; it "
        "predicts the token k + 2 places ahead. Top-1 "
        "and top-5 are teacher-forced, on the training data: how often the token is the head's first choice, or among "
        "its first five."
        + (
            " Alpha: the mean chance that a token drawn from the head is accepted."
            if any("head0_alpha" in record for record in records)
            else ""
        )
    )


def throughput_section(records):
    """Tokens per second and memory.  records: the train lines of metrics.jsonl"""
    drawings = curve_charts(DASHBOARD["Throughput and memory"], records)
    if not any(drawings):
        return missing("metrics.jsonl holds neither speed nor memory of this run: they are written while it trains.")
    return charts(drawings) + caption(
        "Tokens of all processes per second of training, measuring and saving left out. Memory: the most that the first process "
        "held up to then since it was started, of its GPU, or on the CPU of the machine's memory."
    )


def curve_charts(panels, records, steps=()):
    """One drawing per panel of curves, "" for a panel without figures.  records: lines of metrics.jsonl of the panels' kind

    steps: where curves are broken, as values from there on do not compare with those before.
    """
    return [curve_chart(panel, panel_series(panel, records), steps=steps) for panel in panels]


def curve_chart(panel, series, more="", steps=()):
    """The drawing of a panel of curves; more: after its title."""
    axis = dict(y_label=panel.label, start=panel.start, y_max=panel.largest)
    return line_chart(series, title=panel.title + more, breaks=steps, **axis)


def panel_series(panel, records):
    """[(name, [(step, value), ...])] of the curves of a panel."""
    figures = [(record["step"], curves(record)) for record in records]
    keys = {key for _, values in figures for key in values}
    return [
        (name, [(step, values[key]) for step, values in figures if key in values]) for name, key in panel.find(keys)
    ]


def rates_section(acceptance, tree=None):
    """Heat map and table of the acceptance rates.  acceptance: acceptance.json; tree: tree.json, whose own rates come first"""
    own = (tree or {}).get("rates")
    from_tree = bool(own) and any(own)
    rates = own if from_tree else (acceptance or {}).get("rates")
    if not rates or not any(rates):
        return missing(
            "acceptance.json holds no rates per depth and rank: the trainer writes them when the engine measures the heads."
        )
    names = "".join(f'<th scope="col">rank {rank}</th>' for rank in range(max(len(row) for row in rates)))
    rows = "".join(
        f'<tr><th scope="row">depth {depth}</th>{"".join(f"<td>{rate:.4f}</td>" for rate in row)}'
        f"<td>{sum(row):.4f}</td></tr>"
        for depth, row in enumerate(rates, start=1)
    )
    table = (
        '<details><summary>The figures as a table</summary><div class="scroll"><table><thead><tr><td></td>'
        f'{names}<th scope="col">all ranks</th></tr></thead><tbody>{rows}</tbody></table></div></details>'
    )
    # The trainer's count of steps belongs only to the trainer's rates.
    counted = not from_tree and _is_number(acceptance.get("num_steps"))
    steps = f", counted over {acceptance['num_steps']:,} steps" if counted else ""
    text = caption(
        "The probability that the target's own token is the head's candidate of that rank (0 is the first choice), given that "
        f"everything before it was accepted{steps}. Colour follows the square root of the rate, so that small rates "
        "stay visible."
        + (" Measured by headstart tree; the draft tree is chosen from these figures." if from_tree else "")
    )
    drawn, listed = DASHBOARD["Acceptance by depth and rank"]
    return f'<div class="scroll">{heat_map(rates, title=drawn.title)}</div>{text}{named(listed.title, table)}'


def tree_section(tree, acceptance, run):
    """The draft tree, drawn.  tree: tree.json; acceptance: acceptance.json, for the rates where the tree has none"""
    if not tree:
        return missing(
            "No tree was built for this run yet. Build the best one from the measured acceptance:",
            f"headstart tree {run}",
        )
    if "dynamic" in tree:
        shape = tree["dynamic"]
        return caption(
            f"Grown anew in every step from the draft's confidence: {shape['num_nodes']} nodes, {shape['max_depth']} deep at most. "
            f"At every depth the {shape['width']} likeliest nodes get {shape['width']} children each; the best of all are kept."
        )
    parents, ranks = tree["parents"], tree["ranks"]
    rates = tree.get("rates") or (acceptance or {}).get("rates")
    try:
        drawing = tree_drawing(parents, ranks, rates, title="The draft tree")
    except ValueError as error:
        raise ValueError(f"{run / 'tree.json'}: {error}") from error
    expected = tree.get("expected_acceptance_length")
    text = caption(
        f"{len(parents):,} nodes. The root, on top, is the newest token; every node below it is a drafted token, and the number in "
        "it is its rank among the head's candidates at that depth. One pass of the target checks the whole tree. "
        + ("The stronger the colour, the likelier the node is accepted (square root). " if rates else "")
        + (f"Expected from the rates: {expected:.3f} tokens per step." if _is_number(expected) else "")
    )
    return f'<div class="scroll">{drawing}</div>{text}'


def choice_section(tree, run):
    """How the tree was chosen: expected tokens per second over nodes.  tree: tree.json"""
    choice = (tree or {}).get("choice")
    if not tree:
        return missing("No tree was chosen for this run yet: see above.")
    if not choice:
        return missing(
            "This tree has the number of nodes that was asked for; no steps were timed. Choose the tree that decodes fastest:",
            f"headstart tree {run}",
        )
    try:
        plain = choice["batch_size"] / choice["plain_step_seconds"]
        curve = [(1, plain), *((point["num_nodes"], point["tokens_per_second"]) for point in choice["curve"])]
        best, sentence, table = choice["best_static"], choice_sentence(choice), choice_table(choice)
        marked = best["num_nodes"], best["tokens_per_second"], f"{best['num_nodes']} nodes, {best['depth']} deep"
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{run / 'tree.json'}: 'choice' is not what headstart tree writes ({error!r}); make it again or remove it"
        ) from error
    drawing = line_chart(
        [("", curve)],
        title="Expected speed of the best static tree",
        x_label="nodes, the root included",
        y_label="tokens per second",
        start=0,
        marked=marked,
    )
    text = caption(
        "For every number of nodes the best tree and depth: tokens per step from the acceptance rates, over the time of a step. "
        f"Steps of {len(choice['timed_steps'])} trees were timed in the engine, the others lie on the line between them. One node "
        "is plain decoding. The marked tree then decoded prompts, beside what else could be faster:"
    )
    return f"<p>{escape(sentence)}</p>{charts([drawing])}{text}{code(table)}"


def speed_section(benchmark, run, config=None):
    """The speed table.  benchmark: benchmark.json; config: config.yaml as a dict"""
    rows, config = (benchmark or {}).get("rows"), config or {}
    if not rows:
        adapter = f" --adapter {run}" if config.get("stage") == "joint" else ""
        target = config.get("target", "TARGET")
        return missing(
            "No speed was measured for this run yet. Measure its head against plain decoding, into the file that is looked for:",
            f"headstart bench speculation --model {target} --head {run}{adapter} --output {run}/benchmark.json",
        )
    fastest = max((row["speedup"] for row in rows if _is_number(row.get("speedup"))), default=1.0)
    names = ("head", "temperature", "draft", "nodes", "tokens per step", "tokens/s", "against plain", "", "tokens")
    words = {"head", "draft", "tokens"}
    head = "".join(f'<th scope="col"{" class=words" if name in words else ""}>{name}</th>' for name in names)
    body, previous = [], None
    for row in rows:
        group = (row["head"], row["temperature"])
        kinds = ["new"] * (group != previous) + ["best"] * (_is_drafted(row) and row.get("speedup") == fastest > 1)
        body.append(f'<tr class="{" ".join(kinds)}">{_speed_cells(row, fastest)}</tr>')
        previous = group
    where = " · ".join(str(benchmark[key]) for key in ("hardware", "date") if benchmark.get(key))
    return (
        f'<div class="scroll"><table class="speed"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
        + caption(
            "Tokens per step: 1 + accepted drafted tokens per step of the target. Against plain: tokens per second, divided "
            "by those of decoding without a head in the same run. Tokens: whether every output was the same, token "
            "by token, as that of decoding without a head."
        )
        + (caption(f"Measured on {where}.") if where else "")
        + (code(str(benchmark["command"])) if benchmark.get("command") else "")
    )


def _speed_cells(row, fastest):
    drafted, speedup = _is_drafted(row), row.get("speedup")
    width = BAR_WIDTH * speedup / max(fastest, 1.0) if _is_number(speedup) else 0
    same = {True: ("yes", "identical"), False: ("no", "different")}.get(row.get("identical"), ("", "not compared"))
    kind, same = same if drafted else ("", "the reference")
    cells = [
        f'<th scope="row">{escape(str(row["head"]))}</th>',
        f"<td>{row['temperature']:g}</td>",
        f'<td class="words">{escape(str(row["draft"]))}</td>',
        f"<td>{_figure(row.get('num_nodes') if drafted else None, ',.0f')}</td>",
        f"<td>{_figure(row.get('acceptance_length'), '.2f')}</td>",
        f"<td>{_figure(row.get('tokens_per_second'), ',.1f')}</td>",
        f"<td>{_figure(speedup, '.2f', '×')}</td>",
        f'<td class="narrow"><i class="bar" style="width:{width:.0f}px"></i></td>',
        f'<td class="words {kind}">{same}</td>',
    ]
    return "".join(cells)


def samples_section(acceptance):
    """Sample generations.  acceptance: acceptance.json"""
    samples = (acceptance or {}).get("samples")
    if not samples:
        return missing("acceptance.json holds no samples: the trainer writes a few when the engine measures the heads.")
    cards = "".join(
        f'<figure class="sample"><figcaption>prompt</figcaption><pre>{escape(str(sample["prompt"]).strip())}</pre>'
        f'<figcaption>output</figcaption><pre class="output">{escape(str(sample["output"]).strip())}</pre></figure>'
        for sample in samples[:MAX_SAMPLES]
    )
    (panel,) = DASHBOARD["Samples"]
    said = caption("Held-out prompts. The heads only propose: every token written is the target's own choice.")
    return said + named(panel.title, cards)


def config_section(config):
    """The resolved configuration.  config: the text of config.yaml"""
    if config is None:
        return missing("config.yaml is not there: the trainer writes it when the run starts.")
    return caption("As the trainer resolved it: the recipe, then the options of the command line.") + code(
        config.strip()
    )


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_drafted(row):
    return row["draft"] != "none"


def _figure(value, style, unit=""):
    return format(value, style) + unit if _is_number(value) else "–"


def source_of(record):
    names = {"engine": "measured by the engine", "teacher_forced": "teacher-forced, not run by the engine"}
    return names.get(record.get("source"), f"from {record.get('source')}")
