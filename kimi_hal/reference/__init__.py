"""The oracle: every operator in plain torch, one file a family, as in ``kimi_hal/ops``."""
