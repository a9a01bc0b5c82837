"""Charts: values in proportion, all of them readable, nothing drawn without values."""

import re
from itertools import pairwise

import pytest

from headstart.evaluation.charts import MAX_POINTS, bar_chart, heat_map, line_chart, tree_drawing

RATES = [[0.5, 0.125, 0.0625], [0.25, 0.0625, 0.03125]]
TREE = {"parents": [-1, 0, 0, 1], "ranks": [0, 0, 1, 0], "rates": RATES, "expected_acceptance_length": 1.75}


def points_of(svg):
    return [
        [tuple(map(float, pair.split(","))) for pair in path.split()] for path in re.findall(r'points="([^"]*)"', svg)
    ]


def test_line_chart_places_values_in_proportion():
    (line,) = points_of(line_chart([("", [(0, 0.0), (50, 1.0), (100, 4.0)])], title="t", y_label="y", start=0))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert x1 - x0 == pytest.approx((x2 - x0) / 2, abs=0.11)
    assert y0 - y1 == pytest.approx((y0 - y2) / 4, abs=0.11)
    assert y2 < y1 < y0


def test_line_chart_leaves_out_what_is_not_finite_and_is_empty_without_values():
    (line,) = points_of(line_chart([("", [(1, 1.0), (2, float("nan")), (3, 2.0)])], title="t", y_label="y"))
    assert len(line) == 2
    assert line_chart([("", [(1, float("inf"))]), ("b", [])], title="t", y_label="y") == ""


def test_long_line_is_averaged_not_cut():
    (line,) = points_of(
        line_chart([("", [(i, float(i % 2)) for i in range(10 * MAX_POINTS)])], title="t", y_label="y", start=0)
    )
    assert len(line) == MAX_POINTS
    assert len({y for _, y in line}) == 1  # every bucket of ten holds five zeros and five ones
    x_last = max(x for x, _ in line)
    assert x_last > 450


def test_names_of_lines_that_end_together_do_not_overlap():
    svg = line_chart(
        [(f"head {i}", [(1, 1.0), (2, 1.0 + i / 1000)]) for i in range(5)], title="t", y_label="y", start=0
    )
    places = sorted(float(y) for y in re.findall(r'class="name" x="[\d.]+" y="([\d.]+)"', svg))
    assert len(places) == 5
    assert min(b - a for a, b in pairwise(places)) >= 12


def test_bars_are_in_proportion_and_those_of_a_kind_have_a_colour():
    bars = [("a", 1.0), ("b", 2.6, 2.5, 2.7), ("c", float("nan")), ("d", 2.0), ("e", 999.6)]
    svg = bar_chart(bars[:4], title="t", unit="u", kinds=[0, 1, 7, 0])
    widths = [float(width) for width in re.findall(r'class="bars"[^>]* width="([\d.]+)"', svg)]
    assert widths == pytest.approx([widths[1] / 2.6, widths[1], widths[1] / 1.3], abs=0.11)
    assert re.findall(r"--series-(\d)\)", svg) == ["0", "1", "0"]
    assert re.findall(r'class="name"[^>]*>([^<]*)<', svg) == ["1.00", "2.60", "2.00"]
    assert "2.50 to 2.70" in svg
    apart = bar_chart(bars, title="t", unit="u")
    assert len(set(re.findall(r"--series-(\d)\)", apart))) == 4
    assert ">1,000<" in apart


def test_heat_map_writes_every_rate_and_colours_the_larger_stronger():
    svg = heat_map(RATES, title="t")
    hints = [float(value) for value in re.findall(r"<title>depth \d, rank \d: ([\d.]+)</title>", svg)]
    assert hints == pytest.approx([rate for row in RATES for rate in row], abs=1e-4)
    strengths = [float(value) for value in re.findall(r'fill-opacity="([\d.]+)"', svg)]
    assert sorted(range(6), key=strengths.__getitem__) == sorted(
        range(6), key=[r for row in RATES for r in row].__getitem__
    )


def test_tree_shows_ranks_and_path_probabilities():
    svg = tree_drawing(TREE["parents"], TREE["ranks"], RATES, title="t")
    found = re.findall(r"node (\d+), depth (\d+), rank (\d+), accepted with probability ([\d.]+)", svg)
    assert found == [
        ("0", "0", "0", "1.0000"),
        ("1", "1", "0", "0.5000"),
        ("2", "1", "1", "0.1250"),
        ("3", "2", "0", "0.1250"),  # 0.5 of its parent times 0.25
    ]
    assert svg.count('class="edge"') == 3


def test_tree_nodes_of_a_depth_do_not_overlap():
    parents, ranks = [-1] + [0] * 5 + [1] * 4 + [2] * 3 + [6], [0, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 0]
    svg = tree_drawing(parents, ranks, title="t")
    place = [(float(x), float(y)) for x, y in re.findall(r'class="node" cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert len(place) == len(parents)
    width = float(re.search(r'viewBox="0 0 (\d+)', svg)[1])
    for level in {y for _, y in place}:
        row = sorted(x for x, y in place if y == level)
        assert row[0] >= 11
        assert row[-1] <= width - 11
        assert all(b - a >= 21 for a, b in pairwise(row))
