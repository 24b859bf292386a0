"""How many blocks an H200 has room for, which ways of cutting work are chosen by."""

from __future__ import annotations

#: Multiprocessors.
PROCESSORS = 132
#: Clusters that are resident at once, one block a multiprocessor, by their blocks: multiprocessors stand in groups of
#: 16 and 18, and one of fewer.
CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 31, 6: 20, 8: 15, 12: 7, 16: 7}
