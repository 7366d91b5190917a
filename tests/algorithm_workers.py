"""What ranks of the tests of algorithms do."""

from typing import Any

from local_problem import network, optimizer, train, vector

from realrun import algorithms
from realrun.world import World


def follow(world: World, cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    """Train by every case; what this rank holds after each round."""
    found = []
    for case in cases:
        model = network(seed=world.rank)  # rank 0's is the one that counts
        optim = optimizer(model, case["inner"])
        tau, history = case["options"]["tau"], []
        with getattr(algorithms, case["algorithm"])(model, optim, **case["options"]):
            for t in range(case["rounds"]):
                train(model, optim, world.rank, range(t * tau, (t + 1) * tau))
                history.append(vector(model).tolist())
        found.append(history)
    return found
