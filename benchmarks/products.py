"""The speed of matrix products of each GPU, fitted to published measurements of them.

    python benchmarks/products.py --table TABLE.csv                 # a second
    python benchmarks/products.py --table TABLE.csv --dtype fp8     # results stay in 16 bits
    python benchmarks/products.py --quick                           # of a made-up table

The table has the columns gpu, dtype, m, n, k, time_us (or tflops) and peak_tflops_dense, such as
the medians of ai-dynamo/aiconfigurator. Products of 1,024 rows and more count; in fp8 each library
apart, as the times of some hold a cast. Writes products.md: `products` of a GPU's file
(docs/stacks.md), the most that a product attained, and the mean error of the fit.
"""

import csv
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from reports import made_by, parser, publish, table
from scipy.optimize import least_squares

BANDWIDTH = {
    "A100 SXM": 2.039e12,
    "H100 SXM": 3.35e12,
    "H200 SXM": 4.8e12,
    "B200 SXM": 8e12,
    "B300 SXM": 7.7e12,
    "GB200": 8e12,
    "GB300": 8e12,
    "L40S": 864e9,
}
"""Bytes/s, as in the catalog."""
ROWS = 1024
"""The least that count: training has more."""
LEAST = 8
"""Products of a GPU that are fitted."""


def read(path: Path, dtype: str) -> dict[str, NDArray[np.float64]]:
    """By GPU, in fp8 and library: m, n, k, seconds and peak in FLOP/s of each product."""
    found = defaultdict(list)
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["gpu"] not in BANDWIDTH or row["dtype"] != dtype or not row["m"]:
                continue
            gpu = row["gpu"] if dtype == "bf16" else f"{row['gpu']}, {row['library']}"
            if "doubtful" in row.get("note", "") or "SimuMax" in row.get("source", ""):
                continue
            m, n, k = (int(float(row[name])) for name in ("m", "n", "k"))
            flops = 2 * m * n * k
            timed = row["time_us"]
            seconds = float(timed) / 1e6 if timed else flops / (float(row["tflops"]) * 1e12)
            if m >= ROWS:
                peak = float(row["peak_tflops_dense"]) * 1e12
                found[gpu].append((m, n, k, seconds, peak))
    return {gpu: np.array(rows) for gpu, rows in found.items() if len(rows) >= LEAST}


def fit(gpu: str, products: NDArray[np.float64], width: int) -> tuple[NDArray[np.float64], float]:
    """Efficiency, operand efficiency and start in us, and the mean absolute error."""
    m, n, k, seconds, peak = products.T
    moved = width * (m * k + k * n) + 2 * m * n
    bandwidth = BANDWIDTH[gpu.partition(",")[0]]

    def errors(values: NDArray[np.float64]) -> NDArray[np.float64]:
        efficiency, operands, start = values
        arithmetic = 2 * m * n * k / (peak * efficiency)
        predicted = np.hypot(arithmetic, moved / (bandwidth * operands)) + start / 1e6
        return np.asarray(np.log(predicted / seconds))

    bounds = ([0.1, 0.1, 0.0], [1.0, 1.0, 20.0])
    found = least_squares(errors, [0.8, 0.7, 2.4], bounds=bounds, loss="soft_l1", f_scale=0.05)
    return found.x, float(np.mean(np.abs(np.expm1(errors(found.x)))))


def made_up() -> dict[str, NDArray[np.float64]]:
    """Products of an H100: 80 % of peak, operands at full bandwidth, 2 us to start."""
    sizes = [(m, n, k) for m in (1024, 8192) for n in (512, 4096) for k in (512, 2048, 8192)]
    rows = []
    for m, n, k in sizes:
        moved = 2 * (m * k + k * n + m * n) / BANDWIDTH["H100 SXM"]
        seconds = math.hypot(2 * m * n * k / (989.4e12 * 0.8), moved) + 2e-6
        rows.append((m, n, k, seconds, 989.4e12))
    return {"H100 SXM": np.array(rows)}


def main() -> None:
    """Fit, and write the table."""
    command = parser(__doc__, "a made-up table")
    command.add_argument("--table", type=Path, help="measurements, as CSV")
    command.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="of operands")
    options = command.parse_args()
    if not options.quick and options.table is None:
        command.error("give --table, or --quick")
    measured = made_up() if options.quick else read(options.table, options.dtype)
    rows = []
    for gpu, products in sorted(measured.items()):
        m, n, k, seconds, peak = products.T
        (efficiency, operands, start), error = fit(
            gpu, products, 2 if options.dtype == "bf16" else 1
        )
        rows.append(
            {
                "GPU": gpu,
                "products": f"{len(products)}",
                "efficiency": f"{efficiency:.3f}",
                "operand_efficiency": f"{operands:.3f}",
                "start": f"{start:.1f} us",
                "most": f"{np.max(2 * m * n * k / seconds / peak):.3f}",
                "mean error": f"{error:.1%}",
            }
        )
    text = f"""\
# Speed of matrix products

In {options.dtype}, of 1,024 rows and more, alone on a GPU.

{table(rows)}

{made_by()}
"""
    publish(options, "products", text)


if __name__ == "__main__":
    main()
