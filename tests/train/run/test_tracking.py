"""W&B: an offline run read back from its file; never a question, never a crash."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train import medusa
from headstart.train.run import acceptance, run_folder
from headstart.train.run.tracking import MetricsFile, WandbTracker, wandb_mode


def test_offline_run_holds_config_curves_plot_and_samples(arguments, tmp_path, logged_out, read_records, capfd):
    pytest.importorskip("wandb")
    words = arguments(tracker="wandb", eval_prompts=3, eval_every=3, eval_tokens=8, lk_eta=2.5)
    environment = dict(os.environ)
    assert medusa.main(words) == 0
    assert "W&B: offline" in capfd.readouterr().err
    os.environ.pop("WANDB_SERVICE", None)  # the library's own: where its background process listens
    assert dict(os.environ) == environment
    assert not [path for path in (tmp_path / "home").rglob("*") if "wandb" in str(path)]

    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    place = json.loads((tmp_path / "run" / "wandb.json").read_text())
    assert place == {"run": path.parent.name.rsplit("-", 1)[1], "offline": True}
    records = read_records(path)
    updates = [one for record in records for one in (*record.run.config.update, *record.config.update)]
    config = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in updates}
    assert config["lk_eta"] == 2.5
    assert config["target"] == words[1]
    assert set(config) >= set(vars(medusa.parse_recipe(medusa.Recipe, words, "")))

    history = []
    for record in records:
        if record.history.item:
            history.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    lines = MetricsFile(tmp_path / "run" / "metrics.jsonl").lines()
    for kind, name in (("train", "loss"), ("train", "head2_top5"), ("acceptance", "acceptance_length")):
        curve = {json.loads(h["_step"]): json.loads(h[f"{kind}/{name}"]) for h in history if f"{kind}/{name}" in h}
        assert curve == {line["step"]: pytest.approx(line[name]) for line in lines if line["kind"] == kind}
    media = [key for h in history for key in h]
    # Tables are logged as {"_type": "table-file", ...}, which the history holds as nested keys.
    assert {"acceptance/per_position_table/path", "samples/path"} <= set(media)
    assert "vega" in json.dumps(config["_wandb/visualize/acceptance/per_position"]).lower()
    tables = [json.loads(file.read_text()) for file in path.parent.glob("files/media/table/**/*.json")]
    samples = [table for table in tables if table["columns"] == ["step", "prompt", "output"]]
    assert len(samples) == 2
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    expected = [[6, sample["prompt"], sample["output"]] for sample in saved["samples"]]
    assert expected in [table["data"] for table in samples]
    bars = [table["data"] for table in tables if table["columns"] == ["position", "accepted"]]
    assert [[i, rate] for i, rate in enumerate(saved["per_position"])] in [
        [[i, pytest.approx(rate)] for i, rate in bar] for bar in bars
    ]


def test_no_text_of_a_prompt_or_an_output_is_logged_without_log_samples(arguments, tmp_path, logged_out, monkeypatch):
    """Neither in a table nor anywhere else in what W&B keeps; a resumed run may change its mind."""
    pytest.importorskip("wandb")
    measure, private = acceptance.measure_acceptance, ("a private question", "a private answer")

    def measure_private(*words):
        return measure(*words) | {"samples": [dict(zip(("prompt", "output"), private))]}

    monkeypatch.setattr(acceptance, "measure_acceptance", measure_private)
    words = arguments(tracker="wandb", eval_prompts=3, eval_tokens=8, max_steps=2)

    def kept_by_wandb():
        files = [path.read_bytes() for path in (tmp_path / "run" / "wandb").rglob("*") if path.is_file()]
        assert any(b"acceptance/per_position" in content for content in files)
        return [text for text in private if any(text.encode() in content for content in files)]

    assert medusa.main([*words, "--log_samples", "false"]) == 0
    assert kept_by_wandb() == []
    saved = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert tuple(saved["samples"][0].values()) == private
    assert medusa.main([*words, "--resume", "--max_steps", "3", "--log_samples", "true"]) == 0
    assert kept_by_wandb() == list(private)


def finish(folder, tracker):
    """The end of a run in `folder`."""
    run = object.__new__(run_folder.RunFolder)
    run.path, run.is_main, run.adapter, run.curves, run.note = folder, True, None, tracker, print
    run.family, run.state = "Medusa", {"step": 7, "tokens": 9, "recipe": {"loss": "kl"}}
    run.metrics, run.saver = MetricsFile(folder / "metrics.jsonl"), SimpleNamespace(wait=lambda: None)
    run.finish(Medusa(MedusaConfig(8, 16)))


def test_the_place_of_a_head_is_that_of_the_newest_one(tmp_path, monkeypatch):
    """Online as W&B tells it; of a run that is extended without W&B nothing is left, for a card or an address to go there."""
    pytest.importorskip("wandb")
    logged = []
    online = SimpleNamespace(offline=False, url="https://w/run", entity="me", project="headstart")
    online.log_artifact = lambda artifact, aliases: logged.append((artifact.name, aliases))
    monkeypatch.setattr(WandbTracker, "_run", lambda tracker: online)
    folder = tmp_path / "my-run"
    folder.mkdir()
    tracker = WandbTracker(None, folder, {}, print, None)
    tracker.active = True
    finish(folder, tracker)
    place = {"run": "https://w/run", "artifact": "me/headstart/my-run-head:step-7"}
    assert json.loads((folder / "wandb.json").read_text()) == place
    assert logged == [("my-run-head", ["latest", "step-7"])]
    finish(folder, WandbTracker(None, folder, {}, print, None))
    assert not (folder / "wandb.json").exists()


def test_missing_wandb_is_a_note(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "has_wandb", lambda: False)
    assert medusa.main(arguments(tracker="wandb")) == 0
    assert "wandb is not installed" in capsys.readouterr().err
    assert len(MetricsFile(tmp_path / "run" / "metrics.jsonl").lines()) == 6


def test_server_that_cannot_be_reached_means_offline(arguments, logged_out):
    """In a process of its own: the library reads where its server is only once."""
    pytest.importorskip("wandb")
    patient = "import sys; from headstart.train import medusa; from headstart.train.run import tracking; "
    patient += "tracking.START_TIMEOUT = 2; "
    words = [sys.executable, "-c", patient + "sys.exit(medusa.main(sys.argv[1:]))"]
    words += arguments(tracker="wandb", max_steps=2)
    # Nobody listens on the discard port.
    server = {"WANDB_API_KEY": "0123456789" * 4, "WANDB_BASE_URL": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env=os.environ | server, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "W&B does not start online" in done.stderr
    assert "W&B: offline" in done.stderr


def test_mode_is_online_only_where_this_machine_is_logged_in(tmp_path):
    netrc = Path(tmp_path, "netrc")
    netrc.write_text("machine api.wandb.ai login user password 0123\n")
    nowhere = {"NETRC": str(tmp_path / "none")}
    assert wandb_mode(nowhere) == "offline"
    assert wandb_mode(nowhere | {"WANDB_API_KEY": "k"}) == "online"
    assert wandb_mode({"NETRC": str(netrc)}) == "online"
    assert wandb_mode({"NETRC": str(netrc), "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"
    assert wandb_mode({"NETRC": str(netrc), "WANDB_MODE": "offline"}) == "offline"
    assert wandb_mode(nowhere | {"WANDB_MODE": "online"}) == "offline"
    assert wandb_mode({"NETRC": str(netrc), "WANDB_MODE": "disabled"}) == "disabled"
    netrc.write_text("this is not a netrc file {")
    assert wandb_mode({"NETRC": str(netrc)}) == "offline"
