"""Which prompts would a run ask? Counts, token windows and cuts, without loading weights.

python -m experiments.prompts benchmark=longbench2_30k source=local path=FILE
python -m experiments.prompts benchmark=math500 benchmark.source.requests=100 list=true   # a line a prompt
"""

from collections import Counter
from typing import Any

from hydra import compose, initialize_config_dir

from experiments.benchmarks import Item
from experiments.config import CONF, check_overrides, plain, register, script, split
from experiments.layout import build_items, resolve
from experiments.loading import spec_of


def describe_prompts(items: list[Item], provenance: dict[str, Any]) -> str:
    """What was read, what of it is asked, in tokens of the model; a line each."""
    lengths, before = [len(item.prompt_ids) for item in items], [item.original_tokens for item in items]
    cut = [item for item in items if item.truncated]
    lines = [
        f"prompts: {len(items)} of {_span(lengths)} tokens, first ids {' '.join(map(str, items[0].prompt_ids[:8]))}"
    ]
    if "path" in provenance:
        lines.insert(0, _source_line(provenance))
        lines.insert(1, _window_line(provenance))
    if cut:
        kept = _span([len(item.prompt_ids) for item in cut])
        lines.append(f"cut: {len(cut)} of {len(items)}, from {_span([item.original_tokens for item in cut])} to {kept}")
    else:
        assert lengths == before
        lines.append("cut: none")
    tasks = Counter(item.task for item in items if item.task)
    if tasks:
        lines.append(f"tasks: {', '.join(f'{name} {count}' for name, count in sorted(tasks.items()))}")
    return "\n".join(lines)


def _source_line(provenance: dict[str, Any]) -> str:
    revision = f" at {provenance['revision']}" if provenance["revision"] else ""
    return f"source: {provenance['path']}{revision}, {provenance['rows']} rows, sha256 {provenance['sha256'][:12]}"


def _window_line(provenance: dict[str, Any]) -> str:
    least, most = provenance["window"]
    window = f"{least} tokens or more" if most is None else f"{least} to {most} tokens"
    left = f"{provenance['shorter']} shorter, {provenance['longer']} longer"
    return f"window: {window}; {provenance['measured']} rows measured, {provenance['asked']} asked, {left}"


def _span(numbers: list[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else str(numbers[0])


def main(arguments: list[str]) -> None:
    """Raises ValueError for bad arguments, absent files and prompts that do not fit."""
    register()
    own, overrides = split(arguments, {"list": "false"})
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_overrides(overrides)
        config = resolve(plain(compose("config", [*overrides, "output_dir=."])))
    items, provenance = build_items(config, spec_of(config))
    print(describe_prompts(items, provenance))
    if own["list"] == "true":
        for item in items:
            cut = f", cut from {item.original_tokens}" if item.truncated else ""
            print(f"{item.id}: {len(item.prompt_ids)} tokens{cut}" + (f", {item.task}" if item.task else ""))


if __name__ == "__main__":
    script(main)
