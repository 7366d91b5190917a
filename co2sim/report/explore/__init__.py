"""A page to play with: sliders over a computed grid, or a server that asks the simulator."""
