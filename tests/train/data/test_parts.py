"""Large data on their way to a store: batches on disk, encoded by several processes, taken up again after a kill."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer

from headstart.tests.train.data.conftest import Process
from headstart.tests.train.data.test_store import HELD_OUT, PAIRS
from headstart.train.data import encoding
from headstart.train.data.conversations import Chosen, Source, load_conversations
from headstart.train.data.encoding import encode_places
from headstart.train.data.packed import parts as parts_module
from headstart.train.data.packed.documents import Documents
from headstart.train.data.packed.parts import EncodedBatch, Parts, Seen
from headstart.train.data.packed.store import DocumentStore

BATCH = EncodedBatch(
    4, Documents.of(PAIRS), np.array([0, 3]), [("odd", "é"), ("odd", "2")], Seen(1, 2, 3, 4, False, {-1: 2, 7: 1})
)


@pytest.fixture
def tokenizer(word_target):
    return AutoTokenizer.from_pretrained(word_target)


@pytest.fixture
def many(conversations, monkeypatch):
    """Sixty conversations and two that no template encodes, in batches of nine."""
    monkeypatch.setattr(encoding, "BATCH", 9)
    loaded = load_conversations(conversations)
    calls = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2", "tool_calls": [{}]}]
    return [*loaded[:20], calls, *loaded[20:], calls]


def test_a_batch_is_read_as_it_was_written(tmp_path):
    parts = Parts(tmp_path / "parts")
    assert parts.load(3) is None
    parts.save(3, BATCH)
    found = parts.load(3)
    assert (found.count, found.left_out, found.seen) == (BATCH.count, BATCH.left_out, BATCH.seen)
    assert found.places.tolist() == [0, 3]
    assert found.documents == PAIRS


def test_a_damaged_batch_and_one_of_another_size_are_encoded_again(tmp_path, tokenizer, many):
    expected, parts = list(encode_places(tokenizer, many)[0]), Parts(tmp_path)
    encode_places(tokenizer, many, parts=parts)
    damaged = tmp_path / "batch-000001.npz"
    damaged.write_bytes(damaged.read_bytes()[:100])
    parts.save(3, BATCH)
    assert parts.load(1) is None
    assert list(encode_places(tokenizer, many, parts=parts)[0]) == expected


def test_documents_of_all_batches_lie_in_two_files(tmp_path):
    parts, empty = (
        Parts(tmp_path),
        EncodedBatch(1, Documents.of([]), np.array([], dtype=np.int64), [("odd", "")], Seen()),
    )
    assert parts.documents(0) == []
    for number, batch in enumerate((BATCH, empty, BATCH)):
        parts.save(number, batch)
    documents = parts.documents(3)
    assert documents == [*PAIRS, *PAIRS]
    assert isinstance(documents.tokens, np.memmap)
    assert parts.documents(2) == PAIRS


@pytest.mark.parametrize("workers", [0, 2])
def test_any_way_of_encoding_gives_the_same(tmp_path, tokenizer, many, workers):
    def encode(conversations, **how):
        said = []
        documents, places = encode_places(tokenizer, conversations, note=said.append, **how)
        return list(documents), places.tolist(), said

    expected = encode(many)
    assert [place for place in range(62) if place not in expected[1]] == [20, 61]
    assert "2 of 62 conversations are left out" in expected[2][0]
    for _ in range(2):  # the second time from the parts alone
        assert encode(many, workers=workers, parts=Parts(tmp_path)) == expected
    assert len(list(tmp_path.glob("batch-*"))) == 7
    assert encode(iter(many), workers=workers) == expected


def test_what_was_encoded_before_a_kill_is_not_encoded_again(tmp_path, tokenizer, many, monkeypatch):
    encode_batch, encoded = encoding._Encoder.encode_batch, []

    def counted(encoder, batch):
        if len(encoded) == 4:
            raise KeyboardInterrupt  # as good as a kill: nothing is tidied up
        encoded.append(len(batch))
        return encode_batch(encoder, batch)

    def pack(note, parts):
        return encode_places(tokenizer, many, note=note, parts=parts)[0], HELD_OUT

    monkeypatch.setattr(encoding._Encoder, "encode_batch", counted)
    store = DocumentStore(tmp_path, "x", {})
    with pytest.raises(KeyboardInterrupt):
        store.load(pack, Process(), print)
    assert not store.path.exists()
    encoded.clear()
    documents, _ = store.load(pack, Process(), print)
    assert encoded == [9, 9, 8]
    monkeypatch.undo()
    assert documents == encode_places(tokenizer, many)[0]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [store.path.name]  # the parts are gone


PACKING = """
import sys
from transformers import AutoTokenizer
from headstart.tests.train.data.test_store import Process
from headstart.train.data import encoding
from headstart.train.data.conversations import load_conversations
from headstart.train.data.packed.store import DocumentStore

