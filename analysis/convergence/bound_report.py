"""What `co2analysis bound` prints, and what it and `tau` say of clipping."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from analysis.convergence import bound, clipping
from analysis.convergence.bound import TERMS, Bound, Infeasible
from analysis.convergence.setting import Delay, Setting, late_average
from co2sim.common.tables import print_table
from co2sim.common.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What is known about a clip: what a run recorded, or phi and the largest derivative.

    `residual` is eps of `clipping.with_residual`, by `decay`. `largest` is M of
    `clipping.with_noise`; without it sqrt(2 L Delta) is taken, which for equal data holds where f
    is not above its value at the start.
    """

    residual: float | None = None
    decay: float = 0.0
    phi: float | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """The bounds of a clipped setting: None where it was not asked for, or nothing is proved.

    `floor` is what A may stay above with this phi, `least_phi` the one whose bias adds 1 %.
    """

    clip: Clip
    largest: float
    measured: Bound | Infeasible | None
    prior: Bound | Infeasible | None
    threshold: float | None
    floor: float
    least_phi: float | None


def clip_bounds(setting: Setting, clip: Clip) -> Clipped:
    """Evaluate what was asked for. Raises OptionError for what is out of range, or not covered."""
    largest = clipping.start_gradient(setting) if clip.largest is None else clip.largest
    phi, residual = clip.phi, clip.residual
    before = phi is not None or clip.largest is not None
    return Clipped(
        clip=clip,
        largest=largest,
        measured=None
        if residual is None
        else clipping.with_residual(setting, residual, decay=clip.decay),
        prior=None if phi is None else clipping.prior(setting, largest, phi),
        threshold=None if phi is None else clipping.threshold(setting, phi),
        floor=0.0 if phi is None else clipping.floor(setting, phi),
        least_phi=recommended(setting, largest) if before else None,
    )


def recommended(setting: Setting, largest: float) -> float | None:
    """The least clip whose bias alone adds 1 %; None where nothing is proved about any."""
    covered = setting.late is None and setting.most_penalty is None
    if not covered or bound.load(setting) >= 1:
        return None
    return clipping.least_phi(setting, largest)


def _clip_to_dict(setting: Setting, bounds: Clipped) -> dict[str, Any]:
    """The same as plain values."""
    values: dict[str, Any] = {}
    if bounds.clip.residual is not None:
        values["residual"] = bounds.clip.residual
        values["decay"] = bounds.clip.decay
        values["bound_with_residual"] = bound.plain(bounds.measured)
    if bounds.clip.phi is not None:
        values["phi"] = bounds.clip.phi
        values["phi_in_parameters"] = setting.inner_step * bounds.clip.phi
        values["never_clipped_below"] = bounds.threshold
        values["bound_with_phi"] = bound.plain(bounds.prior)
        values["floor"] = bounds.floor
    if bounds.clip.phi is not None or bounds.clip.largest is not None:
        values["gradient_bound"] = bounds.largest
        values["least_phi"] = bounds.least_phi
    return values


def _clip_rows(setting: Setting, bounds: Clipped) -> Iterator[tuple[str, str]]:
    """Lines of the table."""
    clip = bounds.clip
    if clip.residual is not None:
        of = f" of a running mean, decay {clip.decay:g}" if clip.decay else ""
        yield "momentum error eps" + of, f"{clip.residual:.6g}"
        if isinstance(bounds.measured, Bound):
            yield "... staleness term with it", f"{bounds.measured.staleness:.6g}"
            yield "... drift term with it", f"{bounds.measured.drift:.6g}"
        yield "... bound with this error", _clip_total(bounds.measured)
    if clip.phi is not None:
        yield "clip phi", f"{clip.phi:.6g}"
        yield "... in units of parameters, gamma phi", f"{setting.inner_step * clip.phi:.6g}"
        least = "... a mean gradient of a round is clipped only above Phi ="
        yield least, f"{bounds.threshold:.6g}"
        yield "... bound with this clip", _clip_total(bounds.prior)
        yield "... floor of the mean of |grad f|^2", f"{bounds.floor:.6g}"
    if clip.phi is not None or clip.largest is not None:
        origin = "" if clip.largest is not None else " (sqrt(2 L Delta))"
        yield "largest partial derivative M", f"{bounds.largest:.6g}{origin}"
        if bounds.least_phi is not None:
            yield f"phi whose bias alone adds {clipping.SHARE:.0%}", f"{bounds.least_phi:.6g}"


def _clip_total(terms: Bound | Infeasible | None) -> str:
    if isinstance(terms, Bound):
        return f"{terms.total:.6g}"
    return "infeasible" if isinstance(terms, Infeasible) else "none: Theorem 2 needs M below Phi"


