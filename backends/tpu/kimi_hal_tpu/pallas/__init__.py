"""Pallas kernels for TensorCore and SparseCore, one file an operator family. Importing this imports no jax."""