def pack(note, parts):
    given = load_conversations(sys.argv[2]) * 40
    return encoding.encode_places(AutoTokenizer.from_pretrained(sys.argv[3]), given, parts=parts, workers=2)[0], []

if __name__ == "__main__":
    encoding.BATCH = 20
    DocumentStore(sys.argv[1], "x", {}).load(pack, Process(), print)
"""


def test_kill_9_ends_the_workers_and_the_next_start_goes_on(tmp_path, conversations, word_target, tokenizer):
    script, folder = tmp_path / "packing.py", tmp_path / "packed"
    script.write_text(PACKING)
    command = [sys.executable, str(script), str(folder), conversations, word_target]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list(folder.glob(".*.parts/batch-*"))) > 5)
        workers = [int(pid) for pid in Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()]
    finally:
        killed.kill()
        killed.wait()
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob(".*.parts/batch-*")}
    assert 5 < len(before) < 120
    assert len(workers) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers))
    noted = []

    def pack(note, parts):
        noted.append({path.name: path.stat().st_mtime_ns for path in parts.folder.glob("batch-*")})
        given = load_conversations(conversations) * 40
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoding, "BATCH", 20)
            documents, _ = encode_places(tokenizer, given, parts=parts)
        noted.append({path.name: path.stat().st_mtime_ns for path in parts.folder.glob("batch-*")})
        return documents, []

    documents, _ = DocumentStore(folder, "x", {}).load(pack, Process(), print)
    assert noted[0] == before
    assert noted[1].items() > before.items()  # none was made anew
    assert len(noted[1]) == 120
    assert documents == encode_places(tokenizer, load_conversations(conversations) * 40)[0]


def wait_for(holds, seconds=180):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_disk_that_fills_up_is_said(tmp_path, tokenizer, many, monkeypatch):
    def full(file, **arrays):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts_module.np, "savez", full)
    with pytest.raises(ValueError, match=r"the packed data cannot be written \(.*No space left.*--packed_data"):
        DocumentStore(tmp_path, "x", {}).load(
            lambda note, parts: (encode_places(tokenizer, many, parts=parts)[0], []), Process(), print
        )
    monkeypatch.undo()
    DocumentStore(tmp_path, "x", {}).load(lambda note, parts: (Documents.of(PAIRS), []), Process(), print)


def test_a_source_is_read_anew_and_notes_come_once(conversations, tmp_path):
    path, said = tmp_path / "some.jsonl", []
    path.write_text('{"messages": []}\n' + Path(conversations).read_text())
    source, loaded = Source(str(path), said.append), load_conversations(conversations)
    assert source.count is None
    assert [list(source), list(source)] == [loaded, loaded]
    assert source.count == 60
    assert len(said) == 1
    kept = np.arange(60) % 7 == 3
    some = Chosen(source, kept)
    assert some.count == kept.sum()
    assert [list(some), list(some)] == [loaded[3::7], loaded[3::7]]


def test_a_tokenizer_that_cannot_be_sent_is_used_here(tokenizer, many):
    expected = list(encode_places(tokenizer, many)[0])
    tokenizer.own = SimpleNamespace(code=lambda: None)  # as remote code may have
    assert list(encode_places(tokenizer, many, workers=2)[0]) == expected
