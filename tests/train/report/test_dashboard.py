"""The dashboard: every panel finds its data in an offline W&B run, the report draws every panel, and W&B gets one view, updated."""

import json
import math
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM

from headstart.cli import main
from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train import eagle, eagle3, medusa, mlp_speculator
from headstart.train.report import workspace
from headstart.train.report.dashboard import DASHBOARD, KINDS, Panel, curves
from headstart.train.report.report import write_comparison, write_report
from headstart.train.run import tracking
from headstart.train.run.lineage import artifact_name
from headstart.train.run.tracking import MetricsFile

PANELS = [panel for panels in DASHBOARD.values() for panel in panels]
CURVES = [panel for panel in PANELS if panel.kind in ("line", "lines", "bars")]
# Logged, but no figure of how the training goes: the step's tokens so far, and the steps behind an acceptance.
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


def test_head_is_an_artifact_that_knows_its_target_and_its_data(arguments, tmp_path, logged_out, read_records):
    pytest.importorskip("wandb")
    words = arguments(tracker="wandb", max_steps=2)
    assert medusa.main(words) == 0
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    artifacts = [record.artifact for record in read_records(path) if record.WhichOneof("record_type") == "artifact"]
    target, data, head = artifacts
    assert (target.type, data.type, head.type) == ("model", "dataset", "model")
    # What a run uses, and what it made.
    assert (target.use_after_commit, data.use_after_commit, head.use_after_commit) == (True, True, False)
    told = json.loads(head.metadata)
    assert told["target"] == json.loads(target.metadata)
    assert told["data"] == json.loads(data.metadata)
    state = json.loads(next((tmp_path / "run" / "checkpoints").glob("*/state.json")).read_text())
    assert told["data"]["rows"] == state["rows"]
    assert (told["target"]["name"], told["data"]["name"]) == (words[1], words[3])
    assert (told["family"], told["num_heads"], told["tokens"]) == ("Medusa", 3, state["tokens"])
    assert sorted(head.aliases) == ["latest", "step-2"]
    # The head's files are not copied; of target and data there is a description and an address, never a file.
    assert {os.path.dirname(entry.local_path) for entry in head.manifest.contents} == {str(tmp_path / "run" / "head")}
    for artifact, place in ((target, words[1]), (data, words[3])):
        files = [entry for entry in artifact.manifest.contents if entry.local_path]
        assert [entry.path for entry in files] == ["source.json"]
        assert files[0].local_path.startswith(str(tmp_path / "run" / "wandb"))
        addresses = [entry.ref for entry in artifact.manifest.contents if not entry.local_path]
        assert addresses
        assert all(address.startswith(f"file://{place}") for address in addresses)


def test_every_checkpoints_head_is_a_version_if_asked(arguments, tmp_path, logged_out, read_records):
    pytest.importorskip("wandb")
    words = arguments(tracker="wandb", max_steps=3, checkpoint_every=1, keep_checkpoints=1, log_checkpoints="true")
    assert medusa.main(words) == 0
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    artifacts = [record.artifact for record in read_records(path) if record.WhichOneof("record_type") == "artifact"]
    _, _, *heads = artifacts
    assert {head.name for head in heads} == {"run-head"}
    assert [sorted(head.aliases)[-1] for head in heads] == ["step-1", "step-2", "step-3", "step-3"]
    assert all(json.loads(head.metadata)["target"]["name"] == words[1] for head in heads)
    # The first two checkpoints are gone; what is to be uploaded of them is not.
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
    for head in heads:
        assert all(os.path.isfile(entry.local_path) for entry in head.manifest.contents)
        assert any(entry.path == "config.json" for entry in head.manifest.contents)


