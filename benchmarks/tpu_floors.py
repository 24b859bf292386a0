"""What the TPU kernels cannot beat on one TensorCore of a TPU7x, and the memory that they hold. Nothing is measured.

A floor is the longer of the bytes that must pass HBM and the operations of the MXU, at the rates that jax 0.10.2's
``jax/_src/pallas/mosaic/tpu_info.py`` gives for the chip. Sizes are those of ``kimi_hal_tpu.pallas.compiling``.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.record import keep

HBM, BF16, FP8 = 3.7e12, 1.155e15, 2.3e15

DECODE, PREFILL, CONTEXT, TOPK = 64, 512, 65536, 2048
HEADS, INDEX_HEADS = 12, 32


@dataclass(frozen=True)
class Floor:
    """One kernel at one size.

    Args:
        hbm: bytes that it reads and writes.
        fp8: multiplications and additions of FP8 numbers on the MXU.
        bf16: of bfloat16 numbers.
        held: bytes of VMEM, or of a SparseCore subcore's memory, in whole tiles, two for what is double-buffered.
        smem: bytes of scalar memory.
    """

    hbm: int
    fp8: int = 0
    bf16: int = 0
    held: int = 0
    smem: int = 0

    def figures(self) -> dict[str, float | int | str]:
        """Return microseconds of either floor, which is the longer, and the bytes held."""
        bytes_us = self.hbm / HBM * 1e6
        mxu_us = (self.fp8 / FP8 + self.bf16 / BF16) * 1e6
        return {
            "hbm_us": round(bytes_us, 1),
            "mxu_us": round(mxu_us, 1),
            "bound": "HBM" if bytes_us > mxu_us else "MXU",
            "held_bytes": self.held,
            "smem_bytes": self.smem,
        }


def scores(rows: int) -> Floor:
    """Return the floor of ``indexer_logits``: each row reads the pages of its own request."""
    pages = CONTEXT // 64
    held = 2 * 8 * 96 * 128 + 2 * CONTEXT * 4 + 2 * INDEX_HEADS * 128 + 2 * 8 * 128 * 4
    # The sum over heads in float32 takes six bfloat16 passes; the bytes of a key's scale two small products.
    extra = rows * CONTEXT * (2 * INDEX_HEADS * 6 + 2 * 2 * 4 * 128)
    return Floor(
        hbm=rows * (pages * 8448 + CONTEXT * 4),
        fp8=2 * rows * CONTEXT * INDEX_HEADS * 128,
        bf16=extra,
        held=held,
        smem=2 * pages * 4 + 2 * rows * 4,
    )


def select(rows: int) -> Floor:
    """Return the floor of the selection: a row of scores streams in five times."""
    held = 2 * 4096 * 4 + 256 * 4 + (TOPK + 16) * 4 + 16 * 4
    return Floor(hbm=rows * (5 * CONTEXT + TOPK) * 4, held=held)


def gather(rows: int) -> Floor:
    """Return the floor of the gather: each latent is read and written once."""
    return Floor(hbm=rows * TOPK * (2 * 576 + 4), held=2 * 128 * 4 + 2 * 128 * 576)


def attention(rows: int) -> Floor:
    """Return the floor of attention over the gathered latents, probabilities in two bfloat16 terms."""
    padded = 16
    held = (
        2 * 512 * 640 + 2 * padded * 640 * 2 + 2 * padded * 512 * 2 + padded * 512 * 4 + 4 * padded * 128 * 4
    )
    return Floor(
        hbm=rows * (TOPK * (576 + 4) + HEADS * (576 + 512) * 2),
        bf16=2 * rows * TOPK * HEADS * (576 + 2 * 512),
        held=held,
        smem=8,
    )


def main() -> None:
    """Compute and keep every floor."""
    figures = {
        "indexer_logits/decode": scores(DECODE),
        "indexer_logits/prefill": scores(PREFILL),
        "topk_select/select": select(DECODE),
        "sparse_mla/gather": gather(DECODE),
        "sparse_mla/decode": attention(DECODE),
        "sparse_mla/prefill": attention(PREFILL),
    }
    for name, floor in figures.items():
        print(name, floor.figures())
    keep("tpu_floors", {name: floor.figures() for name, floor in figures.items()})


if __name__ == "__main__":
    main()
