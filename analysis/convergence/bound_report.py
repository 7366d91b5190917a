"""What `co2analysis bound` answers: as plain values, and those as words and tables."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from rich.console import Console

from analysis.convergence import bound, clipping, late_averages
from analysis.convergence.bound import TERMS, Bound
from analysis.convergence.setting import Clip, Delay, Late, Setting, late_average, later
from co2sim.common.tables import print_table
from co2sim.common.units import counted

Values: TypeAlias = dict[str, Any]
"""As JSON has them. A bound is its terms and their sum, or None where there is none."""


def clip_bounds(setting: Setting, clip: Clip) -> Values:
    """What a clip costs; empty if nothing is asked. Raises OptionError for what is not covered."""
    values: Values = {}
    largest, phi, residual = clip.gradient_bound, clip.phi, clip.clip_residual
    if largest is None:
        largest = clipping.start_gradient(setting)
    if residual is not None:
        values["residual"] = residual
        values["decay"] = clip.residual_decay
        terms = clipping.with_residual(setting, residual, decay=clip.residual_decay)
        values["bound_with_residual"] = bound.plain(terms)
    if phi is not None:
        values["phi"] = phi
        values["phi_in_parameters"] = setting.inner_step * phi
        values["never_clipped_below"] = clipping.threshold(setting, phi)
        values["bound_with_phi"] = bound.plain(clipping.prior(setting, largest, phi))
        values["floor"] = clipping.floor(setting, phi)
    if clip.before:
        values["gradient_bound"] = largest
        values["least_phi"] = recommended(setting, largest)
    return values


def recommended(setting: Setting, largest: float) -> float | None:
    """The least clip whose bias alone adds 1 %; None where nothing is proved about any."""
    covered = setting.late is None and setting.most_penalty is None
    if not covered or bound.load(setting) >= 1:
        return None
    return clipping.least_phi(setting, largest)


def _clip_rows(
    setting: Setting, clip: Clip, values: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Lines of the table."""
    if "residual" in values:
        of = f" of a running mean, decay {values['decay']:g}" if values["decay"] else ""
        yield "momentum error eps" + of, f"{values['residual']:.6g}"
        terms = values["bound_with_residual"]
        if terms:
            yield "... staleness term with it", f"{terms['staleness']:.6g}"
            yield "... drift term with it", f"{terms['drift']:.6g}"
        yield "... bound with this error", f"{terms['total']:.6g}" if terms else "infeasible"
    if "phi" in values:
        yield "clip phi", f"{values['phi']:.6g}"
        yield "... in units of parameters, gamma phi", f"{values['phi_in_parameters']:.6g}"
        least = "... a mean gradient of a round is clipped only above Phi ="
        yield least, f"{values['never_clipped_below']:.6g}"
        yield "... bound with this clip", _total_with_phi(setting, values)
        yield "... floor of the mean of |grad f|^2", f"{values['floor']:.6g}"
    if clip.before:
        origin = "" if clip.gradient_bound is not None else " (sqrt(2 L Delta))"
        yield "largest partial derivative M", f"{values['gradient_bound']:.6g}{origin}"
        if values["least_phi"] is not None:
            yield f"phi whose bias alone adds {clipping.SHARE:.0%}", f"{values['least_phi']:.6g}"


def _total_with_phi(setting: Setting, values: Mapping[str, Any]) -> str:
    if values["bound_with_phi"]:
        return f"{values['bound_with_phi']['total']:.6g}"
    reached = values["never_clipped_below"] <= values["gradient_bound"]
    return "none: Theorem 2 needs M below Phi" if setting.noise and reached else "infeasible"


