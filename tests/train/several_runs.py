"""Several trainings one after the other in the processes of one launch: starting Python is most of what a tiny run costs.

accelerate launch tests/train/several_runs.py '[["eagle", ["--config", ...]], ...]'
"""

import importlib
import json

from headstart.train.run.stopping import run_script


def main(argv):
    """Run the scripts that argv lists, and leave as one of them does."""
    for script, words in json.loads(argv[0]):
        assert importlib.import_module(f"headstart.train.{script}").main(words) == 0
    return 0


if __name__ == "__main__":
    run_script(main)
