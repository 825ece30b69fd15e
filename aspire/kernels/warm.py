"""What can a kernel do for the product after it? Ask L2 for the first columns of the weight which that will read.

Between two kernels the memory idles for a few microseconds, once or twice a product: a tenth of a pass with few rows.
A kernel that takes `then`, a weight [N, K] with contiguous rows, shares its lines of 128 bytes out over its programs
when its own loads are done. It is a hint: results do not depend on it, nothing waits for it, a CPU ignores it.
"""

from torch import Tensor

from aspire.kernels.jit import jit, tl

BYTES = 8 * 2**20  # what the memory brings in the pause between two kernels, about, and a fifth of L2
LINE = 128


@jit
def warm(weight, rows, stride, program, programs, COLUMNS: tl.constexpr, LANES: tl.constexpr):
    """Fetch the first COLUMNS of each row; one of `programs`, LANES threads wide, fetches its share."""
    PER_ROW: tl.constexpr = COLUMNS * weight.dtype.element_ty.primitive_bitwidth // 1024
    lines = rows * PER_ROW
    for base in range(program * LANES, lines, programs * LANES):
        line = tl.minimum(base + tl.arange(0, LANES), lines - 1)
        at = weight + (line // PER_ROW).to(tl.int64) * stride + (line % PER_ROW) * (COLUMNS // PER_ROW)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


def columns_of(then: Tensor | None) -> int:
    """How many columns of each row to ask for, a multiple of a line; 0 = nothing."""
    if then is None or not then.is_cuda:
        return 0
    rows, columns = then.shape
    line = LINE // then.element_size()
    return min(columns, max(BYTES // (rows * LINE), 1) * line) // line * line
