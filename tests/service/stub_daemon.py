"""`pykv-serve` with a stub engine: run as a program by the tests of the daemon's process."""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from stub_engine import DESCRIPTION, StubEngine

from pykv.errors import ModelError, OutOfBlocksError
from pykv.service.main import main
from pykv.service.served import ServedModel


def load(options, tell):
    """The names of models say what happens."""
    tell("reading")
    if options.model == "nowhere":
        raise ModelError("model 'nowhere' was looked for\nin two places")
    if options.model == "too large":
        raise MemoryError("the pool needs 1 TiB")
    if options.model == "no room":
        raise OutOfBlocksError("the pool needs more blocks")
    if options.model == "a bug":
        raise ZeroDivisionError("division by zero")
    if options.model == "slow":
        threading.Event().wait()
    engine = StubEngine()
    if options.model == "held":
        engine.hold()
    return ServedModel(engine, DESCRIPTION)


sys.exit(main(load=load))
