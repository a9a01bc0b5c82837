"""`headstart serve` in a process of its own, on a free port of this machine."""

import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

END = 60  # seconds for the server to end


@contextmanager
def server_process(words):
    """(base URL, Popen) of a server that ends with the context.  words: its command line after `headstart serve`

    Raises ValueError if it does not start; what it says of the reason is on stderr.
    """
    command = [sys.executable, "-m", "headstart.serve", *words, "--port", "0", "--uvicorn-log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        found = None
        while found is None and (line := process.stdout.readline()):
            found = re.match(rb"ready: (http\S+)/v1 ", line)
        if found is None:
            raise ValueError(f"the server did not start: it ended with status {process.wait()}")
        threading.Thread(target=shutil.copyfileobj, args=(process.stdout, sys.stderr.buffer), daemon=True).start()
        yield found[1].decode(), process
    finally:
        process.terminate()
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
