"""The repaired interpreter converts and multiplies as the hardware does. Each test is a child process:
the switch is read when a kernel is decorated."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")


def interpreted(body: str) -> str:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    code = "import torch, numpy as np\nimport kimi_hal.triton\n" + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_conversions_round_to_nearest_even_saturate_and_keep_nan() -> None:
    out = interpreted(
        """
        import triton.language as tl
        from kimi_hal.triton.interpreter import convert
        x = torch.randn(4096)
        bits = convert(x.numpy(), tl.float32, tl.bfloat16, None).view(np.int16)
        assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), x.bfloat16())
        y = torch.tensor([1e9, -1e9, 449.0, 0.0, float("nan"), float("inf")])
        bits = torch.from_numpy(convert(y.numpy(), tl.float32, tl.float8e4nv, None))
        print(bits.view(torch.float8_e4m3fn).float().tolist())
        codes = np.arange(256, dtype=np.uint8)
        got = torch.from_numpy(convert(codes, tl.float8e4nv, tl.float32, None).view(np.float32))
        want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
        assert torch.equal(got.nan_to_num(7e9), want.nan_to_num(7e9))
        """
    )
    assert out == "[448.0, -448.0, 448.0, 0.0, nan, 448.0]"


KERNEL = """
import triton
import triton.language as tl


@triton.jit
def kernel(a, b, c, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))
"""


CONDITION = """
import triton
import triton.language as tl


@triton.jit
def kernel(values, limits, out, N: tl.constexpr):
    i = tl.arange(0, N)
    live = tl.load(limits) < 1.0
    tl.store(out + i, tl.load(values + i, mask=(i < 3) & live, other=7.0))
"""


def test_threads_take_turns(tmp_path: Path) -> None:
    """Ranks that are threads launch grids of different sizes at once."""
    (tmp_path / "condition_kernel.py").write_text(CONDITION)
    out = interpreted(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from concurrent.futures import ThreadPoolExecutor
        from condition_kernel import kernel

        def rank(number):
            out = torch.full((4,), -1.0)
            for _ in range(20):
                kernel[(1 + 3 * number,)](torch.arange(4.0) + number, torch.tensor([0.5]), out, N=4)
            return out.tolist()

        with ThreadPoolExecutor(4) as pool:
            print(list(pool.map(rank, range(4))))
        """
    )
    assert out == str([[r, r + 1.0, r + 2.0, 7.0] for r in map(float, range(4))])


def test_a_comparison_of_scalars_masks_a_block(tmp_path: Path) -> None:
    (tmp_path / "condition_kernel.py").write_text(CONDITION)
    out = interpreted(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from condition_kernel import kernel
        for limit in (0.5, 2.0):
            out = torch.empty(4)
            kernel[(1,)](torch.arange(4.0), torch.tensor([limit]), out, N=4)
            print(out.tolist())
        """
    )
    assert out == "[0.0, 1.0, 2.0, 7.0]\n[7.0, 7.0, 7.0, 7.0]"


def test_a_bfloat16_dot_multiplies_values_not_bits(tmp_path: Path) -> None:
    (tmp_path / "dot_kernel.py").write_text(KERNEL)
    interpreted(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from dot_kernel import kernel
        a, b, c = torch.randn(32, 32).bfloat16(), torch.randn(32, 32).bfloat16(), torch.empty(32, 32)
        kernel[(1,)](a, b, c, N=32)
        torch.testing.assert_close(c, a.float() @ b.float())
        """
    )
