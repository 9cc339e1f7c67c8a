"""Variables that Kubernetes sets for every service: where one is named pykv, they begin like options."""

import re

__all__ = ["is_service_link"]

NAMES = re.compile(
    r"\w+_SERVICE_HOST|\w+_SERVICE_PORT(_\w+)?|\w+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
ADDRESS = re.compile(r"(tcp|udp|sctp)://.+")


def is_service_link(variable: str, value: str) -> bool:
    """Whether a variable tells of a service: by its name, or, as PYKV_PORT and the like, by an address as its value."""
    return NAMES.fullmatch(variable) is not None or (
        variable.endswith("_PORT") and ADDRESS.fullmatch(value) is not None
    )
