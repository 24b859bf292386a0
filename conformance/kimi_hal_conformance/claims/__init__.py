"""Capability honesty: every declared combination is tried, and what passes undeclared is told."""
