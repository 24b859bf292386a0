"""Run one case on one implementation, in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from kimi_hal import ops
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.errors import SelectionError
from kimi_hal.ops.operator import output_shapes
from kimi_hal.ops.spec import Spec
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.judges import Trial, judge
from kimi_hal_conformance.oracle import Answer, Question, answer, buffers
from kimi_hal_conformance.poison import Room
from kimi_hal_conformance.verdict import FAILED, PASSED, REFUSED, Measure, Verdict

#: What the step metadata of each kind of operator is made from.
PREPARED_FROM = ("row_req", "row_len", "block_table", "cu_seqlens", "state_ids")


@dataclass(frozen=True)
class Subject:
    """Who is on trial, and where."""

    implementation: str
    device: str
    hooks: DeviceHooks

    def plan(self, case: cases.Case, spec: Spec, group: Any, **pair: Any) -> Plan:
        """Plan the case's operator on this implementation."""
        return plan(
            case.operator,
            spec,
            limits=case.limits,
            device=self.device,
            group=group,
            implementation=self.implementation,
            **pair,
        )


def run_case(case: cases.Case, subject: Subject, seed: int) -> Verdict:
    """Plan, run between canaries, then ask the oracle; return the verdict. Exceptions become verdicts."""
    start = time.perf_counter()
    backend = subject.implementation.partition(".")[0]
    verdict = Verdict(
        case=case.id,
        operator=case.operator,
        implementation=subject.implementation,
        status=PASSED,
        seed=seed,
        replay=f"kimi-hal conformance run --backend {backend} --case {case.id} --seed {seed}",
    )
    try:
        problems, measures = _trials(case, subject, seed)
    except SelectionError as error:
        found = {"status": REFUSED, "problems": tuple(str(error).splitlines())}
    except Exception as error:  # whatever a vendor's kernel raises is its verdict
        found = {"status": FAILED, "problems": (f"{type(error).__name__}: {error}",)}
    else:
        problems += [f"{m.tensor}: {m.problem}" for m in measures if m.problem]
        status = FAILED if problems else PASSED
        found = {"status": status, "problems": tuple(problems), "measures": tuple(measures)}
    return msgspec.structs.replace(verdict, seconds=time.perf_counter() - start, **found)


Findings = tuple[list[str], list[Measure]]


def _trials(case: cases.Case, subject: Subject, seed: int) -> Findings:
    """Run the case on one rank, or on each rank of a loopback group."""
    operands = case.make(cases.generator(case, seed))
    if not case.ranks:
        return _trial(case, case.spec, operands, subject, None)

    def one(group: LoopbackGroup) -> Findings:
        return _trial(
            case, rank_spec(case.spec, group.rank()), operands["ranks"][group.rank()], subject, group
        )

    found = LoopbackGroup.run(case.ranks, one)
    problems = [f"rank {rank}: {p}" for rank, (problems, _) in enumerate(found) for p in problems]
    return problems, [measure for _, measures in found for measure in measures]


def rank_spec(spec: Any, rank: int) -> Any:
    """Return a rank's own Spec: the same but for ``dcp.rank``."""
    return dataclasses.replace(spec, dcp=dataclasses.replace(spec.dcp, rank=rank))


def _trial(
    case: cases.Case, spec: Spec, operands: Mapping[str, Any], subject: Subject, group: Any
) -> Findings:
    question = Question(ops.get(case.operator), spec, case.limits, operands, group)
    room = Room(subject.hooks)
    runner = {"kda_commit": _commit, "kda_verify": _verify}.get(case.operator, _run)
    got = runner(case, question, room, subject)
    subject.hooks.synchronize()
    problems = list(room.problems(question.op.mutated))
    exact, reference = (answer(question_for_oracle(question), d) for d in (torch.float64, torch.float32))
    return problems, list(judge(case.operator)(Trial(question, got, exact, reference)))


