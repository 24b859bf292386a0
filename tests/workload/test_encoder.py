from __future__ import annotations

import pytest
import torch

from kimi_hal_conformance.workload import encoder, package, tokens
from kimi_hal_conformance.workload.encoder import Encoder

pytestmark = pytest.mark.usefixtures("encoder_package")

TEXT = (
    "A heap is a binary tree for which every parent node has a value less than or equal to its children. "
    * 40
)


@pytest.fixture(scope="module")
def model(encoder_package: None) -> Encoder:
    return Encoder()


def test_paraphrases_are_closer_than_strangers(model: Encoder) -> None:
    cat, kitten, stocks = model.embed(
        [
            "A cat is sleeping on the sofa.",
            "A kitten naps on the couch.",
            "Share prices fell sharply on Monday.",
        ]
    )
    assert float(cat @ kitten) > 0.6
    assert float(cat @ stocks) < 0.2


def test_embeddings_have_length_one(model: Encoder) -> None:
    torch.testing.assert_close(model.embed(["one", "another text"]).norm(dim=-1), torch.ones(2))


@pytest.mark.parametrize("layers", [0, 2, 6])
def test_states_are_those_of_the_transformers_library(model: Encoder, layers: int) -> None:
    transformers = pytest.importorskip("transformers", reason="requirements/workload.txt is not installed")
    theirs = transformers.BertModel.from_pretrained(package.folder(), attn_implementation="eager").eval()
    ids = tokens.tokenize(TEXT).ids[:300]
    marked = torch.cat([torch.tensor([encoder.BEGIN]), ids, torch.tensor([encoder.END])])[None]
    with torch.no_grad():
        expected = theirs(marked, output_hidden_states=True).hidden_states[layers][0, 1:-1]
    torch.testing.assert_close(model.hidden(ids, layers), expected, rtol=1e-4, atol=1e-4)


def test_windows_do_not_see_each_other(model: Encoder) -> None:
    ids = tokens.tokenize(TEXT).ids[:700]
    whole = model.hidden(ids, 2)
    assert whole.shape == (700, 384)
    torch.testing.assert_close(whole[:510], model.hidden(ids[:510], 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole[510:], model.hidden(ids[510:], 2), rtol=1e-4, atol=1e-5)


def test_a_batch_of_windows_is_as_one_by_one(model: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens.tokenize(TEXT).ids[:510].repeat(3)
    together = model.hidden(ids, 1)
    monkeypatch.setattr(encoder, "BATCH", 1)
    torch.testing.assert_close(together, model.hidden(ids, 1), rtol=1e-4, atol=1e-5)


def test_progress_adds_up_to_the_text(model: Encoder) -> None:
    done: list[int] = []
    model.hidden(tokens.tokenize(TEXT).ids[:600], 0, done.append)
    assert sum(done) == 600


def test_no_tokens_give_no_states(model: Encoder) -> None:
    assert model.hidden(torch.empty(0, dtype=torch.int64), 2).shape == (0, 384)
