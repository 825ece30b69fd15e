"""How is a comparison measured? Prompts prefilled once, warm-up, then timed windows in turn (A B C A B C).

A window opens when every slot holds a request and closes after a fixed number of committed tokens; admissions inside it
(a refilled slot's prompt) are prefill and not counted. Nothing is printed or logged while a window is open.
"""

import hashlib
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from tqdm import tqdm

from aspire import calibrate
from aspire.engine import Engine, PassRecord
from aspire.policies import Method
from aspire.request import Request
from experiments import journal
from experiments.config import MAX_FIT
from experiments.environment import copy_tb_s, device_name, synchronise
from experiments.gate import Forced, force, judge, parting
from experiments.grading import grade
from experiments.journal import Finished
from experiments.layout import lay_out, make_method, resolve
from experiments.loading import Config, free_cached, model_used, tokenizer_of
from experiments.loading import describe as describe_model
from experiments.outcome import Entry, Window, conclude, request_line
from experiments.prompts import describe_prompts
from experiments.records import Cell, Parting, Record, cell_id
from experiments.session import Session, open_session

Report = Callable[[str], None]
Note = Callable[[Request], None]


def cell_of(config: Config) -> Cell:
    """A batch that was never settled counts as 0."""
    acceptance = config["acceptance"]["profile"]
    shapes = config["model"]["weights"] == "random"
    # The profile's parameters follow when it has run; real weights refuse emulation before they run.
    mark = f"emulated:{acceptance}" if shapes and acceptance != "measured" else "measured"
    return Cell(
        model=config["model"]["name"], benchmark=config["benchmark"]["name"], method=config["method"]["name"],
        batch=0 if config["batch"] == MAX_FIT else config["batch"], seed=config["seed"],
        evidence="shapes" if shapes else "real", acceptance=mark,
    )  # fmt: skip


def run_comparison(
    configs: list[Config], out: Path, report: Report = tqdm.write, kept: Sequence[Record] = ()
) -> list[Record]:
    """Measure every config (they differ in `method` alone) and write a record each; a failure fails its own cell.

    A fault before the first method runs (model, benchmark, memory) fails all of them. kept: records of an earlier
    process that are not made again; their methods still count in the sizes that all share.
    """
    made = {record.cell.method: record for record in kept}
    entries = [Entry(config, cell_of(config), kept=made.get(config["method"]["name"])) for config in configs]
    try:
        configs = [resolve(config) for config in configs]
        for entry, config in zip(entries, configs, strict=True):
            entry.config = config
            try:
                entry.method = make_method(entry.config)
            except Exception as error:
                entry.error = describe(error)
        measured = [entry for entry in entries if entry.error is None]
        if any(entry.kept is None for entry in measured):
            measure(measured, configs[0], out, report)
    except Exception as error:
        for entry in entries:
            entry.error = entry.error or describe(error)
    records = [entry.kept or conclude(entry, out) for entry in entries]
    entries.clear()
    free_cached()  # the pool and the captured passes, before the next comparison asks for room
    return records


def measure(entries: list[Entry], config: Config, out: Path, report: Report) -> None:
    """Plan the memory, prefill, calibrate, warm up, then the timed windows, interleaved."""
    if config["engine"]["device"].startswith("cuda"):
        copy_tb_s(config["engine"]["device"])  # while there is room for what it copies
    layout = lay_out(config, [entry.method for entry in entries if entry.method is not None])
    for entry, batch in zip(entries, layout.batches, strict=True):
        settled = {key: layout.config[key] for key in ("benchmark", "protocol")}
        entry.config = {**entry.config, **settled, "batch": batch}
        entry.cell = cell_of(entry.config)
    skipped = [entry.cell.method for entry in entries if entry.kept]
    entries = [entry for entry in entries if not entry.kept]
    report("\n".join(layout.plan.table()))
    report(describe_model(layout.config, model_used(layout.config, layout.spec)))
    report(describe_prompts(layout.items, layout.provenance))
    session = open_session(layout)
    report(f"{len(session.items)} prompts prefilled in {session.prefill_s:.1f} s")
    if layout.scorer is not None:
        judged = sum(map(layout.scorer.judges, session.items))
        report(f"scoring: {layout.scorer}, {judged} of {len(session.items)} prompts have an answer it can judge")
    for entry in entries:
        attempt(entry, lambda entry=entry: take_up(entry, out, len(session.items), skipped))
    repeats = config["protocol"]["repeats"]
    with tqdm(total=len(entries) * (1 + repeats), desc="cells", unit="window") as bar:
        for entry in entries:
            bar.set_postfix_str(f"warm-up {entry.cell.method}")
            attempt(entry, lambda entry=entry: prepare(entry, session, report))
            bar.update()
        for repeat in range(repeats):
            for entry in entries:
                bar.set_postfix_str(f"repeat {repeat + 1} {entry.cell.method}")
                attempt(entry, lambda entry=entry: entry.windows.append(run_window(session, entry)))
                bar.update()
    if config["protocol"]["gate"]:
        hold_to_full_attention(entries, session, config["protocol"]["gate"])
    finish(entries, session)


