"""How near to the memory limit is each kernel on this GPU? One call, ending in one JSON line.

python -m experiments.bench_kernels [out=DIR] [tune] [only=TEXT]
Mixed attention: bytes of the keys and values that its rows must read / time / copy bandwidth of the same run. Pages of
16 in random order, bf16, several pools in turn, so that no cache holds anything; median of seven replays of a captured
graph. The split of the work and the pool entries of a selection are made once a pass, not once a call: they are timed
apart, like all other kernels, in microseconds. `tune` tries other tiles for each attention cell and takes minutes.
only: attention cells with this in their name, and nothing else; for work on a tile, not for a record.
"""

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from aspire.kernels.attention import (
    BlockSet,
    Rows,
    Taps,
    Tuning,
    mixed_attention_triton,
    plan_rows,
    query_tile,
    tuning,
)
from aspire.kernels.blocks import resolve
from aspire.kernels.scores import reduce_scores
from experiments.config import UNIQUE, script, split
from experiments.environment import environment
from experiments.kernel_launches import LAUNCHES

PAGE, LAYERS, REPEATS, WORKERS = 16, 4, 7, 12
GRAPH_BYTES = 8e9  # that a captured graph reads, about: two milliseconds


@dataclass(frozen=True)
class Cell:
    """One shape of mixed attention. kind: dense, draft, verify, or mixed, where every second row drafts.

    read: tokens that a drafting row reads, the forced tail included. at_least: the share of the copy bandwidth wanted;
    at_most: a bound on the time over that of the same bytes at the dense rate of this run.
    """

    kind: str
    rows: int
    context: int
    group: int = 2
    kv_heads: int = 8
    dim: int = 128
    width: int = 1
    read: int = 0
    block: int = 16
    tail: int = 128
    at_least: float | None = None
    at_most: float | None = None

    @property
    def name(self) -> str:
        what = f"{self.kind} {self.rows} x {self.context:,}, {self.kv_heads} x {self.group} heads of {self.dim}"
        if self.width > 1:
            what += f", {self.width} wide"
        return what + (f", {self.read:,} in blocks of {self.block}" if self.read else "")


DENSE = Cell("dense", 12, 90_000, at_least=1.0)
CELLS = [
    DENSE,
    Cell("dense", 32, 32_768, at_least=1.0),
    Cell("dense", 8, 90_000, 4, at_least=1.0),
    Cell("dense", 64, 4_096, at_least=0.97),
    Cell("dense", 13, 90_000),  # rows that do not fill the last wave of programs by themselves
    Cell("dense", 64, 17_000),
    Cell("dense", 128, 7_000, 3, 3, 64),
    Cell("draft", 12, 90_000, read=6_300, at_least=0.85),
    Cell("draft", 64, 17_000, read=1_190, at_least=0.85),
    Cell("draft", 34, 35_000, read=2_450),
    Cell("draft", 7, 90_000, 4, read=6_300, at_least=0.75),
    Cell("draft", 12, 90_000, read=6_300, block=1, tail=1),
    Cell("verify", 12, 90_000, width=8, at_least=0.85),
    Cell("verify", 12, 90_000, width=16, at_least=0.85),
    Cell("verify", 12, 90_000, width=17),
    Cell("verify", 7, 90_000, 4, width=8, at_least=0.82),
    Cell("verify", 7, 90_000, 4, width=16, at_least=0.82),
    Cell("verify", 7, 90_000, 4, width=17),  # one query more than a tile of 64 holds
    Cell("draft", 64, 7_000, 3, 3, 64, read=512),  # a small model
    Cell("mixed", 64, 7_000, 3, 3, 64, width=5, read=512),
    Cell("mixed", 64, 7_000, 3, 3, 64, width=10, read=512),
    Cell("mixed", 12, 90_000, width=8, read=6_300, at_most=1.12),
]
ADDED = 0.03  # what probe scores may add to a dense read
FLASH = ("flash_attn_interface", "fa3_fwd_interface")


@dataclass(frozen=True)
class Inputs:
    """What a call of a cell takes, with other pools and other selections in each layer; bytes: keys and values read."""

    q: Tensor
    out: Tensor
    pools: list[tuple[Tensor, Tensor]]
    rows: list[Rows]
    bytes: int
    tune: Tuning

    def launch(self, taps: Taps | None = None, then: Callable[[], None] = lambda: None) -> None:
        """All calls, `then` after each."""
        for i in range(self.calls):
            (k, v), rows = self.pools[i % len(self.pools)], self.rows[i % len(self.rows)]
            mixed_attention_triton(self.q, k, v, rows, self.out, taps, self.tune)
            then()

    @property
    def calls(self) -> int:
        """Calls that read enough bytes to be timed together, a multiple of the layers."""
        return len(self.pools) * max(1, round(GRAPH_BYTES / self.bytes / len(self.pools)))


