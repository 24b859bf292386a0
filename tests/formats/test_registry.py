from __future__ import annotations

import subprocess
import sys

import pytest

from kimi_hal import formats
from kimi_hal.errors import FormatError, UnknownNameError
from kimi_hal.formats import registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the registry, so that a test's formats don't stay."""
    monkeypatch.setattr(registry, "_formats", dict(registry._formats))
    return


def test_names_are_those_of_the_contract():
    assert formats.names("index") == (
        "index.fp8.e4m3fn.f32.page64",
        "index.fp8.e4m3fn.pow2.page64",
        "index.fp8.e4m3fn.ue8m0x4.page64",
        "index.fp8.e4m3fnuz.f32.page64",
        "index.fp8.e4m3fnuz.f32.shuffled.page64",
        "index.mxfp4.gfx950.page64",
        "index.mxfp4.page64",
    )
    assert formats.names("latent") == (
        "latent.bf16",
        "latent.flashmla.656",
        "latent.fp8.e4m3fn.tensor",
        "latent.fp8.e4m3fnuz.tensor",
        "latent.nvfp4.352",
    )
    assert formats.names("experts") == ("experts.mxfp4-pack",)
    assert formats.names() == tuple(
        sorted(formats.names("index") + formats.names("latent") + formats.names("experts"))
    )


def test_each_getter_returns_its_kind():
    assert all(formats.index(name).name == name for name in formats.names("index"))
    assert all(formats.latent(name).name == name for name in formats.names("latent"))
    assert all(formats.experts(name).name == name for name in formats.names("experts"))
    assert all(formats.get(name).name == name for name in formats.names())


def test_a_name_of_another_kind_is_unknown_to_a_getter():
    with pytest.raises(UnknownNameError) as caught:
        formats.experts("latent.bf16")
    assert str(caught.value) == "unknown experts format 'latent.bf16'. Known: experts.mxfp4-pack"


def test_a_misspelt_name_gets_the_nearest_and_all_others():
    with pytest.raises(UnknownNameError) as caught:
        formats.latent("latent.nvfp4.325")
    assert str(caught.value) == (
        "unknown latent format 'latent.nvfp4.325'; did you mean 'latent.nvfp4.352'? Known: latent.bf16, "
        "latent.flashmla.656, latent.fp8.e4m3fn.tensor, latent.fp8.e4m3fnuz.tensor, latent.nvfp4.352"
    )


def test_an_unknown_kind_is_an_error():
    with pytest.raises(UnknownNameError) as caught:
        formats.names("indexes")
    assert str(caught.value) == (
        "unknown kind of format 'indexes'; did you mean 'index'? Known: experts, index, latent"
    )


def test_problems_yields_one_sentence_for_an_unknown_name_and_none_for_a_known():
    assert list(formats.problems("index", "index.mxfp4.page64")) == []
    (sentence,) = formats.problems("index", "index.mxfp4")
    assert sentence.startswith("unknown index format 'index.mxfp4'; did you mean 'index.mxfp4.page64'?")
    assert list(formats.problems("latent", "index.mxfp4.page64"))


@pytest.mark.usefixtures("own_registry")
def test_a_plugins_format_is_found_by_its_name():
    mine = formats.IndexFormat(
        name="index.acme.page64", element="e4m3fn", scale="pow2", tile_tokens=8, tile_bytes=32
    )
    formats.register(mine)
    assert formats.index("index.acme.page64") is mine
    assert "index.acme.page64" in formats.names("index")
    formats.register(mine)  # a second load of the plugin changes nothing


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_given_to_one_layout_only():
    other = formats.IndexFormat(name="index.mxfp4.page64", element="e2m1", scale="e8m0", scale_lanes=4)
    with pytest.raises(FormatError) as caught:
        formats.register(other)
    assert str(caught.value) == (
        "format 'index.mxfp4.page64' is registered already, with another layout: choose another name"
    )
    assert formats.index("index.mxfp4.page64").scale_lanes == 1


@pytest.mark.usefixtures("own_registry")
def test_a_name_begins_with_its_kind():
    with pytest.raises(FormatError) as caught:
        formats.register(formats.ExpertFormat(name="acme.mxfp4"))
    assert str(caught.value) == "format 'acme.mxfp4' is of kind 'experts': call it 'experts.acme.mxfp4'"


@pytest.mark.usefixtures("own_registry")
def test_a_plugins_subclass_brings_its_own_bytes():
    import torch

    class Float16Latent(formats.LatentFormat):
        def pack(self, kv_c, k_pe, k_scale):
            return torch.cat((kv_c, k_pe), dim=-1).half().view(torch.uint8)

        def unpack(self, rows, k_scale, dtype):
            return rows.clone().view(torch.float16).to(dtype)

    formats.register(Float16Latent(name="latent.acme.half", row_bytes=1152))
    fmt, cache = formats.latent("latent.acme.half"), torch.zeros(2, 1152, dtype=torch.uint8)
    fmt.write(cache, 1, torch.tensor([1]), torch.ones(1, 512), torch.full((1, 64), 2.0), None)
    assert fmt.read(cache, 1, torch.tensor([1, 0]))[:, [0, 575]].tolist() == [[1.0, 2.0], [0.0, 0.0]]
    rows = formats.convert("latent.acme.half", "latent.bf16", cache)
    assert formats.latent("latent.bf16").unpack(rows, None, torch.float32)[1, 0] == 1.0


def test_formats_are_values():
    fmt = formats.index("index.mxfp4.gfx950.page64")
    assert fmt == formats.IndexFormat(
        name="index.mxfp4.gfx950.page64",
        element="e2m1",
        scale="e8m0",
        tile_tokens=32,
        tile_bytes=16,
        scale_lanes=2,
    )
    with pytest.raises(AttributeError):
        fmt.page = 32  # type: ignore[misc]


def test_names_sizes_and_offsets_need_no_torch():
    program = (
        "import sys; from kimi_hal import formats; "
        "fmt = formats.index('index.mxfp4.gfx950.page64'); "
        "print(formats.names(), fmt.page_bytes, fmt.query_dtype, fmt.element_offset(33, 32), fmt.scale_offset(1)); "
        "print(formats.latent('latent.nvfp4.352').row_bytes, list(formats.problems('index', 'x'))); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