def attempt(entry: Entry, work: Callable[[], None]) -> None:
    """Run a part of an entry unless it has failed already."""
    if entry.error is not None:
        return
    try:
        work()
    except Exception as error:
        entry.error, entry.engine = describe(error), None


def describe(error: Exception) -> str:
    """A user's error is its message; anything else keeps its place in the code."""
    if isinstance(error, ValueError):
        return f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def take_up(entry: Entry, out: Path, requests: int, skipped: list[str]) -> None:
    """Find what an earlier process left of this cell, and open the journal of a run that drains."""
    if skipped:
        entry.resumed = f"{', '.join(skipped)} ran in an earlier process"
    if entry.config["protocol"]["replay"] == "drain":
        entry.journal = journal.begin(out / cell_id(entry.cell), entry.config)
        entry.finished = journal.read_finished(entry.journal.parent)
    if entry.finished:
        asked = requests * entry.config["protocol"]["repeats"]
        entry.resumed = f"{len(entry.finished)} of {asked} requests ran in an earlier process"


def restored(one: Finished, session: Session) -> Request:
    """The request of a journal's line, as it ended. Raises ValueError if its prompt or seed is another by now."""
    number = {item.id: number for number, item in enumerate(session.items)}.get(one.request.id)
    request = None if number is None else session.request(number)[0]
    if request is None or (request_line(request).prompt_ids_sha1, request.sampling.seed) != (
        one.request.prompt_ids_sha1, one.request.seed,
    ):  # fmt: skip
        raise ValueError(f"the prompts have changed since {one.request.id} ran; set overwrite=true to run all anew")
    request.output_ids, request.rounds = one.request.output_ids, one.request.rounds
    request.finish_reason = one.request.finish_reason
    return request


def make_engine(session: Session, method: Method, slots: int) -> Engine:
    settings = replace(session.settings, slots=slots)
    return Engine(session.model, settings, method, session.verification, session.pool)


def prepare(entry: Entry, session: Session, report: Report) -> None:
    """Calibrate if the method asks for a cost model, then warm up the passes that will be timed."""
    assert entry.method is not None
    if entry.method.needs_cost_model:
        entry.calibration = calibration_for(entry, session, report)
        entry.method = entry.method.with_cost_model(
            entry.calibration.cost.scaled(**entry.config["calibration"]["scale"])
        )
    entry.engine = make_engine(session, entry.method, entry.config["batch"])
    warm_up(entry.engine, session, session.config["protocol"]["warmup_passes"])


def warm_up(engine: Engine, session: Session, passes: int) -> list[PassRecord]:
    """Capture what the method can come to, run some passes with full slots and forget the requests."""
    supply = itertools.count()
    with closing(engine):
        fill(engine, session, supply, [])
        engine.prepare()
        free_cached()  # what captures ran in before they were captured
        for _ in range(passes):
            fill(engine, session, supply, [])
            engine.step()
    return engine.passes


