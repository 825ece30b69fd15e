"""What does a finished cell leave on disk, and how is it read back? The record contract, schema version 1.

A cell's folder holds `record.json` (one Record) and `requests.jsonl` (one RequestLine a request). Missing is null,
never 0 or 1; a failed cell is a record too. Every summary in the record follows from the lines, so the lines obey:

- output_ids includes the first token, which prefill emits: committed = sum(len(output_ids) - 1) over lines.
- A round is a slot's drafts up to and including one verify. Drafts not yet verified when the window closes are in no
  round; autoregressive decoding is rounds of [0, 0].
- In the round that ends a request, drafts past the end have no right answer: they are counted neither as drafted nor
  as accepted.
- So a round commits accepted + 1 tokens, save a last round cut by a stop (or by the length limit), where it commits
  `accepted` tokens, the last accepted one being the stop.
- A request cut by the timed window has finish_reason null.
"""

import os
import tempfile
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

SCHEMA: Literal[1] = 1
RECORD, REQUESTS, PASSES, CLAIM = "record.json", "requests.jsonl", "passes.jsonl", "claim"
STATUS = "job.json"  # of a sweep's job: experiments/sweep.py
JOURNAL = "journal.jsonl"  # of a cell that has not ended: experiments/journal.py


def _finite(value: Any) -> Any:
    """The mean of no passes is NaN; a record spells that null."""
    return None if isinstance(value, float) and not isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_finite)]


class Section(BaseModel):
    """A part of the record: unknown keys are refused, so that a misspelt counter cannot pass for a missing one."""

    model_config = ConfigDict(extra="forbid", validate_by_name=True, serialize_by_alias=True)


class Cell(Section):
    """Which run this is. acceptance tells whether drafts were judged by a model or drawn from a profile."""

    model: str
    benchmark: str
    method: str
    batch: int
    seed: int
    evidence: Literal["real", "shapes", "modelled"] = "real"
    acceptance: str = Field("measured", pattern=r"^(measured|emulated:.+)$")

    @model_validator(mode="after")
    def _real_is_measured(self) -> "Cell":
        if self.evidence == "real" and self.acceptance != "measured":
            raise ValueError(f"evidence 'real' cannot hold acceptance {self.acceptance!r}; set evidence to 'shapes'")
        return self


class Environment(Section):
    """Where it ran. copy_tb_s: measured device copy bandwidth, bytes read + written, TB/s."""

    device: str | None = None
    driver: str | None = None
    torch: str | None = None
    triton: str | None = None
    transformers: str | None = None
    commit: str | None = None
    dirty: bool | None = None
    copy_tb_s: Number = None


class PromptTokens(Section):
    min: int | None = None
    mean: Number = None
    max: int | None = None


class Workload(Section):
    """What was asked. truncated: prompts that were cut to fit.

    original_tokens: of the same prompts before any was cut. template_hash: of the benchmark's template, the chat
    template and its thinking switch. first_ids: the first 8 of the first prompt. tasks: prompts of each task.
    """

    requests: int | None = None
    prompt_tokens: PromptTokens = Field(default_factory=PromptTokens)
    data_hash: str | None = None
    truncated: int | None = None
    original_tokens: PromptTokens | None = None
    template_hash: str | None = None
    first_ids: list[int] | None = None
    tasks: dict[str, int] | None = None


class ModelUsed(Section):
    """What stood behind the cell's model. revision: the commit of a Hub snapshot. context: tokens.

    rope: base frequency, scaling rule and scale of cos and sin, as they were in force. end_ids: those of config,
    generation config and tokenizer. suggested_sampling: of the generation config, for the reader; it is not applied.
    """

    source: str | None = None
    revision: str | None = None
    context: int | None = None
    rope: dict[str, Any] | None = None
    end_ids: list[int] | None = None
    suggested_sampling: dict[str, Any] | None = None


class SamplingUsed(Section):
    temperature: Number = None
    top_k: int | None = None
    top_p: Number = None
    seed: int | None = None
    verification: str | None = None


class Tokens(Section):
    """Counters over the timed window; prompt is the prompt tokens of the same requests."""

    committed: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    rounds: int | None = None
    prompt: int | None = None


class Repeats(Section):
    """Seconds of every repeat of the timed window; timing.decode_s is their median."""

    decode_s: list[float]
    order: Literal["interleaved"] = "interleaved"


class Timing(Section):
    """draft, verify and mixed pass ms: the mean pass of only draft rows, only verify rows, more than one kind.

    resumed: which part ran in an earlier process, in words; such times enter no speed-up. Null for one process.
    Passes, and `passes.jsonl`, are then those of the last process alone, and their number is null.
    """

    prefill_s: Number = None
    decode_s: Number = None
    passes: int | None = None
    draft_pass_ms: Number = None
    verify_pass_ms: Number = None
    mixed_pass_ms: Number = None
    host_gap: Number = None
    repeats: Repeats | None = None
    resumed: str | None = None


class TpotMs(Section):
    p50: Number = None
    p95: Number = None
    p99: Number = None


class Metrics(Section):
    """Definitions are in experiments/metrics.py; peak_gib and hbm_efficiency are measured, not derived."""

    decode_tok_s: Number = None
    e2e_tok_s: Number = None
    acceptance_rate: Number = None
    acceptance_by_position: list[Number] | None = None
    tokens_per_round: Number = None
    tpot_ms: TpotMs | None = None
    peak_gib: Number = None
    hbm_efficiency: Number = None


