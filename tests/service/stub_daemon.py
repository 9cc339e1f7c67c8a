"""`pykv-serve` with a stub engine: run as a program by the tests of the daemon's process."""

import sys

from stub_engine import load

from pykv.service.main import main

sys.exit(main(load=load))
