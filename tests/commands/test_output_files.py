"""The output files of commands, and the state of the disk after a failed write."""

import json
import os

import pytest

from headstart.cli import main
from headstart.evaluation.results import Report
from headstart.heads.storage.atomic_write import check_writable, write_whole
from headstart.inference.prompt_files import read_prompts
from headstart.inference.speculation.tree import chain, save_tree


def test_a_folder_is_refused_before_the_work(tmp_path):
    with pytest.raises(ValueError, match="is a folder: name a file with --output"):
        check_writable(tmp_path)
    for path in (tmp_path / ("x" * 252), tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match=r"cannot write .*File name too long; name another file"):
            check_writable(path)
    check_writable(tmp_path / "new" / "out.json")
    assert [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")] == ["new"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write .*file/out\.json: Not a directory"):
        write_whole(tmp_path / "file" / "out.json", "text")
    with pytest.raises(ValueError, match="is a folder"):
        Report("x", {}, "cpu", "command", {}, f"{tmp_path}/")


@pytest.mark.parametrize("write", [lambda path: write_whole(path, "text"), lambda path: save_tree(chain(2), path)])
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path, monkeypatch, write):
    path = tmp_path / "out.json"
    path.write_text("before")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"cannot write .*folder"):
        write(tmp_path / "folder")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*out\.json: No space left on device"):
        write(path)
    assert path.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "out.json"]


def test_the_tree_of_a_head_on_the_hub_needs_a_place(monkeypatch, tmp_path, head_folder, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headstart.heads.checkpoint.resolve_head", lambda source: head_folder)
    monkeypatch.setattr("headstart.inference.speculation.proposers.is_draft_model", lambda source: False)
    assert main(["tree", "you/heads", "--model", "m", "--budget", "4"]) == 2
    assert "you/heads is not a folder here to keep the tree in: name a file with --output" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["a\ud800b", "bad\udcff"])
def test_text_with_half_a_character_is_refused_by_name(llm, target_folder, tmp_path, capsys, text):
    with pytest.raises(ValueError, match="prompt 1 is not valid Unicode text: the character"):
        llm.generate(["fine", text])
    with pytest.raises(ValueError, match="message 0 of the conversation: the content is not valid Unicode text"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": text}]}])
    assert main(["generate", "--model", str(target_folder), text]) == 2
    assert "is not valid Unicode text" in capsys.readouterr().err
    path = tmp_path / "prompts.jsonl"
    for entry, what in (({"prompt": text}, "prompt"), ({"messages": [{"role": "user", "content": text}]}, "content")):
        path.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps(entry))
        with pytest.raises(ValueError, match=rf"prompts\.jsonl, line 2: the {what} is not valid Unicode"):
            read_prompts(path)
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2 is not UTF-8 text"):
        read_prompts(path)