def _clip_warnings(setting: Setting, clip: Clip, values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a clip, a sentence each."""
    phi, least = clip.phi, values.get("least_phi")
    if phi is None or least is None or phi >= least:
        return
    largest = values["gradient_bound"]
    origin = "" if clip.gradient_bound is not None else " (--gradient-bound sets it)"
    words = (
        f"phi = {phi:g} is too small for M = {largest:.4g}{origin}: it should be {least:.4g}"
        f" at least, whose bias adds {clipping.SHARE:.0%}."
    )
    if values["floor"]:
        words += (
            f" There is noise of this variance with which the mean of |grad f|^2 stays at"
            f" {values['floor']:.3g} or more, however long the training and however small the"
            " steps: phi has to grow as T^(1/4)."
        )
    if setting.noise == 0:
        kappa = clipping.slowdown(setting, largest, phi)
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


def allowed(setting: Setting, price: float, *, tune: bool) -> Values:
    """How late averages may be: `setting` says what is kept, its own delay does not count.

    Where it has no late average that is what CO2 keeps. `steps` is the longest delay in local steps
    whose price is at most `price`, 0 if that of 1 step is above it; a price is by what share a
    bound is above that of waiting for the average. `feasible_steps` is the longest with which the
    condition holds; where inner steps are tuned it is tau. Both are None where waiting itself has
    no bound. `delays` begin with waiting (0) and end with the delay of CO2, 1 round with a restart.
    With `tune` every delay has its own best inner step. The bound rises with the delay, and so does
    the load; bisection relies on it. Raises OptionError where `bound.tuned` does.
    """
    mix = setting.late or late_average(1, setting.local_steps)
    waiting = replace(setting, late=None, delay=0)
    base = _total(bound.plain(bound.evaluate(_chosen(waiting, tune=tune))))

    def line(steps: int) -> Values:
        late = later(mix, steps, setting.local_steps) if steps else None
        return _line(replace(waiting, late=late), Delay(steps or None, 0), base, tune=tune)

    tau = setting.local_steps
    steps = _longest(lambda d: bool(line(d)["price"] <= price), tau)
    feasible = _longest(lambda d: line(d)["bound"] is not None, tau)
    shown = {0, tau, *(2**j for j in range(tau.bit_length())), steps or 0, feasible or 0}
    restart = _line(replace(waiting, delay=1), Delay(None, 1), base, tune=tune)
    delays = [*(line(d) for d in sorted(shown) if d <= tau), restart]
    return {"price": price, "steps": steps, "feasible_steps": feasible, "delays": delays}


def _chosen(setting: Setting, *, tune: bool) -> Setting:
    return bound.tuned(setting) if tune else setting


def _total(terms: Mapping[str, float] | None) -> float:
    return terms["total"] if terms else math.inf


def _line(setting: Setting, delay: Delay, base: float, *, tune: bool) -> Values:
    """The bound with one delay, and its price above `base`."""
    setting = _chosen(setting, tune=tune)
    terms = bound.plain(bound.evaluate(setting))
    total = _total(terms)
    return {
        "delay": str(delay),
        "inner_step": setting.inner_step,
        "load": bound.load(setting),
        "bound": terms,
        "mean_over_all_steps": terms and total * _all_alike(setting),
        "price": total / base - 1
        if 0 < base < math.inf
        else 0.0
        if total == base == 0
        else math.inf,
    }


def _longest(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number from 0 to `most` that holds, if all below it do; None if 0 does not."""
    count = bisect_left(range(most + 1), 1, key=lambda length: int(not holds(length)))
    return count - 1 if count else None


UNCLIPPED = (
    "Clipping and quantized averages, unless what they changed is given: --clip-residual, from a"
    " training, or --phi, before one (docs/theory.md)."
)
"""What the four terms do not cover, where nothing was said of the clip."""
UNCOVERED = ("Local steps other than those of plain SGD, such as AdamW's or with momentum.",)
"""What the theorem never covers."""
UNCOVERED_FRAGMENTS = (
    "Steps with gamma L nu of 1 or more, also where every function is convex.",
    "A penalty that varies; a clip, or quantized averages, where not everything is kept.",
)
"""What it does not cover besides, of averages in fragments."""
UNCOVERED_LATE = (
    "Averages that are used later than after the delay, or at other steps by other workers.",
    "Throwing away all that was done since the launch (keep 0): its gradients have no weight.",
    "A penalty that varies, together with prediction.",
)
"""What it does not cover besides, of averages that are late by local steps."""


def answer(
    setting: Setting, *, tune: bool, price: float | None = None, clip: Clip | None = None
) -> tuple[Setting, Values]:
    """The setting, with the best inner step if `tune` asks for it, and its bounds.

    `price` asks how late averages may be: by what share that may raise the bound. `clip` asks for
    the bound of a clipped momentum, at the same inner step. With late averages
    `mean_over_all_steps` is the bound of the mean in which all steps count alike, and
    `drift_over_waiting` is None if the drift of waiting is 0. Raises OptionError for what is not
    covered.
    """
    longest = None if price is None else allowed(setting, price, tune=tune)
    setting = _chosen(setting, tune=tune)
    terms = bound.evaluate(setting)
    plain = bound.plain(terms)
    published = bound.published(replace(setting, delay=0, late=None))
    values: Values = {
        "inner_step": setting.inner_step,
        "tuned": tune,
        "largest_inner_step": bound.largest_inner_step(setting),
        "load": bound.load(setting),
        "feasible": isinstance(terms, Bound),
        "why_infeasible": None if plain else why_infeasible(setting),
        "bound": plain,
        "slowmo_published": published if isinstance(published, float) else None,
    }
    if late := setting.late:
        waiting = bound.drift(replace(setting, late=None))
        values["mean_over_all_steps"] = plain and plain["total"] * _all_alike(setting)
        values["drift_over_waiting"] = bound.drift(setting) / waiting if waiting else None
        if late.fragments > 1:
            values["fragments"] = _beside_one(setting, late, tune=tune)
    clipped = clip_bounds(setting, clip or Clip())
    if clipped:
        values["clipping"] = clipped
    values["drift_bounded_below"] = late_averages.bounded_below(setting)
    unclipped = () if clipped else (UNCLIPPED,)
    of_late = UNCOVERED_LATE if setting.late else ()
    of_parts = UNCOVERED_FRAGMENTS if "fragments" in values else ()
    values["not_covered"] = [*unclipped, *UNCOVERED, *of_late, *of_parts]
    if longest is not None:
        values["allowed_delay"] = longest
    return setting, values


def _all_alike(setting: Setting) -> float:
    """By what a bound grows if all steps count 1 in A, and those before an arrival not `keep`."""
    late, tau = setting.late, setting.local_steps
    return late.counted(tau) / (late.keep * tau) if late else 1.0


def _beside_one(setting: Setting, late: Late, *, tune: bool) -> Values:
    """The second condition of fragments, and the bound of the whole model as one.

    That is as many times as late as it is large, or the whole round.
    """
    steps = min(late.steps * late.fragments, setting.local_steps)
    whole = replace(later(late, steps, setting.local_steps), fragments=1)
    waited = _chosen(replace(setting, late=whole), tune=tune)
    terms = bound.plain(bound.evaluate(waited))
    return {
        "count": late.fragments,
        "gamma_l_nu": late_averages.reach(setting),
        "whole_delay_steps": steps,
        "whole_bound": terms,
        "whole_mean_over_all_steps": terms and terms["total"] * _all_alike(waited),
    }


def print_bound(out: Console, setting: Setting, values: Mapping[str, Any], clip: Clip) -> None:
    """The answer as tables, and what it does not cover."""
    terms, clipped = values["bound"], values.get("clipping", {})
    rows = [
        ("inner step gamma", f"{setting.inner_step:.6g}{_note(setting, tuned=values['tuned'])}"),
        ("largest feasible gamma", f"{values['largest_inner_step']:.6g}"),
        ("load L eta + 2 L omega, feasible below 1", f"{values['load']:.4f}"),
    ]
    parts = values.get("fragments")
    if parts:
        rows.append(("gamma L nu of fragments, feasible below 1", f"{parts['gamma_l_nu']:.4f}"))
    if terms:
        rows += [(f"{name} term", f"{terms[name]:.6g}") for name in TERMS]
        rows.append(("bound of the mean of E|grad f|^2", f"{terms['total']:.6g}"))
        rows += _late_rows(setting, values)
        if parts:
            name = f"the same of the whole model as one, {parts['whole_delay_steps']} steps late"
            whole, alike = parts["whole_bound"], parts["whole_mean_over_all_steps"]
            text = f"{whole['total']:.6g}" if whole else "infeasible"
            both = whole and setting.late and setting.late.keep < 1
            rows.append((name, f"{text}; {alike:.6g}" if both else text))
    else:
        rows.append(("bound of the mean of E|grad f|^2", "infeasible, see below"))
    rows += _clip_rows(setting, clip, clipped)
    published = values["slowmo_published"]
    rows.append(
        (
            "for comparison: the bound of SlowMo's paper, without a delay",
            "none: it needs more rounds" if published is None else f"{published:.6g}",
        )
    )
    print_table(out, "bound", ("figure", "value"), rows)
    if not terms:
        _say(out, values["why_infeasible"])
    if (longest := values.get("allowed_delay")) is not None:
        _print_delays(out, longest["delays"])
        _say(out, _verdict(setting, longest))
    for sentence in _clip_warnings(setting, clip, clipped):
        _say(out, sentence)
    if (below := values["drift_bounded_below"]) is not None:
        _say(
            out,
            "The drift grows from round to round at this inner step, so that the bound says little"
            f" of a long run. It stays bounded below gamma = {below:.3g}.",
        )
    out.print("not covered by the theorem:", highlight=False)
    for sentence in values["not_covered"]:
        out.print(f"- {sentence}", highlight=False, markup=False)


def _say(out: Console, sentence: str) -> None:
    out.print(f"{sentence}\n", highlight=False, markup=False)


def _note(setting: Setting, *, tuned: bool) -> str:
    """How the inner step was chosen."""
    if tuned and not bound.has_best_step(setting):
        return " (the bound falls up to the largest feasible gamma: without noise, its infimum)"
    return " (tuned)" if tuned else ""


def why_infeasible(setting: Setting) -> str:
    """The condition that a setting does not meet, and what of it to change, in sentences."""
    taken, step = bound.load(setting), setting.inner_step
    reach = late_averages.reach(setting)
    broken = [f"L eta + 2 L omega is {taken:.3g}"] if taken >= 1 else []
    broken += [f"gamma L nu of fragments is {reach:.3g}"] if reach >= 1 else []
    text = (
        f"There is no bound: {' and '.join(broken)}, and must be below 1. It is for an inner step"
        f" (learning rate) below {bound.largest_inner_step(setting):.3g}, if nothing else changes;"
        f" here it is {step:.3g}, {step / bound.largest_inner_step(setting):.3g} times as much."
    )

    def shorter(tau: int) -> Setting:
        late = setting.late
        if late is not None:
            parts = min(tau, late.fragments)
            late = replace(later(late, min(tau, late.steps), tau), fragments=parts)
        return replace(setting, local_steps=tau, late=late)

    def holds(tau: int) -> bool:
        return not tau or bound.largest_inner_step(shorter(tau)) > step

    if longest := _longest(holds, setting.local_steps - 1):
        steps = counted(longest, "local step")
        return f"{text} With this inner step there is one in rounds of up to {steps}."
    alone = bound.load(replace(shorter(1), late=None, delay=0))
    return (
        f"{text} With this inner step no shorter round has a bound, and even one local step with an"
        f" average that is waited for has L eta + 2 L omega = {alone:.3g}."
    )


def _late_rows(setting: Setting, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    late = setting.late
    if late is None:
        return
    name = "share that a late average keeps; that it predicts"
    yield name, f"{late.keep:g}; {late.predict:g}"
    if late.keep < 1:
        name = f"... with steps before an arrival counted 1, not {late.keep:g}"
        yield name, f"{values['mean_over_all_steps']:.6g}"
    if values["drift_over_waiting"] is not None:
        name = "drift over that of waiting for the average"
        yield name, f"{values['drift_over_waiting']:.3g}"


def _print_delays(out: Console, lines: list[Values]) -> None:
    rows = []
    for line in lines:
        terms, cells = line["bound"], [*["-"] * len(TERMS), "infeasible", "-"]
        if terms:
            cells = [*(f"{terms[name]:.3g}" for name in TERMS), f"{terms['total']:.4g}"]
            cells.append(f"{line['price']:+.1%}")
        rows.append([line["delay"], f"{line['inner_step']:.3g}", f"{line['load']:.3f}", *cells])
    columns = ("delay", "gamma", "load", *TERMS, "bound", "price")
    print_table(out, "by delay; 0: waiting; 1 round: with a restart, as in CO2", columns, rows)


def _verdict(setting: Setting, longest: Values) -> str:
    """How late an average may be used, as a text."""
    tau, most = setting.local_steps, f"{1 + longest['price']:.4g} times that of waiting for it"
    steps, feasible = longest["steps"], longest["feasible_steps"]
    if steps is None or feasible is None:
        return (
            "There is no bound even for waiting for the average, at this inner step; it must be"
            f" below {bound.largest_inner_step(replace(setting, late=None, delay=0)):.3g}."
        )
    notes = ""
    if feasible < tau:
        notes = f" The condition of the theorem holds up to {feasible} of {tau} local steps."
    if setting.late is not None and setting.late.keep < 1:
        waiting, *late = longest["delays"]
        (chosen,) = (line for line in late if line["delay"] == str(Delay(steps or 1, 0)))
        alike = chosen["mean_over_all_steps"]
        more = alike and f"{alike / _total(waiting['bound']) - 1:+.0%} after {chosen['delay']}"
        notes += (
            f" But steps before an arrival count {setting.late.keep:g} in all bounds but the first;"
            f" counted 1 the bound rises by more ({more}). --keep 1 compares like with like."
        )
    if steps == 0:
        return f"With any lateness of an average the bound is above {most}.{notes}"
    return (
        f"An average may be used up to {steps} of {tau} local steps late: up to there the"
        f" bound is at most {most}.{notes}"
    )
