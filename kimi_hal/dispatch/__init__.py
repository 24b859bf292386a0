"""What a plugin writes, how it is loaded and chosen, and the plans that come of it."""
