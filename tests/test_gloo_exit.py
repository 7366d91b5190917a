"""Why a script that uses Gloo may abort when it ends, and what avoids it."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.dist

ENDING = """
import mmap, os, socket, sys, time
import torch, torch.distributed as dist

class Late:
    def __del__(self):
        time.sleep(0.5)  # the interpreter is torn down, and lets go of its lock for a moment

def rank(number, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=number, world_size=2)
    tensor = torch.ones(8)
    if number:
        time.sleep(0.3)
        dist.all_reduce(tensor)
        ended[0] = 1
        time.sleep(3)
        return
    dist.all_reduce(tensor, async_op=True)
    sys.late = Late()
    del tensor  # Gloo's thread holds it alone now, and must give it back to Python
    sys.setswitchinterval(1000)
    while not ended[0]:  # keeps the interpreter's lock
        pass
    sum(range(3 * 10**7))  # the average ends here, too, and Gloo's thread waits for the lock
    if sys.argv[1] == "destroy":
        dist.destroy_process_group()

ended = mmap.mmap(-1, 1)  # both ranks see it
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
children = []
for number in range(2):
    child = os.fork()
    if not child:
        rank(number, port)
        sys.exit()
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(*codes)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "codes"),
    [
        pytest.param(
            "leave",
            "-6 0",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 14), reason="Python 3.14 lets such threads hang"
            ),
        ),
        ("destroy", "0 0"),
    ],
)
def test_destroy_process_group_avoids_the_abort_at_exit(how: str, codes: str) -> None:
    """A thread of Gloo that waits for Python's lock when Python ends is ended through C++ code.

    That aborts ("terminate called without an active exception"). To destroy the group waits for it.
    """
    done = subprocess.run(
        [sys.executable, "-c", ENDING, how], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split("\n")[0] == codes
    assert ("terminate called without an active exception" in done.stderr) == (how == "leave")
