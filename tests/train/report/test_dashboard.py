"""The dashboard's panels: every one finds its data in an offline W&B run, and the reports of one run and of several draw it."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.cli import main
from headstart.heads.checkpoint import save_head
from headstart.heads.families import FAMILIES
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train import medusa
from headstart.train.report.dashboard import DASHBOARD, KINDS, Panel, curves
from headstart.train.report.report import write_comparison, write_report
from headstart.train.run import tracking
from headstart.train.run.tracking import MetricsFile

PANELS = [panel for panels in DASHBOARD.values() for panel in panels]
CURVES = [panel for panel in PANELS if panel.kind in ("line", "lines", "bars")]
# Logged, but no figure of how the training goes: the step's tokens so far, and the steps after an acceptance.
NO_PANEL = {"train/tokens", "acceptance/num_steps"}


def titles_without(keys):
    """Of the panels of curves that find nothing among these keys."""
    return {panel.title for panel in CURVES if not panel.find(keys)}


def titles_of_others(*names):
    """Of the panels whose figures only other families or stages log than those of these names."""
    return {panel.title for panel in CURVES if panel.only not in ("", *names)}


def keys_in_no_panel(keys):
    return set(keys) - {key for panel in CURVES for _, key in panel.find(keys)}


def history_of(records):
    """{key: [values]} of a .wandb file; nested keys joined by /."""
    history = {}
    for record in records:
        for item in record.history.item:
            history.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    return history


def test_every_panel_finds_finite_figures_in_an_offline_run(arguments, tmp_path, logged_out, read_records):
    pytest.importorskip("wandb")
    assert medusa.main(arguments(tracker="wandb", eval_prompts=3, eval_every=3, eval_tokens=8)) == 0
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    records = read_records(path)
    history = history_of(records)
    for panel in PANELS:
        if panel in CURVES:
            assert all(math.isfinite(value) for _, key in panel.find(history) for value in history[key])
        elif panel.kind == "heat map":
            drawing = (path.parent / "files" / history[f"{panel.key}/path"][-1]).read_text()
            assert history[f"{panel.key}/_type"] == ["html-file"] * 2
            assert "<title>depth 3, rank 9: " in drawing
        elif panel.kind == "table":
            table = json.loads((path.parent / "files" / history[f"{panel.key}/path"][-1]).read_text())
            assert table["data"]
            assert all(math.isfinite(cell) for row in table["data"] for cell in row if not isinstance(cell, str))
    assert titles_without(history) == titles_of_others()
    assert [name for name, _ in PANELS[1].find(history)] == ["head 0", "head 1", "head 2"]
    lines = MetricsFile(tmp_path / "run" / "metrics.jsonl").lines()
    assert history["train/peak_memory_gib"] == [
        pytest.approx(line["peak_memory_gib"]) for line in lines if "lr" in line
    ]
    assert (
        0.05 < history["train/peak_memory_gib"][-1] < 500
    )  # GiB: torch alone takes more than the one, no machine the other
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    cells = json.loads((path.parent / "files" / history["acceptance/rates/path"][-1]).read_text())["data"]
    assert {(depth, rank): rate for _, depth, rank, rate in cells} == {
        (d + 1, r): pytest.approx(rate) for d, row in enumerate(saved["rates"]) for r, rate in enumerate(row)
    }
    config = {one.key: json.loads(one.value_json) for record in records for one in record.run.config.update}
    config |= {one.key: json.loads(one.value_json) for record in records for one in record.config.update if one.key}
    assert config["family"] == saved["family"] == "Medusa"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.key)
def test_every_family_logs_under_the_same_keys(family, trainers):
    run = trainers[family.key].run(max_steps=2, eval_prompts=2, eval_tokens=6)
    keys = {key for line in MetricsFile(run / "metrics.jsonl").lines() for key in curves(line)}
    assert titles_without(keys) == titles_of_others(family.name)
    assert keys_in_no_panel(keys) == NO_PANEL
    acceptance = json.loads((run / "acceptance.json").read_text())
    assert acceptance["family"] == family.name
    assert acceptance["rates"]
    assert acceptance["samples"]


def test_joint_stage_logs_its_own_figures_and_describes_the_same_target(
    arguments, word_target, tmp_path, logged_out, monkeypatch, read_records
):
    pytest.importorskip("wandb")
    save_head(Medusa(MedusaConfig(32, 48, 3)), tmp_path / "start")
    keys = {"stage": "joint", "start_from": tmp_path / "start", "max_steps": 2, "eval_prompts": 2, "eval_tokens": 6}
    monkeypatch.setattr(tracking, "UPLOAD_LIMIT", 40_000)
    assert medusa.main(arguments(**keys, tracker="wandb")) == 0
    keys = {key for line in MetricsFile(tmp_path / "run" / "metrics.jsonl").lines() for key in curves(line)}
    assert titles_without(keys) == titles_of_others("joint")
    assert keys_in_no_panel(keys) == NO_PANEL
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    artifacts = [record.artifact for record in read_records(path) if record.WhichOneof("record_type") == "artifact"]
    target, *_, head = artifacts
    frozen = AutoModelForCausalLM.from_pretrained(word_target)
    assert json.loads(target.metadata)["num_parameters"] == sum(one.numel() for one in frozen.parameters())
    # The heads' own files are below the limit, with adapter/ they are above it.
    sizes = [one.stat().st_size for one in (tmp_path / "run" / "head").rglob("*") if one.is_file()]
    own = [one.stat().st_size for one in (tmp_path / "run" / "head").iterdir() if one.is_file()]
    assert sum(own) < 40_000 < sum(sizes)
    assert not any(entry.local_path for entry in head.manifest.contents)


@pytest.mark.gpu
def test_peak_memory_of_a_gpu_is_the_most_that_was_allocated_on_it():
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats(device)
    before = tracking.peak_memory(device)
    torch.empty(2**28, dtype=torch.uint8, device=device)  # freed again at once
    torch.empty(2**20, dtype=torch.uint8, device=device)
    assert tracking.peak_memory(device) == pytest.approx(before + 0.25, abs=0.01)


def test_lines_are_told_apart_by_their_number_and_nothing_else_matches():
    panel = Panel("t", "lines", "train/head([0-9]+)_loss", series="token", first=1)
    keys = ["train/head10_loss", "train/head2_loss", "train/head2_top1", "train/loss", "x/train/head1_loss"]
    assert panel.find(keys) == [("token 3", "train/head2_loss"), ("token 11", "train/head10_loss")]
    assert {panel.kind for panel in PANELS} == set(KINDS)


# The report.


SELECTOR = ("selector_loss", "selector_top1", "selector_recall")


@pytest.fixture
def runs(tmp_path):
    """Two run folders with what every panel shows."""
    found = []
    for number, name in enumerate(("medusa", "eagle")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        train = {"step": 1, "kind": "train", "loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "tokens": 9, "skipped_steps": 0}
        train |= {"tokens_per_second": 1234.0 + number, "peak_memory_gib": 2.25}
        train |= {
            f"head{k}_{what}": 0.5
            for k in range(2)
            for what in ("loss", "top1", "top5", "alpha", "feature_loss", "confidence_loss", *SELECTOR)
        }
        train["target_loss"] = 1.5
        measured = {"step": 2, "kind": "acceptance", "acceptance_length": 1.5 + number, "per_position": [0.4, 0.1]}
        measured |= {"heldout_loss": 1.75, "frozen_heldout_loss": 1.25, "head_loss": 2.5, "set_losses": {"code": 2.25}}
        figure = {"set": "code", "acceptance_length": 1.25}
        measured["sets"] = [figure, *(figure | {"turns": "later", "temperature": t} for t in (0.0, 1.0))]
        lines = [json.dumps(line) + "\n" for line in (train, train | {"step": 2}, measured)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        acceptance = {
            "acceptance_length": 1.5 + number,
            "family": name.upper(),
            "rates": [[0.5, 0.25], [0.125, 0.0625]],
        }
        acceptance["samples"] = [{"prompt": f"ask {name}", "output": "answer"}]
        (folder / "acceptance.json").write_text(json.dumps(acceptance))
        (folder / "config.yaml").write_text(f"target: some/model\nlr: 0.{number}\n")
        found.append(folder)
    return found


def shows(page, title, form):
    """Does the page hold the panel of this title, filled, as a drawing or as a group of something else?"""
    if form == "drawing":
        drawing = page.split(f"<title>{title}</title>", 1)
        return len(drawing) == 2 and any(mark in drawing[1].split("</svg>")[0] for mark in ("<circle", "<rect"))
    group = page.split(f'aria-label="{title}">', 1)
    return len(group) == 2 and any(mark in group[1].split("</div>")[0] for mark in ("<td", "<th", "<pre"))


def form_of(panel):
    return "group" if panel.kind in ("table", "recipes") else "drawing"


def test_report_shows_every_panel(runs, tmp_path):
    one = write_report(runs[0]).read_text()
    several = write_comparison(runs, tmp_path / "both.html").read_text()
    for section, panels in DASHBOARD.items():
        page = several if section.startswith("Comparison") else one
        for panel in panels:
            assert shows(page, panel.title, form_of(panel)), panel
    (runs[0] / "metrics.jsonl").write_text("")
    empty = write_report(runs[0]).read_text()
    assert not any(shows(empty, panel.title, "drawing") for panel in DASHBOARD["Training"])


def test_comparison_holds_the_figures_of_every_run(runs, tmp_path):
    page = write_comparison([str(run) for run in runs], str(tmp_path / "new" / "both.html")).read_text()
    section = page.split("<h2>Comparison across heads</h2>")[1].split("</section>")[0]
    bars = section.split("<title>Acceptance length at the end</title>")[1].split("</svg>")[0]
    assert bars.index("medusa, MEDUSA") < bars.index(">1.50<") < bars.index("eagle, EAGLE") < bars.index(">2.50<")
    assert ">1,234<" in section
    assert ">1,235<" in section
    table = section.split("<table>")[1]
    assert '<th scope="row">lr</th><td>0.0</td><td>0.1</td>' in table
    assert "target" not in table  # the same in both
    length = page.split("<title>Acceptance length</title>")[1].split("</svg>")[0]
    assert ">medusa</text>" in length
    assert ">eagle</text>" in length
    for name in ("medusa", "eagle"):
        for title in ("Loss of each head", "Acceptance per drafted token", "Acceptance rate per depth and rank"):
            assert shows(page, f"{title}: {name}", "drawing")
    assert "ask eagle" in page


def test_runs_called_alike_are_named_by_their_paths(runs, tmp_path):
    other = tmp_path / "b" / "medusa"
    other.parent.mkdir()
    runs[1].rename(other)
    page = write_comparison([runs[0], other], tmp_path / "both.html").read_text()
    assert "<h1>runs/medusa · b/medusa</h1>" in page
    longer = [tmp_path / f"an-experiment-with-a-long-name-{n}" for n in (1, 2)]
    for old, new in zip((runs[0], other), longer):
        old.rename(new)
    page = write_comparison(longer, tmp_path / "both.html").read_text()
    assert "<h1>an-exper…-name-1 · an-exper…-name-2</h1>" in page
    with pytest.raises(ValueError, match="given twice"):
        write_comparison([longer[0], f"{longer[0]}/."], tmp_path / "both.html")


def test_command_compares_only_into_a_named_file(runs, tmp_path, capsys):
    words = ["report", *map(str, runs)]
    assert main(words) == 2
    assert "--output" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path / "page.html")]) == 0
    assert "Comparison across heads" in (tmp_path / "page.html").read_text()
    assert main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out.endswith(f"{runs[0] / 'report.html'}\n")
