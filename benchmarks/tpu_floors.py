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
#: Of KDA: channels of a head, rows of a chunk and of a verify.
DIM, CHUNK, DRAFTS = 128, 64, 8


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


def scores(rows: int, run: int) -> Floor:
    """Return the floor of ``indexer_logits``: ``run`` rows, one request's in a tile, read each of its pages once."""
    pages, tile = CONTEXT // 64, 16
    pool, lines = 2 * 8 * 96 * 128, 2 * tile * tiled(4, 128, 4)
    held = pool + lines + 2 * tile * INDEX_HEADS * 128 + 2 * tiled(tile, INDEX_HEADS, 4)
    # The sum over heads in float32 takes six bfloat16 passes; the bytes of a key's scale two small products a read.
    extra = CONTEXT * (rows * 2 * INDEX_HEADS * 6 + rows // run * 2 * 2 * 4 * 128)
    return Floor(
        hbm=rows // run * pages * 8448 + rows * CONTEXT * 4,
        fp8=2 * rows * CONTEXT * INDEX_HEADS * 128,
        bf16=extra,
        held=held,
        smem=2 * pages * 4 + 2 * rows * 4,
    )


def select(rows: int) -> Floor:
    """Return the floor of the selection: a row of scores streams in five times."""
    held = 2 * 4096 * 4 + 256 * 4 + (TOPK + 16) * 4 + 16 * 4
    return Floor(hbm=rows * (5 * CONTEXT + TOPK) * 4, held=held)


@dataclass(frozen=True)
class Latent:
    """Rows of a latent format.

    Args:
        row: bytes.
        read: bytes that a stream of TPU7x reads for one: it moves granules of 64.
        stream: rows of one.
        planes: in which a key's columns lie.
        rest: columns of a plane that are no values.
    """

    row: int
    read: int
    stream: int
    planes: int
    rest: int

    @property
    def dense(self) -> int:
        """Return the bytes of a row in the dense buffer, whose lines have 512."""
        return -(-self.row // 512) * 512


LATENTS = {
    "": Latent(576, 576, 128, planes=4, rest=16),
    "-nvfp4": Latent(352, 384, 128, planes=4, rest=16),
    "-bf16": Latent(1152, 1152, 64, planes=2, rest=32),
}


def gather(rows: int, latent: Latent) -> Floor:
    """Return the floor of the gather: each latent is read and written once."""
    return Floor(
        hbm=rows * TOPK * (latent.read + latent.row + 4),
        held=2 * latent.stream * (4 + latent.row),
    )


def attention(rows: int, latent: Latent) -> Floor:
    """Return the floor of attention over the gathered latents, probabilities in two bfloat16 terms.

    What unpacks a key's 576 elements runs on the vector unit and comes on top: no rate of it is published.
    """
    padded, columns = 16, 512 + latent.planes * latent.rest
    query = tiled(padded, 512, 2) + tiled(padded, latent.planes * 128, 2)
    sums = tiled(padded, 512, 4) + 4 * tiled(padded, 1, 4)
    held = 2 * 512 * latent.dense + 2 * query + 2 * tiled(padded, 512, 2) + sums + 2 * tiled(1, 512, 4)
    spread = 2 * 32 * 128 if latent.row == 352 else 0  # NVFP4's scales to its codes
    return Floor(
        hbm=rows * (TOPK * (latent.dense + 4) + HEADS * (576 + 512) * 2),
        bf16=rows * TOPK * (2 * HEADS * (columns + 2 * 512) + spread),
        held=held,
        smem=8,
    )


def tiled(rows: int, columns: int, size: int) -> int:
    """Return the bytes of a matrix in whole tiles of 32-bit rows of 8 and 128 lanes."""
    packed = 8 * (4 // size)
    return -(-rows // packed) * packed * -(-columns // 128) * 128 * size


def recurrence(rows: int, inputs: int, results: int, states: int, taps: int = 0) -> Floor:
    """Return the floor of states that advance by ``rows`` rows each. The MXU has no part in it.

    Seven operations of the vector unit an element of the state and row come on top: no rate of it is published.

    Args:
        rows: of one sequence.
        inputs: bfloat16 rows of all heads that one sequence reads.
        results: that it writes.
        states: how often a state passes HBM: 1 where it is only read.
        taps: float32 rows of all heads that the convolution multiplies with.
    """
    state, row, one = HEADS * DIM * DIM * 4, tiled(HEADS, DIM, 2), tiled(HEADS, 1, 4)
    shared = (taps + 2) * tiled(HEADS, DIM, 4)
    convolved = 3 * rows * row if taps else 0
    return Floor(
        hbm=DECODE * (states * state + (inputs + results) * HEADS * DIM * 2 + rows * one),
        held=3 * state + 2 * ((inputs + results) * row + rows * one + shared) + convolved,
        smem=5 * DECODE * 4,
    )


def chunks(rows: int) -> Floor:
    """Return the floor of a prefill of one sequence by chunks, four heads a step of the grid.

    Every product of float32 numbers is six of bfloat16 ones; the one that sums decays, a factor 0 or 1, is three.
    """
    count, heads, levels = rows // CHUNK, 4, CHUNK.bit_length() - 1
    spans = (2 + levels) * CHUNK
    pairs = levels * 2 * CHUNK * CHUNK * DIM
    inverse = (levels - 1) * 2 * CHUNK**3
    states = 3 * CHUNK * DIM * DIM  # what queries and keys read, what is written
    rest = 2 * CHUNK * CHUNK * DIM
    products = 6 * (pairs + inverse + states + rest) + 3 * spans * CHUNK * DIM
    blocks = 5 * tiled(CHUNK, DIM, 2) + tiled(1, CHUNK, 4) + 2 * tiled(1, DIM, 4)
    return Floor(
        hbm=HEADS * (2 * DIM * DIM * 4 + rows * (5 * DIM * 2 + 4)),
        bf16=2 * HEADS * count * products,
        held=heads * (2 * blocks + 3 * DIM * DIM * 4) + 2 * tiled(spans, CHUNK, 2),
        smem=5 * count * 4,
    )


def experts(rows: int, size: int) -> Floor:
    """Return the floor of the experts of one of 32 ranks, 28 of 896, where every expert is as likely as any other.

    An expert that no row wants is not read; the others' rows fit a tile each, of ``size`` rows, and the MXU multiplies
    whole tiles. Decoding the weights is work of the vector unit and comes on top: no rate of it is published.
    """
    local, of, topk, hidden, columns, block = 28, 896, 16, 3584, 3072, 256
    reached = local * (1 - (1 - topk / of) ** rows)
    numbers = 3 * hidden * columns
    routes = rows * topk * local // of
    tiles = -(-rows * topk // size) + local
    streamed = tiled(hidden // 2, 2 * block, 1) + tiled(hidden // 32, 2 * block, 1)
    streamed += tiled(block // 2, hidden, 1) + tiled(block // 32, hidden, 1)
    scales = tiled(hidden // 32, 2 * block, 4) + tiled(block // 32, hidden, 4)
    kept = 5 * tiled(size, hidden, 4) + tiled(size, hidden, 2) + tiled(size, 2 * block, 4)
    return Floor(
        hbm=round(reached * numbers * 17 / 32) + routes * hidden * 3 * 4,
        bf16=round(reached * size * 2 * numbers),
        held=2 * streamed + scales + kept + 2 * tiled(1, size, 4),
        smem=4 * (2 * tiles + 2) + 2 * 2 * size * 4,
    )


def main() -> None:
    """Compute and keep every floor."""
    figures = {
        "indexer_logits/decode": scores(DECODE, run=1),
        "indexer_logits/prefill": scores(PREFILL, run=16),
        "topk_select/select": select(DECODE),
        "kda_decode/decode": recurrence(1, inputs=4, results=1, states=2),
        "kda_verify/verify": recurrence(
            DRAFTS, inputs=3 * (3 + DRAFTS) + DRAFTS, results=3 * DRAFTS, states=1, taps=12
        ),
        "kda_commit/commit": recurrence(DRAFTS, inputs=3 * DRAFTS, results=0, states=2),
        "kda_prefill/prefill": chunks(PREFILL),
        "moe_experts/decode": experts(DECODE, size=16),
        "moe_experts/prefill": experts(PREFILL, size=32),
    }
    for suffix, latent in LATENTS.items():
        figures[f"sparse_mla/gather{suffix}"] = gather(DECODE, latent)
        figures[f"sparse_mla/decode{suffix}"] = attention(DECODE, latent)
        figures[f"sparse_mla/prefill{suffix}"] = attention(PREFILL, latent)
    for name, floor in figures.items():
        print(name, floor.figures())
    keep("tpu_floors", {name: floor.figures() for name, floor in figures.items()})


if __name__ == "__main__":
    main()