def calibration_key(entry: Entry, session: Session) -> calibrate.Key:
    """What a cost model depends on."""
    assert entry.method is not None
    engine = {k: v for k, v in entry.config["engine"].items() if k not in ("device", "max_len", "pages")}
    selection = entry.method.selection
    return {
        "device": device_name(session.settings.device), "model": entry.config["model"]["name"],
        "dtype": entry.config["model"]["dtype"], "batch": entry.config["batch"], "engine": engine,
        "selection": repr(selection), "verification": entry.config["verification"]["mode"], "torch": torch.__version__,
        "refresh": {name: list(value) for name, value in asdict(entry.method.refresh).items()},
        "prompt_tokens": max(p.length for p in session.prompts),
    }  # fmt: skip


def calibration_for(entry: Entry, session: Session, report: Report) -> calibrate.Calibration:
    """The cost model on file for this set-up, or a new one from a profiling run."""
    assert entry.method is not None
    key = calibration_key(entry, session)
    name = hashlib.sha1(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    path = Path(entry.config["calibration"]["dir"]) / f"{entry.cell.model}-{name}.json"
    if path.exists():
        return calibrate.load(path, key)
    profile = calibrate.profiling_method(entry.method)
    engine = make_engine(session, profile, entry.config["batch"])
    passes = warm_up(engine, session, 4 + entry.config["calibration"]["passes"])[4:]
    del engine
    free_cached()  # its captured passes
    layers = session.model.spec.layers
    found = calibrate.fit(passes, layers, len(profile.refresh.dense_layers(layers)), key)
    calibrate.save(found, path)
    cost = found.cost
    report(
        f"calibrated {entry.cell.method} on {found.passes} passes: {cost.model:.2f} ms + {cost.mlp:.3f} ms/token + "
        f"{1e3 * cost.attn:.3f} us/KV token, MAPE {100 * found.mape:.1f} %"
    )
    return found


def run_window(session: Session, entry: Entry) -> Window:
    """One timed window, from full slots to `window_tokens` committed tokens (or, draining, to the last request)."""
    assert entry.engine is not None
    drain, device = session.config["protocol"]["replay"] == "drain", session.settings.device
    before = [one for one in entry.finished if one.repeat == len(entry.windows)]
    missing = [n for n, item in enumerate(session.items) if item.id not in {one.request.id for one in before}]
    supply = iter(missing) if drain else itertools.count()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    with closing(entry.engine) as engine:
        engine.passes = []
        window = Window([restored(one, session) for one in before], engine.passes)
        window.decode_s = {one.request.id: one.decode_s for one in before}
        earlier = max((one.window_s for one in before), default=0.0)
        fill(engine, session, supply, window.requests)
        admitted, missed = engine.prefill_seconds, engine.graph_misses
        synchronise(device)
        start = engine.clock()

        def elapsed() -> float:
            return earlier + engine.clock() - start - (engine.prefill_seconds - admitted) - window.aside

        def note(request: Request) -> None:
            begun, seconds = engine.clock(), elapsed()
            if entry.journal is not None:
                one = Finished(
                    repeat=len(entry.windows), decode_s=window.decode_s[request.id], window_s=seconds,
                    request=request_line(request),
                )  # fmt: skip
                journal.append(entry.journal, one)
            window.aside += engine.clock() - begun

        tokens = None if drain else session.config["protocol"]["window_tokens"]
        run_until_full(engine, session, supply, window, tokens, note)
        # A pass has run when its tokens are here; a GPU may be at the next one, which the window does not count.
        window.seconds = elapsed()
        window.graph_misses = engine.graph_misses - missed
    if before:
        place = {item.id: number for number, item in enumerate(session.items)}
        window.requests.sort(key=lambda request: place[request.id])
    if device.startswith("cuda"):
        window.peak_gib = (torch.cuda.max_memory_allocated() + held_by_graphs()) / 2**30
    return window


def held_by_graphs() -> int:
    """Bytes that captured passes keep for their next run, which count as free between runs."""
    segments = torch.cuda.memory_snapshot()
    own = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in own)


