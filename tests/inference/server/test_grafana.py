"""docs/grafana.json: every metric and label that it names is exported, and every family that is exported is shown."""

import json
import re
from pathlib import Path

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana.json"
METRIC = re.compile(r"\b(?:vllm|headstart):\w+")


def test_every_metric_of_the_dashboard_is_exported(http):
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    board = json.loads(DASHBOARD.read_text())
    samples = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    labels = {}  # of each metric
    for line in samples:
        labels.setdefault(METRIC.match(line)[0], set()).update(re.findall(r'(\w+)="', line))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries = [variable["query"] for variable in board["templating"]["list"]]
    named = {name for text in expressions + queries for name in METRIC.findall(text)}
    assert len(expressions) > 20
    assert named - set(labels) == set()
    for text in expressions:
        used = set(re.findall(r'(\w+)="\$', text)) | set(re.findall(r"by \((\w+)\)", text))
        assert used, text
        assert all(used - labels[name] <= {"position"} for name in METRIC.findall(text)), text
        assert text.count("(") == text.count(")")
    # _created: when a counter began; _count and _sum are in the histograms' buckets.
    shown = {re.sub(r"_(bucket|total)$", "", name) for name in named}
    exported = {re.sub(r"_(bucket|total|created|count|sum)$", "", name) for name in labels}
    assert exported == shown


def test_panels_lie_side_by_side():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
