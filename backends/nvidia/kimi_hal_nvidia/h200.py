"""How many blocks an H200 has room for, which ways of cutting work are chosen by."""

from __future__ import annotations

#: Multiprocessors.
PROCESSORS = 132
#: Clusters that are resident at once, one block a multiprocessor, by their blocks: multiprocessors stand in groups of
#: 16 and 18, and one of fewer, not alike on all of these devices. Of three and six fewer than the driver tells: 40 and
#: 20 took two rounds.
CLUSTERS = {1: 132, 2: 66, 3: 36, 4: 31, 6: 18, 8: 15, 12: 7, 16: 7}
