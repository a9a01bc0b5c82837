"""One training at a time in a run folder, and none after a launcher that is gone."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from headstart.train import medusa
from headstart.train.run import run_folder, run_lock

LEAVES = """
import os, signal, sys, time
from headstart.train.run.stopping import leave_with_launcher
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"left"), os._exit(0)))
leave_with_launcher()
os.write(1, b"ready ")
time.sleep(60)
"""
LAUNCHES = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=os.environ)
child.wait()
"""


@pytest.fixture
def taken(tmp_path):
    """taken(folder): hold it as another process does, in another open file; returns how to leave it."""
    descriptors = []

    def take(folder):
        descriptors.append(os.open(folder, os.O_RDONLY))
        fcntl.flock(descriptors[-1], fcntl.LOCK_EX)
        return lambda: fcntl.flock(descriptors[0], fcntl.LOCK_UN)

    yield take
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_run_that_another_process_writes_is_left_alone(arguments, taken, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "PATIENCE", 0.0)
    assert medusa.main(arguments(max_steps=2, checkpoint_every=1)) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    leave = taken(tmp_path / "run")
    with pytest.raises(ValueError, match=r"another process is training into .*run: wait for its end"):
        medusa.main(arguments(max_steps=4, checkpoint_every=1, resume=True))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    leave()
    assert medusa.main(arguments(max_steps=4, checkpoint_every=1, resume=True)) == 0


def test_a_run_has_its_folder_while_it_trains_and_no_longer(arguments, tmp_path, monkeypatch):
    seen = []

    def look(run, conversations):
        with pytest.raises(BlockingIOError):
            probe(tmp_path / "run")
        seen.append(True)

    def probe(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)

    monkeypatch.setattr(run_folder.RunFolder, "keep_held_out", look)
    assert medusa.main(arguments(max_steps=1)) == 0
    assert seen
    probe(tmp_path / "run")


def test_an_orphan_that_leaves_in_time_is_waited_for(taken, tmp_path, monkeypatch):
    leave, pauses = taken(tmp_path), []
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: (pauses.append(seconds), len(pauses) == 3 and leave()))
    assert run_lock.claim(tmp_path)
    assert len(pauses) == 3
    run_lock.release(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.parametrize("launcher", ["ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"])
def test_workers_leave_with_a_launcher_that_is_killed(launcher):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "TORCHELASTIC"))}
    command = [sys.executable, "-c", LAUNCHES, LEAVES]
    process = subprocess.Popen(
        command, env=environment | {launcher: "no"}, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert os.read(process.stdout.fileno(), 6) == b"ready "
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b"left"  # until the worker's end closes the pipe
    finally:
        process.wait()
        process.stdout.close()
