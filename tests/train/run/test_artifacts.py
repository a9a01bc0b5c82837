"""A run's artifacts in W&B: its heads, and of the target and the data what they are and where they lie."""

import json
import os

import pytest

from headstart.train import medusa
from headstart.train.run import tracking
from headstart.train.run.lineage import artifact_name


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


def test_artifact_names_are_what_wandb_takes():
    assert artifact_name("data", "/a place/conversations.jsonl") == "data-a-place-conversations.jsonl"
    assert artifact_name("target", "org/model") == "target-org-model"
    assert len(artifact_name("x" * 300)) == 128
