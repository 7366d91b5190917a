"""Operations, process groups and the schedule of a rank: the data that is simulated and run."""
