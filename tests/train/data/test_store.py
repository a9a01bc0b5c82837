"""Encoded data on disk: made once, found again, made anew when anything changes, and never half there."""

import errno
import json
import multiprocessing
import os
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headstart.tests.train.data.conftest import Process
from headstart.tests.train.tiny_runs import assert_same_tensors, head_tensors
from headstart.train.data import rows, stdlib_pairs
from headstart.train.data.packed import layout, store
from headstart.train.data.packed.documents import Documents
from headstart.train.data.packed.store import DocumentStore
from headstart.train.data.rows import build_rows
from headstart.train.data.sources.records import source_facts

PAIRS = [([1, 2, 3], [False, True, True]), ([4, 5], [False, True])]
HELD_OUT = [[{"role": "user", "content": "é"}, {"role": "assistant", "content": "\n", "weight": 0}]]


def make(note, parts=None):
    note("one is left out")
    return Documents.of(PAIRS), HELD_OUT


def refuse(note, parts=None):
    raise AssertionError("the data are encoded again")


def test_a_store_gives_what_was_made_with_its_notes(tmp_path):
    said = []
    for making in (make, refuse):
        documents, held_out = DocumentStore(tmp_path, "a/b.jsonl", {"seed": 0}).load(making, Process(), said.append)
        assert list(documents) == PAIRS
        assert held_out == HELD_OUT
        assert isinstance(documents.tokens, np.memmap)
    first, packed, found, again = said
    assert first == again == "one is left out"
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert folder.name.startswith("a-b.jsonl-")
    assert str(folder) in packed
    assert f"2 documents, 5 tokens in {folder}" in found
    documents, _ = DocumentStore(tmp_path, "a/b.jsonl", {"seed": 0}).load(refuse, Process(False), refuse)
    assert list(documents) == PAIRS


def test_rows_from_the_store_are_those_in_memory(recipe, load, monkeypatch):
    *in_memory, _ = load(recipe(packed_data="memory"))
    *packed, first = load(recipe())
    monkeypatch.setattr(rows, "encode_places", refuse)
    *found, again = load(recipe())
    for documents, held_out in (packed, found):
        assert documents == in_memory[0]
        assert held_out == in_memory[1]
        (one, counts), (other, expected) = (build_rows(some, 48, 0, print) for some in (documents, in_memory[0]))
        assert counts.tolist() == expected.tolist()
        assert rows.fingerprint(one) == rows.fingerprint(one) == rows.fingerprint(other)
        assert torch.equal(one.select([1, 0]).supervised, other.select([1, 0]).supervised)
    (kept,) = found[0].folder.glob("rows-48-0-*")  # the fingerprint is not computed again
    kept.write_text("7")
    one, _ = build_rows(found[0], 48, 0, print)
    assert rows.fingerprint(one) == 7
    assert rows.fingerprint(build_rows(found[0].all_supervised(), 48, 0, print)[0]) != 7
    assert rows.fingerprint(build_rows(found[0], 40, 0, print)[0]) != 7
    assert "the data are packed" in first[-1]
    assert "the data were packed on" in again[0]


def test_which_documents_share_a_row_is_worked_out_once(recipe, load, monkeypatch):
    found = {}
    for _ in range(2):
        documents, *_ = load(recipe())
        for length in (48, 40):
            built, labels = build_rows(documents, length, 0, print)
            kept = rows.fingerprint(built), labels.tolist(), built.num_cut
            assert found.setdefault(length, kept) == kept
        monkeypatch.setattr(layout, "lay_out", lambda documents, length, _: refuse(print))
    assert found[48] != found[40]
    with pytest.raises(AssertionError, match="encoded again"):  # other labels, which are not kept
        build_rows(documents.all_supervised(), 48, 0, print)


