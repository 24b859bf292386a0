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
            id="workspace_set_up_once",
            file="reference/backend.py",
            old="        results = self.fn(self.ctx.spec, **operands, **context, **tested)",
            new=(
                "        results = (lambda found, mark: "
                "([t.mul_(0) for t in found] if bool((mark == 42).all()) else 0, mark.fill_(42), found)[2])"
                "(self.fn(self.ctx.spec, **operands, **context, **tested), given['workspace'][:8])"
            ),
            breaks="What the last call left in the workspace is taken for its own progress, and nothing is done.",
            imitates="https://github.com/flashinfer-ai/flashinfer/pull/1463",
            passes="flashinfer-bench",
            operators=("sparse_mla", "topk_select"),
            workspace=64,
        ),
        Mutant(
            id="step_prepared_once",
            file="reference/backend.py",
            old="    run = signatures.function(op, op.name, call)",
            new=(
                "    run = signatures.function(op, op.name, lambda given: call({**given, 'row_len': "
                "given['step'][8 : 8 + given['row_len'].nbytes].view(given['row_len'].dtype)})); "
                "run.prepare = lambda row_len, step, **known: bool((step[:8] == 42).all()) or ("
                "step[8 : 8 + row_len.nbytes].copy_(row_len.repeat(1).view(step.dtype)), step[:8].fill_(42))"
            ),
            breaks="A step that was prepared before is not prepared again: the lengths are those of the first one.",
            imitates="https://github.com/vllm-project/vllm/pull/41162",
            passes="flashinfer-bench",
            operators=("indexer_logits", "indexer_topk"),
            step=16,
        ),
        Mutant(
            id="maximum_into_output",
            file="reference/backend.py",
            old="        buffer.copy_(value)",
            new="        buffer.copy_(value.fmax(buffer) if str(value.dtype) == 'torch.float32' else value)",
            breaks="A largest value is gathered in the caller's buffer, in which an earlier step's is larger.",
            imitates="https://github.com/Azure/MS-AMP/pull/17",
            passes="flashinfer-bench",
            operators=("quantize_index_query", "kda_gate", "moe_route"),
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
        Mutant(
            id="query_of_a_plan_shared_by_threads",
            file="reference/backend.py",
            old="operands = {name: given[name] for name in (*self.inputs, *self.written)}",
            new=(
                "operands = {name: (self.__dict__.__setitem__('q', given[name]), __import__('time').sleep(0.002), "
                "self.q)[2] if (self.op.name, name) == ('sparse_mla', 'q') else given[name] "
                "for name in (*self.inputs, *self.written)}"
            ),
            breaks="The query stands in scratch of the plan: another thread's call overwrites it before it is read.",
            imitates="https://github.com/inclusionAI/cuLA/pull/108",
            passes="flashinfer-bench",
            operators=("sparse_mla",),
        ),
        Mutant(
            id="checkpoint_loses_two_bits",
            file="reference/kda.py",
            old=(
                "            o[start[:live] + t] = out\n            if t + 1 in due:\n"
                "                save(state, saved.where(count == t + 1, -1), states)"
            ),
            new=(
                "            o[start[:live] + t] = out\n            if t + 1 in due:\n                save(state, "
                "saved.where(count == t + 1, -1), (states.float().view(torch.int32) & -4).view(torch.float32))"
            ),
            breaks="A state stored on the way lacks two bits of float32: what goes on from it is another run.",
            imitates="https://github.com/sgl-project/sglang/pull/34820",
            passes="flashinfer-bench",
            operators=("kda_prefill",),
        ),
        Mutant(
            id="prepared_weights_by_shape",
            file="reference/moe.py",
            old="return tensors if donate else [t.clone(memory_format=torch.contiguous_format) for t in tensors]",
            new=(
                "return [globals().setdefault((i, t.shape), t.clone()).clone() for i, t in enumerate(tensors)]"
            ),
            breaks="What was prepared for one layer is handed out for every layer of the same shapes.",
            imitates="https://github.com/flashinfer-ai/flashinfer/pull/4361",
            passes="flashinfer-bench",
            operators=("prepare_moe_weights",),
        ),
    )
)
