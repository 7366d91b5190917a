"""One case: from a job on a cluster to its result, interval, totals and goodput."""