def question_for_oracle(question: Question) -> Question:
    """Return the call as the reference takes it: with a records buffer of its own where it writes one."""
    if question.op.name != "kda_verify":
        return question
    records = reference_records(question)
    return dataclasses.replace(question, operands={**question.operands, "records": records})


def reference_records(question: Question) -> torch.Tensor:
    """Return a records buffer that is long enough for the reference in float64."""
    from kimi_hal.reference.sizes import records_bytes

    spec: Any = question.spec
    width = records_bytes(spec, question.limits.rows_per_req, u_bytes=8)
    return torch.zeros(question.limits.max_reqs, width, dtype=torch.uint8)


def _run(case: cases.Case, question: Question, room: Room, subject: Subject) -> Answer:
    """Plan and call once; outputs, step and workspace hold NaN bytes before."""
    found = subject.plan(case, question.spec, question.group)
    placed = {name: room.operand(name, _prepared(found, value)) for name, value in question.operands.items()}
    return _call(found, question, room, placed)


def _prepared(found: Plan, value: Any) -> Any:
    return list(found.weights(**value)) if isinstance(value, Checkpoint) else value


def _call(found: Plan, question: Question, room: Room, placed: Mapping[str, Any]) -> Answer:
    op = question.op
    shapes = () if op.listed else output_shapes(op, found.spec, found.limits, placed)
    outs = {s.keyword: room.output(s.keyword, tuple(s.shape), s.dtype) for s in shapes}
    extra = {}
    for name, size in (("workspace", found.workspace_bytes), ("step", found.step_bytes)):
        if size and name in op.signature.parameters:
            extra[name] = room.output(name, (size,), "uint8")
    if "step" in extra:
        found.prepare(**{k: placed[k] for k in PREPARED_FROM if k in placed}, step=extra["step"])
    results = found.run(**placed, **outs, **extra)
    if op.listed:
        return Answer({"weights": results}, {})
    results = results if isinstance(results, tuple) else (results,) if op.outs else ()
    for out, result in zip(op.outs, results, strict=True):
        if result is not outs[out.keyword]:
            raise AssertionError(f"{out.keyword} was given, but another tensor was returned")
    mutated = buffers(op.mutated, placed)
    return Answer({k: v.cpu() for k, v in outs.items()}, {k: v.cpu() for k, v in mutated.items()})


def _verify(case: cases.Case, question: Question, room: Room, subject: Subject) -> Answer:
    """Run ``kda_verify`` with a records buffer of the plan's own size."""
    found = subject.plan(case, question.spec, None)
    placed = {name: room.operand(name, value) for name, value in question.operands.items()}
    placed["records"] = room.output("records", (case.limits.max_reqs, found.records_bytes), "uint8")
    return _call(found, question, room, placed)


def _commit(case: cases.Case, question: Question, room: Room, subject: Subject) -> Answer:
    """Run the paired ``kda_verify``, then ``kda_commit`` of what was accepted, for one layer."""
    verify_case = dataclasses.replace(case, operator="kda_verify")
    verify = subject.plan(verify_case, question.spec, None)
    given = {k: v for k, v in question.operands.items() if k != "accepted"}
    placed = {name: room.operand(name, value) for name, value in given.items()}
    placed["records"] = room.output("records", (case.limits.max_reqs, verify.records_bytes), "uint8")
    verify.run(**placed)
    lists = {
        "conv_states": [placed["conv_state"]],
        "states": [placed["state"]],
        "records": [placed["records"]],
        "A_logs": None if placed["A_log"] is None else [placed["A_log"]],
        "dt_biases": None if placed["dt_bias"] is None else [placed["dt_bias"]],
    }
    accepted = room.operand("accepted", question.operands["accepted"])
    commit = subject.plan(case, question.spec, None, pair=verify)
    commit.run(**lists, state_ids=placed["state_ids"], accepted=accepted)
    for name in ("conv_state", "state"):  # the commit's own to change
        room.originals.pop(name)
    return Answer({}, {"conv_states[0]": placed["conv_state"].cpu(), "states[0]": placed["state"].cpu()})