def pages_of(cell: Cell) -> int:
    """Pages of one row, with room for drafts."""
    return -(-(cell.context + 16) // PAGE)


def elements_of(cell: Cell) -> int:
    """Elements of the keys of one layer."""
    return cell.rows * pages_of(cell) * PAGE * cell.kv_heads * cell.dim


def storage(cells: list[Cell], layers: int = LAYERS) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values of each layer, as many as the largest cell takes."""
    size = max(map(elements_of, cells))
    fresh = lambda: torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()  # noqa: E731
    return [(fresh(), fresh()) for _ in range(layers)]


def selection_of(cell: Cell, table: Tensor, drafts: Tensor) -> tuple[BlockSet, int]:
    """Random blocks before the tail, and how many tokens a drafting row reads."""
    device, tail = table.device, max(0, cell.context - cell.tail) // cell.block * cell.block
    count = (cell.read - (cell.context - tail)) // cell.block
    order = torch.rand(cell.rows, tail // cell.block, device=device).argsort(1)
    blocks, counts = order[:, :count].sort(1).values, torch.full((cell.rows,), count, device=device)
    units = resolve(blocks[None], counts[None], table, drafts, cell.block, PAGE)[0]
    tails = torch.full((cell.rows,), tail, device=device)
    return BlockSet(blocks, counts, tails, cell.block, units), count * cell.block + cell.context - tail


def make_inputs(cell: Cell, layers: list[tuple[Tensor, Tensor]], tune: Tuning | None = None) -> Inputs:
    """Rows over shuffled pages of the storage; where that is smaller than the cell, rows share pages."""
    device, dtype = layers[0][0].device, layers[0][0].dtype
    per_page = PAGE * cell.kv_heads * cell.dim
    have, pages = min(layers[0][0].numel() // per_page, cell.rows * pages_of(cell)), pages_of(cell)
    table = (torch.randperm(cell.rows * pages, device=device) % have).view(cell.rows, pages)
    pools = [tuple(x[: have * per_page].view(have * PAGE, cell.kv_heads, cell.dim) for x in pair) for pair in layers]
    drafts = torch.full((cell.rows,), cell.kind == "draft", device=device)
    drafts[1::2] |= cell.kind == "mixed"
    width = torch.where(drafts, 1, cell.width)
    q = torch.randn(int(width.sum()), cell.kv_heads * cell.group, cell.dim, dtype=dtype, device=device)
    row_of = torch.arange(cell.rows, device=device).repeat_interleave(width)
    start, position = width.cumsum(0) - width, cell.context - width
    rows = Rows(start, width, position, table, PAGE, widest=cell.width, row_of=row_of)
    tune = tune or tuning(cell.rows, cell.width, cell.group, cell.kv_heads, not cell.read)
    tokens = cell.rows * cell.context
    each = [rows]
    if cell.read:
        sets = [selection_of(cell, table, drafts) for _ in (layers if cell.block == 1 else layers[:1])]
        each = [replace(rows, selection=chosen, sparse=drafts) for chosen, _ in sets]
        drafting = int(drafts.sum())
        tokens = drafting * sets[0][1] + (cell.rows - drafting) * cell.context
    nbytes = tokens * cell.kv_heads * cell.dim * 2 * dtype.itemsize
    each = [replace(x, work=plan_rows(x, cell.group, cell.kv_heads, cell.dim, tune)) for x in each]
    return Inputs(q, torch.empty_like(q), pools, each, nbytes, tune)  # type: ignore[arg-type]


def seconds(launch: Callable[[], Any], calls: int, captured: bool = True) -> float:
    """Median time of one call, of seven replays of a captured graph with `calls` of them."""
    launch()
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        launch = graph.replay
    launch()
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for begin, end in spans:
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in spans) / 1e3 / calls


def copy_of_4_gib() -> float:
    """TB/s read and written by a plain copy, outside of a graph, whose copies are slower."""
    source = torch.zeros(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), 1, captured=False) / 1e12


# -- attention ---------------------------------------------------------------------------------------------------------


def measure(cell: Cell, layers: list[tuple[Tensor, Tensor]], copy: float) -> dict[str, Any]:
    """Time of a call, TB/s and share of the copy."""
    inputs = make_inputs(cell, layers)
    took = seconds(inputs.launch, inputs.calls)
    rate = inputs.bytes / took / 1e12
    return {"cell": cell.name, "gb": inputs.bytes / 1e9, "us": took * 1e6, "tb_s": rate, "share": rate / copy}


def verdict_of(cell: Cell, line: dict[str, Any], dense: float) -> dict[str, Any]:
    """The line with its bound and whether it holds; dense: TB/s of the dense rows of this run."""
    if cell.at_most is not None:
        line["over_dense"] = dense / line["tb_s"]
        return line | {"bound": cell.at_most, "ok": line["over_dense"] <= cell.at_most}
    return line | {"bound": cell.at_least, "ok": None if cell.at_least is None else line["share"] >= cell.at_least}


def flash(cell: Cell, layers: list[tuple[Tensor, Tensor]]) -> tuple[str, float]:
    """Module and TB/s of FlashAttention 3 on the same bytes, contiguous. Raises ImportError where it is not there."""
    module = next((m for m in FLASH if _importable(m)), None)
    if module is None:
        raise ImportError(f"none of {', '.join(FLASH)} is installed")
    attend = import_module(module).flash_attn_with_kvcache
    inputs, length = make_inputs(cell, layers), pages_of(cell) * PAGE
    q = inputs.q.view(cell.rows, 1, -1, cell.dim)
    lengths = torch.full((cell.rows,), cell.context, dtype=torch.int32, device="cuda")
    pools = [[x.view(cell.rows, length, cell.kv_heads, cell.dim) for x in pair] for pair in inputs.pools]

    def launch() -> None:
        for i in range(inputs.calls):
            attend(q, *pools[i % len(pools)], cache_seqlens=lengths, causal=True)

    return module, inputs.bytes / seconds(launch, inputs.calls) / 1e12


def _importable(module: str) -> bool:
    try:
        import_module(module)
    except (ImportError, OSError):
        return False
    return True


def taps_of_dense() -> tuple[Taps, Callable[[], None]]:
    """Room for the logits of the dense rows, and their reduction to scores."""
    rows, length, heads = DENSE.rows, pages_of(DENSE) * PAGE, DENSE.kv_heads * DENSE.group
    logits = torch.empty(rows, 1, heads, length, dtype=torch.float16, device="cuda")
    lse, out = torch.empty(rows, heads, device="cuda"), torch.empty(1, rows, length, device="cuda")
    queries = torch.arange(rows, device="cuda")[:, None]
    at, counts = torch.full_like(queries, DENSE.context - 1), torch.ones_like(queries, dtype=torch.bool)
    taps = Taps(counts[:, 0].contiguous(), False, logits, lse)
    return taps, lambda: reduce_scores(logits, lse, queries, at, counts, DENSE.kv_heads, "max", out)


def probed(layers: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """What the scores of the dense rows cost on top of their read: logits left behind, then reduced."""
    inputs, (taps, reduced) = make_inputs(DENSE, layers), taps_of_dense()
    launches = (inputs.launch, lambda: inputs.launch(taps), lambda: inputs.launch(taps, reduced))
    plain, tapped, both = (seconds(launch, inputs.calls) for launch in launches)
    added = both / plain - 1
    return {
        "cell": f"scores of {DENSE.name}", "us": plain * 1e6, "tapped_us": tapped * 1e6, "reduced_us": both * 1e6,
        "taps_add": tapped / plain - 1, "scores_add": added, "bound": ADDED, "ok": added <= ADDED,
    }  # fmt: skip


# -- all of it -------------------------------------------------------------------------------------------------------

NARROW = [Tuning(n, warps, stages, pieces) for n, warps, stages, pieces in product((64, 128), (2, 4), (2, 3), (4, 8))]
WIDE = [Tuning(n, warps, stages, pieces) for n, warps, stages, pieces in product((64, 128), (4, 8), (2, 3), (4, 8))]


def tunings(cell: Cell) -> list[Tuning]:
    """What `tune` tries: narrow tiles want few warps."""
    return NARROW if query_tile(cell.width, cell.group) <= 16 else WIDE


def best_tiles(cell: Cell, layers: list[tuple[Tensor, Tensor]], copy: float) -> dict[str, Any]:
    """Share of the copy with each tuning, the best first and printed; one that does not fit the device is left out."""
    found = []
    for tune in tunings(cell):
        try:
            inputs = make_inputs(cell, layers, tune)
            rate = inputs.bytes / seconds(inputs.launch, inputs.calls) / 1e12
        except Exception as error:  # out of shared memory or registers, in the words of the compiler
            print(f"  {tune}: {error}"[:120])
            continue
        found.append({**asdict(tune), "share": rate / copy})
    found.sort(key=lambda x: -x["share"])
    print(cell.name, *found[:3], sep="\n  ")
    return {"cell": cell.name, "tunings": found}


def compile_task(task: tuple[str, int, Tuning | None]) -> None:
    """Compile what one cell or launch needs, in a process of its own, on a pool of a few pages."""
    kind, number, tune = task
    if kind == "launch":
        launch, _ = [*LAUNCHES.values()][number]()
        launch()
    else:
        cell = CELLS[number]
        size = 64 * PAGE * cell.kv_heads * cell.dim
        small = [tuple(torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in "kv")]
        try:
            inputs = make_inputs(cell, small, tune)  # type: ignore[arg-type]
            (k, v), rows = inputs.pools[0], inputs.rows[0]
            taps = taps_of_dense()[0] if kind == "taps" else None
            mixed_attention_triton(inputs.q, k, v, rows, inputs.out, taps, inputs.tune)
        except Exception:  # the measurement will say it
            return
    torch.cuda.synchronize()


def compile_all(cells: list[Cell], tune: bool) -> None:
    """Fill Triton's cache from many processes; then nothing is compiled one by one."""
    numbers = [CELLS.index(cell) for cell in cells]
    tasks: list[tuple[str, int, Tuning | None]] = [("cell", i, None) for i in numbers]
    if cells == CELLS:
        tasks += [("taps", CELLS.index(DENSE), None), *(("launch", i, None) for i in range(len(LAUNCHES)))]
    if tune:
        tasks += [("cell", i, t) for i in numbers for t in tunings(CELLS[i]) if t.pieces == 8]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(compile_task, tasks, chunksize=1)


def show(line: dict[str, Any]) -> None:
    mark = {None: "", True: "ok", False: "below"}[line["ok"]]
    if "scores_add" in line:
        print(f"{line['cell']:<66}{line['taps_add']:>7.1%} +reduce {line['scores_add']:.1%} (<= {ADDED:.0%}) {mark}")
        return
    over = f" {line['over_dense']:.2f} of its bytes at the dense rate," if "over_dense" in line else ""
    bound = "" if line["bound"] is None else f" bound {line['bound']:.2f} {mark}"
    print(f"{line['cell']:<66}{line['us']:>9.1f} us {line['tb_s']:>6.2f} TB/s {line['share']:>5.2f}{over}{bound}")


def run(cells: list[Cell], tune: bool) -> dict[str, Any]:
    """Measure everything, a printed line each; of fewer cells than all only these."""
    compile_all(cells, tune)
    where, by_events = environment("cuda"), copy_of_4_gib()
    copy = max(by_events, where.copy_tb_s or 0.0)
    print(f"{where.device}, torch {where.torch}, triton {where.triton}; copy {copy:.2f} TB/s")
    result: dict[str, Any] = {"environment": where.model_dump(), "copy_tb_s": copy, "copy_events_tb_s": by_events}
    layers = storage(cells)
    lines = [measure(cell, layers, copy) for cell in cells]
    dense = lines[cells.index(DENSE)]["tb_s"] if DENSE in cells else float("nan")
    result["attention"] = [verdict_of(cell, line, dense) for cell, line in zip(cells, lines)]
    result["attention"] += [probed(layers)] if cells == CELLS else []
    for line in result["attention"]:
        show(line)
    if tune:
        result["tune"] = [best_tiles(cell, layers, copy) for cell in cells]
    if cells != CELLS:
        return result
    result["flash"] = []
    for cell in (c for c in CELLS if c.kind == "dense"):
        try:
            module, rate = flash(cell, layers)
        except Exception as error:  # an interface of another version is told, not hidden
            result["flash"].append({"cell": cell.name, "error": f"{type(error).__name__}: {error}"})
            print(f"FlashAttention 3: {error}")
            break
        result["flash"].append({"cell": cell.name, "module": module, "tb_s": rate, "share": rate / copy})
        print(f"{module}, contiguous: {cell.name:<40}{rate:>6.2f} TB/s {rate / copy:.2f}")
    layers.clear()
    torch.cuda.empty_cache()
    result["kernels_us"] = {name: 1e6 * seconds(*make()) for name, make in LAUNCHES.items()}
    for name, us in result["kernels_us"].items():
        print(f"{name:<66}{us:>9.2f} us")
    result["below"] = [line["cell"] for line in result["attention"] if line["ok"] is False]
    return result


def main(words: list[str]) -> None:
    """Raises ValueError for bad arguments or where there is no GPU."""
    own, rest = split(words, {"out": "", "only": ""})
    if unknown := [word for word in rest if word != "tune"]:
        raise ValueError(f"unknown argument {unknown[0]!r}; there are out=DIR, only=TEXT and tune")
    if not (cells := [cell for cell in CELLS if own["only"] in cell.name]):
        raise ValueError(f"no cell has {own['only']!r} in its name")
    if not torch.cuda.is_available():
        raise ValueError("the kernels are timed on a GPU, and torch finds none")
    result = run(cells, "tune" in rest)
    if cells == CELLS:
        out = Path(own["out"] or f"runs/bench-kernels-{datetime.now():%Y-%m-%d_%H-%M-%S}-{UNIQUE}")
        out.mkdir(parents=True, exist_ok=True)
        (out / "kernels.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "tune"}))


if __name__ == "__main__":
    script(main)
