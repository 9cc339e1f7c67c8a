"""Asks the model hub for a model once, before transformers asks it for many files and tries each for long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)

from pykv.errors import ModelError
from pykv.models.sources import Checkpoint

__all__ = ["confirmed_by_hub"]

FILE = "config.json"
ANSWER_SECONDS = 10.0


def confirmed_by_hub(checkpoint: Checkpoint, tell: Callable[[str], None]) -> Checkpoint:
    """A checkpoint that the hub has; one that is in the hub's cache counts as local where the hub cannot be asked.

    Args:
        tell: told that the hub is asked, if it is.

    Raises:
        ModelError: it is no name for the hub's client; the hub has none of this name for this caller; or it cannot be
            asked, and the cache has none.
    """
    name = checkpoint.location
    try:
        url = hf_hub_url(name, FILE)
    except HFValidationError as error:
        raise _missing(name, f"takes this for no name: {_first_line(error)}") from error
    if constants.HF_HUB_OFFLINE:
        return _cached(checkpoint, "may not be asked, since HF_HUB_OFFLINE is set", None)
    tell(f"asking the hub for {name}: no folder here has this name")
    try:
        get_hf_file_metadata(url, timeout=ANSWER_SECONDS)
    except GatedRepoError as error:
        reason = "gives it to those only who have accepted its terms: set HF_TOKEN to a token of theirs"
        raise _missing(name, reason) from error
    except RepositoryNotFoundError as error:
        reason = "has no model of this name that may be read without HF_TOKEN, or with the one that is set"
        raise _missing(name, reason) from error
    except EntryNotFoundError as error:
        raise _missing(name, f"has no {FILE} under this name") from error
    except HfHubHTTPError as error:
        return _cached(checkpoint, f"answers with an error: {_first_line(error)}", error)
    except Exception as error:  # what the hub's client raises without an answer depends on its version
        return _cached(checkpoint, f"cannot be reached: {_first_line(error)}", error)
    return checkpoint


def _cached(checkpoint: Checkpoint, reason: str, error: Exception | None) -> Checkpoint:
    if isinstance(try_to_load_from_cache(checkpoint.location, FILE), str):
        return replace(checkpoint, is_local=True, hub_problem=f"the hub {constants.ENDPOINT} {reason}")
    where = f"{reason}, and its cache in {constants.HF_HUB_CACHE} has no such model"
    raise _missing(checkpoint.location, where) from error


def _missing(name: str, reason: str) -> ModelError:
    tried = f"there is no folder {Path(name).absolute()}"
    return ModelError(f"no model at {name}: {tried}, and the hub {constants.ENDPOINT} {reason}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
