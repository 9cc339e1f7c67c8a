"""The program `pykv-serve`."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec

import anyio

import pykv
from pykv.errors import ConfigError, PykvError
from pykv.service.daemon import LOAD_THREAD, Daemon, Loader
from pykv.service.files import shortened
from pykv.service.loading import load_model
from pykv.service.logs import configure_logs
from pykv.service.options import ServeOptions, read_options
from pykv.service.reload import RELOAD_THREAD
from pykv.service.served import ServedModel
from pykv.service.status import innermost

__all__ = ["main"]

REFUSED = 2
UNENDING = frozenset({LOAD_THREAD, RELOAD_THREAD, "pykv-engine"})
"""Threads that cannot be told to end: one that reads a model, or a mount that hangs, and one whose step hangs."""
MOST_CHARACTERS = 2000


def main(
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    load: Loader = load_model,
) -> int:
    """Serves until SIGTERM or SIGINT.

    Args:
        arguments: of the command line; None = of this process.
        environment: None = of this process.
        load: loads the model.

    Returns:
        0 after an orderly end; 2, with one line on stderr, for options or a model that cannot be served.
    """
    try:
        options = read_options(
            sys.argv[1:] if arguments is None else arguments,
            os.environ if environment is None else environment,
            pykv.__version__,
        )
    except ConfigError as error:
        return _refuse(error)
    configure_logs(options.log_level, options.log_format)
    code = _serve(options, load)
    gc.unfreeze()  # or the modules of others would tell at the end of what they think is leaked
    if any(thread.name in UNENDING for thread in threading.enumerate()):
        _end_now(code)
    return code


def _serve(options: ServeOptions, load: Loader) -> int:
    # else each core has a thread with words of its own
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    async def run() -> None:
        await Daemon(options, _settling(load)).run()

    try:
        anyio.run(run, backend_options={"use_uvloop": find_spec("uvloop") is not None})
    except Exception as error:
        cause = innermost(error)
        if isinstance(cause, (PykvError, MemoryError)):
            return _refuse(cause)
        raise
    return 0


def _settling(load: Loader) -> Loader:
    """Freezes what is there once the model is loaded, so that no later collection of garbage goes through it.

    The objects of torch and transformers alone take a quarter of a second, in which no stream goes on.
    """

    def load_and_settle(options: ServeOptions, tell: Callable[[str], None]) -> ServedModel:
        served = load(options, tell)
        gc.collect()
        gc.freeze()
        gc.collect()  # of little, so that the next comes when little has been added
        return served

    return load_and_settle


def _end_now(code: int) -> None:
    """Ends the process under a thread in the midst of native code, which an orderly end would crash."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def _refuse(error: BaseException) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"pykv-serve: {shortened(text, MOST_CHARACTERS)}", file=sys.stderr)
    return REFUSED
