"""Alibaba T-HEAD Zhenwu PPUs as a kimi-hal backend."""