def run_until_full(
    engine: Engine, session: Session, supply: Iterator[int], window: Window, tokens: int | None, note: Note
) -> None:
    """Step until `tokens` are committed (None: until nothing is left), noting each request's decode seconds.

    note: called with a request that has ended.
    """
    committed = 0
    while tokens is None or committed < tokens:
        fill(engine, session, supply, window.requests)
        if not engine.busy:
            break
        seated = [seat.request for seat in engine.seats if seat]
        before, admitting = engine.clock(), engine.prefill_seconds
        engine.step()
        spent = engine.clock() - before - (engine.prefill_seconds - admitting)
        committed += engine.passes[-1].committed
        for request in seated:
            window.decode_s[request.id] = window.decode_s.get(request.id, 0.0) + spent
        for request in seated:
            if request.finished:
                note(request)


def fill(engine: Engine, session: Session, supply: Iterator[int], requests: list[Request]) -> None:
    """Put the next requests into empty slots, until all are taken; every request is remembered."""
    while (wanted := engine.settings.slots - sum(map(bool, engine.seats))) and not engine.waiting:
        batch = [session.request(number) for number in itertools.islice(supply, wanted)]
        if not batch:
            break
        for request, prompt in batch:  # together: a fresh batch is sized by what waits
            requests.append(request)
            engine.submit(request, prompt)
        engine.fill_slots()


def hold_to_full_attention(entries: list[Entry], session: Session, count: int) -> None:
    """The near-tie gate over the first `count` texts of each method, beside those of plain decoding where it ran.

    The texts of all methods are fed together, for a pass is as slow with few rows, but as many at a time as the
    smallest batch has slots: the pool has room for no more answers.
    """
    ran = [entry for entry in entries if entry.error is None and entry.windows]
    plain = next((e for e in ran if e.method and not e.method.speculation.longest), None)
    said = {id(entry): entry.windows[0].requests[: min(count, len(session.items))] for entry in ran}
    asked: list[tuple[Entry, int, Request, Request]] = []
    for entry in ran:
        pairs = enumerate(zip(said[id(entry)], said[id(plain or entry)]))
        asked += [(entry, i, *pair) for i, pair in pairs if all(r.output_ids for r in pair)]
    width = max([2, *(e.method.speculation.longest + 1 for e in ran if e.method)])

    @cache
    def forced() -> list[Forced]:
        found, room = list[Forced](), min(session.layout.batches)
        for part in (asked[start : start + room] for start in range(0, len(asked), room)):
            _, numbers, own, other = zip(*part)
            prompts = [session.prompts[i] for i in numbers]
            texts, twins = ([r.output_ids for r in requests] for requests in (own, other))
            found += force(session.model, session.pool, prompts, texts, width, twins)
        return found

    def hold(entry: Entry) -> None:
        mine = [(own, other, each) for (e, _, own, other), each in zip(asked, forced(), strict=True) if e is entry]
        entry.gate = judge([each for *_, each in mine])
        for own, other, each in mine:
            at = parting(own.output_ids, other.output_ids)
            if at is not None and each.plain_gap is not None:
                entry.partings[own.id] = Parting(at=at, gap=each.plain_gap)
        if not entry.gate.passed:
            raise ValueError(f"texts are not those of full attention: {entry.gate.as_record()}")

    for entry in ran:
        attempt(entry, lambda entry=entry: hold(entry))


def finish(entries: list[Entry], session: Session) -> None:
    """Tie each entry to the session, check that repeats agree, grade the answers, and give the prompts back."""
    engine = {
        "max_len": session.settings.max_len,
        "pages": session.pool.pages,
        "dtype": session.config["model"]["dtype"],
    }
    for entry in entries:
        entry.session = session
        entry.config = {**entry.config, "engine": {**entry.config["engine"], **engine}}
        outputs = [[r.output_ids for r in w.requests] for w in entry.windows]
        if entry.error is None and not entry.finished and any(output != outputs[0] for output in outputs):
            entry.error = "repeats of the same requests gave different tokens"
        attempt(entry, lambda entry=entry: grade_answers(entry, session))
    for prompt in session.prompts:
        session.pool.release(prompt.pages)


def grade_answers(entry: Entry, session: Session) -> None:
    """The verdicts of a run in which every request came to its end; a window that cuts answers has none."""
    scorer = session.layout.scorer
    if scorer is not None and session.config["protocol"]["replay"] == "drain":
        entry.graded = grade(entry.windows[0].requests, session.items, scorer, tokenizer_of(session.config))
