"""What decode attention would take on a GPU, on paper: from the compiled kernel's own copies and
resources and the plan's own work lists, not from a formula of what it should read.

For each batch and context it says

  moved       bytes that the kernel copies: trips of its main loop, as the plan deals them out,
              times the bytes that the PTX of that loop copies a trip, and partial results
  floor       the time to move what must be moved (K and V of the live context, q, out) at the
              GPU's measured copy rate
  in flight   bytes a multiprocessor has asked for at once (blocks that fit x tiles ahead), against
              latency x bandwidth
  waves       programs over what fits at once
  estimate    a fluid simulation: programs start in order as room comes free, wait for their first
              bytes, then share the copy rate, each of them held back by its bytes in flight over
              the latency and by the time its arithmetic takes

It needs what `pallas_kernels.aot` needs, and no GPU. Nothing here is a measurement.

    python scripts/estimate_decode.py --backend mosaic --gpu H200
"""

import heapq
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import pallas_kernels
from pallas_kernels import aot, plan
from pallas_kernels.ptx import entries

LATENCY = 1e-6  # s from asking to having, under load
STARTUP = 3e-6  # s: launch of a program, then work item, page id and first tile, one after another
LAUNCH = 2e-6  # s a kernel, from one's end to the next one's first programs
ISSUE = 1.0  # instructions a clock of one of a multiprocessor's four schedulers


class Gpu(NamedTuple):
    """What the estimate needs of a GPU."""

    cores: int
    copy_rate: float  # bytes/s: measured for H200, 0.9 of the data sheet's otherwise
    clock: float  # Hz
    shared_bytes: int  # of a multiprocessor


GPUS = {
    "A100-80GB": Gpu(108, 0.9 * 2.039e12, 1.41e9, 167936),
    "H100": Gpu(132, 0.9 * 3.352e12, 1.98e9, 233472),
    "H200": Gpu(132, 4.3e12, 1.98e9, 233472),
}
REGISTERS, THREADS, BLOCKS = 65536, 2048, 32  # of a multiprocessor
RESERVED_SHARED = 1024  # bytes a block


class Loop(NamedTuple):
    """A loop of a kernel in PTX."""

    copied_bytes: int  # into shared memory, a trip
    instructions: int  # a trip, of one thread


class Shape(NamedTuple):
    """A decode batch: one sequence of each of these context lengths."""

    contexts: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


def loops(text: str, threads: int) -> list[Loop]:
    """The innermost loops of a kernel that copy to shared memory, in the order of the code."""
    lines = [line.strip() for line in text.splitlines()]
    places = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", text))
    ends: dict[int, int] = {}  # of each place that is jumped back to, the last jump
    for i, line in enumerate(lines):
        match = re.search(r"\bbra(?:\.uni)?\s+(\S+);", line)
        if match and places.get(match[1], i) < i:
            ends[places[match[1]]] = i
    result = []
    for begin, end in sorted(ends.items()):
        if any(begin < other < end for other in ends):
            continue  # not an innermost one
        body = lines[begin:end]
        copied = sum(_copied_bytes(line, threads, constants) for line in body)
        if copied:
            result.append(Loop(copied, sum(line.endswith(";") for line in body)))
    return result


def _copied_bytes(line: str, threads: int, constants: dict[str, str]) -> int:
    """Bytes that all threads of a block have copied to shared memory by an instruction."""
    if match := re.search(r"cp\.async\.\S*shared\.global\S* \[.*\], \[.*\], (\w+)", line):
        size = int(match[1], 0)
        return size * threads if size == 16 else 0  # 4 bytes are page ids
    # A bulk copy says how much it brings to a barrier, each thread its share.
    if match := re.search(r"mbarrier\.\S*expect_tx\S* .*, (%?\w+);", line):
        return int(constants.get(match[1], match[1])) * threads
    return 0


class Estimate(NamedTuple):
    """One row of the table; times in seconds."""

    moved_bytes: int
    floor: float
    in_flight: float  # bytes a multiprocessor
    programs: int
    waves: float
    decode: float
    total: float  # with the other launches of the operator

    @property
    def efficiency(self) -> float:
        """Of the decode kernel alone."""
        return self.floor / self.decode


