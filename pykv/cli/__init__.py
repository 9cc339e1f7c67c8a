"""The programs of pykv: `pykv`, `pykv-serve` and the demo."""
