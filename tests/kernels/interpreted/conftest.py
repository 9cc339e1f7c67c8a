"""Mends the interpreter before a kernel is imported."""

import faithful_interpreter

faithful_interpreter.install()
