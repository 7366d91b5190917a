"""What `co2analysis bound` and `tau` say about clipping, and other errors of the momentum."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from analysis.convergence import bound, clipping
from analysis.convergence.bound import Bound, Infeasible
from analysis.convergence.setting import Setting


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


def clipped(setting: Setting, clip: Clip) -> Clipped:
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


def to_dict(setting: Setting, bounds: Clipped) -> dict[str, Any]:
    """The same as plain values."""
    values: dict[str, Any] = {}
    if bounds.clip.residual is not None:
        values["residual"] = bounds.clip.residual
        values["decay"] = bounds.clip.decay
        values["bound_with_residual"] = _plain(bounds.measured)
    if bounds.clip.phi is not None:
        values["phi"] = bounds.clip.phi
        values["phi_in_parameters"] = setting.inner_step * bounds.clip.phi
        values["never_clipped_below"] = bounds.threshold
        values["bound_with_phi"] = _plain(bounds.prior)
        values["floor"] = bounds.floor
    if bounds.clip.phi is not None or bounds.clip.largest is not None:
        values["gradient_bound"] = bounds.largest
        values["least_phi"] = bounds.least_phi
    return values


def _plain(terms: Bound | Infeasible | None) -> dict[str, float] | None:
    return {**asdict(terms), "total": terms.total} if isinstance(terms, Bound) else None


def rows(setting: Setting, bounds: Clipped) -> Iterator[tuple[str, str]]:
    """Lines of the table."""
    clip = bounds.clip
    if clip.residual is not None:
        of = f" of a running mean, decay {clip.decay:g}" if clip.decay else ""
        yield "momentum error eps" + of, f"{clip.residual:.6g}"
        if isinstance(bounds.measured, Bound):
            yield "... staleness term with it", f"{bounds.measured.staleness:.6g}"
            yield "... drift term with it", f"{bounds.measured.drift:.6g}"
        yield "... bound with this error", _total(bounds.measured)
    if clip.phi is not None:
        yield "clip phi", f"{clip.phi:.6g}"
        yield "... in units of parameters, gamma phi", f"{setting.inner_step * clip.phi:.6g}"
        least = "... a mean gradient of a round is clipped only above Phi ="
        yield least, f"{bounds.threshold:.6g}"
        yield "... bound with this clip", _total(bounds.prior)
        yield "... floor of the mean of |grad f|^2", f"{bounds.floor:.6g}"
    if clip.phi is not None or clip.largest is not None:
        origin = "" if clip.largest is not None else " (sqrt(2 L Delta))"
        yield "largest partial derivative M", f"{bounds.largest:.6g}{origin}"
        if bounds.least_phi is not None:
            yield f"phi whose bias alone adds {clipping.SHARE:.0%}", f"{bounds.least_phi:.6g}"


def _total(terms: Bound | Infeasible | None) -> str:
    if isinstance(terms, Bound):
        return f"{terms.total:.6g}"
    return "infeasible" if isinstance(terms, Infeasible) else "none: Theorem 2 needs M below Phi"


def sentences(setting: Setting, bounds: Clipped) -> Iterator[str]:
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
