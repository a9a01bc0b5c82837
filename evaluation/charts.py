"""Drawings as SVG, for the report's page and for the model card: line charts, bars, the heat map of acceptance, the draft tree.

Every function takes plain numbers and returns one `<svg>` string. Its colours are CSS variables (COLOURS), for light and dark; the
rest of its style is RULES. A page holds both once (train/report/page.py); `as_file` puts them into a separate drawing. Colour-blind
readers can tell the colours of series apart, and every line has its name, so colour is never the only sign. Values that are not
finite are left out, never drawn as zero. Nothing here reads a file.
"""

import math
import re
from html import escape
from itertools import pairwise

NUM_SERIES_COLOURS = 8  # --series-0 .. --series-7 of the page
MAX_POINTS = 120  # a longer line is averaged in buckets: readable lines, small pages

COLOURS = """\
:root {
  color-scheme: light dark;
  --paper: #fdfdfb; --card: #ffffff; --ink: #1c2127; --soft: #59636e; --rule: #dfe3e6; --grid: #e9ecee;
  --accent: #0b62a4; --heat: #0b62a4; --yes: #16703a; --no: #b3261e; --strong: #ffffff;
  --series-0: #0b62a4; --series-1: #c2570c; --series-2: #1a7f5a; --series-3: #9a3b8f;
  --series-4: #8a6d00; --series-5: #4b4fc4; --series-6: #b3263c; --series-7: #5b6570;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181c; --card: #1b2026; --ink: #e6e9ec; --soft: #a0abb5; --rule: #323a42; --grid: #2a3138;
    --accent: #6cb6f5; --heat: #3f8fd6; --yes: #6fcf97; --no: #ff8a80; --strong: #0d1114;
    --series-0: #6cb6f5; --series-1: #f5a25d; --series-2: #5fcfa3; --series-3: #df8fd6;
    --series-4: #dcc04a; --series-5: #a5a8ff; --series-6: #ff8c9c; --series-7: #b4bec7;
  }
}
"""

# Colours on white, {name: #rrggbb}, for viewers that do not know variables: they skip a rule that uses one.
ON_WHITE = dict(re.findall(r"--([\w-]+): (#\w+)", COLOURS.partition("@media")[0]))
RULES = """\
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .heading { font-size: 14px; font-weight: 600; fill: var(--ink); }
svg .name { font-weight: 600; }
svg .on-weak { fill: var(--ink); font-size: 13px; }
svg .on-strong { fill: var(--strong); font-size: 13px; }
svg .node-label { font-size: 10.5px; }
.grid { stroke: var(--grid); }
.line { fill: none; stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round; }
.leader { stroke: var(--rule); }
.break { stroke: var(--rule); stroke-dasharray: 4 3; }
.interval { fill: none; stroke: var(--ink); stroke-width: 1.5; }
.marked { fill: none; stroke: var(--series-1); stroke-width: 2.5; }
.cell, .node { fill: var(--heat); }
.node-back { fill: var(--paper); }
.node { stroke: var(--heat); stroke-opacity: .7; }
.edge { fill: none; stroke: var(--soft); stroke-opacity: .55; }
"""


def as_file(drawing):
    """A drawing as a separate SVG document, for an image on a page.  "" stays ""."""
    if not drawing:
        return ""
    style = f"{COLOURS}svg {{ font-family: system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif; }}\n{RULES}"
    # Its own background: the page may be dark although the reader's system is light.
    paper = f'<rect x="-8" y="-8" width="100%" height="100%" fill="{ON_WHITE["paper"]}" style="fill:var(--paper)"/>'
    [size] = re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawing)
    width, height = (int(length) + 16 for length in size)
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {width} {height}" width="{width}" height="{height}" '
        'role="img">'
    )
    body = drawing[drawing.index(">") + 1 :]
    return f"{start}<style>\n{style}</style>{paper}{body}\n"


