"""The engine in a page: each of its ways to a result gives the bits of another, on one rank and on several."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kimi_hal.parallel import LoopbackGroup

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "minimal_engine.py"
MODULES = ("tiny_model", "minimal_engine", "engine_story")
#: Attention over a group rounds each part and the merged result to bf16, on one rank the result alone.
BUDGET = 2.0**-8


@pytest.fixture(scope="module")
def tale() -> Iterator[ModuleType]:
    """Return the module of the story, which knows the engine's."""
    variables = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("KIMI_HAL_")}
    sys.path.insert(0, str(EXAMPLES))
    yield importlib.import_module("engine_story")
    sys.path.remove(str(EXAMPLES))
    for name in MODULES:
        del sys.modules[name]
    os.environ.update(variables)


@dataclass(frozen=True)
class Told:
    """The story of one rank in chunks; what its layers saw and what its pool held before it went on."""

    story: Any
    seen: Any
    pool: torch.Tensor


@pytest.fixture(scope="module")
def alone(tale: ModuleType) -> Told:
    story = tale.Story(tale.Watched(), 128)
    return Told(story, story.engine.seen(), story.engine.pool.clone())


def test_chunks_give_the_bits_of_one_shot(tale: ModuleType, alone: Told) -> None:
    shot = tale.Story(tale.Engine(), 512)
    assert shot.first.equal(alone.story.first)
    assert shot.later.equal(alone.story.later)
    # Same blocks, same poison where nothing was written: latents, index keys, states and checkpoints.
    assert shot.engine.pool.equal(alone.pool)


def test_decoding_gives_the_bits_of_a_prefill(tale: ModuleType, alone: Told) -> None:
    whole = tale.Engine()
    for request, logits in zip(alone.story.requests, alone.story.later[-1], strict=True):
        again = whole.add(request.tokens[: request.done], room=1)
        assert whole.prefill(again, 512).equal(logits)
        assert again.tokens == request.tokens
        for layer in (0, 2):
            for kind in ("conv", "recurrent"):
                states = [
                    e.views[kind][layer][r.live[e.group_of[layer]]]
                    for e, r in ((whole, again), (alone.story.engine, request))
                ]
                assert torch.equal(*states)


def test_a_known_prefix_gives_the_bits_of_a_cold_run(tale: ModuleType, alone: Told) -> None:
    engine, (length, _) = alone.story.engine, tale.PROMPTS
    warm = engine.add(tale.prompt(length, 0))
    assert warm.done == 256
    assert warm.blocks[0] == alone.story.requests[0].blocks[0]
    assert engine.prefill(warm, 128).equal(alone.story.first[0])
    for state in engine.decode([warm]):
        assert state.equal(alone.story.later[0, 0])


def test_speculation_gives_the_tokens_and_states_of_decoding(tale: ModuleType, alone: Told) -> None:
    engine = alone.story.engine
    again = [engine.add(tale.prompt(length, seed)) for seed, length in enumerate(tale.PROMPTS)]
    for request in again:
        engine.prefill(request, 128)
    kept = tale.speculate(engine, again, alone.story.requests)
    assert {count for call in kept for count in call} == {0, 1, 2, 3}
    for one, other in zip(again, alone.story.requests, strict=True):
        assert one.tokens == other.tokens
        assert tale.same_states(engine, one, other)


@pytest.mark.parametrize("world", [2, 4])
def test_a_group_selects_as_one_rank_and_attends_within_budget(
    tale: ModuleType, alone: Told, world: int
) -> None:
    runs = LoopbackGroup.run(world, lambda group: tale.over(group, alone.seen, 128, tale.PROMPTS))
    assert [same for same, _ in runs] == [True] * world
    assert max(far for _, far in runs) < BUDGET


def test_a_group_shares_prefixes_and_speculates(tale: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank of two has half a state, so a smaller block holds one: 2 · 128 tokens are a block of the group.
    monkeypatch.setattr("minimal_engine.BLOCK", 128)
    prompts = (270, 41)

    def rank(group: Any) -> tuple[int, bool, bool]:
        story = tale.Story(tale.Engine(group), 128, prompts, steps=4)
        engine = story.engine
        again = [engine.add(tale.prompt(length, seed)) for seed, length in enumerate(prompts)]
        found = again[0].done
        first = torch.stack([engine.prefill(request, 128) for request in again])
        tale.speculate(engine, again, story.requests)
        states = [tale.same_states(engine, *pair) for pair in zip(again, story.requests, strict=True)]
        same = [one.tokens == other.tokens for one, other in zip(again, story.requests, strict=True)]
        return found, first.equal(story.first), all(states + same)

    assert LoopbackGroup.run(2, rank) == [(256, True, True)] * 2


def script(*command: str, **variables: str) -> str:
    """Run the script in a process of its own; return what it prints."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KIMI_HAL_", "PYTEST_"))}
    env = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)} | variables
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_says_yes_to_everything() -> None:
    lines = script(sys.executable, str(SCRIPT), KIMI_HAL_CHECK="args").splitlines()
    names = [line.split()[0] for line in lines]
    assert names == ["plans", "cache", "prefill", "decode", "prefix", "verify", "DCP"]
    assert lines[0].startswith("plans    on cpu, reference.torch: store_index_keys, store_latent, ")
    assert lines[2] == "prefill  270 tokens, 128 rows a step; in one shot the same bits: yes"
    assert lines[4] == "prefix   256 of 270 tokens found; the same bits: yes"
    assert lines[5].endswith("tokens as decoded: yes, states bit for bit: yes")
    assert lines[6].startswith("DCP 2    24 selections, the same bits: yes; attention differs by 0.2")
    shown = (EXAMPLES.parent / "docs" / "integrator.md").read_text().partition("## An engine in a page")[2]
    assert shown.partition("```text\n")[2].partition("```")[0].splitlines() == lines


@pytest.mark.full
def test_torchrun_spreads_it_over_processes() -> None:
    pytest.importorskip("torch.distributed.run", reason="torchrun starts the processes")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    lines = script(*torchrun, str(SCRIPT)).splitlines()
    assert [line.split()[0] for line in lines].count("DCP") == 1  # rank 0 speaks alone
    assert lines[-1].startswith("DCP 2    24 selections, the same bits: yes; attention differs by 0.2")


@pytest.mark.full
def test_a_variable_alone_puts_other_kernels_under_it() -> None:
    pytest.importorskip("triton", reason="Triton is not installed: nothing can be interpreted")
    pytest.importorskip("kimi_hal_nvidia", reason="the plugin is not installed")
    here = {"KIMI_HAL_EXECUTION": "interpreted", "KIMI_HAL_FALLBACK": "reference"}
    lines = script(sys.executable, str(SCRIPT), "20", "3", KIMI_HAL_BACKEND="nvidia", **here).splitlines()
    plain = script(sys.executable, str(SCRIPT), "20", "3").splitlines()
    chosen = {line.split()[3].rstrip(":") for line in lines if line.startswith("plans")}
    assert "nvidia.triton" in chosen
    told = [
        # Decoding comes from the plugin and verifying may not: then their states agree within rounding.
        [x.partition(", states")[0] for x in said if x.startswith(("prefill", "decode", "prefix", "verify"))]
        for said in (lines, plain)
    ]
    assert told[0] == told[1]
    assert lines[-1].startswith("DCP 2    20 selections, the same bits: yes")