@pytest.mark.parametrize("damage", ["cut", "other bytes", "other documents"])
def test_a_damaged_layout_is_worked_out_anew(recipe, load, damage):
    documents, *_ = load(recipe())
    expected, labels = build_rows(documents, 48, 0, print)
    path = documents.folder / "layout-1-48.npz"
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "other bytes":
        path.write_bytes(whole.replace(expected.order.tobytes(), bytes(expected.order.nbytes)))
    else:
        arrays = dict(order=expected.order + len(documents), starts=expected.starts, labels=labels)
        np.savez(path, **arrays)
    again, counts = build_rows(documents, 48, 0, print)
    assert again.order.tolist() == expected.order.tolist()
    assert counts.tolist() == labels.tolist()
    with np.load(path) as file:
        assert file["order"].tolist() == expected.order.tolist()


@pytest.mark.parametrize(
    "keys",
    [
        {"seed": 1},
        {"max_tokens": 300},
        {"max_examples": 9},
        {"eval_prompts": 3},
        {"data_rules": 0},
        {"document": "answer"},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_other_keys_are_other_data(recipe, load, keys, tmp_path):
    load(recipe())
    *packed, _ = load(recipe(**keys))
    assert packed == list(load(recipe(packed_data="memory", **keys))[:2])
    assert len([path for path in (tmp_path / "packed").iterdir() if path.is_dir()]) == 2


def test_before_conversations_were_split_packed_data_served_every_row_length(recipe, load, tmp_path):
    for row_length in (64, 32):
        load(recipe(data_rules=1, row_length=row_length))
    assert len([path for path in (tmp_path / "packed").iterdir() if path.is_dir()]) == 1
    for row_length in (64, 32):
        load(recipe(row_length=row_length))
    assert len([path for path in (tmp_path / "packed").iterdir() if path.is_dir()]) == 3


def test_changed_data_and_another_template_are_noticed(recipe, load, conversations, tmp_path):
    data = tmp_path / "data.jsonl"
    shutil.copy(conversations, data)
    some = recipe(data=str(data))
    before = len(load(some)[0])
    lines = data.read_text().splitlines()
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    data.write_text("\n".join([*lines, json.dumps({"messages": turns})]))
    assert len(load(some)[0]) == before + 1
    os.utime(data, ns=(1, 1))  # written anew, as long as before
    assert "the data are packed" in load(some)[2][-1]
    load.tokenizer.chat_template += " "
    assert "the data are packed" in load(some)[2][-1]


@pytest.fixture
def small_stdlib(monkeypatch):
    """The built-in set without most modules, which take seconds to parse and encode."""
    modules = stdlib_pairs.stdlib_modules()[::8]
    monkeypatch.setattr(stdlib_pairs, "stdlib_modules", lambda: modules)


def test_small_data_are_kept_only_in_a_folder_that_is_named(recipe, load, small_stdlib, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load(recipe(packed_data=""))
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(rows, "KEPT_BYTES", 100)
    load(recipe(packed_data=""))
    assert len([path for path in (tmp_path / "cache/headstart/packed").iterdir() if path.is_dir()]) == 1
    load(recipe(data="stdlib", packed_data="", max_tokens=500))
    assert len([path for path in (tmp_path / "cache/headstart/packed").iterdir() if path.is_dir()]) == 1


def test_what_a_killed_process_left_is_removed(tmp_path):
    one = DocumentStore(tmp_path, "x", {})
    left = tmp_path / f".{one.path.name}.partial-0123abcd"
    other = tmp_path / ".y-0123.partial-0123abcd"
    for folder in (left, other):
        folder.mkdir()
        (folder / "tokens.npy").write_bytes(b"x")
    one.load(make, Process(), print)
    assert not left.exists()
    assert other.exists()  # somebody else may still write it


def slowly(folder, number, made, has_locks=True):
    if not has_locks:
        store.fcntl.flock = no_locks

    def make_slowly(note, parts):
        time.sleep(1)
        made.put(number)
        return make(note)

    said = []
    DocumentStore(folder, "x", {}).load(make_slowly, Process(), said.append)
    made.put(said)


def test_two_runs_that_pack_the_same_do_it_once(tmp_path):
    context = multiprocessing.get_context("fork")
    made = context.Queue()
    runs = [context.Process(target=slowly, args=(tmp_path, number, made)) for number in range(2)]
    for run in runs:
        run.start()
    told = [made.get(timeout=60) for _ in range(3)]
    for run in runs:
        run.join(60)
    assert len([one for one in told if isinstance(one, int)]) == 1
    waited = next(one for one in told if isinstance(one, list) and "waiting" in one[0])
    assert "the data were packed on" in waited[1]


def no_locks(file, how):
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_without_locks_both_pack_and_the_first_is_kept(tmp_path):
    context = multiprocessing.get_context("fork")
    made = context.Queue()
    runs = [context.Process(target=slowly, args=(tmp_path, number, made, False)) for number in range(2)]
    for run in runs:
        run.start()
    told = [made.get(timeout=60) for _ in range(4)]
    for run in runs:
        run.join(60)
        assert run.exitcode == 0
    assert sorted(one for one in told if isinstance(one, int)) == [0, 1]
    documents, _ = DocumentStore(tmp_path, "x", {}).load(refuse, Process(), print)
    assert documents == PAIRS
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_data_that_change_while_they_are_read_are_not_kept(recipe, load, conversations, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    shutil.copy(conversations, data)
    encode = rows.encode_places

    def changing(*given, **how):
        os.utime(data, ns=(1, 1))
        return encode(*given, **how)

    monkeypatch.setattr(rows, "encode_places", changing)
    with pytest.raises(ValueError, match="have changed while they were read: start again"):
        load(recipe(data=str(data)))
    assert not [path for path in (tmp_path / "packed").iterdir() if path.is_dir()]


def test_a_built_in_set_to_measure_on_keeps_nothing_from_being_packed(recipe, load, small_stdlib, tmp_path):
    for said in ("the data are packed", "the data were packed on"):
        documents, held_out, notes = load(recipe(eval_data="stdlib"))
        assert any(said in note for note in notes)
    assert len(held_out) == 4
    assert documents == load(recipe(eval_data="stdlib", packed_data="memory"))[0]


def test_every_match_of_a_pattern_counts(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name in ("a", "b"):
        datasets.Dataset.from_list([{"messages": [], "n": name}]).save_to_disk(tmp_path / name)
    (tmp_path / "c.jsonl").write_text("{}")
    pattern = str(tmp_path / "*")
    before = source_facts(pattern)
    assert source_facts(pattern) == before
    shutil.rmtree(tmp_path / "b")
    datasets.Dataset.from_list([{"messages": [], "n": "other"}]).save_to_disk(tmp_path / "b")
    assert source_facts(pattern) != before
    changed = source_facts(pattern)
    (tmp_path / "c.jsonl").write_text("{} ")
    assert source_facts(pattern) != changed


def test_what_a_tokenizer_was_called_with_is_no_fact(word_target):
    tokenizer = AutoTokenizer.from_pretrained(word_target)
    before = store.tokenizer_facts(tokenizer)
    tokenizer(["w1 w2", "w1"], truncation=True, padding=True, max_length=1)
    assert store.tokenizer_facts(tokenizer) == before
    tokenizer.split_special_tokens = True
    assert store.tokenizer_facts(tokenizer) != before


def test_an_error_of_one_rank_ends_all(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "gather_object", lambda found: [*found, "the disk is full"])
    with pytest.raises(ValueError, match="the disk is full"):
        DocumentStore(tmp_path, "x", {}).load(refuse, Process(False), print)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    one = DocumentStore(tmp_path / "packed", "x", {})
    advice = r"name another folder with --packed_data; with --packed_data memory every"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
        with pytest.raises(ValueError, match=rf"take 0\.00 GiB, and .* has 0\.00 GiB left.*{advice}"):
            one.load(make, Process(), print)
    with monkeypatch.context() as patch:

        def full(path, array):
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(store.np, "save", full)
        with pytest.raises(ValueError, match=rf"No space left on device.*{advice}"):
            one.load(make, Process(), print)
    assert not one.path.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=advice):
        DocumentStore(tmp_path / "file", "x", {}).load(make, Process(), print)


@pytest.mark.parametrize("name", ["tokens.npy", "starts.npy", "held_out.jsonl", "about.json"])
def test_damaged_files_are_refused(tmp_path, name):
    one = DocumentStore(tmp_path, "x", {})
    one.load(make, Process(), print)
    content = (one.path / name).read_bytes()
    (one.path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"the packed data in .* are damaged .*: remove the folder"):
        one.load(refuse, Process(), print)


def test_a_run_on_packed_data_is_that_in_memory(trainer, finished, tmp_path, capsys):
    keys = dict(max_steps=3, eval_prompts=3, eval_tokens=6)
    plain = finished("medusa", **keys)
    for number in range(2):
        run = trainer.run(**keys, packed_data=tmp_path / "packed", output=tmp_path / f"run-{number}")
        assert_same_tensors(head_tensors(run), head_tensors(plain))
        assert ("the data are packed" if number == 0 else "the data were packed on") in capsys.readouterr().err


@pytest.fixture
def left(tmp_path):
    """left(name, sources) -> the parts that a killed packing of `name` has left."""

    def left(name, *sources):
        folder = tmp_path / f".{name}"
        (folder / "inner").mkdir(parents=True)
        (folder / "sources.json").write_text(json.dumps([None, *sources]))
        return folder

    return left


def test_parts_of_data_that_have_changed_are_removed(tmp_path, left):
    same, changed, gone, kept = (tmp_path / f"{name}.jsonl" for name in ("same", "changed", "gone", "kept"))
    for path in (same, changed, gone, kept):
        path.write_text("{}")
    facts = {path: source_facts(str(path)) for path in (same, changed, gone, kept)}
    elsewhere = {"files": [[str(tmp_path / "not mounted" / "x.jsonl"), 2, 3]], "sets": [], "split": "train"}
    stays = [left("a.parts", facts[same]), left("b.parts", elsewhere), left("c", facts[changed])]
    goes = [left("d.parts", facts[same], facts[changed]), left("e.parts", facts[gone])]
    old = left("f.parts", facts[same])
    changed.write_text("{} ")
    gone.unlink()
    os.utime(old, (1, 1))
    DocumentStore(tmp_path, "x", {"sources": [facts[kept]]}).load(make, Process(), print)
    assert [path for path in stays if not path.exists()] == []
    assert [path for path in [*goes, old] if path.exists()] == []


def test_parts_that_a_process_writes_stay(tmp_path, left):
    context = multiprocessing.get_context("fork")
    made, store_of = context.Queue(), DocumentStore(tmp_path, "x", {})
    run = context.Process(target=slowly, args=(tmp_path, 1, made))
    run.start()
    folder = tmp_path / f".{store_of.path.name}.parts"
    end = time.monotonic() + 60
    while not (folder / "sources.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.utime(folder, (1, 1))  # as if nobody went on with it
    DocumentStore(tmp_path, "y", {}).load(make, Process(), print)
    assert folder.exists()
    assert made.get(timeout=60) == 1
    made.get(timeout=60)
    run.join(60)
    assert run.exitcode == 0


def test_without_locks_parts_of_processes_that_have_ended_are_removed(tmp_path, left):
    ended = multiprocessing.get_context("fork").Process(target=print)
    ended.start()
    ended.join()
    host = store.socket.gethostname()
    stays = [left(f"a.parts-{host}-{os.getpid()}"), left(f"a.parts-other-host-{ended.pid}"), left(f"b.parts-{host}-1")]
    goes = left(f"a.parts-{host}-{ended.pid}")
    DocumentStore(tmp_path, "x", {}).load(make, Process(), print)
    assert [path for path in stays if not path.exists()] == []
    assert not goes.exists()
