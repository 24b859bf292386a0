"""Real blocks between two CPU processes over NIXL and UCX; every failure is a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
import transfer_child as child
from cache_cases import Caches, Step, equal, pool_of
from transfer_child import Prefill

from kimi_hal import cache
from kimi_hal.cache import Move
from kimi_hal.cache.transfer import Endpoint, Peer
from kimi_hal.errors import CacheError

nixl = pytest.importorskip(
    "nixl", reason="block transfer needs the nixl wheel: pip install --no-deps nixl==1.5.1 nixl-cu13==1.5.1"
)


@pytest.fixture(scope="module")
def prefill() -> Iterator[Prefill]:
    other = Prefill()
    yield other
    if other.process.is_alive():
        other.end()


def endpoint(name: str, layout: cache.Layout, rank: int = 0) -> Endpoint:
    return Endpoint(name, pool_of(layout), layout, rank=rank)


# --- blocks that move -----------------------------------------------------------------------------------------


def test_whole_blocks_arrive_bit_for_bit_and_the_peer_is_told(prefill: Prefill) -> None:
    here = endpoint("decode-same", child.layout(child.BLOCK, child.TP))
    peer = here.meet(prefill.cards[1])
    assert (peer.name, peer.rank, peer.layout) == ("prefill-1", 1, here.layout)
    moves = cache.pair(peer.layout, here.layout).moves(1, {"tokens": [3, 4, 5]}, {"tokens": [7, 1, 2]})[1]
    assert len(moves) == 2  # blocks 4 and 5 continue each other on both sides
    here.read(peer, moves, note=b"free 3 4 5")
    theirs, ours = prefill.ask("pool", 1).view(child.BLOCKS, -1), here.pool.view(child.BLOCKS, -1)
    assert equal(ours[[7, 1, 2]], theirs[[3, 4, 5]])
    others = [b for b in range(child.BLOCKS) if b not in (7, 1, 2)]
    assert (ours[others] == 0xFF).all()
    assert prefill.ask("notes", 1) == {"decode-same": [b"free 3 4 5"]}
    here.close()


def test_a_decode_instance_of_other_sizes_continues_with_the_bits_of_the_prefill(prefill: Prefill) -> None:
    """Two ranks with blocks of 64 to one rank with blocks of 128; conv states by their three reads."""
    layout = child.layout(128, 1)
    here = endpoint("decode-other", layout)
    peers = [here.meet(card) for card in prefill.cards]
    pairing = cache.pair(peers[0].layout, layout)
    blocks = ((2, 0), (6, 1))
    kda = [group.name for group in layout.groups if group.name != "tokens"]
    held = [group.name for group in peers[0].layout.groups if group.name != "tokens"]
    for r in (0, 1):
        source = {"tokens": child.TOKEN_BLOCKS[r]} | {
            n: [child.state_block(peers[0].layout, n, r)] for n in held
        }
        target = {"tokens": blocks[r][: -(-len(child.TOKEN_BLOCKS[r]) // 2)]} | {
            n: [8 + 2 * i + r] for i, n in enumerate(kda)
        }
        for rank, moves in pairing.moves(0, source, target).items():
            assert any(move.what.startswith("conv q") for move in moves)
            here.read(peers[rank], moves)
    moved = Step(
        Caches.packed(layout, here.pool),
        blocks=((2, 0), (6, -1)),
        state_blocks=tuple((8 + 2 * i, 9 + 2 * i) for i in range(len(kda))),
        seed=3,
    )
    plain = Caches.plain(child.layout(child.BLOCK, 1))
    table = tuple((*ids, *[-1] * (4 - len(ids))) for ids in child.TOKEN_BLOCKS)
    again = Step(plain, blocks=table, state_blocks=((0, 1),) * 5, seed=3)
    first = again.run()
    for name, value in prefill.outputs.items():
        assert equal(value, first[name]), name  # this process computes what the other did
    ours, theirs = moved.reads(), again.reads()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert equal(value, theirs[name]), name
    here.close()


def test_blocks_can_be_written_to_a_peer(prefill: Prefill) -> None:
    here = endpoint("decode-writes", child.layout(child.BLOCK, child.TP))
    peer = here.meet(prefill.cards[0])
    here.pool.view(child.BLOCKS, -1)[2] = torch.arange(here.layout.block_bytes) % 251
    here.write(peer, cache.whole_blocks(here.layout, [2], [15]))
    theirs = prefill.ask("pool", 0).view(child.BLOCKS, -1)
    assert equal(theirs[15], here.pool.view(child.BLOCKS, -1)[2])
    here.close()


def test_no_moves_are_no_transfer(prefill: Prefill) -> None:
    here = endpoint("decode-idle", child.layout(child.BLOCK, child.TP))
    here.read(here.meet(prefill.cards[0]), ())
    assert (here.pool == 0xFF).all()
    here.close()


# --- failures -------------------------------------------------------------------------------------------------


def test_refuses_a_range_outside_either_pool(prefill: Prefill) -> None:
    layout = child.layout(child.BLOCK, child.TP)
    here = endpoint("decode-range", layout)
    peer = here.meet(prefill.cards[0])
    with pytest.raises(CacheError, match=r"^x: bytes .* are outside the source pool's"):
        here.read(peer, [Move(layout.bytes - 4, 0, 8, "x")])
    with pytest.raises(CacheError, match=r"^x: bytes .* are outside the target pool's"):
        here.write(peer, [Move(0, layout.bytes, 8, "x")])
    here.close()


def test_refuses_memory_that_the_peer_did_not_register(prefill: Prefill) -> None:
    layout = child.layout(child.BLOCK, child.TP)
    here = endpoint("decode-lies", layout)
    peer = here.meet(prefill.cards[0])
    lying = Peer(**{**vars(peer), "base": peer.base + (1 << 40)})
    with pytest.raises(CacheError, match=r"NIXL could not read 8 bytes, peer 'prefill-0': nixlNotFoundError"):
        here.read(lying, [Move(0, 0, 8, "x")])
    here.close()


def test_refuses_what_is_no_card() -> None:
    here = endpoint("decode-cards", child.layout(child.BLOCK, child.TP))
    with pytest.raises(CacheError, match="these 4 bytes are not an endpoint's card"):
        here.meet(b"junk")
    with pytest.raises(CacheError, match="these 2 bytes are not an endpoint's card: KeyError"):
        here.meet(b"{}")
    old = json.dumps(json.loads(here.card()) | {"version": 0}).encode()
    with pytest.raises(CacheError, match="a card of version 0, this side speaks 1: run one release on both"):
        here.meet(old)
    wrong = json.dumps(json.loads(here.card()) | {"agent": "AAAA", "name": "x"}).encode()
    with pytest.raises(CacheError, match="NIXL could not meet 'x': nixl"):
        here.meet(wrong)
    here.close()


def test_refuses_a_pool_and_a_transport_that_will_not_do() -> None:
    layout = child.layout(child.BLOCK, child.TP)
    with pytest.raises(CacheError, match="the pool has 16 bytes"):
        Endpoint("x", torch.zeros(16, dtype=torch.uint8), layout)
    with pytest.raises(CacheError, match=r"NIXL has no transport 'TELEX' here. Known: .*UCX"):
        Endpoint("x", pool_of(layout), layout, backend="TELEX")


def test_a_transfer_that_does_not_end_is_given_up(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    here = endpoint("decode-late", child.layout(child.BLOCK, child.TP))
    peer = here.meet(prefill.cards[0])
    real = here._agent.check_xfer_state
    monkeypatch.setattr(
        here._agent, "transfer", lambda handle: here._agent.__class__.transfer(here._agent, handle) and "PROC"
    )
    monkeypatch.setattr(here._agent, "check_xfer_state", lambda handle: real(handle) and "PROC")
    with pytest.raises(
        CacheError, match=r"NIXL did not read 8 bytes, peer 'prefill-0' within 0.05 s; is the peer alive"
    ):
        here.read(peer, [Move(0, 0, 8, "x")], timeout=0.05)
    here.close()


def test_refuses_a_pool_that_has_moved() -> None:
    layout = child.layout(child.BLOCK, child.TP)
    here = endpoint("decode-moved", layout)
    peer = Peer("x", 0, 0, layout.bytes, "DRAM", 0, layout)
    here.pool.set_(pool_of(layout))
    with pytest.raises(CacheError, match="the pool of 'decode-moved' has moved since it was registered"):
        here.read(peer, [Move(0, 0, 8, "x")])
    here.close()


def test_a_peer_that_is_gone_is_an_error_and_not_a_hang() -> None:
    other = Prefill()
    here = endpoint("decode-left", child.layout(child.BLOCK, child.TP))
    peer = here.meet(other.cards[0])
    here.read(peer, [Move(0, 0, 64, "x")])
    other.process.kill()
    other.process.join(30)
    with pytest.raises(CacheError, match="read 64 bytes, peer 'prefill-0'"):
        here.read(peer, [Move(0, 0, 64, "x")], timeout=3)
    here.close()
