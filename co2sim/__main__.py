"""`python -m co2sim` is `co2sim`."""

from co2sim.cli import main

main()
