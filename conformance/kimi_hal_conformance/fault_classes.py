"""The classes of fault of ``docs/faults.md``, by number: what each is, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

CLASSES: Mapping[int, str] = {
    1: "A softmax over a block in which every key is masked, or a mask that a real logit reaches.",
    2: "A merge with a part that is empty: its NaN output, an LSE of +inf, two empty parts, a clamped LSE.",
    3: "Padding rows that write to slot 0 or to the last slot, that advance a state, or whose NaN spreads.",
    4: "Memory that nobody wrote or nobody owns any more enters with weight 0, and is NaN.",
    5: "Ties across the cut overflow a buffer, or are broken another way on another rank or run.",
    6: "Distinct scores that share a bin of a radix selection overflow it.",
    7: "Fewer keys than k, as many, one more; no key; lengths and windows that must be clamped.",
    8: "A product of an index and a stride wraps at 2^31 or 2^32.",
    9: "A last chunk that is not full, one token, fewer than a tile, more than 65,536.",
    10: "A recurrent state that survives into the next request, or that something advances twice.",
    11: "Logarithms of another base, a causal bound taken locally, an interleave that is ignored.",
    12: "Sequences without a row, of one row among long ones, and rows behind the last sequence.",
    13: "A square state or matrix that is read transposed.",
    14: "A dimension that is no power of two is read past its end.",
    15: "A head count that no list of a kernel has.",
    16: "An expert, all experts or a rank without a token.",
    17: "More experts, rows or requests than one block holds.",
    18: "A bias that enters the weight, a tie-break that reorders scores, an id of −1 that indexes a map.",
    19: "NaN, infinities and zeros of both signs among scores.",
    20: "Edge codes of scales, blocks of zeros, blocks of tiny numbers.",
    21: "Another order of nibbles, a divisor taken for a multiplier, scales that are not split with their matrix.",
    22: "A dialect of FP8 that is taken from the device and not from the cache.",
    23: "Another unit of pages, another layout of records, strides that are ignored.",
    24: "Collectives: sizes that alternate, numbers that a protocol takes for a mark.",
    25: "Selection: a swallowed error, a misspelt variable, a silent fallback.",
}
