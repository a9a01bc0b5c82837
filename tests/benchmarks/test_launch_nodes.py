"""benchmarks/training/launch_nodes.py, by which benchmarks and GPU tests start processes as if on several machines."""

import os
import time
from types import SimpleNamespace

import pytest

CPU = {"ACCELERATE_USE_CPU": "true"}
RANK = "import os, time; from pathlib import Path; here, rank = Path(__file__).parent, os.environ['RANK']\n"
WAITING = "end = os.open(here / 'alive', os.O_WRONLY)\n(here / rank).touch()\ntime.sleep(3600)\n"


def test_every_rank_of_every_node_runs(launch_nodes, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANK + "(here / rank).write_text(os.environ['LOCAL_RANK'] + os.environ.get('NCCL_HOSTID', ''))\n")
    launch_nodes("ddp.yaml", 4, 2, [script], CPU, tmp_path, 300)
    found = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert found == ["0node-0", "1node-0", "0node-1", "1node-1"]


def test_a_node_that_fails_ends_the_others_and_is_heard(launch_nodes, tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(
        RANK + "(here / rank).write_text(str(os.getpid()))\n"
        "while len([path for path in here.iterdir() if path.name in '01']) < 2:\n    time.sleep(0.1)\n"
        "if rank == '1':\n    raise SystemExit('REASON')\ntime.sleep(3600)\n"
    )
    with pytest.raises(RuntimeError, match=r"a node failed(?s:.*)REASON"):
        launch_nodes("ddp.yaml", 2, 1, [script], CPU, tmp_path, 300)
    waiting = int((tmp_path / "0").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(waiting, 0)


@pytest.mark.parametrize(("config", "num_processes"), [("cpu.yaml", 1), ("ddp.yaml", 2)])
def test_time_that_is_up_leaves_no_process(launch_nodes, tmp_path, monkeypatch, config, num_processes):
    script, alive = tmp_path / "waiting.py", tmp_path / "alive"
    script.write_text(RANK.replace("os.environ['RANK']", "os.environ.get('RANK', '0')") + WAITING)
    os.mkfifo(alive)
    reader = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)

    def hours():
        """A clock that stands still until every process has begun."""
        return 3600 * (len(list(tmp_path.glob("[0-9]"))) == num_processes)

    monkeypatch.setitem(launch_nodes.__globals__, "time", SimpleNamespace(monotonic=hours, sleep=time.sleep))
    with pytest.raises(RuntimeError, match="it took more than 300 s"):
        launch_nodes(config, num_processes, num_processes, [script], CPU, tmp_path, 300)
    for _ in range(600):
        try:
            assert os.read(reader, 1) == b"", "the end of a pipe comes when no writer is left"
            break
        except BlockingIOError:
            time.sleep(0.1)
    else:
        pytest.fail("a process is left")
    os.close(reader)
