from __future__ import annotations

import pytest
import torch

from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import candidates


@pytest.mark.parametrize(
    ("world", "interleave", "count"),
    [(2, 1, 8), (3, 1, 6), (4, 64, 4), (8, 1, 2), (16, 1, 1), (32, 4, 1), (2, 1 << 20, 16)],
)
def test_segments_hold_the_local_positions_of_a_million_tokens(
    world: int, interleave: int, count: int
) -> None:
    assert candidates.segments(DCP(world=world, interleave=interleave)) == count


def test_a_message_is_its_header_and_one_word_a_candidate() -> None:
    scores = torch.tensor([[-1, 0x7FFF, 5]])
    positions = torch.tensor([[7, 65536 + 2, -1]])
    message = candidates.pack(scores, positions, torch.tensor([9]), 2)
    assert message.dtype == torch.int32
    assert message[0, :4].tolist() == [1, 1, 9, -65536 + 7]
    assert message[0, 4].item() == 0x7FFF0002


def test_messages_are_unpacked_as_they_were() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (1, 2, 8):
        positions = torch.stack(
            [torch.randperm(count * 65536, generator=generator)[:50].sort().values for _ in range(20)]
        )
        kept = torch.randint(0, 51, (20, 1), generator=generator)
        positions = torch.where(torch.arange(50) < kept, positions, -1)
        scores = torch.randint(-(1 << 15), 1 << 15, (20, 50), generator=generator)
        message = candidates.pack(scores, positions, kept[:, 0], count)
        got_scores, got_positions, held = candidates.unpack(message.reshape(4, 5, -1), count)
        assert torch.equal(got_positions.reshape(20, 50), positions)
        assert torch.equal(held.flatten().long(), kept[:, 0])
        live = positions >= 0
        assert torch.equal(got_scores.reshape(20, 50)[live].long(), scores[live])


def test_a_message_without_candidates_has_none() -> None:
    message = candidates.pack(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3), 4)
    assert message.shape == (3, 5)
    assert candidates.unpack(message, 4)[1].shape == (3, 0)
