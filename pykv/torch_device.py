"""A torch device that an option names, seen to be there before anything is loaded or allocated for it."""

from __future__ import annotations

import torch

from pykv.errors import ConfigError
from pykv.field_checks import refusal, refuse
from pykv.host_memory import available_bytes

__all__ = ["as_device", "check_pinnable", "free_bytes", "named_device"]

_MISSING = (RuntimeError, AssertionError, NotImplementedError)
"""What torch raises for a device that this machine, or this build of torch, does not have."""


def as_device(field: str, value: object) -> torch.device:
    """Returns the device of this name, which this machine has.

    Raises:
        ConfigError: it is no name of a device, or the machine has none of that name.
    """
    device = named_device(field, value)
    try:
        torch.empty(0, device=device)
    except _MISSING as error:
        why = str(error).partition("\n")[0].partition(". ")[0]
        refuse(field, str(device), f"a device that is there ({why})", ConfigError)
    return device


def named_device(field: str, value: object) -> torch.device:
    """Returns the device of this name, whether or not this machine has it.

    Raises:
        ConfigError: it is no name of a device.
    """
    if isinstance(value, torch.device):
        return value
    allowed = "the name of a torch device, such as cpu, cuda or cuda:1"
    if not isinstance(value, str):
        refuse(field, value, allowed, ConfigError)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise refusal(field, value, allowed, ConfigError) from error


def check_pinnable(field: str, device: torch.device) -> None:
    """Sees whether memory of this device can be pinned: the host's can, where a GPU shall reach it.

    Raises:
        ConfigError: it cannot.
    """
    if device.type != "cpu" or not torch.accelerator.is_available():
        refuse(field, True, "False, but for memory of the CPU on a machine with a GPU", ConfigError)


def free_bytes(device: torch.device) -> int | None:
    """The bytes that can still be allocated on a device; None where nothing says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes() if device.type == "cpu" else None
