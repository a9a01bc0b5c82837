"""A rank other than the first: `python -m headstart.inference.ranks.worker CONNECTION PARENT`, started by processes.py.

CONNECTION: number of an open socket; PARENT: process id of rank 0. It builds the LLM that it is told, with its own part of the
weights, and takes the steps that rank 0 takes (lockstep.py). It ends when the connection is closed, and kills itself when the
parent is gone, whatever it does then.
"""

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection

import torch
from transformers.utils import logging

from ..frozen_heap import end_without_collecting
from ..llm import LLM
from ..models.transport import GlooRanks, RankLost
from .lockstep import follow
from .processes import LOST, READY, Failed, receive, send

LOOK_AGAIN = 0.5  # seconds


def run_worker(connection):
    """Until the other side closes the connection.  -> exit status"""
    try:
        send(connection, READY)
        begin = receive(connection)
        torch.set_num_threads(begin.num_threads)
        warnings.simplefilter("ignore")  # rank 0 says the same
        logging.disable_progress_bar()
        ranks = GlooRanks(begin.folder, begin.rank, begin.size)
        follow(LLM(**begin.arguments, tensor_parallel_size=ranks), connection)
    except (EOFError, ConnectionError):
        pass
    except RankLost:
        return LOST
    except Exception as error:
        is_users = isinstance(error, ValueError)
        send(connection, Failed(str(error) if is_users else f"{type(error).__name__}: {error}", is_users))
        if not is_users:
            traceback.print_exc()
        return 1
    return 0


def end_with(parent):
    """Kill this process once its parent is gone: a step, or a load, may take long."""
    while os.getppid() == parent:
        time.sleep(LOOK_AGAIN)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments):
    number, parent = map(int, arguments)
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    end_without_collecting()
    return run_worker(Connection(number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
