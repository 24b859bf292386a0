"""Compile-only mode: what a backend's kernels become for devices that are not here, each in a process of its own."""
