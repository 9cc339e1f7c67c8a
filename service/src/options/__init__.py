"""The options of `pykv-serve`: one table, three sources."""

from pykv.service.options.sources import read_options
from pykv.service.options.table import ServeOptions

__all__ = ["ServeOptions", "read_options"]
