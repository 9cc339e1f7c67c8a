"""`python -m pykv`: the program `pykv` where its script is not on the path."""

import sys

from pykv.cli.launch import run_client

if __name__ == "__main__":
    sys.exit(run_client())
