"""The console scripts: each imports its program late, so a missing extra ends in one line, no traceback."""

import signal
import sys
from importlib import import_module

from pykv.errors import MissingExtraError
from pykv.extras import needs_extra

__all__ = ["run_client", "run_server"]


def run_client() -> int:
    """The script `pykv`."""
    return _launch("pykv", extra="client", module="pykv.cli.main")


def run_server() -> int:
    """The script `pykv-serve`."""
    return _launch("pykv-serve", extra="serve", module="pykv.service.main")


def _launch(program: str, extra: str, module: str) -> int:
    try:
        with needs_extra(program, extra):
            main = import_module(module).main
        return int(main() or 0)
    except MissingExtraError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while the program was still being imported; else it answers for that itself
        return 128 + signal.SIGINT
