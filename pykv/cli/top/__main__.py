"""`python -m pykv.cli.top`: the same as `pykv top`."""

import sys

from pykv.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["top", *sys.argv[1:]]))
