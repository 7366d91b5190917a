"""Errors of a rank that cannot go on: which rank is at fault, and what it was doing."""

from collections.abc import Iterator
from contextlib import contextmanager

from co2sim.errors import Co2simError
from realrun.algorithms.notices import of_network
from realrun.errors import BAD_INPUT, CheckpointError, RankFailure
from realrun.execute.world import World
from realrun.launch.watch import Place


@contextmanager
def guarded(world: World, place: Place) -> Iterator[None]:
    """Work that others depend on, at a place that they can see.

    Raises RankFailure, with the ranks that are lost, when a collective fails, or with this one when
    its own work raises. An error for users is told to the others, unless all have it, and goes on
    here.
    """
    world.watch.enter("training", place)
    everybody = range(world.layout.world_size)
    try:
        yield
    except RankFailure as error:
        if error.ranks:
            raise
        raise world.watch.lost(place, everybody, error) from error
    except Co2simError as error:
        if isinstance(error, CheckpointError) and error.everywhere:
            raise  # all know
        if world.watch.failure:
            raise world.watch.failure from error
        world.watch.raised(place, error, said=isinstance(error, BAD_INPUT))
        raise
    except RuntimeError as error:
        if not of_network(error):
            raise world.watch.raised(place, error) from error
        raise world.watch.lost(place, everybody, error) from error
    except Exception as error:
        raise world.watch.raised(place, error) from error
    finally:
        world.watch.exit("training")
