"""The parts of `pykv.Client` that its users do not see."""
