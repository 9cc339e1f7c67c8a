"""Mends the interpreter before a kernel is imported, or puts every tensor on the GPU that the environment names."""

import torch
from paged_cases import DEVICE

if DEVICE.type == "cpu":
    import faithful_interpreter

    faithful_interpreter.install()
else:
    torch.set_default_device(DEVICE)

# These are about the interpreter, or rely on it to survive wild memory accesses.
collect_ignore = [] if DEVICE.type == "cpu" else ["test_faithful_interpreter.py", "test_mutants.py"]
