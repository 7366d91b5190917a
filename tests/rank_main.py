"""A rank of a test: join the others, do what REQUEST asks, write the answer as JSON."""

import json
import os
from importlib import import_module
from pathlib import Path

from realrun.execute.world import end, join


def main() -> None:
    """Call MODULE.FUNCTION(world, **arguments)."""
    place = int(os.environ["RANK"]) % int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = str(place)  # a test may divide this machine into nodes
    request = json.loads(os.environ["REQUEST"])
    world = join(request["backend"], 20.0)
    function = getattr(import_module(request["module"]), request["function"])
    answer = function(world, **request["arguments"])
    (Path(request["folder"]) / str(world.rank)).write_text(json.dumps(answer))
    world.leave()
    end()


if __name__ == "__main__":
    main()
