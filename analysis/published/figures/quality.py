"""Published quality of trained models, which no simulation predicts."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.published.figures.style import PLAIN, WIDTH, legend, shown
from co2sim.published_cells import QualityCell

_MODELS = {
    "resnet-50": "ResNet-50",
    "vit-b16": "ViT-B",
    "gpt2-small": "GPT-2 small",
    "transnormer-7b": "TransNormerLLM\n7B",
}
_QUANTITIES = {"top1_accuracy_percent": "top-1 accuracy, %", "perplexity": "perplexity"}


def quality(rows: Sequence[QualityCell]) -> Figure:
    """A panel for each model: a star for each method, with its published plus-minus."""
    panels: dict[tuple[str, str], list[QualityCell]] = {}
    for row in rows:
        panels.setdefault((row.model, row.quantity), []).append(row)
    figure = Figure(figsize=(WIDTH * max(2.4, len(panels)) / 4, 2.8), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, ((model, quantity), some) in zip(axes, panels.items(), strict=True):
        for place, row in enumerate(some):
            spread = row.spread or None
            axis.errorbar(
                place,
                row.value,
                yerr=spread,
                fmt="*",
                ms=10,
                mfc=PLAIN.fill,
                color="black",
                capsize=3,
            )
            note = f"\n± {row.spread:g}" if row.spread else ""
            axis.annotate(
                f"{row.value:g}{note}",
                (place, row.value + row.spread),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                fontweight="bold",
            )
        axis.set_xticks(range(len(some)), [shown(row.strategy) for row in some])
        axis.set_xlim(-0.7, len(some) - 0.3)
        axis.margins(y=0.45)
        axis.set_title(_MODELS.get(model, model))
        axis.set_ylabel(_QUANTITIES[quantity])
    star = Line2D([], [], ls="", marker="*", ms=10, mfc=PLAIN.fill, mec="black")
    star.set_label("published; co2sim does not\npredict the quality of training")
    legend(figure, [star])
    return figure
