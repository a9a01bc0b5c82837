"""`python -m headstart.serve MODEL ...` is `headstart serve MODEL ...` (commands/serve.py)."""

import sys

from headstart.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
