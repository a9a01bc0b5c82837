"""A head that came from a W&B run: its card names run and artifact, the artifact learns the Hub's address, nothing fails for it."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import yaml

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export.export import main

ONLINE = {"run": "https://wandb.example/me/headstart/runs/abc", "artifact": "me/headstart/run-head:step-9"}
OFFLINE = {"run": "abc", "offline": True}


@pytest.fixture
def run(tmp_path):
    """A run folder with its final head, and the head of a checkpoint."""
    torch.manual_seed(0)
    for folder in ("head", "checkpoints/step-000004/head"):
        save_head(Medusa(MedusaConfig(16, 33, num_heads=2)), tmp_path / "run" / folder)
    return tmp_path / "run"


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the library: one artifact."""
    library = ModuleType("wandb")
    library.asked, library.logged_in, library.saved = [], True, []
    artifact = SimpleNamespace(metadata={"loss": "ce"}, description="the heads")
    artifact.save = lambda: library.saved.append((dict(artifact.metadata), artifact.description))
    library.login = lambda **keywords: library.asked.append(keywords) or library.logged_in

    def find(name):
        if name != ONLINE["artifact"]:
            raise ValueError(f"no artifact {name}")
        return artifact

    library.Api = lambda: SimpleNamespace(artifact=find)
    monkeypatch.setitem(sys.modules, "wandb", library)
    return library


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def export(run, source, out, *arguments):
    return main([str(run / source), "--format", "medusa", "--output", str(out), *arguments])


def test_the_card_names_run_and_artifact_and_the_artifact_the_address(run, tmp_path, hub_here, wandb, capsys):
    (run / "wandb.json").write_text(json.dumps(ONLINE))
    assert export(run, ".", tmp_path / "out", "--push-to-hub", "me/heads") == 0
    matter = front_matter(tmp_path / "out")
    assert matter["wandb"] == ONLINE
    assert matter["library_name"] == "headstart"  # and what was there before
    address = f"{hub_here.url}/me/heads"
    assert wandb.saved == [({"loss": "ce", "hub": address}, f"the heads\nOn the Hugging Face Hub: {address}")]
    assert wandb.asked == [{"prompt": False, "verify": False}]
    assert f"the W&B artifact {ONLINE['artifact']} names the address" in capsys.readouterr().out
    assert main(["push", str(tmp_path / "out"), "me/heads"]) == 0
    assert wandb.saved[1] == wandb.saved[0]  # said once


def test_a_checkpoint_names_the_run_and_no_artifact(run, tmp_path, hub_here, wandb):
    (run / "wandb.json").write_text(json.dumps(ONLINE))
    assert export(run, "checkpoints/step-000004", tmp_path / "out", "--push-to-hub") == 0
    assert front_matter(tmp_path / "out")["wandb"] == {"run": ONLINE["run"]}
    assert wandb.asked == []


@pytest.mark.parametrize(
    ("told", "logged_in", "said"),
    [
        (OFFLINE, True, "note: the run abc was logged to W&B offline"),
        (ONLINE, False, "does not know the address (W&B is not logged in here"),
        (
            ONLINE | {"artifact": "me/headstart/gone:v1"},
            True,
            "does not know the address (no artifact me/headstart/gone:v1)",
        ),
    ],
)
def test_what_wandb_does_not_take_is_a_note(run, tmp_path, hub_here, wandb, capsys, told, logged_in, said):
    (run / "wandb.json").write_text(json.dumps(told))
    wandb.logged_in = logged_in
    assert export(run, ".", tmp_path / "out", "--push-to-hub") == 0
    assert said in capsys.readouterr().out
    assert wandb.saved == []
    assert front_matter(tmp_path / "out")["wandb"] == told


def test_a_run_without_wandb_has_no_word_of_it(run, tmp_path, hub_here, wandb, capsys):
    assert export(run, ".", tmp_path / "out", "--push-to-hub") == 0
    assert "wandb" not in front_matter(tmp_path / "out")
    assert "W&B" not in capsys.readouterr().out


def test_a_broken_file_ends_the_export_before_it_writes(run, tmp_path, capsys):
    (run / "wandb.json").write_text("{")
    assert export(run, ".", tmp_path / "out") == 2
    assert "wandb.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
