"""`--push-to-hub`, through the command line and a real HTTP server: what arrives is what was exported, byte by byte."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants

from headstart.heads.checkpoint import save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.hub_export.export import main


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    head = Medusa(MedusaConfig(16, 33, num_heads=2, base_model_name_or_path="some/target"))
    save_head(head, tmp_path / "run" / "head")
    return tmp_path / "run"


def push(source, output, hub, *arguments):
    """Run the command in a process of its own, as a user does."""
    ours = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(output.parent / "home")}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    command = [sys.executable, "-m", "headstart.hub_export.export", *arguments_of(source, output), *arguments]
    environment = kept | ours | {"HF_TOKEN": "hf_dummy"}
    return subprocess.run(command, capture_output=True, text=True, cwd=output.parent, env=environment, timeout=120)


def arguments_of(source, output):
    return [str(source), "--format", "medusa", "--output", str(output)]


@pytest.fixture
def run_here(source, hub_here):
    """Run the command in this process, which is faster."""
    return lambda output, *arguments: main([*arguments_of(source, output), *arguments])


@pytest.fixture
def error_of(run_here, tmp_path, capsys):
    """Run the command, to `tmp_path / "out"`, and return the one line that it fails with."""

    def run(*arguments):
        assert run_here(tmp_path / "out", *arguments) == 2
        captured = capsys.readouterr()
        assert "pushed" not in captured.out
        *_, last = captured.err.strip().splitlines()
        assert last.startswith("heads.export: ")
        return last

    return run


def test_every_file_arrives_byte_by_byte_in_a_private_repository(source, tmp_path, fake_hub):
    result = push(source, tmp_path / "first-medusa", fake_hub, "--push-to-hub", "team/first", "--private")
    assert result.returncode == 0, result.stderr
    assert f"pushed to {fake_hub.url}/team/first" in result.stdout
    assert list(fake_hub.repositories) == ["team/first"]
    assert fake_hub.repositories["team/first"]["private"] is True
    written = {path.name: path.read_bytes() for path in (tmp_path / "first-medusa").iterdir()}
    assert fake_hub.repositories["team/first"]["files"] == written
    assert set(written) == {
        "README.md",
        "config.json",
        "medusa_lm_head.pt",
        "medusa_lm_head.safetensors",
        "replay.json",
    }
    assert '"model": "team/first"' in written["README.md"].decode()
    assert len([line for line in fake_hub.requests if line.startswith("PUT /storage/")]) == 2


@pytest.mark.parametrize("arguments", [["--push-to-hub"], ["--push-to-hub", "first-medusa"]])
def test_repository_defaults_to_the_account_and_the_folder(run_here, tmp_path, fake_hub, arguments):
    assert run_here(tmp_path / "first-medusa", *arguments) == 0
    assert list(fake_hub.repositories) == ["tester/first-medusa"]
    assert fake_hub.repositories["tester/first-medusa"]["private"] is False


def test_a_pushed_head_can_be_pushed_again(run_here, tmp_path, fake_hub):
    files = []
    for output, arguments in (("one", ()), ("two", ("--dtype", "bfloat16"))):
        assert run_here(tmp_path / output, "--push-to-hub", "tester/same", *arguments) == 0
        files.append(dict(fake_hub.repositories["tester/same"]["files"]))
    assert files[0].keys() == files[1].keys()
    assert files[0]["medusa_lm_head.pt"] != files[1]["medusa_lm_head.pt"]
    assert files[1]["medusa_lm_head.pt"] == (tmp_path / "two" / "medusa_lm_head.pt").read_bytes()


def test_without_a_token_nothing_is_done(run_here, tmp_path, fake_hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    assert run_here(tmp_path / "out", "--push-to-hub") == 2
    error = capsys.readouterr().err
    assert error.startswith("heads.export: error: no Hugging Face token to push with: run `hf auth login`")
    assert error.count("\n") == 1
    assert fake_hub.requests == []
    assert not (tmp_path / "out").exists()


def test_a_wrong_token_stops_before_any_work(error_of, tmp_path, fake_hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "did not accept the token" in error_of("--push-to-hub")
    assert fake_hub.repositories == {}
    assert not (tmp_path / "out").exists()


def test_offline_mode_stops_before_any_work(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of("--push-to-hub")
    assert not (tmp_path / "out").exists()


def test_no_network_stops_before_any_work(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub at http://127.0.0.1:9" in error_of("--push-to-hub")
    assert not (tmp_path / "out").exists()


def test_a_name_the_hub_does_not_take_stops_before_any_work(error_of, tmp_path):
    assert "cannot push to 'a/b/c'" in error_of("--push-to-hub", "a/b/c")
    assert not (tmp_path / "out").exists()


def test_private_heads_do_not_go_to_a_public_repository(error_of, fake_hub):
    fake_hub.repositories["tester/out"] = {"private": False, "files": {}}
    assert "exists already and is public" in error_of("--push-to-hub", "--private")
    assert fake_hub.repositories["tester/out"]["files"] == {}


def test_heads_are_not_mixed_with_other_weights(error_of, fake_hub):
    fake_hub.repositories["tester/out"] = {"private": False, "files": {"model.safetensors": b"others"}}
    assert "other weights already (model.safetensors)" in error_of("--push-to-hub")
    assert fake_hub.repositories["tester/out"]["files"] == {"model.safetensors": b"others"}


def test_heads_are_not_mixed_with_the_tree_of_others(error_of, fake_hub):
    """Headstart would draft with it, and refuse heads that are not as deep."""
    fake_hub.repositories["tester/out"] = {"private": False, "files": {"tree.json": b"{}"}}
    assert "another head's tree already (tree.json)" in error_of("--push-to-hub")
    assert fake_hub.repositories["tester/out"]["files"] == {"tree.json": b"{}"}


def test_a_push_that_fails_keeps_the_export_and_says_how_to_push_it(error_of, tmp_path, fake_hub):
    fake_hub.fail_commits = True
    last = error_of("--push-to-hub")
    assert "exceeded your storage limit" in last
    assert "the account must have room" in last
    assert f"`heads.export push {tmp_path / 'out'} tester/out`" in last
    assert len(list((tmp_path / "out").iterdir())) == 5
    assert error_of("--push-to-hub").endswith("pushes it as it is, or name a new folder")
    fake_hub.fail_commits = False
    assert main(["push", str(tmp_path / "out")]) == 0
    assert len(fake_hub.repositories["tester/out"]["files"]) == 5
    assert len(fake_hub.uploads) == 2  # the two weight files, not again


@pytest.fixture(scope="module")
def exported_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    save_head(Medusa(MedusaConfig(16, 33, num_heads=2)), folder / "head")
    assert main(arguments_of(folder / "head", folder / "out")) == 0
    return folder / "out"


@pytest.fixture
def exported(exported_once, tmp_path):
    return shutil.copytree(exported_once, tmp_path / "out")


def lines_of(capsys):
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_dry_run_tells_what_is_missing_and_changes_nothing(exported, hub_here, capsys):
    command = ["push", str(exported), "team/first", "--dry-run", "--collection", "Some heads"]
    assert main([*command, "--private"]) == 0
    told = lines_of(capsys)
    assert told[0] == "team/first (private, to be created), nothing is changed:"
    sizes = {path.name: path.stat().st_size for path in exported.iterdir()}
    shown = [f"send {size / 1000:.3g} kB {name}" for name, size in sizes.items() if size >= 1000]
    assert set(shown) | {f"send {sizes['config.json']} B config.json"} <= set(told)
    assert any(line.startswith("to send: 5 of 5 files, ") for line in told)
    assert told[-1] == f"`heads.export push {exported} team/first --private --collection 'Some heads'` pushes it"
    assert [line for line in hub_here.requests if not line.startswith(("GET ", "HEAD "))] == []
    assert hub_here.repositories == {}
    assert hub_here.collections == {}

    assert main(["push", str(exported), "team/first"]) == 0
    (exported / "config.json").write_text("{}")
    (exported / "more.json").write_text("{}")
    before = dict(hub_here.repositories["team/first"]["files"])
    capsys.readouterr()
    assert main([*command, "--revision", "next"]) == 0
    told = lines_of(capsys)
    assert told[:2] == [
        "team/first, branch next (public), nothing is changed:",
        "the branch next would be made from main",
    ]
    assert {"replace 2 B config.json", "send 2 B more.json", "to send: 2 of 6 files, 4 B"} <= set(told)
    assert len([line for line in told if line.startswith("there already ")]) == 4
    assert hub_here.repositories["team/first"] == {"private": False, "files": before, "branches": {}}


def test_hidden_files_stay_here(exported, hub_here):
    (exported / ".cache").mkdir()
    (exported / ".cache" / "x.json").write_text("{}")
    (exported / ".secret").write_text("mine")
    assert main(["push", str(exported), "team/first"]) == 0
    assert len(hub_here.repositories["team/first"]["files"]) == 5


def test_a_file_that_the_hub_leaves_out_is_named(exported, hub_here, capsys):
    hub_here.ignored = ("config.json",)
    assert main(["push", str(exported), "team/first"]) == 2
    assert "does not hold config.json: is it named in .gitignore there?" in capsys.readouterr().err


def test_a_branch_is_made_and_main_stays(exported, hub_here):
    assert main(["push", str(exported), "team/first"]) == 0
    main_files = dict(hub_here.repositories["team/first"]["files"])
    (exported / "config.json").write_text("{}")
    assert main(["push", str(exported), "team/first", "--revision", "fine/tuned"]) == 0
    assert hub_here.repositories["team/first"]["files"] == main_files
    assert hub_here.repositories["team/first"]["branches"] == {"fine/tuned": main_files | {"config.json": b"{}"}}


def test_a_collection_is_made_once_and_found_by_title_and_by_slug(exported, hub_here, capsys):
    hub_here.collections["other/some-heads-1"] = {
        "title": "Some heads",
        "owner": "other",
        "private": False,
        "items": [],
    }
    for repo, name in (
        ("tester/one", "Some heads"),
        ("tester/two", "Some heads"),
        ("tester/two", "tester/some-heads-0123"),
    ):
        assert main(["push", str(exported), repo, "--collection", name, "--private"]) == 0
        assert f"in the collection {hub_here.url}/collections/tester/some-heads-0123" in capsys.readouterr().out
    assert hub_here.collections.keys() == {"other/some-heads-1", "tester/some-heads-0123"}
    made = hub_here.collections["tester/some-heads-0123"]
    assert made["private"] is True
    assert [(item["id"], item["type"]) for item in made["items"]] == [("tester/one", "model"), ("tester/two", "model")]


def test_a_collection_that_is_not_there_stops_before_any_work(error_of, tmp_path):
    assert "there is no collection 'tester/none-1'" in error_of("--push-to-hub", "--collection", "tester/none-1")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (("README.md",), "holds no README.md, so heads.export did not write it: export it first"),
        (("medusa_lm_head.pt", "medusa_lm_head.safetensors"), "holds no weights"),
        (("config.json",), "holds no config.json"),
    ],
)
def test_what_is_no_export_is_not_pushed(exported, hub_here, leave, said, capsys):
    for name in leave:
        (exported / name).unlink()
    assert main(["push", str(exported)]) == 2
    assert said in capsys.readouterr().err
    assert hub_here.requests == []


def test_a_model_without_a_head_is_not_pushed_but_a_merged_target_is(tiny_target, tmp_path, hub_here, capsys):
    model = tmp_path / "model"
    shutil.copytree(tiny_target, model)
    (model / "README.md").write_text("# A model\n")
    assert main(["push", str(model), "me/model"]) == 2
    said = capsys.readouterr().err
    assert f"{model} holds neither a head that can be read nor a target with an adapter merged" in said
    assert said.count("\n") == 1
    assert hub_here.requests == []
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"merged_adapter": "0" * 16}))
    assert main(["push", str(model), "me/model"]) == 0
    assert "model.safetensors" in hub_here.repositories["me/model"]["files"]


def test_a_damaged_export_is_not_pushed(exported, hub_here, capsys):
    (exported / "medusa_lm_head.safetensors").write_bytes(b"cut")
    assert main(["push", str(exported), "me/it"]) == 2
    assert "holds neither a head that can be read" in capsys.readouterr().err
    assert hub_here.requests == []


def test_options_of_a_push_need_one(run_here, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_here(tmp_path / "out", "--dry-run")
    assert ended.value.code == 2
    assert "--dry-run belongs to --push-to-hub" in capsys.readouterr().err
