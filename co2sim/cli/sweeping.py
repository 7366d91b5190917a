"""`co2sim sweep`: any parameter over values."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from co2sim.case import Case
from co2sim.cli.batch import run_all
from co2sim.cli.scaling import to_frame
from co2sim.console.result_tables import print_assumed
from co2sim.console.tables import console, print_lines, print_table
from co2sim.errors import OptionError
from co2sim.files import write_atomically
from co2sim.units import counted, duration, scaled


def values(text: str) -> list[str]:
    """Values between commas; commas inside parentheses belong to a value."""
    found = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    if not all(found):
        raise OptionError(f"--vary: {text!r} has an empty value")
    return found


def sweep(
    cases: Sequence[Case],
    settings: Sequence[Mapping[str, str]],
    csv: Path | None,
    jobs: int,
    *,
    as_json: bool,
) -> None:
    """Simulate all cases; `settings` says what each varies."""
    results = run_all(cases, jobs)
    if csv is not None:
        frame = to_frame(cases, results)
        for place, path in enumerate(settings[0]):
            frame.insert(place, f"vary {path}", [setting[path] for setting in settings])
        write_atomically({csv: frame.to_csv(index=False).encode()})
    if as_json:
        pairs = zip(settings, results, strict=True)
        found = [{"setting": dict(setting), **result.to_dict()} for setting, result in pairs]
        print(json.dumps(found, indent=2))
        return
    unit = results[0].unit
    columns = [*settings[0], f"{unit}s/s", "per GPU", "step", "exposed", "overlap", "MFU", "memory"]
    rows = [
        [
            *setting.values(),
            f"{r.tokens_per_s:,.0f}",
            f"{r.tokens_per_s_per_gpu:,.1f}",
            duration(r.step_time_s),
            f"{r.exposed_share:.1%}",
            "-" if r.overlap_ratio is None else f"{r.overlap_ratio:.1%}",
            f"{r.mfu:.1%}",
            scaled(r.memory_bytes_per_gpu["total"], "B") + ("" if r.fits_in_memory else "*"),
        ]
        for setting, r in zip(settings, results, strict=True)
    ]
    terminal = console()
    parts = ([f"{r.model} on {r.cluster}", r.strategy, counted(r.gpus, "GPU")] for r in results)
    constant = [same[0] for same in zip(*parts, strict=True) if len(set(same)) == 1]
    title = ", ".join([*constant, f"by {' and '.join(settings[0])}"])
    print_table(terminal, title, columns, rows, left=len(settings[0]))
    if not all(r.fits_in_memory for r in results):
        terminal.print("* does not fit in the memory of a GPU: shown as if it did")
    print_assumed(terminal, results)
    if csv is not None:
        print_lines(terminal, f"table   {csv}")
