"""A model, not a measurement: bytes and time of sparse attention over W ranks, for machines that were not at hand.

Its figures are data (``figures.json``), each with its source: measured on two H200s, published by a vendor, or assumed.
"""
