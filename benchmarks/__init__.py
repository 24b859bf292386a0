"""Measurements. Each module has ``main()``, prints what it found and writes it under ``results/``."""
