"""Kill workers of a training in a lab at random times: the others go on, and the lost come back.

    python benchmarks/elastic.py            # as root; half an hour on two busy cores
    python benchmarks/elastic.py --quick    # one kill

Writes benchmarks/results/elastic.csv, elastic.md and elastic.png.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
from elastic_figure import Curve, draw
from elastic_runs import DEADLINE, LONGEST, NODES, RATE, TAU, log, members, training
from reports import folder, machine, made_by, parser, table

from realrun.train.elastic_record import GenerationRow

STRATEGIES = {
    "CO2 as published": f"co2:tau={TAU}",
    "CO2 with a delay": f"co2:tau={TAU},delay=3,fragments=2",
    "DiLoCo": f"diloco:tau={TAU}",
    "Streaming DiLoCo": f"diloco:tau={TAU},fragments=2,delay=3",
}
CURVES = ("CO2 as published", "DiLoCo")
_EARLIEST, _LATEST = 0.2, 3.0
"""Seconds from when all are there to the next kill."""


@dataclass(frozen=True)
class Kill:
    """One kill. Seconds are on the clock of the machine; rounds are those of the first member.

    `went_on_s` is from the kill to the end of the first step that the others finished without the
    victim; for `stood_still_s` of it they waited for each other. `limit_s` is a round and the
    deadline.
    """

    method: str
    victim: str
    led: bool
    round: int
    went_on_s: float
    stood_still_s: float
    limit_s: float
    rounds_until: int
    rounds_away: int
    back_s: float
    same: int
    members: int

    @property
    def good(self) -> bool:
        """The others went on in time, and all hold one anchor once it is back."""
        return self.went_on_s <= self.limit_s and self.same == self.members == NODES


def killed(out: Path, method: str, count: int, rng: np.random.Generator) -> list[Kill]:
    """Kill members of one training, each when all are there."""
    told: list[tuple[str, float, int, GenerationRow]] = []
    with training(out, STRATEGIES[method], 10**6) as run:
        before = run.wait_for_all(-1)
        for _ in range(count):
            time.sleep(rng.uniform(_EARLIEST, _LATEST))
            victim = str(rng.choice(members(before)))
            process = run.members()[victim]
            at, now = run.round(), time.time()
            process.send_signal(signal.SIGKILL)
            told.append((victim, now, at, before))
            before = run.wait_for_all(before.generation + 1)
        run.stop()
    rows = run.generations()
    facts = json.loads((out / "train.json").read_text())["facts"]["elastic"]
    assert facts["losses"] == facts["rejoins"] == count, facts
    assert facts["anchors_equal"], facts
    last = log(out)[-1]
    round_s = last.seconds * TAU / last.step
    return [kill_of(method, *one, rows, round_s) for one in told]


def kill_of(
    method: str,
    victim: str,
    when: float,
    at: int,
    before: GenerationRow,
    rows: tuple[GenerationRow, ...],
    round_s: float,
) -> Kill:
    """What came of a kill, from the record that the others wrote."""
    lost = next(row for row in rows if victim in row.lost.split())
    rank, life = victim.split(".")
    back = next(row for row in rows if f"{rank}.{int(life) + 1}" in row.joined.split())
    return Kill(
        method=method,
        victim=victim,
        led=victim == members(before)[0],
        round=at,
        went_on_s=lost.went_on - when,
        stood_still_s=lost.stood_still,
        limit_s=round_s + DEADLINE,
        rounds_until=lost.round - at,
        rounds_away=back.round - lost.round,
        back_s=back.went_on - when,
        same=back.same,
        members=len(members(back)),
    )


def curve(out: Path, method: str, steps: int, *, kill: bool) -> Curve:
    """The validation losses of a training of so many steps, one worker of which is killed early."""
    with training(out, STRATEGIES[method], steps) as run:
        first = run.wait_for_all(-1)
        if kill:
            while run.round() * TAU < steps / 10 and run.process.poll() is None:
                time.sleep(0.05)
            run.members()[members(first)[1]].send_signal(signal.SIGKILL)
        run.process.wait(LONGEST)
    seen = [(row.step, row.validation_loss) for row in log(out) if row.validation_loss is not None]
    rows = run.generations()[1:]
    return Curve(
        steps=[step for step, _ in seen],
        losses=[loss for _, loss in seen],
        lost=[row.step for row in rows if row.lost],
        back=[row.step for row in rows if row.joined],
    )


def main() -> None:
    """Run all, and write the tables and the figure."""
    command = parser(__doc__, "one kill, and short curves of CO2")
    command.add_argument("--kills", type=int, default=5, help="in the training of each method")
    command.add_argument("--steps", type=int, default=2400, help="of each training with a curve")
    command.add_argument("--seed", type=int, default=0, help="of the times and the victims")
    given = command.parse_args()
    methods, drawn, count = list(STRATEGIES), list(CURVES), given.kills
    steps = given.steps
    if given.quick:
        methods, drawn, count, steps = methods[:1], drawn[:1], 1, 80
    rng, kills, curves = np.random.default_rng(given.seed), [], {}
    with tempfile.TemporaryDirectory() as name:
        for number, method in enumerate(methods):
            kills += killed(Path(name) / f"kills{number}", method, count, rng)
            print(f"{method}: {sum(one.good for one in kills)} of {len(kills)}", file=sys.stderr)
        for number, method in enumerate(drawn):
            curves[method] = tuple(
                curve(Path(name) / f"curve{number}{kill}", method, steps, kill=kill)
                for kill in (False, True)
            )
    text = report(kills, curves)
    with folder(given) as out:
        pd.DataFrame([asdict(one) for one in kills]).to_csv(out / "elastic.csv", index=False)
        (out / "elastic.png").write_bytes(draw(curves, TAU))
        (out / "elastic.md").write_text(text)
    print(text)


def report(kills: list[Kill], curves: Mapping[str, tuple[Curve, Curve]]) -> str:
    """The tables in words."""
    rows = []
    for method in dict.fromkeys(one.method for one in kills):
        own = [one for one in kills if one.method == method]
        rows.append(
            {
                "method": method,
                "kills": str(len(own)),
                "others went on in time": f"{sum(one.went_on_s <= one.limit_s for one in own)}",
                "seconds until then: median, longest": _both([one.went_on_s for one in own]),
                "of these stood still": _both([one.stood_still_s for one in own]),
                "rounds until then, most": f"{max(one.rounds_until for one in own)}",
                "back after, median s": f"{median(one.back_s for one in own):.1f}",
                "back with the same anchor": f"{sum(one.same == NODES for one in own)}",
            }
        )
    ends = [
        {
            "method": method,
            "undisturbed": f"{calm.losses[-1]:.4f}",
            "a worker killed": f"{hit.losses[-1]:.4f}",
            "lost at step": ", ".join(map(str, hit.lost)),
            "back at step": ", ".join(map(str, hit.back)) or "not before the end",
        }
        for method, (calm, hit) in curves.items()
    ]
    good, led = sum(one.good for one in kills), sum(one.led for one in kills)
    return f"""\
# Workers that die, and come back

{NODES} nodes in the lab at {RATE}, a GPT of 62,016 parameters, rounds of {TAU} steps, a deadline\
 of {DEADLINE:g} s. A worker is killed (SIGKILL) at a random time when all are there; {led} of\
 {len(kills)} led, which means that they wrote the log. In {good} of {len(kills)} cases the others\
 went on within one round and the deadline, and all members held the same anchor, bit for bit, once\
 the worker was back. Seconds are from the kill to the end of the first step that the others\
 finished without it. Coming back takes as long as it takes to start Python and torch here, on\
 cores that train meanwhile. {machine()}

{table(rows)}

Validation loss at the end of a training that one kill disturbs, and of one that none does:

{table(ends)}

{made_by()}
"""


def _both(seconds: list[float]) -> str:
    return f"{median(seconds):.2f}, {max(seconds):.2f}"


if __name__ == "__main__":
    main()
