"""The convergence bound of CO2: evaluated, checked against runs, and used to choose tau."""
