"""Block transfer between processes over NIXL. Needs the ``nixl`` package; nothing else here does.

An ``Endpoint`` registers one pool. Two endpoints exchange cards by any channel, agree that their layouts pair,
and then read or write the moves that ``Pair`` gives, in one request.
"""

from __future__ import annotations

import base64
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_hal.cache.host import check_move
from kimi_hal.cache.layout import Layout
from kimi_hal.cache.ranges import Move
from kimi_hal.cache.views import check_pool
from kimi_hal.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

#: Version of a card.
VERSION = 1

#: What to type when the package is missing: its own dependency on torch must not choose torch's build.
INSTALL = (
    "pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1 (after torch; nixl-cu12 for torch built with CUDA 12)"
)

#: Seconds between two looks at a request in flight.
POLL = 0.0005


@dataclass(frozen=True)
class Peer:
    """Another endpoint, as its card describes it: where its pool is, and how it is laid out."""

    name: str
    rank: int
    base: int
    bytes: int
    memory: str
    device: int
    layout: Layout


class Endpoint:
    """One rank's pool, registered with NIXL.

    Args:
        name: unique among the endpoints that meet.
        pool: as ``Layout.views`` takes it, in host or device memory. The endpoint keeps it alive; it must not
            move, as a host tensor does when it is sent to another process by ``torch.multiprocessing``.
        layout: the packed cache.
        rank: tensor-parallel rank.
        backend: NIXL's transport.

    Raises:
        CacheError: NIXL is missing or refuses the memory, or the pool does not fit the layout.
    """

    def __init__(
        self, name: str, pool: Tensor, layout: Layout, *, rank: int = 0, backend: str = "UCX"
    ) -> None:
        check_pool(layout, pool)
        api = _nixl()
        self.name, self.pool, self.layout, self.rank = name, pool, layout, rank
        self.memory = "VRAM" if pool.is_cuda else "DRAM"
        self.device = max(pool.get_device(), 0)
        self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=[backend]))
        if backend not in self._agent.backends:
            known = ", ".join(sorted(self._agent.get_plugin_list()))
            raise CacheError(f"NIXL has no transport {backend!r} here. Known: {known}")
        self.base = pool.data_ptr()
        region = [(self.base, layout.bytes, self.device, "")]
        self._region = self._try("register the pool", self._agent.register_memory, region, self.memory)

    def card(self) -> bytes:
        """Return what another endpoint needs to reach this one; send it by any channel."""
        fields = {
            "version": VERSION,
            "name": self.name,
            "rank": self.rank,
            "base": self.base,
            "bytes": self.layout.bytes,
            "memory": self.memory,
            "device": self.device,
            "layout": self.layout.to_dict(),
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
        }
        return json.dumps(fields).encode()

    def meet(self, card: bytes) -> Peer:
        """Make another endpoint known from its card.

        Raises:
            CacheError: the bytes are no card, of another version, or NIXL refuses them.
        """
        try:
            fields = json.loads(card)
            version, agent = fields["version"], base64.b64decode(fields["agent"])
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(f"these {len(card)} bytes are not an endpoint's card: {error!r}") from None
        if version != VERSION:
            raise CacheError(
                f"a card of version {version}, this side speaks {VERSION}: run one release on both"
            )
        self._try(f"meet {fields['name']!r}", self._agent.add_remote_agent, agent)
        layout = Layout.from_dict(fields["layout"])
        plain = {name: fields[name] for name in ("name", "rank", "base", "bytes", "memory", "device")}
        return Peer(**plain, layout=layout)

    def read(self, peer: Peer, moves: Sequence[Move], *, note: bytes = b"", timeout: float = 60.0) -> None:
        """Read ranges of the peer's pool into this one, and return when they have arrived.

        Args:
            peer: the source.
            moves: source offsets in the peer's pool, target offsets in this one.
            note: given to the peer when all is read (``notes``), so that it may free the blocks.
            timeout: seconds.

        Raises:
            CacheError: a range outside a pool, a peer that is gone, or no end within ``timeout``.
        """
        for move in moves:
            check_move(move, peer.bytes, self.layout.bytes)
        there = [(peer.base + m.source, m.length, peer.device) for m in moves]
        here = [(self.base + m.target, m.length, self.device) for m in moves]
        self._transfer("READ", peer, here, there, note, timeout)

    def write(self, peer: Peer, moves: Sequence[Move], *, note: bytes = b"", timeout: float = 60.0) -> None:
        """Write ranges of this pool into the peer's; arguments and errors as ``read``, directions turned."""
        for move in moves:
            check_move(move, self.layout.bytes, peer.bytes)
        here = [(self.base + m.source, m.length, self.device) for m in moves]
        there = [(peer.base + m.target, m.length, peer.device) for m in moves]
        self._transfer("WRITE", peer, here, there, note, timeout)

    def notes(self) -> dict[str, list[bytes]]:
        """Return the notes that came with finished transfers since the last call, by peer."""
        notes: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return notes

    def close(self) -> None:
        """Take the pool out of NIXL's hands; the endpoint is of no use afterwards."""
        self._try("release the pool", self._agent.deregister_memory, self._region)

    def _transfer(
        self,
        direction: str,
        peer: Peer,
        here: list[tuple[int, int, int]],
        there: list[tuple[int, int, int]],
        note: bytes,
        timeout: float,
    ) -> None:
        if self.pool.data_ptr() != self.base:
            raise CacheError(
                f"the pool of {self.name!r} has moved since it was registered, as torch.multiprocessing moves what "
                "it sends: send a clone, or make a new endpoint"
            )
        if not here:
            return
        what = f"{direction.lower()} {sum(length for _, length, _ in here):,} bytes, peer {peer.name!r}"
        local = self._agent.get_xfer_descs(here, self.memory)
        remote = self._agent.get_xfer_descs(there, peer.memory)
        handle = self._try(what, self._agent.initialize_xfer, direction, local, remote, peer.name, note)
        try:
            self._wait(what, handle, timeout)
        finally:
            self._try(f"end: {what}", handle.release)

    def _wait(self, what: str, handle: Any, timeout: float) -> None:
        end = time.monotonic() + timeout
        state = self._try(what, self._agent.transfer, handle)
        while state == "PROC":
            if time.monotonic() > end:
                raise CacheError(f"NIXL did not {what} within {timeout:g} s; is the peer alive?")
            time.sleep(POLL)
            state = self._try(what, self._agent.check_xfer_state, handle)
        if state != "DONE":
            raise CacheError(f"NIXL could not {what}: it ended in state {state}")

    @staticmethod
    def _try(what: str, call: Any, *arguments: Any) -> Any:
        """Call NIXL; its errors have no common base and no sentence, so give them one."""
        try:
            return call(*arguments)
        except Exception as error:
            raise CacheError(f"NIXL could not {what}: {type(error).__name__}: {error}") from error


def _nixl() -> Any:
    """Return NIXL's Python interface, or say how to get it."""
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise CacheError(f"block transfer needs NIXL ({error}): {INSTALL}") from error
