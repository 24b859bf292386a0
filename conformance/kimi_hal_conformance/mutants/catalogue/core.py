"""Mutants of what chooses and plans: selection, settings, loading, pairing, groups."""

from __future__ import annotations
