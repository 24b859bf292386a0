"""Byte layouts, code by code, against values that are written out here and computed nowhere else."""

from __future__ import annotations

import math

import torch

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@holds("formats/e8m0-times-e2m1", "256 scale codes × 16 element codes")
def e8m0_times_e2m1(modules: Modules) -> None:
    """Every code pair of MXFP4 is worth e2m1 · 2^(c − 127); scale code 255 is NaN."""
    fmt = modules("formats").experts("experts.mxfp4-pack")
    packed = torch.tensor([(2 * i + 1) << 4 | 2 * i for i in range(8)] * 2, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    values = fmt.decode(packed.expand(256, -1), scale, torch.float64)
    for code, row in enumerate(values):
        if code == 255:
            expect("NaN under scale code 255", int(row.isnan().sum()), 32)
            continue
        wanted = [math.copysign(1, s) * e * 2.0 ** (code - 127) for s in (1.0, -1.0) for e in E2M1] * 2
        expect(f"values under scale code {code}", row.tolist(), wanted)


@holds("formats/every-code-comes-back", "the 256 codes of both FP8 dialects and the 16 of e2m1")
def every_code_comes_back(modules: Modules) -> None:
    """Encoding what a code is worth gives the code; halves between two codes go to the even one."""
    minifloat = modules("formats.minifloat")
    for name, kind in minifloat.ELEMENTS.items():
        codes = torch.arange(1 << kind.width, dtype=torch.uint8)
        values = minifloat.decode(codes, kind)
        finite = values.isfinite()
        expect(f"codes of {name}", minifloat.encode(values[finite], kind).tolist(), codes[finite].tolist())
        positive = torch.arange(int(minifloat.encode(torch.tensor(kind.largest), kind)), dtype=torch.uint8)
        low, high = minifloat.decode(positive, kind), minifloat.decode(positive + 1, kind)
        even = positive + (positive & 1)
        expect(f"halves of {name}", minifloat.encode((low + high) / 2, kind).tolist(), even.tolist())
        beyond = torch.tensor([kind.largest, 1e30, math.inf])
        expect(
            f"beyond the largest of {name}",
            minifloat.decode(minifloat.encode(beyond, kind), kind).tolist(),
            [kind.largest] * 3,
        )


@holds("formats/dialects", "byte 0x38 in both FP8 dialects; −10⁻⁹ in fnuz")
def dialects(modules: Modules) -> None:
    """Byte 0x38 is 1.0 in fn and 0.5 in fnuz, where 0x80 is NaN and no small negative number."""
    formats, minifloat = modules("formats"), modules("formats.minifloat")
    for name, worth in (("index.fp8.e4m3fn.f32.page64", 1.0), ("index.fp8.e4m3fnuz.f32.page64", 0.5)):
        fmt = formats.index(name)
        elements = torch.full((1, 128), 0x38, dtype=torch.uint8)
        scale = torch.ones(1, 1).view(torch.uint8)
        expect(f"0x38 in {name}", fmt.unpack(elements, scale, torch.float32).unique().tolist(), [worth])
    small = minifloat.encode(torch.tensor([-1e-9, -0.0]), minifloat.E4M3FNUZ)
    expect("−10⁻⁹ and −0 in fnuz", small.tolist(), [0, 0])
    latent = formats.latent("latent.fp8.e4m3fnuz.tensor")
    row = latent.pack(torch.full((1, 512), 0.5), torch.full((1, 64), 0.5), torch.ones(1))
    expect("0.5 as a latent of fnuz", row.unique().tolist(), [0x38])


@holds("formats/exponents", "every power of two, and the next number above it")
def exponents(modules: Modules) -> None:
    """⌈log2⌉ is exact at powers of two and just above them, clamped to what a scale can hold."""
    scales = modules("formats.scales")
    power = torch.tensor([2.0**e for e in range(-126, 128)])
    expect("⌈log2⌉ of powers of two", scales.ceil_log2(power).tolist(), list(range(-126, 128)))
    above = scales.ceil_log2(torch.nextafter(power, torch.full_like(power, math.inf)))
    expect("⌈log2⌉ just above them", above.tolist(), [min(e + 1, 127) for e in range(-126, 128)])


@holds("formats/zero-blocks", "an all-zero block in every format with block scales")
def zero_blocks(modules: Modules) -> None:
    """An all-zero block has a finite scale, and is zero."""
    formats = modules("formats")
    mx = formats.index("index.mxfp4.page64")
    expect("scale of a zero key", mx.pack(torch.zeros(1, 128))[1].tolist(), [[1] * 4])
    packed, scale = formats.experts("experts.mxfp4-pack").encode(torch.zeros(1, 64))
    expect("scale of zero weights", (packed.unique().tolist(), scale.tolist()), ([0], [[127, 127]]))
    nvfp4 = formats.latent("latent.nvfp4.352")
    row = nvfp4.pack(torch.zeros(1, 512), torch.zeros(1, 64), None)
    expect("scales of a zero latent", row[0, 320:].tolist(), [1] * 32)
    expect("a zero latent", nvfp4.unpack(row, None, torch.float32).unique().tolist(), [0.0])


@holds("formats/expert-scales", "groups of 32 whose largest weight is 1.749·2^3 and 1.75·2^3")
def expert_scales(modules: Modules) -> None:
    """The expert format rounds amax up from a mantissa of 1.75 and down below, exponent less 2."""
    fmt = modules("formats").experts("experts.mxfp4-pack")
    weights = torch.tensor([1.749 * 8, 1.75 * 8, 1.4999 * 8])[:, None].expand(3, 32)
    expect("scale codes", fmt.encode(weights)[1].flatten().tolist(), [128, 129, 128])


@holds("formats/nibbles", "32 elements whose codes count up from 0")
def nibbles(modules: Modules) -> None:
    """The even element stands in the low nibble."""
    minifloat = modules("formats.minifloat")
    codes = torch.arange(32, dtype=torch.uint8) % 16
    packed = minifloat.pack_nibbles(codes)
    expect("bytes", packed.tolist(), [(2 * i + 1) % 16 << 4 | 2 * i % 16 for i in range(16)])
    values = minifloat.decode_nibbles(packed)
    expect("values", values.tolist(), minifloat.decode(codes, minifloat.E2M1).tolist())


@holds("formats/latent-scale", "a latent of 2, 4 and 6 times its cache's scale")
def latent_scale(modules: Modules) -> None:
    """The cache's scale belongs to the latent and to the shared key part."""
    fmt = modules("formats").latent("latent.fp8.e4m3fn.tensor")
    k_scale = torch.tensor([0.25])
    row = fmt.pack(torch.full((1, 512), 0.5), torch.full((1, 64), 1.5), k_scale)
    got = fmt.unpack(row, k_scale, torch.float32)[0]
    expect("latent", got[:512].unique().tolist(), [0.5])
    expect("key part", got[512:].unique().tolist(), [1.5])
    expect("codes", (row[0, 0].item(), row[0, 575].item()), (0x40, 0x4C))


@holds("formats/nvfp4-scales", "a latent of 32 blocks, each of its own power of two")
def nvfp4_scales(modules: Modules) -> None:
    """Scale s of an NVFP4 latent stands at byte 320 + 8·(s mod 4) + s // 4, rounded up."""
    fmt = modules("formats").latent("latent.nvfp4.352")
    worth = [2.0 ** (s % 8 - 4) for s in range(32)]
    kv_c = torch.tensor(worth).repeat_interleave(16)[None] * 6
    row = fmt.pack(kv_c, torch.zeros(1, 64), None)
    codes = [int(row[0, 320 + 8 * (s % 4) + s // 4]) for s in range(32)]
    expect("scale codes", codes, [(s % 8 + 3) << 3 for s in range(32)])
    expect("latent", fmt.unpack(row, None, torch.float32)[0, :512].tolist(), kv_c[0].tolist())
    above = fmt.pack(torch.full((1, 512), 6.01), torch.zeros(1, 64), None)
    expect("scale of a block just above 6", above[0, 320].item(), 0x39)


@holds("formats/flashmla-scales", "a record of ones with scales 0.75, 1.3, 3 and 0.001")
def flashmla_scales(modules: Modules) -> None:
    """A FlashMLA record's float32 scales need not be powers of two (fault report: FlashMLA #184)."""
    fmt = modules("formats").latent("latent.flashmla.656")
    scale = torch.tensor([0.75, 1.3, 3.0, 0.001])
    ones = torch.full((512,), 0x38, dtype=torch.uint8)
    row = torch.cat((ones, scale.view(torch.uint8), torch.zeros(128, dtype=torch.uint8)))[None]
    got = fmt.unpack(row, None, torch.float32)[0, :512]
    expect("quarters", got.tolist(), scale.repeat_interleave(128).tolist())


@holds("formats/index-pages", "key 37 of a page in every index format, byte by byte")
def index_pages(modules: Modules) -> None:
    """An index page's elements and scales stand where the format's own offsets say, read by any entry."""
    formats = modules("formats")
    keys = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    for name in formats.names("index"):
        fmt = formats.index(name)
        cache = torch.zeros((1, fmt.page_bytes), dtype=torch.uint8)
        fmt.write(cache, torch.arange(64), keys)
        elements, scale = fmt.pack(keys[37:38])
        at = [fmt.element_offset(37, dim) for dim in range(0, 128, 128 // fmt.element_bytes)]
        expect(f"elements of {name}", cache[0, at].tolist(), elements[0].tolist())
        expect(
            f"scale of {name}",
            cache[0, [fmt.scale_offset(37, i) for i in range(4)]].tolist(),
            scale[0].tolist(),
        )
        one = fmt.read(cache, torch.tensor([37]))
        expect(f"key 37 of {name}", one.tolist(), fmt.unpack(elements, scale, torch.float32).tolist())
        expect(f"key 37 of a whole page of {name}", fmt.read_pages(cache)[0, 37:38].tolist(), one.tolist())


@holds("formats/conversion", "keys with both zeros between the FP8 dialects")
def conversion(modules: Modules) -> None:
    """Keys keep their values from one FP8 dialect to the other and back, −0 included."""
    formats = modules("formats")
    a, b = "index.fp8.e4m3fn.f32.page64", "index.fp8.e4m3fnuz.f32.page64"
    keys = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)).clamp(-3, 3)
    keys[:, 0], keys[:, 1], keys[:, 2] = -0.0, -1e-9, 3.5
    cache = torch.zeros((1, formats.index(a).page_bytes), dtype=torch.uint8)
    formats.index(a).write(cache, torch.arange(64), keys)
    there = formats.convert(a, b, cache)
    values = formats.index(a).read_pages(cache)
    expect("values in fnuz", formats.index(b).read_pages(there).tolist(), values.tolist())
    back = formats.convert(b, a, there)
    expect("values back in fn", formats.index(a).read_pages(back).tolist(), values.tolist())


@plain("formats")
def random_values(modules: Modules) -> torch.Tensor:
    """Return random keys, latents and weights as they come back from their bytes, in the fn dialect."""
    formats, g = modules("formats"), torch.Generator().manual_seed(6)
    found = []
    for name in ("index.fp8.e4m3fn.f32.page64", "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"):
        fmt = formats.index(name)
        found.append(fmt.unpack(*fmt.pack(torch.randn(64, 128, generator=g)), torch.float32))
    for name in ("latent.nvfp4.352", "latent.flashmla.656"):
        fmt = formats.latent(name)
        latent = torch.randn(64, 576, generator=g)
        found.append(fmt.unpack(fmt.pack(latent[:, :512], latent[:, 512:], None), None, torch.float32))
    experts = formats.experts("experts.mxfp4-pack")
    found.append(experts.decode(*experts.encode(torch.randn(64, 128, generator=g)), torch.float32))
    return torch.cat([values.flatten() for values in found])
