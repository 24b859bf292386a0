"""Mutants whose first call is right: what they return, keep or are given is taken for what it was then."""

from __future__ import annotations

from kimi_hal_conformance.mutants.mutant import Mutant, add

add(
    (
        Mutant(
            id="results_in_one_buffer",
            file="reference/backend.py",
            old="return rounded.clone() if shared and home else rounded",
            new=(
                "return place.__dict__.setdefault((dtype, rounded.shape, __import__('threading').get_ident()), "
                "rounded.clone()).copy_(rounded)"
            ),
            breaks="Without out= each call returns the same buffer, so that the result before is overwritten.",
            imitates="https://github.com/flashinfer-ai/flashinfer/pull/3118",
            passes="flashinfer-bench",
            operators=("kda_decode", "sparse_mla", "moe_experts", "all_gather"),
        ),
        Mutant(
            id="out_rows_taken_as_dense",
            file="reference/backend.py",
            old="        buffer.copy_(value)",
            new="        buffer.as_strided(buffer.shape, value.new_empty(buffer.shape).stride()).copy_(value)",
            breaks="The rows of a caller's buffer are written one behind the other, whatever its strides are.",
            imitates="https://github.com/NVIDIA/cutlass/issues/1323",
            passes="flashinfer-bench",
            operators=(
                "all_gather",
                "dsa_decode",
                "indexer_topk",
                "kda_decode",
                "kda_prefill",
                "merge_attn_states",
                "moe_experts",
                "sparse_mla",
                "topk_select",
            ),
        ),
        Mutant(
            id="weights_of_the_first_layer_kept",
            file="reference/backend.py",
            old="operands = {name: given[name] for name in (*self.inputs, *self.written)}",
            new=(
                "operands = {name: self.__dict__.setdefault(name, given[name]) if name == 'weights' else "
                "given[name] for name in (*self.inputs, *self.written)}"
            ),
            breaks="A plan that layers share goes on with the weights of its first call.",
            imitates="https://github.com/sgl-project/sglang/pull/29916",
            passes="flashinfer-bench",
            operators=("kda_layer_decode", "moe_experts"),
        ),
        Mutant(
            id="merge_order_by_number_of_rows",
            file="reference/sparse_mla.py",
            old="        for weight, logit, piece in zip(weights, clean, outs[:, part], strict=True):",
            new=(
                "        for weight, logit, piece in list(zip(weights, clean, outs[:, part], strict=True))"
                "[:: 1 if rows < 8 else -1]:"
            ),
            breaks="The order in which parts are added depends on how many rows the call has.",
            imitates="https://github.com/deepseek-ai/FlashMLA/issues/212",
            passes="flashinfer-bench",
            operators=("merge_attn_states",),
        ),
        Mutant(
            id="experts_order_by_call",
            file="reference/moe.py",
            old="for expert, routes in _routes(spec, topk_ids, expert_map):",
            new=(
                "for expert, routes in list(_routes(spec, topk_ids, expert_map))"
                "[:: (-1) ** next(globals().setdefault('calls', __import__('itertools').count()))]:"
            ),
            breaks="The order in which experts add to a row changes from call to call: equal calls have other bits.",
            imitates="https://github.com/microsoft/onnxruntime/issues/27003",
            passes="flashinfer-bench",
            operators=("moe_experts",),
        ),
        Mutant(
            id="gather_input_kept_by_address",
            file="reference/backend.py",
            old="operands = {name: given[name] for name in (*self.inputs, *self.written)}",
            new=(
                "operands = {name: self.__dict__.setdefault(f'at{given[name].data_ptr()}', given[name].clone()) "
                "if (self.op.name, name) == ('all_gather', 'x') else given[name] "
                "for name in (*self.inputs, *self.written)}"
            ),
            breaks="What a rank gives is copied once for each address: later data is not seen.",
            imitates="https://github.com/ROCm/aiter/pull/4812",
            passes="flashinfer-bench",
            operators=("all_gather",),
        ),
    )
)
