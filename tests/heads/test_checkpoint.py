"""Folders of heads in every format: finding, reading, writing them whole, and errors that name what is wrong."""

import errno
import json
import multiprocessing
import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from headstart.heads.checkpoint import check_head_fits, load_head, resolve_head, save_head
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.heads.storage import weight_files
from headstart.heads.storage.hub_id import near_folder
from headstart.heads.storage.weight_files import read_names, read_tensors

H, V = 24, 37


def make_head(num_heads=3, num_layers=1, shared=False, base="some/target"):
    """Heads with random tensors only, so that no two tensors can be mistaken for each other."""
    head = Medusa(MedusaConfig(H, V, num_heads, num_layers, shared, base))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def llama_config(hidden_size=H, vocab_size=V):
    return LlamaConfig(hidden_size=hidden_size, vocab_size=vocab_size, num_attention_heads=4)


def same_head(one, other):
    states = [head.state_dict() for head in (one, other)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def rewrite(folder, change, name="medusa_lm_head.safetensors"):
    """Change a saved file's {name: tensor} in place."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


def edit_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_dtype_is_kept_or_cast(tmp_path):
    head = make_head()
    save_head(head, tmp_path / "half", dtype="bfloat16")
    save_head(head, tmp_path / "full")
    assert load_head(tmp_path / "half").heads[0].lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(
        load_head(tmp_path / "half", "float32").heads[0].lm_head.weight, head.heads[0].lm_head.weight.bfloat16()
    )
    assert same_head(load_head(tmp_path / "full", torch.bfloat16), head.bfloat16())
    for dtype in ("int8", "float8_e4m3fn"):
        with pytest.raises(ValueError, match=rf"'{dtype}'.*expected float32"):
            load_head(tmp_path / "full", dtype)


def test_files_of_something_else_are_refused(tmp_path):
    save_head(make_head(), tmp_path / "head", format="vllm")
    save_file({"model.embed_tokens.weight": torch.zeros(V, H)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ValueError, match=r"no known format.*holds model\.embed_tokens\.weight"):
        load_head(tmp_path / "head")


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_file_cut_short_is_named(tmp_path, name, keep):
    save_head(make_head(), tmp_path / "head", torch_file=True)
    path = tmp_path / "head" / name
    if name.endswith(".pt"):
        (tmp_path / "head" / "medusa_lm_head.safetensors").unlink()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=rf"{name} cannot be read; it is cut short or damaged"):
        load_head(tmp_path / "head")


def test_an_old_pickle_is_named_wherever_it_is_cut_and_whatever_else_it_holds(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"0.1.weight": torch.ones(2, 3)}, path, _use_new_zipfile_serialization=False)
    assert read_tensors(path).keys() == {"0.1.weight"}
    content = path.read_bytes()
    for length in range(0, len(content), 5):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read; it is cut short or damaged"):
            read_tensors(path)
    for held in ({1: torch.ones(2)}, {"state_dict": {"0.1.weight": torch.ones(2)}}, [torch.ones(2)]):
        torch.save(held, path)
        with pytest.raises(ValueError, match="holds something other than named tensors"):
            read_tensors(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="counts the bytes read as Linux does")
def test_names_of_a_bin_file_are_read_without_its_values(tmp_path):
    def read_by(action):
        def count():
            with open("/proc/self/io") as file:
                return int(file.readline().removeprefix("rchar:"))

        before = count()
        return action(path), count() - before

    path = tmp_path / "pytorch_model.bin"
    torch.save({"0.1.weight": torch.zeros(1024, 1024), "0.2.weight": torch.zeros(3)}, path)
    names, num_bytes = read_by(read_names)
    assert names == ["0.1.weight", "0.2.weight"]
    assert num_bytes < 2**20 < read_by(read_tensors)[1]
    torch.save({"0.1.weight": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert read_names(path) == ["0.1.weight"]
    for content in (b"", b"cut", b"PK\x03\x04"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_model\.bin cannot be read; it is cut short or damaged"):
            read_names(path)


def test_a_broken_or_missing_config_is_named(tmp_path):
    save_head(make_head(), tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text('{"medusa_num_heads": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_head(tmp_path / "head")
    (tmp_path / "head" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_head(tmp_path / "head")


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes\.txt"):
        save_head(make_head(), tmp_path / "head")
    assert [path.name for path in tmp_path.rglob("*")] == ["head", "notes.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        save_head(make_head(), tmp_path / "file")


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "head").mkdir()
    save_head(make_head(), tmp_path / "head")
    assert load_head(tmp_path / "head").config.num_heads == 3


def test_files_are_readable_like_any_other_file(tmp_path):
    save_head(make_head(), tmp_path / "new" / "head", torch_file=True)
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "head").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def fill(*args, **kwargs):
        (next(tmp_path.glob(".head.partial-*")) / "medusa_lm_head.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weight_files, "save_file", fill)
    with pytest.raises(OSError, match=r"cannot write .*head \(No space left on device\)") as caught:
        save_head(make_head(), tmp_path / "head")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_refuses_leaves_nothing_behind(tmp_path):
    """A write that really fails, in both libraries: the process may not write files larger than 4 KiB, or than one of the files."""
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()

    def save_within(limit, folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            save_head(Medusa(MedusaConfig(32, 64)), folder, torch_file=True)
        except OSError as error:
            said.put(str(error))

    complete = tmp_path / "complete"
    save_head(Medusa(MedusaConfig(32, 64)), complete, torch_file=True)
    sizes = {path.suffix: path.stat().st_size for path in complete.iterdir()}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert sizes[".safetensors"] < sizes[".pt"]
    for limit in (4096, sizes[".safetensors"]):
        folder = tmp_path / f"limit-{limit}" / "head"
        process = context.Process(target=save_within, args=(limit, folder))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert not said.empty()
        assert f"cannot write {folder}" in said.get()
        assert list(folder.parent.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .*file/head"):
        save_head(make_head(), tmp_path / "file" / "head")


def test_runs_and_checkpoints_resolve_to_their_newest_head(tmp_path):
    run = tmp_path / "run"
    for step in (200, 1000, 900):
        save_head(make_head(num_heads=1 + step // 200), run / "checkpoints" / f"step-{step:03d}" / "head")
    (run / "checkpoints" / "step-2000").mkdir()  # without a head yet
    (run / "checkpoints" / "step-3000.partial").mkdir()
    save_file({"x": torch.zeros(1)}, run / "checkpoints" / "step-200" / "model.safetensors")  # a trainer's own state
    assert load_head(run).config.num_heads == 6
    assert load_head(run / "checkpoints" / "step-200").config.num_heads == 2
    save_head(make_head(num_heads=4), run / "head")
    assert resolve_head(run) == run / "head"
    assert load_head(run / "head").config.num_heads == 4
    with pytest.raises(ValueError, match=r"holds no head: looked for medusa_lm_head\.safetensors"):
        resolve_head(tmp_path)


@pytest.mark.parametrize("offline", ["1", "0"])
def test_a_head_that_is_nowhere_says_what_was_tried(tmp_path, offline):
    """In a subprocess, as huggingface_hub reads its environment once, at import; it retries without waiting here."""
    script = "import time; time.sleep = lambda _: None; from headstart import load_head; load_head('nobody/no-head')"
    environment = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": offline}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | environment)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ValueError: no head at 'nobody/no-head': there is no such folder, and the Hub at http://127.0.0.1:9"
    )
    assert ("HF_HUB_OFFLINE is set" in last) == (offline == "1")
    assert "medusa_lm_head.safetensors" in last


def test_a_misspelt_folder_is_answered_with_the_one_beside_it(tmp_path):
    (tmp_path / "stdlib-coder-medusa").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "stdlib-coder-meduse").touch()
    near = tmp_path / "stdlib-coder-medusa"
    assert near_folder(str(tmp_path / "stdlib-coder-meduza")) == f" (did you mean {str(near)!r}?)"
    assert (
        near_folder("~no-such-user/x")
        == near_folder(tmp_path / "zzz")
        == near_folder(tmp_path / "gone" / "other")
        == ""
    )
    with pytest.raises(ValueError, match=f"there is no folder .*meduza.*did you mean {str(near)!r}"):
        load_head(tmp_path / "stdlib-coder-meduza")


def test_what_can_be_no_hub_id_is_said_to_be_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for name, said in ((tmp_path / "file", "is a file: name the folder"), (tmp_path / "gone", "there is no folder")):
        with pytest.raises(ValueError, match=said):
            resolve_head(name)
    with pytest.raises(ValueError, match="there is no folder runs/first/head"):
        resolve_head("runs/first/head")


def test_heads_of_another_target_are_refused():
    head = make_head()
    target = llama_config(hidden_size=H, vocab_size=V)
    check_head_fits(head, target)
    with pytest.raises(ValueError, match=rf"some/target.*hidden size {H}, the target has 48"):
        check_head_fits(head, llama_config(hidden_size=48, vocab_size=V))
    with pytest.raises(ValueError, match=rf"vocabulary {V}, the target has 99"):
        check_head_fits(head, llama_config(hidden_size=H, vocab_size=99))
    head.config = replace(head.config, base_model_name_or_path="")
    with pytest.raises(ValueError, match=r"hidden size .* and vocabulary"):
        check_head_fits(head, llama_config(hidden_size=48, vocab_size=99))


def test_loading_draws_no_random_numbers(tmp_path):
    save_head(make_head(), tmp_path / "head")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_head(tmp_path / "head")
    assert torch.equal(torch.rand(2), expected)
