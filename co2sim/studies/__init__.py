"""Many cases: grids, sweeps, plans, and the workers that run them."""