def line_chart(series, *, title, y_label, x_label="training step", start=None, y_max=None, marked=None, breaks=()):
    """Lines over training steps, or over the quantity in x_label.

    series: list of (name, [(x, value), ...]); a name is written at the end of its line unless there is only one line.
    start: beginning of the vertical axis unless a value lies below; by default near the smallest value.
    y_max: greatest end of the axis (1 for a share). marked: (x, value, text) of one highlighted point.
    breaks: each x from which values do not compare with those before it: a dashed line, and no line across it.
    Returns "" if there is no finite value.
    """
    series = [(name, [(x, y) for x, y in points if math.isfinite(y)]) for name, points in series]
    series = [(name, _averaged(points)) for name, points in series if points]
    if not series:
        return ""
    width, height, left, top, bottom = 480, 262, 66, 38, 40
    right = 16 if len(series) == 1 else 18 + math.ceil(8.5 * max(len(name) for name, _ in series))  # bold
    x_ticks, _, _ = _ticks([x for _, points in series for x, _ in points], start=0, largest=None)
    y_ticks, y_low, y_high = _ticks([y for _, points in series for _, y in points], start, y_max)
    x_high = max(x for _, points in series for x, _ in points) or 1

    def place_x(x):
        return left + (width - left - right) * x / x_high

    def place_y(y):
        return height - bottom - (height - top - bottom) * (y - y_low) / (y_high - y_low)

    parts = [_open(width, height, title), _text(0, 14, title, anchor="start", kind="heading")]
    for tick in y_ticks:
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{place_y(tick):.1f}" y2="{place_y(tick):.1f}"/>'
        )
        parts.append(_text(left - 8, place_y(tick) + 4, _number(tick, y_ticks), anchor="end"))
    for tick in (tick for tick in x_ticks if tick <= x_high):
        parts.append(_text(place_x(tick), height - bottom + 18, _number(tick, x_ticks)))
    parts.append(_text((left + width - right) / 2, height - 4, x_label, kind="axis"))
    parts.append(
        f'<text class="axis" text-anchor="middle" transform="translate(12 {(top + height - bottom) / 2:.0f}) rotate(-90)">'
        f"{escape(y_label)}</text>"
    )
    for x in map(place_x, breaks):
        parts.append(f'<line class="break" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}"/>')
    ends = _spread([place_y(points[-1][1]) for _, points in series], gap=14, low=top, high=height - bottom)
    for i, (name, points) in enumerate(series):
        colour = f"var(--series-{i % NUM_SERIES_COLOURS})"
        placed = [(place_x(x), place_y(y)) for x, y in points]
        for stretch in _between(placed, map(place_x, breaks)):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in stretch)
            if len(stretch) > 1:
                parts.append(f'<polyline class="line" style="stroke:{colour}" points="{path}"/>')
        if len(placed) <= 24:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in placed]
        if len(series) > 1:
            x, y = placed[-1]
            parts.append(f'<line class="leader" x1="{x + 3:.1f}" x2="{x + 11:.1f}" y1="{y:.1f}" y2="{ends[i]:.1f}"/>')
            parts.append(_text(x + 14, ends[i] + 4, name, anchor="start", kind="name", colour=colour))
    if marked is not None:
        x, y, words = place_x(marked[0]), place_y(marked[1]), marked[2]
        parts.append(f'<circle class="marked" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>')
        # The text goes below its point, on the side with room.
        right = x < (left + width) / 2
        parts.append(_text(x + (9 if right else -9), y + 20, words, anchor="start" if right else "end", kind="name"))
    return "".join([*parts, "</svg>"])


def bar_chart(bars, *, title, unit, kinds=None):
    """Horizontal bars from zero, each with its name and figure.

    bars: list of (name, value >= 0), or of (name, value, low, high) with the ends of an interval; unit: of the values; kinds: an
    int for each bar, those of one kind have one colour; None: each has its own. Returns "" if there is no finite value.
    """
    kept = [(bar, kind) for bar, kind in zip(bars, kinds or range(len(bars))) if all(map(math.isfinite, bar[1:]))]
    bars, kinds = [bar for bar, _ in kept], [kind for _, kind in kept]
    if not bars:
        return ""
    row_h, top, figure_w = 30, 30, 64
    left = 14 + 7 * max(len(name) for name, *_ in bars)
    width, height = 480, top + len(bars) * row_h + 26
    longest = max(max(values) for _, *values in bars) or 1
    parts = [_open(width, height, title), _text(0, 14, title, anchor="start", kind="heading")]
    for i, (name, value, *interval) in enumerate(bars):
        y = top + i * row_h
        length, *ends = (max(width - left - figure_w, 40) * x / longest for x in (value, *interval))
        figure = f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")
        parts.append(_text(left - 10, y + 20, name, anchor="end"))
        series = f"series-{kinds[i] % NUM_SERIES_COLOURS}"
        parts.append(
            f'<rect class="bars" x="{left}" y="{y + 6}" width="{length:.1f}" height="{row_h - 10}" rx="3" '
            f'fill="{ON_WHITE[series]}" style="fill:var(--{series})"/>'
        )
        if ends:
            low, high = (left + end for end in ends)
            middle = y + row_h / 2 + 1
            parts.append(
                f'<path class="interval" stroke="{ON_WHITE["ink"]}" '
                f'd="M{low:.1f},{middle - 4} V{middle + 4} M{low:.1f},{middle} H{high:.1f} '
                f'M{high:.1f},{middle - 4} V{middle + 4}"><title>{interval[0]:#.3g} to {interval[1]:#.3g}</title></path>'
            )
        parts.append(_text(left + max(length, *ends, 0) + 8, y + 20, figure, anchor="start", kind="name"))
    parts.append(_text(left, height - 8, unit, anchor="start", kind="axis"))
    return "".join([*parts, "</svg>"])