class Resources(NamedTuple):
    """What the decode kernel takes, and does a trip of its main loop."""

    registers: int
    shared_bytes: int
    threads: int
    spill_bytes: int
    loop: Loop
    ahead_bytes: int  # asked for before they are waited for, a block

    def blocks(self, gpu: Gpu) -> int:
        """Blocks that fit on a multiprocessor."""
        warps = -(-self.threads // 32)
        registers = -(-self.registers // 8) * 8 * 32 * warps
        shared = self.shared_bytes + RESERVED_SHARED
        return min(
            REGISTERS // registers, gpu.shared_bytes // shared, THREADS // (32 * warps), BLOCKS
        )


def compiled_decode(shape: Shape, backend: str, gpu_name: str) -> Resources:
    """Compiles the operator and reads what its decode kernel takes and copies."""

    def integers(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    pool = (2, 4096, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    batch, blocks = len(shape.contexts), -(-max(shape.contexts) // shape.block_size)

    def attend(*arguments):
        return pallas_kernels.paged_attention(
            *arguments, scale=shape.head_dim**-0.5, backend=backend
        )

    compiled = aot.compile_for(
        attend,
        jax.ShapeDtypeStruct((batch, shape.num_heads, shape.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct(pool, jnp.bfloat16),
        integers(),
        integers(batch, blocks),
        integers(batch + 1),
        integers(batch),
        gpu=gpu_name,
    )
    [(name, kernel)] = [(n, k) for n, k in compiled.kernels.items() if "decode" in n]
    texts = [text for entry, text in entries(compiled.ptx).items() if name in entry]
    # The first loop walks over the keys that every row sees, the second over those at the edges.
    loop = loops(texts[0], kernel.threads)[0]
    # Half of what is loaded ahead is being waited for while the other half is used.
    ahead = kernel.shared_bytes // loop.copied_bytes * loop.copied_bytes
    return Resources(
        kernel.registers,
        kernel.shared_bytes,
        kernel.threads,
        kernel.spill_bytes,
        loop,
        max(ahead - loop.copied_bytes, loop.copied_bytes),
    )


def trips(shape: Shape, cores: int, keys: int, programs_a_core: int) -> np.ndarray:
    """Trips of each program's loop: those of the plan for this batch, for each KV head."""
    batch = len(shape.contexts)
    contexts = np.array(shape.contexts, np.int32)
    items = plan.make_plan(
        np.arange(batch + 1, dtype=np.int32),
        contexts,
        num_tokens=batch,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        dtype=jnp.bfloat16,
        num_cores=cores,
        programs_a_core=programs_a_core,
    ).items
    sequence, _, _, _, part, parts = items[:, items[2] > 0]
    tiles = -(-contexts[sequence] // keys)
    tiles_a_part = -(-tiles // parts)
    taken = np.clip(tiles - part * tiles_a_part, 0, tiles_a_part)
    return np.repeat(taken, shape.num_kv_heads)


def simulate(work: np.ndarray, slots: int, rate: float, cap: float, startup: float) -> float:
    """Seconds until all programs are done.

    `work` is each program's bytes, in the order of their start; `slots` run at once, of which those
    past their start-up share `rate` equally, none getting more than `cap` (bytes/s).
    """
    # All that run progress alike, so a program ends when the common progress reaches its own mark.
    waiting = list(work[::-1])
    starting: list[tuple[float, float]] = []  # (when its start-up ends, bytes)
    running: list[float] = []  # marks
    now = progress = 0.0
    while waiting or starting or running:
        while waiting and len(starting) + len(running) < slots:
            heapq.heappush(starting, (now + startup, waiting.pop()))
        speed = min(cap, rate / len(running)) if running else 0.0
        next_start = starting[0][0] if starting else math.inf
        next_end = now + (running[0] - progress) / speed if running else math.inf
        then = min(next_start, next_end)
        progress += speed * (then - now)
        now = then
        while starting and starting[0][0] <= now:
            heapq.heappush(running, progress + heapq.heappop(starting)[1])
        while running and running[0] <= progress * (1 + 1e-12):
            heapq.heappop(running)
    return now


def estimate(
    shape: Shape, resources: Resources, gpu: Gpu, keys: int, programs_a_core: int
) -> Estimate:
    """The row of one batch."""
    number = trips(shape, gpu.cores, keys, programs_a_core)
    partials = (shape.num_heads // shape.num_kv_heads) * (shape.head_dim + 1) * 4
    work = number * resources.loop.copied_bytes + partials
    blocks = resources.blocks(gpu)
    in_flight = blocks * resources.ahead_bytes
    arithmetic = resources.loop.instructions * (resources.threads // 128) / ISSUE / gpu.clock
    cap = min(
        resources.ahead_bytes / LATENCY,
        resources.loop.copied_bytes / arithmetic,
    )
    decode = simulate(work.astype(float), gpu.cores * blocks, gpu.copy_rate, cap, STARTUP)
    row = 2 * shape.num_heads * shape.head_dim  # q and out in bfloat16
    key_and_value = 4 * shape.num_kv_heads * shape.head_dim
    moved = sum(shape.contexts) * key_and_value + len(shape.contexts) * 2 * row
    floor = moved / gpu.copy_rate
    merge = len(work) * partials / gpu.copy_rate
    return Estimate(
        int(work.sum()),
        floor,
        in_flight,
        len(work),
        len(work) / (gpu.cores * blocks),
        decode,
        decode + merge + 3 * LAUNCH,
    )


FLAGS = flags.FLAGS
flags.DEFINE_enum("backend", "mosaic", ["mosaic", "triton"], "Whose decode kernel.")
flags.DEFINE_enum("gpu", "H200", list(GPUS), "The GPU.")
flags.DEFINE_list("batch", ["1", "32", "128"], "Sequences.")
flags.DEFINE_list("context", ["1024", "4096", "32768"], "Tokens of each sequence.")
flags.DEFINE_integer("num_heads", 32, "Query heads.")
flags.DEFINE_integer("num_kv_heads", 8, "KV heads.")
flags.DEFINE_integer("head_dim", 128, "Head dim.")
flags.DEFINE_integer("block_size", 16, "Block size.")
flags.DEFINE_list(
    "programs_a_core",
    [str(plan.PROGRAMS_A_CORE)],
    "How finely contexts are split: programs for each multiprocessor.",
)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    gpu = GPUS[FLAGS.gpu]
    sizes = FLAGS.num_heads, FLAGS.num_kv_heads, FLAGS.head_dim, FLAGS.block_size
    shape = Shape((1024,), *sizes)
    resources = compiled_decode(shape, FLAGS.backend, FLAGS.gpu)
    row_bytes = 4 * shape.head_dim  # of a key and its value
    keys = resources.loop.copied_bytes // row_bytes
    print(
        f"{FLAGS.backend} decode on {FLAGS.gpu}, H {shape.num_heads}, K {shape.num_kv_heads}, "
        f"D {shape.head_dim}, B {shape.block_size}, bfloat16: {keys} keys a tile "
        f"({resources.loop.copied_bytes} bytes and {resources.loop.instructions} instructions a "
        f"trip), {resources.threads} threads, {resources.registers} registers, "
        f"{resources.spill_bytes} bytes spilled, {resources.shared_bytes} bytes shared: "
        f"{resources.blocks(gpu)} blocks a multiprocessor, "
        f"{resources.blocks(gpu) * resources.ahead_bytes / 1024:.0f} KiB in flight where latency x "
        f"bandwidth asks for {LATENCY * gpu.copy_rate / gpu.cores / 1024:.0f} KiB\n"
    )
    print(
        "| batch | context | split | moved MB | floor us | waves | decode us | of floor | all us |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for batch, context in itertools.product(map(int, FLAGS.batch), map(int, FLAGS.context)):
        # All alike; and one long sequence among short ones.
        cases = {f"{context}": (context,) * batch}
        if batch > 1:
            cases[f"{context}, others {context // 16}"] = (context, *[context // 16] * (batch - 1))
        for name, contexts in cases.items():
            for split in map(int, FLAGS.programs_a_core):
                row = estimate(Shape(contexts, *sizes), resources, gpu, keys, split)
                print(
                    f"| {batch} | {name} | {split} | {row.moved_bytes / 1e6:.1f} | "
                    f"{row.floor * 1e6:.1f} | {row.waves:.2f} | {row.decode * 1e6:.1f} | "
                    f"{row.efficiency:.0%} | {row.total * 1e6:.1f} |"
                )


if __name__ == "__main__":
    app.run(main)
