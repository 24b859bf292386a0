"""Wrong implementations, each with one bug of the field, that prove the suite can fail."""
