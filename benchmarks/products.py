"""Fit the speed of matrix products of each GPU to published measurements of them.

python benchmarks/products.py TABLE.csv

The table has the columns gpu, dtype, m, n, k, time_us (or tflops) and peak_tflops_dense, such as
the medians of ai-dynamo/aiconfigurator. Products in bf16 of 1,024 rows and more count. Prints
`products` of a GPU's file (see docs/stacks.md), and the mean error of the fit.
"""

import csv
import math
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

BANDWIDTH = {
    "A100 SXM": 2.039e12,
    "H100 SXM": 3.35e12,
    "H200 SXM": 4.8e12,
    "B200 SXM": 8e12,
}
"""Bytes/s, as in the catalog."""

ROWS = 1024
"""The least that count: training has more."""


def read(path: Path) -> dict[str, NDArray[np.float64]]:
    """By GPU: rows, columns, inner, seconds and peak in FLOP/s of each product."""
    found = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["gpu"] not in BANDWIDTH or row["dtype"] != "bf16" or not row["m"]:
                continue
            if "doubtful" in row.get("note", "") or "SimuMax" in row.get("source", ""):
                continue
            m, n, k = (int(float(row[name])) for name in ("m", "n", "k"))
            flops = 2 * m * n * k
            timed = row["time_us"]
            seconds = float(timed) / 1e6 if timed else flops / (float(row["tflops"]) * 1e12)
            if m >= ROWS:
                peak = float(row["peak_tflops_dense"]) * 1e12
                found[row["gpu"]].append((m, n, k, seconds, peak))
    return {gpu: np.array(rows) for gpu, rows in found.items()}


def fit(gpu: str, products: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Efficiency, operand efficiency and start in us, and the mean absolute error."""
    m, n, k, seconds, peak = products.T
    moved = 2 * (m * k + k * n + m * n)

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency, operands, start = values
        arithmetic = 2 * m * n * k / (peak * efficiency)
        predicted = np.hypot(arithmetic, moved / (BANDWIDTH[gpu] * operands)) + start / 1e6
        return np.asarray(np.log(predicted / seconds))

    bounds = ([0.1, 0.1, 0.0], [1.0, 1.0, 20.0])
    found = least_squares(errors, [0.8, 0.7, 2.4], bounds=bounds, loss="soft_l1", f_scale=0.05)
    return found.x, float(np.mean(np.abs(np.expm1(errors(found.x)))))


def main() -> None:
    """Print the fits of a table."""
    if len(sys.argv) != 2:  # noqa: PLR2004 - the table
        sys.exit(__doc__)
    for gpu, products in sorted(read(Path(sys.argv[1])).items()):
        (efficiency, operands, start), error = fit(gpu, products)
        told = (
            f"efficiency {efficiency:.3f}, operand_efficiency {operands:.3f}, start {start:.1f} us"
        )
        print(f"{gpu}: {told}; {len(products)} products, {error:.1%} off in the mean")
        assert math.isfinite(error)


if __name__ == "__main__":
    main()
