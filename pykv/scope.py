"""Scopes: what may share cached blocks, as bytes that no two different scopes have in common.

>>> scope_of(model="m", tenant="ab") == scope_of(model="ma", tenant="b")
False
>>> scope_of(model="m", tenant=None) == scope_of(model="m", tenant="")
False
"""

from __future__ import annotations

from pykv.field_checks import as_integer, refuse

__all__ = ["scope_of"]


def scope_of(
    *,
    model: bytes | str | None = None,
    adapter: bytes | str | None = None,
    adapter_generation: int = 0,
    tenant: bytes | str | None = None,
    salt: bytes | str | None = None,
) -> bytes:
    """Returns the scope of requests that may share cached blocks: all of their fields are equal.

    Every field is framed by its place, its kind and its length, so that no two different scopes give the same bytes,
    whatever their fields hold. A field that is None differs from an empty one, and text from bytes.

    Args:
        model: what computed the blocks: its name and revision, or a hash of its weights.
        adapter: the adapter that was applied.
        adapter_generation: raise it whenever the adapter is loaded anew under its name: other weights, other blocks.
        tenant: whose requests they are, as the server has found out; who may choose it could read along.
        salt: sets a caller's requests apart from the others of its tenant. It is no border between tenants.

    Raises:
        InvalidRequestError: a field is of another type, or the generation is no integer from 0 to below 2**64.
    """
    generation = as_integer("adapter_generation", adapter_generation, 0, 2**64 - 1).to_bytes(8, "little")
    fields = {"model": model, "adapter": adapter, "tenant": tenant, "salt": salt}
    return b"pykv-scope-1" + generation + b"".join(_framed(name, value) for name, value in fields.items())


def _framed(name: str, value: bytes | str | None) -> bytes:
    if value is None:
        return b"n"
    if isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, content = b"b", value
    else:
        refuse(name, value, "text, bytes or None")
    return kind + len(content).to_bytes(8, "little") + content