def _clip_warnings(setting: Setting, bounds: Clipped) -> Iterator[str]:
    """What is wrong with a clip, a sentence each."""
    phi, least = bounds.clip.phi, bounds.least_phi
    if phi is None or least is None or phi >= least:
        return
    origin = "" if bounds.clip.largest is not None else " (--gradient-bound sets it)"
    words = (
        f"phi = {phi:g} is too small for M = {bounds.largest:.4g}{origin}: it should be {least:.4g}"
        f" at least, whose bias adds {clipping.SHARE:.0%}."
    )
    if bounds.floor:
        words += (
            f" There is noise of this variance with which the mean of |grad f|^2 stays at"
            f" {bounds.floor:.3g} or more, however long the training and however small the steps:"
            " phi has to grow as T^(1/4)."
        )
    if setting.noise == 0:
        kappa = clipping.slowdown(setting, bounds.largest, phi)
        words += f" Training is up to {kappa:.3g} times as slow."
    yield words


def recommendation(setting: Setting, largest: float | None) -> str:
    """A clip for a setting that has one, in a sentence. Raises OptionError as `least_phi` does."""
    largest = clipping.start_gradient(setting) if largest is None else largest
    least = clipping.least_phi(setting, largest)
    return (
        f"A clip of phi = {least:.3g} (gamma phi = {setting.inner_step * least:.3g} in units of"
        f" parameters) has a bias that alone adds {clipping.SHARE:.0%} to the bound, if no partial"
        f" derivative exceeds {largest:.3g}; terms of second order add more, and phi has to grow as"
        " T^(1/4)."
    )


# --- delays -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLine:
    """The bound with one delay; None where no bound holds.

    `price` is by what share the bound is above that of waiting for the average.
    """

    delay: Delay
    inner_step: float
    load: float
    bound: Bound | None
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The longest delays, in local steps, and the bound with some of them.

    `steps` is the longest whose price is at most `price`, 0 if that of 1 step is above it.
    `feasible` is the longest with which the condition holds; where inner steps are tuned it is tau.
    Both are None where waiting itself has no bound. `lines` begin with waiting for the average
    (delay 0) and end with the delay of CO2, 1 round with a restart.
    """

    price: float
    steps: int | None
    feasible: int | None
    lines: tuple[DelayLine, ...]


def allowed(setting: Setting, price: float, *, tune: bool) -> Allowed:
    """How late averages may be: `setting` says what is kept, its own delay does not count.

    Where it has no late average that is what CO2 keeps.
    With `tune` every delay has its own best inner step. The bound rises with the delay, and so does
    the load; bisection relies on it. Raises OptionError where `bound.tuned` does.
    """
    mix = setting.late or late_average(1, setting.local_steps)
    waiting = replace(setting, late=None, delay=0)
    base = _total(_evaluated(waiting, tune=tune)[1])

    def line(steps: int) -> DelayLine:
        late = replace(mix, steps=steps) if steps else None
        return _line(replace(waiting, late=late), Delay(steps or None, 0), base, tune=tune)

    tau = setting.local_steps
    steps = _longest(lambda d: line(d).price <= price, tau)
    feasible = _longest(lambda d: line(d).bound is not None, tau)
    shown = {0, tau, *(2**j for j in range(tau.bit_length())), steps or 0, feasible or 0}
    restart = _line(replace(waiting, delay=1), Delay(None, 1), base, tune=tune)
    lines = (*(line(d) for d in sorted(shown) if d <= tau), restart)
    return Allowed(price=price, steps=steps, feasible=feasible, lines=lines)


def _evaluated(setting: Setting, *, tune: bool) -> tuple[Setting, Bound | None]:
    setting = bound.tuned(setting) if tune else setting
    terms = bound.evaluate(setting)
    return setting, terms if isinstance(terms, Bound) else None


def _total(terms: Bound | None) -> float:
    return math.inf if terms is None else terms.total


def _line(setting: Setting, delay: Delay, base: float, *, tune: bool) -> DelayLine:
    setting, terms = _evaluated(setting, tune=tune)
    total = _total(terms)
    price = total / base - 1 if 0 < base < math.inf else 0.0 if total == base == 0 else math.inf
    return DelayLine(
        delay=delay,
        inner_step=setting.inner_step,
        load=bound.load(setting),
        bound=terms,
        price=price,
    )


def _longest(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number from 0 to `most` that holds, if all below it do; None if 0 does not."""
    if not holds(0):
        return None
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


UNCLIPPED = (
    "Clipping and quantized averages, unless what they changed is given: --clip-residual, from a"
    " training, or --phi, before one (docs/theory.md)."
)
"""What the four terms do not cover, where nothing was said of the clip."""
UNCOVERED = ("Local steps other than those of plain SGD, such as AdamW's or with momentum.",)
"""What the theorem never covers."""
UNCOVERED_LATE = (
    "Averages that are used later than after the delay, or at other steps by other workers.",
    "Throwing away all that was done since the launch (keep 0): its gradients have no weight.",
    "A penalty that varies, together with prediction.",
)
"""What it does not cover besides, of averages that are late by local steps."""