def heat_map(rates, *, title):
    """Probability per depth (rows) and rank (columns), the value written in every cell.

    rates: list over depth of list over rank, each in [0, 1]. The square root of the rate sets the strength of the colour.
    """
    num_ranks = max(len(row) for row in rates)
    cell_w, cell_h, left, top = 76, 40, 84, 46
    width, height = left + num_ranks * cell_w + 4, top + len(rates) * cell_h + 4
    parts = [_open(width, height, title, least=0.75)]
    parts.append(_text(left + num_ranks * cell_w / 2, 14, "rank among the head's candidates", kind="axis"))
    parts += [_text(left + (rank + 0.5) * cell_w, 36, str(rank)) for rank in range(num_ranks)]
    for depth, row in enumerate(rates):
        y = top + depth * cell_h
        parts.append(_text(left - 12, y + cell_h / 2 + 4, f"depth {depth + 1}", anchor="end"))
        for rank, rate in enumerate(row):
            if not math.isfinite(rate):
                continue
            x, strength = left + rank * cell_w, math.sqrt(min(max(rate, 0.0), 1.0))
            parts.append(
                f'<g><title>depth {depth + 1}, rank {rank}: {rate:.4f}</title><rect class="cell" x="{x + 1}" y="{y + 1}" '
                f'width="{cell_w - 2}" height="{cell_h - 2}" rx="4" fill-opacity="{_opacity(strength)}"/>'
                + _text(x + cell_w / 2, y + cell_h / 2 + 5, _share(rate), kind=_ink(strength))
                + "</g>"
            )
    return "".join([*parts, "</svg>"])


def tree_drawing(parents, ranks, rates=None, *, title):
    """The draft tree from the root downwards: one row per depth, rank written in the node, colour by its probability.

    parents: index of each node's parent, -1 for the root, in topological order. ranks: rank among the siblings.
    rates: acceptance per depth and rank; without them all nodes look alike.
    Raises ValueError if parents and ranks do not describe one tree.
    """
    if not parents or len(ranks) != len(parents):
        raise ValueError(f"a tree needs one rank per node, got {len(ranks)} ranks for {len(parents)} nodes")
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], start=1)):
        raise ValueError("parents must start with -1 for the root and name an earlier node everywhere else")
    depths = [0] * len(parents)
    children = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        depths[node] = depths[parent] + 1
        children[parent].append(node)
    probabilities = _path_probabilities(parents, ranks, depths, rates) if rates else None
    columns = _columns(parents, children, ranks)
    spacing, row_h, left, right, top, radius = 24, 78, 72, 12, 20, 10.5
    tree_w = (max(columns) + 1) * spacing
    width, height = max(480.0, left + tree_w + right), top + max(depths) * row_h + 20
    start = left + (width - left - right - tree_w + spacing) / 2  # centred if the tree is narrow
    place = [(start + column * spacing, top + depth * row_h) for column, depth in zip(columns, depths)]

    parts = [_open(width, height, title, least=0.75)]
    for depth in range(max(depths) + 1):
        name = f"depth {depth}" if depth else "root"
        parts.append(_text(4, top + depth * row_h + 4, name, anchor="start"))
    for node, parent in enumerate(parents[1:], start=1):
        (x0, y0), (x1, y1) = place[parent], place[node]
        middle = (y0 + y1) / 2
        parts.append(
            f'<path class="edge" d="M{x0:.1f},{y0} C{x0:.1f},{middle:.1f} {x1:.1f},{middle:.1f} {x1:.1f},{y1}"/>'
        )
    for node, (x, y) in enumerate(place):
        hint, strength = f"node {node}, depth {depths[node]}, rank {ranks[node]}", 0.3
        if probabilities:
            hint += f", accepted with probability {probabilities[node]:.4f}"
            strength = math.sqrt(min(max(probabilities[node], 0.0), 1.0))
        parts.append(
            f'<g><title>{hint}</title><circle class="node-back" cx="{x:.1f}" cy="{y}" r="{radius}"/>'
            f'<circle class="node" cx="{x:.1f}" cy="{y}" r="{radius}" fill-opacity="{_opacity(strength)}"/>'
            + _text(x, y + 4, str(ranks[node]) if node else "", kind=f"node-label {_ink(strength)}")
            + "</g>"
        )
    return "".join([*parts, "</svg>"])


