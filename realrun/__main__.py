"""`python -m realrun`, as torchrun starts it."""

from realrun.cli import main

main()
