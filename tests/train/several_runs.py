"""Several trainings one after the other in the processes of one launch: starting Python is most of what a tiny run costs.

accelerate launch tests/train/several_runs.py '[["eagle", ["--config", ...]], ...]'
"""

import importlib
import json
import sys

from headstart.train.run.stopping import leave_group

for trainer, argv in json.loads(sys.argv[1]):
    assert importlib.import_module(f"headstart.train.{trainer}").main(argv) == 0
leave_group()
