"""Where a command may draw: looked at before its work."""

from pathlib import Path

from pykv.errors import ConfigError

__all__ = ["check_picture"]

ENDINGS = (".svg", ".png")


def check_picture(path: str) -> None:
    """Checks the file of `--plot`.

    Raises:
        ConfigError: it does not end in .svg or .png, or its folder is missing.
    """
    if Path(path).suffix not in ENDINGS:
        raise ConfigError(f"--plot is {path!r}: allowed is a file that ends with {' or '.join(ENDINGS)}")
    if not Path(path).parent.is_dir():
        raise ConfigError(
            f"--plot is {path!r}, which cannot be written: there is no folder {Path(path).parent}"
        )
