"""What the reference covers: every legal Spec of every operator, read off the Spec classes.

Imports no torch. ``IMPLEMENTATIONS`` is made anew at each reading, so that formats which a plugin has
registered since are covered as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from kimi_hal import formats, ops
from kimi_hal.dispatch.contract import Capability, Implementation, Properties
from kimi_hal.dispatch.fields import Leaf, leaves
from kimi_hal.dispatch.validation import FORMAT_FIELDS
from kimi_hal.domain import Domain, OneOf
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import ANY_FLOAT
from kimi_hal.reference.sizes import RECORDS
from kimi_hal.reference.weights import FORMAT

#: Operators that treat each row or sequence by itself, bit for bit: comparisons, copies, arithmetic on
#: single elements, sums in an order of their own.
ROW_BY_ROW = frozenset(
    {"quantize_index_query", "store_index_keys", "store_latent", "topk_select", "topk_merge", "all_gather"}
    | {"indexer_logits", "indexer_topk", "sparse_mla", "merge_attn_states", "dsa_decode", "kda_layer_decode"}
    | {"kda_conv", "kda_gate", "kda_prefill", "kda_decode", "kda_verify", "kda_commit"}
)
NONE = OneOf((None,))


def implementation(op: Operator) -> Implementation:
    """Return the declaration of the reference for one operator."""
    alone = op.name in ROW_BY_ROW
    properties = Properties(
        deterministic=True,
        concurrent=True,
        batch_invariant=alone,
        numerics_id="reference" if alone else "",
        checkpoint_exact=op.family == "kda",
    )
    return Implementation(
        operator=op.name,
        name="torch",
        build="kimi_hal.reference.backend:build",
        capabilities=tuple(Capability(("*",), c, properties=properties) for c in coverage(op.spec_type)),
        weights="kimi_hal.reference.weights:weights" if op.takes_weights else None,
        size="kimi_hal.reference.sizes:sizes",
        source=tuple(f"kimi_hal/{part}/*.py" for part in ("reference", "ops", "formats", "parallel")),
        records=RECORDS if op.name in ("kda_verify", "kda_commit") else None,
        weights_format=FORMAT if op.name in ("prepare_moe_weights", "moe_experts") else None,
        execution=("native", "portable", "interpreted"),
    )


def coverage(spec_type: Any) -> list[Mapping[str, Domain]]:
    """Return conjunctions that together cover every legal Spec of a class.

    A field that may be ``None`` beside numbers is no single domain, so it takes two conjunctions, unless
    ``None`` is its default, which is covered anyway.
    """
    known = leaves(spec_type)
    choices = {name: domains(leaf) for name, leaf in known.items()}
    return [dict(zip(choices, combination, strict=True)) for combination in product(*choices.values())]


def domains(leaf: Leaf) -> tuple[Domain, ...]:
    """Return the legal values of one field as domains."""
    if leaf.record is not None:
        return (NONE,)  # its presence is covered by the fields below it
    values = leaf.legal or _by_type(leaf)
    return (values, NONE) if leaf.optional and leaf.default is not None else (values,)


def _by_type(leaf: Leaf) -> Domain:
    """Return the domain of a field that its Spec class constrains by type alone."""
    field = leaf.name.rpartition(".")[2]
    if field in FORMAT_FIELDS:
        return OneOf(tuple(formats.names(FORMAT_FIELDS[field])))
    if leaf.hint is bool:
        return OneOf((False, True))
    return ANY_FLOAT


def __getattr__(name: str) -> Any:
    if name != "IMPLEMENTATIONS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tuple(implementation(op) for op in ops.OPERATORS.values())
