"""Start `accelerate launch` with one process per GPU, or with more, which share the GPUs as if on several machines.

NCCL refuses two processes on one GPU, unless each claims another host; then they communicate over the network, here this host's
own. The results are those of as many GPUs; the speed is not.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "accelerate"
GRACE = 60  # seconds for a launcher to end its workers


def launch(config, num_processes, gpus, command, environment, logs=None, timeout=None):
    """Run the command (a list: a script and its arguments) in `num_processes` processes to its end.

    config: a file's name in configs/accelerate; gpus: number of GPUs for them, a divisor of num_processes if fewer; environment:
    added to this process's own; logs: folder for the output of each node, node-0.txt ..., None: this process's stderr;
    timeout: seconds.
    Raises RuntimeError, with the output in `logs`, if a node fails or time is up; all processes are ended then.
    """
    nodes = max(num_processes // gpus, 1)
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config)]
    words += ["--num_processes", str(num_processes), "--main_process_port", str(_free_port())]
    environment = os.environ | environment
    if nodes > 1:
        words += ["--num_machines", str(nodes), "--main_process_ip", "127.0.0.1"]
        environment["NCCL_SOCKET_IFNAME"] = "lo"
    started = []
    with ExitStack() as files:
        try:
            for node in range(nodes):
                own = []
                if nodes > 1:
                    own, environment["NCCL_HOSTID"] = ["--machine_rank", str(node)], f"node-{node}"
                stderr = files.enter_context(open(Path(logs, f"node-{node}.txt"), "w")) if logs else None
                streams = {"stdout": sys.stderr if logs is None else stderr, "stderr": stderr}
                words_of_node = [*words, *own, *map(str, command)]
                started.append(subprocess.Popen(words_of_node, env=environment, start_new_session=True, **streams))
            until = time.monotonic() + timeout if timeout else None
            # With several nodes the others would wait for a failed one.
            while None in (ends := [node.poll() for node in started]) and not any(ends):
                if until and time.monotonic() > until:
                    break
                time.sleep(0.1)
        finally:
            _end(started)
    if any(ends) or None in ends:
        said = (
            "\n".join(path.read_text() for path in (Path(logs, f"node-{node}.txt") for node in range(nodes)))
            if logs
            else ""
        )
        how = "a node failed" if any(ends) else f"it took more than {timeout} s"
        raise RuntimeError(
            f"the launch of {num_processes} processes with {config}: {how} (exit statuses {ends})\n{said}"
        )


def _end(started):
    """End a launcher. With several workers it passes SIGTERM on; with one it does not, but that worker is in its group."""
    for node in started:
        _signal(node, signal.SIGTERM)
    for node in started:
        try:
            node.wait(GRACE)
        except subprocess.TimeoutExpired:
            _signal(node, signal.SIGKILL)
            node.wait()


def _signal(node, number):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.pid, number)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
