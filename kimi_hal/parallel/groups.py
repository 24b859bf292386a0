"""Process groups: what an operator may ask of the other ranks, and nothing more.

``LoopbackGroup`` plays W ranks in W threads on one device, so that every distributed property can be tested
on a laptop; ``TorchGroup`` speaks to ``torch.distributed``. Both move bytes: any dtype, any bit pattern.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kimi_hal.errors import GroupError
from kimi_hal.parallel.agreement import agree
from kimi_hal.parallel.meeting import Faults, Meeting, Offer, check_timeout, disagreement, run_ranks

if TYPE_CHECKING:
    from kimi_hal.ops.spec import DCP

__all__ = ["Faults", "Group", "LoopbackGroup", "TorchGroup", "agree", "require"]

Result = TypeVar("Result")


class Group(ABC):
    """W ranks that meet at collective calls, in the same order on each of them.

    Attributes:
        bytes_sent: payload bytes that this rank has handed to others, each counted once however many
            ranks receive it.
        device: where messages that no tensor argument decides (``agree``) are made.
    """

    bytes_sent: int = 0
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def size(self) -> int:
        """Return the number of ranks, W."""

    @abstractmethod
    def rank(self) -> int:
        """Return this rank, 0 ≤ rank < W."""

    @abstractmethod
    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return ``[W, *x.shape]``: every rank's tensor in rank order, bit for bit.

        Args:
            x: any dtype, any strides; same shape and dtype on every rank.
            out: a contiguous buffer of that shape and dtype, which is filled and returned.

        Raises:
            GroupError: on all ranks, if shapes or dtypes differ, a rank fails or does not arrive in time; on
                this rank, if ``x`` is no dense tensor or ``out`` does not fit.
        """

    @abstractmethod
    def all_to_all(self, x: Tensor) -> Tensor:
        """Exchange pieces: ``x[i]`` goes to rank i, ``result[j]`` came from rank j.

        Args:
            x: ``[W, ...]``, any dtype; same shape and dtype on every rank.

        Raises:
            GroupError: as ``all_gather``; also if ``x.shape[0]`` is not W.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    def _check_gathered(self, x: Tensor, out: Tensor | None) -> None:
        _check_dense("all_gather", x)
        if out is None:
            return
        _check_dense("all_gather into out", out)
        wanted = (self.size(), *x.shape)
        if out.shape != wanted or out.dtype != x.dtype or not out.is_contiguous() or out.device != x.device:
            raise GroupError(
                f"all_gather: out must be contiguous {list(wanted)} {_name(x.dtype)} on {x.device}, got "
                f"{list(out.shape)} {_name(out.dtype)} on {out.device}, strides {list(out.stride())}"
            )

    def _check_pieces(self, x: Tensor) -> None:
        _check_dense("all_to_all", x)
        if not x.dim() or x.shape[0] != self.size():
            raise GroupError(f"all_to_all needs one piece a rank, [{self.size()}, ...], got {list(x.shape)}")


class LoopbackGroup(Group):
    """One of W ranks that are threads of this process and share a device.

    Each rank runs the same code, sees only its own tensors and meets the others at group calls alone. What a
    rank receives is a copy taken when the sender arrived, so it does not depend on which thread ran first.
    All ranks must use one stream of the device.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    @classmethod
    def run(
        cls,
        world: int,
        fn: Callable[[LoopbackGroup], Result],
        *,
        timeout: float = 60.0,
        faults: Faults | None = None,
    ) -> list[Result]:
        """Run ``fn(group)`` on W ranks and return their results in rank order.

        Args:
            world: number of ranks, W ≥ 1.
            fn: the code of one rank.
            timeout: seconds that a rank may keep the others waiting at a call.
            faults: what goes wrong on purpose.

        Raises:
            GroupError: a rank raised, died, came too late or gave other shapes; names the rank. The
                exception of a rank that raised is the cause.
        """
        meeting = Meeting(world, timeout, faults or Faults())
        return run_ranks(meeting, lambda rank: fn(cls(meeting, rank)))

    def size(self) -> int:
        """Return W."""
        return self._meeting.world

    def rank(self) -> int:
        """Return this thread's rank."""
        return self._rank

    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return every rank's tensor, ``[W, *x.shape]``."""
        self._check_gathered(x, out)
        self._count(x.nbytes)
        parts = [_to_bytes(part) for part in self._exchange("all_gather", x)]
        if out is not None:
            torch.stack(parts, out=_to_bytes(out).view(len(parts), -1))
            return out
        return _from_bytes(torch.stack(parts), (len(parts), *x.shape), x.dtype)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return the piece that each rank meant for this one, ``[W, ...]``."""
        self._check_pieces(x)
        self._count(x.nbytes - x.nbytes // self.size())
        parts = self._exchange("all_to_all", x)
        return _from_bytes(torch.stack([_to_bytes(p[self._rank]) for p in parts]), tuple(x.shape), x.dtype)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._meeting.exchange(self._rank, Offer("barrier"))

    def _exchange(self, call: str, x: Tensor) -> Sequence[Any]:
        # A contiguous copy: the sender may overwrite its tensor as soon as its own call has returned.
        copy = x.detach().clone(memory_format=torch.contiguous_format)
        return self._meeting.exchange(self._rank, Offer(call, tuple(x.shape), _name(x.dtype), copy))

    def _count(self, sent: int) -> None:
        self.bytes_sent += sent if self.size() > 1 else 0


class TorchGroup(Group):
    """The ranks of a ``torch.distributed`` process group that the engine has made.

    Args:
        process_group: the engine's group; ``None`` is the default group.
        timeout: seconds that a call may take. Where ``verify`` is off and the message is on an accelerator the
            host does not wait, since a graph may be recording: then the process group's own timeout counts.
        verify: send shape and dtype ahead of every message, so that a difference is an error on all ranks
            and not a hang. It reads the device: switch it off where calls are captured into a graph.
        device: where control messages are made; ``None``: the CPU if the group's backend serves it, else
            the current accelerator.
    """

    def __init__(
        self,
        process_group: Any | None = None,
        *,
        timeout: float = 600.0,
        verify: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise GroupError("no process group; start one: torch.distributed.init_process_group(…)")
        check_timeout(timeout)
        self._dist = dist
        self._pg = process_group if process_group is not None else dist.group.WORLD
        self._timeout = timeout
        self._verify = verify
        self._calls = 0
        self._served = str(dist.get_backend_config(self._pg))  # "cpu:gloo,cuda:nccl"
        self.device = torch.device(device) if device is not None else self._control_device()

    def size(self) -> int:
        """Return W."""
        return int(self._dist.get_world_size(self._pg))

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return int(self._dist.get_rank(self._pg))

    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return every rank's tensor, ``[W, *x.shape]``."""
        self._check_gathered(x, out)
        self._meet("all_gather", x)
        got = self._gather_bytes("all_gather", _to_bytes(x), out)
        self.bytes_sent += x.nbytes if self.size() > 1 else 0
        return _from_bytes(got, (self.size(), *x.shape), x.dtype) if out is None else out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return the piece that each rank meant for this one, ``[W, ...]``."""
        self._check_pieces(x)
        self._meet("all_to_all", x)
        sent = _to_bytes(x)
        got = torch.empty_like(sent)
        start = partial(self._dist.all_to_all_single, got, sent, group=self._pg, async_op=True)
        self._wait("all_to_all", start, sent.device)
        self.bytes_sent += x.nbytes - x.nbytes // self.size()
        return _from_bytes(got, tuple(x.shape), x.dtype)

    def barrier(self) -> None:
        """Wait for every rank."""
        self._calls += 1
        self._wait("barrier", partial(self._dist.barrier, group=self._pg, async_op=True), self.device)

    def _control_device(self) -> torch.device:
        if "cpu:" in self._served:
            return torch.device("cpu")
        kind = torch.accelerator.current_accelerator()
        return torch.device(kind.type if kind else "cpu", torch.accelerator.current_device_index())

    def _meet(self, call: str, x: Tensor) -> None:
        """Exchange what each rank is about to send; ranks that differ raise together."""
        self._check_served(call, x)
        self._calls += 1
        if not self._verify:
            return
        mine = _header(f"{call} {list(x.shape)} {_name(x.dtype)}").to(x.device)
        headers = self._gather_bytes(call, mine).cpu()
        problem = disagreement(self._calls - 1, [_shown(bytes(row.tolist())) for row in headers])
        if problem:
            raise GroupError(problem)

    def _check_served(self, call: str, x: Tensor) -> None:
        """Refuse a device that the group's backend does not serve: torch may fill nothing there, and say nothing."""
        kinds = [pair.partition(":")[0] for pair in self._served.split(",")]
        if x.device.type not in kinds:
            raise GroupError(
                f"{call}: the process group's backend ({self._served}) moves tensors of {', '.join(kinds)}, this one "
                f"is on {x.device}: give a copy on one of these, or init_process_group with a backend for it"
            )

    def _gather_bytes(self, call: str, data: Tensor, buffer: Tensor | None = None) -> Tensor:
        out = data.new_empty((self.size(), *data.shape)) if buffer is None else _to_bytes(buffer)
        gather = getattr(self._dist, "all_gather_single", None)  # its name from torch 2.13 on
        gather = gather or self._dist.all_gather_into_tensor
        self._wait(call, partial(gather, out.view(-1), data, group=self._pg, async_op=True), data.device)
        return out

    def _wait(self, call: str, start: Callable[[], Any], device: torch.device) -> None:
        # With a timeout the host waits for the device, which a recording graph forbids.
        limit = (timedelta(seconds=self._timeout),) if self._verify or device.type == "cpu" else ()
        try:
            start().wait(*limit)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise GroupError(
                f"rank {self.rank()} of {self.size()}: {call} (call {self._calls - 1}) did not end within "
                f"{self._timeout:g} s: {first}. Did every rank reach this call?"
            ) from error


