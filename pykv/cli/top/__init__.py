"""The command `pykv top`."""
