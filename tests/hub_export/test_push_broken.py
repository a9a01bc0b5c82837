"""Pushes that fail: a busy Hub, connections cut in a file and between files, a killed process; what is then sent again."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export import push as push_file, push_command
from headstart.hub_export.export import main

WEIGHTS = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    save_head(Medusa(MedusaConfig(16, 33, num_heads=2, base_model_name_or_path="some/target")), folder / "head")
    assert main([str(folder / "head"), "--format", "medusa", "--output", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def exported(exported_once, tmp_path):
    """An export with two weight files of more than 4,000 bytes."""
    return shutil.copytree(exported_once, tmp_path / "out")


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def push(folder, *arguments):
    return main(["push", str(folder), "team/first", *arguments])


@pytest.mark.parametrize("status", [503, 429, None])
def test_what_the_hub_does_not_answer_is_asked_again(exported, hub_here, status, capsys):
    matches = (
        "GET /api/whoami",
        "GET /api/models/team",
        "repos/create",
        "branch/bf16",
        "preupload",
        "batch",
        "/commit/",
    )
    faults = [hub_here.fail(match, **({"status": status} if status else {})) for match in (*matches, "PUT /storage")]
    assert push(exported, "--revision", "bf16") == 0, capsys.readouterr().err
    assert [fault.match for fault in faults if fault.times] == []
    assert hub_here.repositories["team/first"]["branches"]["bf16"] == read(exported)
    assert "creating team/first: " in (err := capsys.readouterr().err)
    assert "attempt 2 of 4 in 0 s" in err


def test_a_hub_that_stays_busy_is_given_up_with_the_command_that_goes_on(exported, hub_here, capsys):
    hub_here.fail("/commit/", status=503, times=99)
    assert push(exported) == 2
    *notes, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("heads.export push: error: could not push to team/first: Server error '503")
    assert f"`heads.export push {exported} team/first` sends what is missing" in last
    assert len([line for line in hub_here.requests if "/commit/" in line]) == 4 == len(push_file.PAUSES) + 1
    assert len([note for note in notes if note.startswith("committing: ")]) == 3


@pytest.mark.parametrize(("asked", "waited"), [("7", 7), ("99999", push_file.LONGEST_WAIT), ("tomorrow", 0)])
def test_the_hub_says_how_long_to_wait(exported, hub_here, monkeypatch, asked, waited):
    waits = []
    monkeypatch.setattr(push_file, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    hub_here.fail("repos/create", status=429, headers={"Retry_After": asked})
    assert push(exported) == 0
    assert waits == [waited]


@pytest.mark.parametrize(("status", "advice"), [(401, "log in again"), (403, "the right to write there")])
def test_what_the_hub_refuses_ends_at_once(exported, hub_here, status, advice, capsys):
    hub_here.fail("repos/create", status=status, times=99)
    assert push(exported) == 2
    assert advice in capsys.readouterr().err
    assert len([line for line in hub_here.requests if "repos/create" in line]) == 1
    assert hub_here.uploads == []


def test_a_token_that_may_only_read_ends_before_anything(exported, hub_here, capsys):
    hub_here.role = "read"
    assert push(exported) == 2
    assert "may only read" in capsys.readouterr().err
    assert hub_here.requests[-1] == "GET /api/whoami-v2"
    assert push(exported, "--dry-run") == 0


def test_a_connection_cut_in_a_part_sends_that_part_again_and_no_other(exported, hub_here):
    hub_here.part_size = 2000
    content = (exported / WEIGHTS[1]).read_bytes()
    num_parts = -(-len(content) // 2000)
    assert num_parts >= 3
    hub_here.fail(f"{oid_of(content)}/2", after=700)
    assert push(exported) == 0
    assert hub_here.repositories["team/first"]["files"] == read(exported)
    assert hub_here.sent(content) == (num_parts + 1, len(content) + 700)


def test_a_connection_that_stays_away_for_long_sends_no_finished_file_again(exported, hub_here):
    """Longer than huggingface_hub's own attempts: the file is sent from its beginning, the file before it is not sent again."""
    first, second = ((exported / name).read_bytes() for name in WEIGHTS)
    hub_here.fail(f"PUT /storage/{oid_of(second)}", after=10, times=8)
    assert push(exported) == 0
    assert hub_here.repositories["team/first"]["files"] == read(exported)
    assert hub_here.sent(first) == (1, len(first))
    assert hub_here.sent(second) == (9, len(second) + 80)


def test_a_killed_push_that_is_started_again_sends_what_is_missing(exported, hub_here, capsys):
    first, second = ((exported / name).read_bytes() for name in WEIGHTS)
    fault = hub_here.fail(f"PUT /storage/{oid_of(second)}", after=1000, stall=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ours = {"HF_ENDPOINT": hub_here.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_dummy", "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "headstart.hub_export.export", "push", str(exported), "team/first"]
    process = subprocess.Popen(command, env=kept | ours, stderr=subprocess.DEVNULL, cwd=exported.parent)
    assert fault.reached.wait(60)
    process.kill()
    assert process.wait() < 0
    assert hub_here.repositories["team/first"]["files"] == {}  # no reader finds half a head
    fault.released.set()
    assert push(exported) == 0
    assert hub_here.repositories["team/first"]["files"] == read(exported)
    assert hub_here.sent(first) == (1, len(first))
    assert hub_here.sent(second) == (2, len(second) + 1000)
    assert push(exported) == 0
    assert "all 5 files are there: team/first" in capsys.readouterr().out
    assert len(hub_here.uploads) == 3


def test_an_interrupted_push_says_what_goes_on(exported, hub_here, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(push_command, "push_folder", interrupt)
    with pytest.raises(SystemExit) as ended:
        push(exported)
    assert ended.value.code == 130
    assert f"interrupted; `heads.export push {exported} team/first` sends what is missing" in capsys.readouterr().err


def test_a_commit_whose_answer_is_lost_is_not_made_twice(exported, hub_here, monkeypatch):
    real = hub_here.commit_of
    cut = []

    def commit_of(repo_id, revision):
        # Called by the server as it answers the commit, when the files are in.
        if hub_here.requests[-1].startswith("POST") and "/commit/" in hub_here.requests[-1] and not cut:
            cut.append(hub_here.requests[-1])
            raise ConnectionError("the answer is lost")
        return real(repo_id, revision)

    monkeypatch.setattr(hub_here, "commit_of", commit_of)
    assert push(exported) == 0
    assert len(cut) == 1
    assert hub_here.requests.count(cut[0]) == 1
    assert hub_here.repositories["team/first"]["files"] == read(exported)


def test_blocks_of_xet_are_not_sent_again(exported, hub_here, monkeypatch):
    """The default way to send, with the library's own client; the blocks go to a storage that only counts them."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub_here.fail_commits = True
    assert push(exported) == 2
    size = sum((exported / name).stat().st_size for name in WEIGHTS)
    sent = sum(count for _, count in hub_here.uploads)
    assert size / 3 < sent < size * 1.1  # both files hold the same tensors
    hub_here.fail_commits = False
    assert push(exported) == 0
    assert sum(count for _, count in hub_here.uploads) == sent
    held = hub_here.repositories["team/first"]["files"]
    assert {name: held[name]["oid"] for name in WEIGHTS} == {
        name: oid_of((exported / name).read_bytes()) for name in WEIGHTS
    }


def oid_of(content):
    return hashlib.sha256(content).hexdigest()