def require(group: Group | None, dcp: DCP) -> Group:
    """Return the group if it is the one that ``dcp`` describes.

    Raises:
        GroupError: there is none, or its size or rank is another.
    """
    if group is None:
        raise GroupError(f"dcp.world={dcp.world} needs a group: hal.plan(…, group=TorchGroup(process_group))")
    if (group.size(), group.rank()) != (dcp.world, dcp.rank):
        raise GroupError(
            f"the Spec is rank {dcp.rank} of {dcp.world}, the group is rank {group.rank()} of {group.size()}"
        )
    return group


def _check_dense(call: str, x: object) -> None:
    """Refuse what has no bytes of its own in one run: no tensor, a sparse or a quantised one."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_quantized:
        got = f"{_name(x.dtype)} {x.layout}" if isinstance(x, Tensor) else type(x).__name__
        raise GroupError(f"{call} takes a dense tensor, got {got}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _to_bytes(x: Tensor) -> Tensor:
    """Return the elements as a flat run of bytes; the storage is shared where it is contiguous."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return data.reshape(-1).view(dtype).reshape(shape)


def _header(text: str, width: int = 256) -> Tensor:
    """Return a text as a fixed number of bytes, cut or filled with zeros."""
    data = text.encode()[:width]
    return torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)


def _shown(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="ignore")
