"""kimi-hal-conformance: proves that a backend's kernels keep kimi-hal's operator contract."""

__version__ = "0.1.0"
