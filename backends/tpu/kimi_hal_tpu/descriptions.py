"""The Pallas kernels as compilers are told of them, if their jax and libtpu are here. Importing this imports no jax."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from kimi_hal.dispatch.compiling import Kernel, Target
from kimi_hal_tpu import requirements

Describe = Callable[[Target], list[Kernel]]


def _of(module: str, operator: str) -> Describe:
    def kernels(target: Target) -> list[Kernel]:
        requirements.check_compiler()
        describe: Describe = getattr(importlib.import_module(f"kimi_hal_tpu.pallas.{module}"), operator)
        return describe(target)

    return kernels


indexer_logits = _of("compiling", "indexer_logits")
indexer_topk = _of("compiling", "indexer_topk")
topk_select = _of("compiling", "topk_select")
sparse_mla = _of("compiling", "sparse_mla")
moe_experts = _of("compiling", "moe_experts")
kda_prefill = _of("kda_compiling", "kda_prefill")
kda_decode = _of("kda_compiling", "kda_decode")
kda_verify = _of("kda_compiling", "kda_verify")
kda_commit = _of("kda_compiling", "kda_commit")
