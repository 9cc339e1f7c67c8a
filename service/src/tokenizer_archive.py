"""A tokenizer's files as one archive, from which the gateway makes a tokenizer of its own."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["tokenizer_archive", "tokenizer_chunks"]

CHUNK_BYTES = 64 * 1024
MADE_AT = (1980, 1, 1, 0, 0, 0)  # the same tokenizer gives the same bytes


def tokenizer_archive(tokenizer: Any, config: Any) -> bytes:
    """A ZIP archive of what `save_pretrained` of a tokenizer and of a model's config write; takes a moment."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        config.save_pretrained(folder)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.writestr(zipfile.ZipInfo(path.name, MADE_AT), path.read_bytes(), zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


def tokenizer_chunks(archive: bytes) -> Iterator[bytes]:
    """The archive in parts that fit a message; at least one."""
    for start in range(0, len(archive) or 1, CHUNK_BYTES):
        yield archive[start : start + CHUNK_BYTES]
