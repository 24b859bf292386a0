"""NVIDIA GPUs as a kimi-hal backend."""