class Slice(Section):
    """The items of one task. low, high: 95 % interval of the score, as in Quality."""

    items: int
    score: Number = None
    low: Number = None
    high: Number = None


class Quality(Section):
    """How right the answers are; definitions are in experiments/scores.py. scorer: its name and parameters.

    items, samples_per_item, unscored (items without a reference that the scorer can judge). score: avg@k, 0 to 1.
    pass_at: k -> chance that one of k samples is right. Of all samples: right, partly right, wrong, unparsable,
    unfinished (cut at the token limit before an answer); at_limit: cut at the token limit, with or without an answer.
    """

    scorer: str
    items: int
    samples_per_item: int
    unscored: int
    score: Number = None
    stderr: Number = None
    low: Number = None
    high: Number = None
    pass_at: dict[str, Number]
    right: int
    partly: int
    wrong: int
    unparsable: int
    unfinished: int
    at_limit: int
    tasks: dict[str, Slice]


class Record(Section):
    """One cell. protocol and calibration are free-form; metrics.py says what of them is compared."""

    schema_version: Literal[1] = Field(SCHEMA, alias="schema")
    cell_id: str
    status: Literal["ok", "failed", "skipped"]
    error: str | None = None
    cell: Cell
    environment: Environment = Field(default_factory=Environment)
    config: dict[str, Any] = Field(default_factory=dict)
    model: ModelUsed = Field(default_factory=ModelUsed)
    workload: Workload = Field(default_factory=Workload)
    sampling: SamplingUsed = Field(default_factory=SamplingUsed)
    protocol: dict[str, Any] | None = None
    tokens: Tokens = Field(default_factory=Tokens)
    timing: Timing = Field(default_factory=Timing)
    metrics: Metrics = Field(default_factory=Metrics)
    quality: Quality | None = None
    calibration: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        """The method's name for readers."""
        return str(pick(self.config, "method.label") or self.cell.method)


class Graded(Section):
    """The verdict on an answer; found: its first 200 characters, as they were read; task: of the benchmark."""

    outcome: Literal["answered", "unfinished", "unparsable"]
    score: float = Field(ge=0, le=1)
    found: str | None = None
    task: str | None = None


class Parting(Section):
    """Where a text leaves that of plain decoding: index of the token, and how far plain decoding's token lies there
    below the argmax of full attention, in logits."""

    at: int
    gap: float


class RequestLine(Section):
    """One request of the timed window; rounds holds [drafted, accepted] of each round, in order.

    original_tokens: of the prompt before it was cut, null where it is whole. graded: null where nothing scored it.
    parting: null where the near-tie gate did not look, or saw no difference.
    """

    id: str
    prompt_ids_sha1: str
    prompt_tokens: int
    output_ids: list[int]
    finish_reason: str | None
    seed: int
    rounds: list[tuple[int, int]]
    original_tokens: int | None = None
    graded: Graded | None = None
    parting: Parting | None = None

    @property
    def committed(self) -> int:
        """Tokens after the one that prefill emitted; 0 too for a request whose prefill had not ended."""
        return max(len(self.output_ids) - 1, 0)

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.rounds)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.rounds)


Line = TypeVar("Line", bound=Section)


def pick(tree: Any, path: str) -> Any:
    """tree["a"]["b"] for "a.b", or None where a key is missing."""
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def cell_id(cell: Cell) -> str:
    """Folder name of a cell; a sweep over a setting that is not here must append that setting."""
    return f"{cell.model}-{cell.benchmark}-{cell.method}-b{cell.batch}-s{cell.seed}"


def failed_record(cell: Cell, config: dict[str, Any], error: BaseException | str, name: str | None = None) -> Record:
    """The record of a cell that did not finish: counted and shown, every number null."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Record(cell_id=name or cell_id(cell), status="failed", error=text, cell=cell, config=config)


def write_record(folder: Path | str, record: Record, lines: Iterable[RequestLine] = ()) -> Path:
    """Write both files whole or not at all; the record comes last, so its presence means a complete folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # A record beside the lines of another run would pass for finished if we died between the two files.
    (folder / RECORD).unlink(missing_ok=True)
    write_whole(folder / REQUESTS, "".join(line.model_dump_json() + "\n" for line in lines))
    write_whole(folder / RECORD, record.model_dump_json(indent=2) + "\n")
    return folder / RECORD


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, or leave it as it was."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files private to the user; a record is for everyone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_record(path: Path | str) -> Record:
    """Read a record from its folder or its file. Raises ValueError naming the file and the field at fault."""
    path = Path(path)
    path = path / RECORD if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"no record at {path}; pass a cell's folder, or run the cell first")
    try:
        return Record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{path} does not follow record schema {SCHEMA}; run the cell again: {error}") from error


def read_requests(folder: Path | str) -> list[RequestLine]:
    """Read a cell's requests, in file order. Raises ValueError naming the line at fault."""
    return read_lines(Path(folder) / REQUESTS, RequestLine, "run the cell again")


def read_lines(path: Path, kind: type[Line], mend: str) -> list[Line]:
    """A file of lines beside a record, in order; mend: what to do about a missing file or a bad line, in the error."""
    if not path.exists():
        raise ValueError(f"no {path.name} beside the record in {path.parent}; copy it there or {mend}")
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(kind.model_validate_json(text))
        except ValidationError as error:
            raise ValueError(f"{path}:{number} is not a {kind.__name__}; {mend}: {error}") from error
    return lines


def find_records(root: Path | str) -> list[Path]:
    """Folders under root (itself included) that hold a record, sorted by path."""
    return sorted(path.parent for path in Path(root).rglob(RECORD))