@dataclass(frozen=True, slots=True)
class BoundAnswer:
    """The bound of a setting, whose inner step was perhaps tuned, and SlowMo's published one.

    `allowed` says how late averages may be, and `clipped` what a clip costs, if that was asked for.
    """

    setting: Setting
    tuned: bool
    bound: Bound | Infeasible
    published: float | Infeasible
    allowed: Allowed | None = None
    clipped: Clipped | None = None

    @property
    def mean_over_all(self) -> float | None:
        """The bound of the mean in which all steps count alike; None without a bound."""
        if not isinstance(self.bound, Bound):
            return None
        late, tau = self.setting.late, self.setting.local_steps
        return self.bound.total * (late.counted(tau) / (late.keep * tau) if late else 1.0)

    @property
    def drift_of_waiting(self) -> float | None:
        """The drift over that of waiting for the average; None if that is 0, or nothing is late."""
        waiting = bound.drift(replace(self.setting, late=None))
        if self.setting.late is None or not waiting:
            return None
        return bound.drift(self.setting) / waiting


def answer(
    setting: Setting, *, tune: bool, price: float | None = None, clip: Clip | None = None
) -> BoundAnswer:
    """Evaluate the bounds of a setting, with the best inner step if `tune` asks for it.

    `price` asks how late averages may be: by what share that may raise the bound. `clip` asks for
    the bound of a clipped momentum, at the same inner step.
    """
    longest = None if price is None else allowed(setting, price, tune=tune)
    setting = bound.tuned(setting) if tune else setting
    published = bound.published(replace(setting, delay=0, late=None))
    clipped = None if clip is None else clip_bounds(setting, clip)
    return BoundAnswer(setting, tune, bound.evaluate(setting), published, longest, clipped)


def bound_to_dict(answered: BoundAnswer) -> dict[str, Any]:
    """The answer as plain values."""
    terms = answered.bound
    values: dict[str, Any] = {
        "inner_step": answered.setting.inner_step,
        "tuned": answered.tuned,
        "largest_inner_step": bound.largest_inner_step(answered.setting),
        "load": bound.load(answered.setting),
        "feasible": isinstance(terms, Bound),
        "why_infeasible": None if isinstance(terms, Bound) else why_infeasible(answered.setting),
        "bound": bound.plain(terms),
        "slowmo_published": answered.published if isinstance(answered.published, float) else None,
    }
    if answered.setting.late is not None:
        values["mean_over_all_steps"] = answered.mean_over_all
        values["drift_over_waiting"] = answered.drift_of_waiting
    if answered.clipped is not None:
        values["clipping"] = _clip_to_dict(answered.setting, answered.clipped)
    values["drift_bounded_below"] = bound.bounded_below(answered.setting)
    values["not_covered"] = uncovered(answered)
    if answered.allowed is not None:
        values["allowed_delay"] = _allowed_to_dict(answered.allowed)
    return values


def _allowed_to_dict(longest: Allowed) -> dict[str, Any]:
    return {
        "price": longest.price,
        "steps": longest.steps,
        "feasible_steps": longest.feasible,
        "delays": [
            {
                "delay": str(line.delay),
                "inner_step": line.inner_step,
                "load": line.load,
                "bound": bound.plain(line.bound),
                "price": line.price,
            }
            for line in longest.lines
        ],
    }


def uncovered(answered: BoundAnswer) -> list[str]:
    """What the theorem does not cover, in sentences."""
    unclipped = () if answered.clipped else (UNCLIPPED,)
    return [*unclipped, *UNCOVERED, *(UNCOVERED_LATE if answered.setting.late else ())]


