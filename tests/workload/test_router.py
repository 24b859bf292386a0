from __future__ import annotations

import torch

from kimi_hal_conformance.workload import router


def states(count: int = 400) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(count, 384, generator=g) + torch.randn(384, generator=g)


def test_directions_are_orthogonal_to_the_mean() -> None:
    x = states()
    codes = router.directions(x, torch.arange(400), 31)["router.codes"].double()
    mean = x.double().mean(0)
    cosine = codes @ mean / codes.norm(dim=-1) / mean.norm()
    assert float(cosine.abs().max()) < 0.01


def test_every_expert_has_the_same_spread() -> None:
    x = states()
    stored = router.directions(x, torch.arange(400), 31)
    logits = x.double() @ stored["router.codes"].double().T * stored["router.gain"].double()
    torch.testing.assert_close(logits.std(0), torch.full((896,), 2.0, dtype=torch.float64), rtol=1e-5, atol=0)


def test_distinct_words_come_first() -> None:
    ids = torch.arange(1000).repeat(2)
    chosen = router._prototypes(ids, 31)
    assert len(set(ids[chosen].tolist())) == 896


def test_a_short_text_is_used_again() -> None:
    chosen = router._prototypes(torch.tensor([5, 5, 6]), 31)
    assert chosen.shape == (896,)
    assert set(chosen.tolist()) == {0, 1, 2}
    assert {int(torch.tensor([5, 5, 6])[p]) for p in chosen[:2].tolist()} == {5, 6}


def test_the_bias_evens_out_the_load() -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 896, generator=g) * 2 + torch.randn(896, generator=g)
    done: list[int] = []
    bias = router.balance(logits, done.append)

    def fullest(b: torch.Tensor | float) -> int:
        return int(torch.bincount((logits.sigmoid() + b).topk(16).indices.flatten(), minlength=896).max())

    mean = 512 * 16 / 896
    assert fullest(0.0) > 5 * mean
    assert fullest(bias) < 2.5 * mean
    assert sum(done) == router.STEPS