def test_head_above_the_limit_is_pointed_at_not_uploaded(arguments, tmp_path, logged_out, read_records, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr(tracking, "UPLOAD_LIMIT", 10)
    assert medusa.main(arguments(tracker="wandb", max_steps=1)) == 0
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    *_, head = [record.artifact for record in read_records(path) if record.WhichOneof("record_type") == "artifact"]
    assert not any(entry.local_path for entry in head.manifest.contents)
    assert any(entry.ref.endswith("run/head/config.json") for entry in head.manifest.contents)


def test_what_wandb_refuses_is_told_once_and_ends_no_run(arguments, tmp_path, logged_out, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb")

    def refuse(*_, **__):
        raise RuntimeError("no\nmore")

    for owner, name in ((wandb, "Table"), (wandb.Artifact, "new_file"), (wandb.Artifact, "add_dir")):
        monkeypatch.setattr(owner, name, refuse)
    assert medusa.main(arguments(tracker="wandb", eval_prompts=3, eval_every=2, eval_tokens=8)) == 0
    said = capsys.readouterr().err
    for what in ("the lineage", "the acceptance", "the head"):
        assert said.count(f"W&B does not take {what} (no)") == 1
    assert (tmp_path / "run" / "head" / "config.json").is_file()


@pytest.mark.parametrize(
    ("family", "script", "builder"),
    [
        ("Medusa", medusa, "arguments"),
        ("MLP speculator", mlp_speculator, "speculator_arguments"),
        ("EAGLE", eagle, "eagle_arguments"),
        ("EAGLE-3", eagle3, "eagle3_arguments"),
    ],
)
def test_every_family_logs_under_the_same_keys(family, script, builder, request, tmp_path):
    arguments = request.getfixturevalue(builder)
    assert script.main(arguments(max_steps=2, eval_prompts=2, eval_tokens=6)) == 0
    keys = {key for line in MetricsFile(tmp_path / "run" / "metrics.jsonl").lines() for key in curves(line)}
    assert titles_without(keys) == titles_of_others(family)
    assert keys_in_no_panel(keys) == NO_PANEL
    acceptance = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert acceptance["family"] == family
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


@pytest.fixture
def runs(tmp_path):
    """Two run folders with what every panel shows."""
    found = []
    for number, name in enumerate(("medusa", "eagle")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        train = {"step": 1, "kind": "train", "loss": 2.5, "lr": 0.1, "grad_norm": 1.5, "tokens": 9}
        train |= {"tokens_per_second": 1234.0 + number, "peak_memory_gib": 2.25}
        train |= {
            f"head{k}_{what}": 0.5 for k in range(2) for what in ("loss", "top1", "top5", "alpha", "feature_loss")
        }
        train["target_loss"] = 1.5
        measured = {"step": 2, "kind": "acceptance", "acceptance_length": 1.5 + number, "per_position": [0.4, 0.1]}
        measured |= {"heldout_loss": 1.75, "frozen_heldout_loss": 1.25}
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
    assert bars.index("medusa, MEDUSA") < bars.index(">1.5<") < bars.index("eagle, EAGLE") < bars.index(">2.5<")
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


# The W&B workspace.


@pytest.mark.filterwarnings("ignore:Pydantic V1 style")  # the library's own
def test_printed_workspace_holds_every_panel_and_contacts_nobody(capsys, monkeypatch):
    pytest.importorskip("wandb_workspaces")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["dashboard", "--print", "--entity", "someone", "--name", "Heads"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert (found["entity"], found["project"], found["title"]) == ("someone", "headstart", "Heads")
    sections = found["spec"]["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(DASHBOARD)
    for section, panels in zip(sections, DASHBOARD.values()):
        for shown, panel in zip(section["panels"], panels, strict=True):
            config = shown["config"]
            if panel.kind == "line":
                assert (config["metrics"], config["chartTitle"]) == ([panel.key], panel.title)
            elif panel.kind == "lines":
                assert config["metricRegex"] == f"^{panel.key}$"
                assert config["useMetricRegex"] is True
            elif panel.kind == "heat map":
                assert config["mediaKeys"] == [panel.key]
            elif panel.kind == "table":
                assert f'"{panel.key}"' in json.dumps(config)
            elif panel.kind == "bars":
                assert (config["metrics"], config["groupBy"]) == ([panel.key], "family.value")
            else:
                assert shown["viewType"] == "Run Comparer"
    ids = [shown["__id__"] for section in sections for shown in section["panels"]]
    assert len(set(ids)) == len(PANELS)
    assert main(["dashboard", "--print", "--entity", "someone", "--name", "Heads"]) == 0
    assert capsys.readouterr().out == text
    assert main(["dashboard", "--print", "--entity", "someone", "--name", "Other heads"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] != found["name"]


class Wandb(ThreadingHTTPServer):
    """As much of a W&B server as the dashboard needs: one user, projects by name, views by name."""

    def __init__(self, *projects):
        super().__init__(("127.0.0.1", 0), Answers)
        self.views, self.saved = {project: {} for project in projects}, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, query, variables):
        if "upsertView" in query:
            views = self.views[variables["projectName"]]
            identity = variables.get("id") or f"VIEW{len(views)}"
            views[variables["name"]] = identity
            self.saved.append(variables | {"id": identity})
            return {"upsertView": {"view": {"id": identity, "name": variables["name"]}, "inserted": True}}
        if "allViews" in query:
            views = self.views.get(variables["name"])
            found = [] if views is None or variables["viewName"] not in views else [views[variables["viewName"]]]
            edges = [{"node": {"id": identity}} for identity in found]
            return {"project": None if views is None else {"allViews": {"edges": edges}}}
        return {"viewer": {"id": "U", "entity": "someone", "username": "someone", "teams": {"edges": []}}}


class Answers(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = json.dumps({"data": self.server.answer(asked["query"], asked.get("variables") or {})}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_second_call_updates_the_view_of_the_first(logged_out):
    """In a process of its own: the library reads where its server is only once."""
    pytest.importorskip("wandb_workspaces")
    server = Wandb("headstart")
    login = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0123456789" * 4}
    calls = [[], ["--entity", "someone"], ["--project", "nowhere"]]
    code = f"from headstart.cli import main; print([main(['dashboard', *words]) for words in {calls}])"
    options = {"capture_output": True, "text": True, "timeout": 100, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | login | {"WANDB_MODE": "offline"}, **options
        )
    finally:
        server.shutdown()
        server.server_close()
    view = workspace.view_id("someone", "headstart", "Headstart")
    assert done.stdout.splitlines() == [f"{login['WANDB_BASE_URL']}/someone/headstart?nw={view}"] * 2 + ["[0, 0, 2]"], (
        done
    )
    assert [saved["id"] for saved in server.saved] == ["VIEW0", "VIEW0"]
    assert [saved["displayName"] for saved in server.saved] == ["Headstart"] * 2
    spec = json.loads(server.saved[1]["spec"])
    names = [section["name"] for section in spec["section"]["panelBankConfig"]["sections"]]
    assert names == list(DASHBOARD)
    assert "W&B knows no project someone/nowhere" in done.stderr


def test_without_a_login_the_command_says_how_to_log_in(logged_out, capsys):
    pytest.importorskip("wandb_workspaces")
    assert main(["dashboard"]) == 2
    assert "wandb login" in capsys.readouterr().err


def test_without_the_package_the_command_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert main(["dashboard", "--print"]) == 2
    assert 'pip install "wandb-workspaces' in capsys.readouterr().err


def test_artifact_names_are_what_wandb_takes():
    assert artifact_name("data", "/a place/conversations.jsonl") == "data-a-place-conversations.jsonl"
    assert artifact_name("target", "org/model") == "target-org-model"
    assert len(artifact_name("x" * 300)) == 128
