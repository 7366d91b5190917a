"""`python -m analysis` is `co2analysis`."""

from analysis.cli import main

main()
