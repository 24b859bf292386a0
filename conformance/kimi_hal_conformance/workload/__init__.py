"""Builds the real-text workload: an encoder over Python sources, and its feed-forward weights as experts.

The reader is ``kimi_hal.workload``; what the numbers are and what they are not: ``docs/workload.md``.
"""