def print_bound(out: Console, answered: BoundAnswer) -> None:
    """The answer as tables, and what it does not cover."""
    setting, terms, published = answered.setting, answered.bound, answered.published
    note = " (tuned)" if answered.tuned else ""
    if note and not bound.has_best_step(setting):
        note = " (the bound falls up to the largest feasible gamma: without noise, its infimum)"
    rows = [
        ("inner step gamma", f"{setting.inner_step:.6g}{note}"),
        ("largest feasible gamma", f"{bound.largest_inner_step(setting):.6g}"),
        ("load L eta + 2 L omega, feasible below 1", f"{bound.load(setting):.4f}"),
    ]
    if isinstance(terms, Bound):
        rows += [(f"{name} term", f"{getattr(terms, name):.6g}") for name in TERMS]
        rows.append(("bound of the mean of E|grad f|^2", f"{terms.total:.6g}"))
        rows += _late_rows(answered)
    else:
        rows.append(("bound of the mean of E|grad f|^2", "infeasible, see below"))
    if answered.clipped is not None:
        rows += _clip_rows(setting, answered.clipped)
    unbounded = "none: it needs more rounds"
    rows.append(
        (
            "for comparison: the bound of SlowMo's paper, without a delay",
            f"{published:.6g}" if isinstance(published, float) else unbounded,
        )
    )
    print_table(out, "bound", ("figure", "value"), rows)
    if isinstance(terms, Infeasible):
        out.print(f"{why_infeasible(setting)}\n", highlight=False, markup=False)
    if answered.allowed is not None:
        _print_allowed(out, setting, answered.allowed)
    if answered.clipped is not None:
        for sentence in _clip_warnings(setting, answered.clipped):
            out.print(f"{sentence}\n", highlight=False, markup=False)
    below = bound.bounded_below(setting)
    if below is not None:
        out.print(
            "The drift grows from round to round at this inner step, so that the bound says little"
            f" of a long run. It stays bounded below gamma = {below:.3g}.\n",
            highlight=False,
        )
    out.print("not covered by the theorem:", highlight=False)
    for sentence in uncovered(answered):
        out.print(f"- {sentence}", highlight=False, markup=False)


def why_infeasible(setting: Setting) -> str:
    """The condition that a setting does not meet, and what of it to change, in sentences."""
    taken, step = bound.load(setting), setting.inner_step
    text = (
        f"There is no bound: L eta + 2 L omega is {taken:.3g}, and must be below 1. It is for an"
        f" inner step (learning rate) below {bound.largest_inner_step(setting):.3g}, if nothing"
        f" else changes; here it is {step:.3g}."
    )

    def shorter(tau: int) -> Setting:
        late = setting.late and replace(setting.late, steps=min(tau, setting.late.steps))
        return replace(setting, local_steps=tau, late=late)

    longest = _longest(lambda t: not t or bound.load(shorter(t)) < 1, setting.local_steps - 1)
    if longest:
        steps = counted(longest, "local step")
        return f"{text} With this inner step it is below 1 in rounds of up to {steps}."
    alone = bound.load(replace(shorter(1), late=None, delay=0))
    return (
        f"{text} With this inner step no shorter round has a bound, and even one local step with an"
        f" average that is waited for has {alone:.3g}."
    )


def _late_rows(answered: BoundAnswer) -> list[tuple[str, str]]:
    late, rows = answered.setting.late, []
    if late is not None:
        name = "share that a late average keeps; that it predicts"
        rows.append((name, f"{late.keep:g}; {late.predict:g}"))
    if late is not None and late.keep < 1:
        name = f"with steps before an arrival counted 1, not {late.keep:g}"
        rows.append((name, f"{answered.mean_over_all:.6g}"))
    if answered.drift_of_waiting is not None:
        ratio = answered.drift_of_waiting
        rows.append(("drift over that of waiting for the average", f"{ratio:.3g}"))
    return rows


def _print_allowed(out: Console, setting: Setting, longest: Allowed) -> None:
    rows = [(str(line.delay), *_cells(line)) for line in longest.lines]
    columns = ("delay", "gamma", "load", *TERMS, "bound", "price")
    print_table(out, "by delay; 0: waiting; 1 round: with a restart, as in CO2", columns, rows)
    out.print(f"{_verdict(setting, longest)}\n", highlight=False, markup=False)


def _cells(line: DelayLine) -> tuple[str, ...]:
    head = (f"{line.inner_step:.3g}", f"{line.load:.3f}")
    if line.bound is None:
        return (*head, *["-"] * len(TERMS), "infeasible", "-")
    terms = (f"{getattr(line.bound, name):.3g}" for name in TERMS)
    return (*head, *terms, f"{line.bound.total:.4g}", f"{line.price:+.1%}")


def _verdict(setting: Setting, longest: Allowed) -> str:
    """How late an average may be used, as a text."""
    tau, most = setting.local_steps, f"{1 + longest.price:.4g} times that of waiting for it"
    if longest.steps is None or longest.feasible is None:
        return (
            "There is no bound even for waiting for the average, at this inner step; it must be"
            f" below {bound.largest_inner_step(replace(setting, late=None, delay=0)):.3g}."
        )
    notes = ""
    if longest.feasible < tau:
        notes = (
            f" The condition of the theorem holds up to {longest.feasible} of {tau} local steps."
        )
    if setting.late is not None and setting.late.keep < 1:
        notes += (
            f" Steps before an arrival count {setting.late.keep:g} in all bounds but the first."
        )
    if longest.steps == 0:
        return f"With any lateness of an average the bound is above {most}.{notes}"
    return (
        f"An average may be used up to {longest.steps} of {tau} local steps late: up to there the"
        f" bound is at most {most}.{notes}"
    )