def _path_probabilities(parents, ranks, depths, rates):
    """Probability that each node is accepted: the product of the rates on its path; 0 where no rate was measured."""
    probabilities = [1.0]
    for node in range(1, len(parents)):
        row = rates[depths[node] - 1] if depths[node] <= len(rates) else []
        rate = row[ranks[node]] if ranks[node] < len(row) else 0.0
        probabilities.append(probabilities[parents[node]] * rate)
    return probabilities


def _columns(parents, children, ranks):
    """Horizontal place of every node: leaves side by side, a parent in the middle of its children."""
    columns, next_leaf = [0.0] * len(children), -1.4
    order, stack = [], [0]
    while stack:  # depth first, low ranks to the left; no recursion, a chain may be long
        node = stack.pop()
        order.append(node)
        stack += sorted(children[node], key=lambda child: -ranks[child])
    last = -1
    for node in order:
        if not children[node]:
            next_leaf += 1 if parents[node] == last else 1.4  # a little space between groups of siblings
            columns[node], last = next_leaf, parents[node]
    for node in reversed(order):
        if children[node]:
            places = [columns[child] for child in children[node]]
            columns[node] = (min(places) + max(places)) / 2
    return columns


def _between(points, breaks):
    """The stretches of `points` between breaks, each from its own break on."""
    edges = [-math.inf, *sorted(breaks), math.inf]
    stretches = [[(x, y) for x, y in points if low <= x < high] for low, high in pairwise(edges)]
    return [stretch for stretch in stretches if stretch]


def _averaged(points):
    """At most MAX_POINTS points, each the mean of a bucket of consecutive points."""
    size = -(-len(points) // MAX_POINTS)
    buckets = [points[i : i + size] for i in range(0, len(points), size)]
    return [(bucket[-1][0], sum(y for _, y in bucket) / len(bucket)) for bucket in buckets]


def _ticks(values, start, largest):
    """Round tick values around `values`, and the two ends of the axis: (ticks, low, high)."""
    low, high = min(values), max(values)
    if start is not None:
        low = min(low, float(start))
    if high == low:
        low, high = (low, low + 1.0) if start is not None else (low - 1.0, high + 1.0)
    raw = (high - low) / 4
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if largest is not None:
        last = min(last, max(math.floor(largest / step + 1e-9), first + 1))
    ticks = [i * step for i in range(first, last + 1)]
    return ticks, ticks[0], max(ticks[-1], high)


def _number(value, ticks):
    """`value` as the label of one of `ticks`, all with the same number of decimals."""
    largest = max(abs(tick) for tick in ticks)
    if value == 0:
        return "0"
    if largest < 1e-2:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    if largest >= 10000 and ticks[1] - ticks[0] >= 100:
        return f"{value / 1000:g}k"
    places = next(n for n in range(9) if n == 8 or all(abs(round(tick, n) - tick) < 1e-6 * largest for tick in ticks))
    return f"{value:.{places}f}"


def _ink(strength):
    """Class of the text on a cell or node of this strength of colour."""
    return "on-strong" if strength > 0.75 else "on-weak"  # at 0.75 both texts have the same contrast


def _opacity(strength):
    return f"{0.06 + 0.94 * strength:.3f}"


def _share(value):
    """A probability in three characters: .42, .004, 1."""
    if value >= 0.995:
        return "1.0"
    text = f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
    return text.removeprefix("0") if float(text) else "0"


def _spread(places, gap, low, high):
    """The places moved apart until neighbours are `gap` from each other, all inside [low, high] if they fit."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    floor = low
    for i in order:
        moved[i] = max(moved[i], floor)
        floor = moved[i] + gap
    ceiling = high
    for i in reversed(order):
        moved[i] = min(moved[i], ceiling)
        ceiling = moved[i] - gap
    return moved


def _open(width, height, title, least=0.0):
    """Opening tag of a drawing. least: a narrow page shrinks it down to this share of its width; below that it scrolls."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    size += f' style="min-width:{least * width:.0f}px"' if least else ""
    return f'<svg {size} role="img"><title>{escape(title)}</title>'


def _text(x, y, text, *, anchor="middle", kind="tick", colour=None):
    style = f' style="fill:{colour}"' if colour else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
