"""Operators as traced torch/XLA programs, one file an operator family. Importing this imports no torch_xla."""
