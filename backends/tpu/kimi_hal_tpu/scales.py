"""e8m0 codes whose powers of two a TPU would lose: it takes subnormal numbers for 0. Imports neither torch nor jax."""

from __future__ import annotations

#: Codes below this are small: what is under them is held 2^64 times too large, which the square of ``BACK`` undoes.
SMALL, BACK = 64, 2.0**-32
