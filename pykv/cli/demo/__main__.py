"""`python -m pykv.cli.demo`: the same as `pykv demo`."""

import sys

from pykv.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
