"""An average that fails is launched anew with what was launched, and nothing is lost or doubled."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from realrun.algorithms.average import Average, Flight
from realrun.algorithms.elastic import ElasticAverage

ABOVE = 100.0
"""What the average adds here, in place of others' vectors."""


class Scripted(Average):
    """Averages that fail as `fails` says, one after the other; they spoil the vector, as Gloo's."""

    def __init__(self, fails: list[bool], launched: list[float]) -> None:
        super().__init__(None, "fp32", 1.0, 4)
        self.fails, self.launched = fails, launched

    def among(self, group: object) -> "Scripted":
        """The same."""
        del group
        return Scripted(self.fails, self.launched)

    def launch(self, vector: Tensor, number: int) -> Flight:
        """Note what was launched."""
        self.launched.append(float(vector[0]))

        def wait(_: float) -> None:
            vector.add_(ABOVE)
            if self.fails and self.fails.pop(0):
                raise RuntimeError("Connection closed by peer")

        return Flight(number, vector, [wait], polls=[lambda: False])


def elastic(fails: list[bool], kept: int) -> tuple[ElasticAverage, list[float], list[str]]:
    """One that connects anew and goes on; what was launched, and the failures that it was told."""
    launched: list[float] = []
    told: list[str] = []

    def recover(failure: str) -> None:
        told.append(failure)
        made.disconnect()
        made.connect(None)
        made.launch_again()

    made = ElasticAverage(Scripted(fails, launched), kept, recover)
    return made, launched, told


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 4))
def test_every_average_arrives_once_whatever_fails(fails: list[bool], under_way: int) -> None:
    """With several under way: each gets the mean of what it launched, after as many failures."""
    count = 6
    expected_failures = sum(fails)
    made, launched, told = elastic(list(fails), under_way)
    flights: list[Flight] = []
    vectors = [torch.full((3,), float(number)) for number in range(count)]
    for number, vector in enumerate(vectors):
        flights.append(made.launch(vector, number))
        assert float(vector[0]) == number  # until it is waited for
        if len(flights) == under_way:
            flights.pop(0).wait()
    for flight in flights:
        flight.wait()
        assert flight.arrived()
        assert flight.wait() == 0
    assert [float(vector[0]) for vector in vectors] == [ABOVE + number for number in range(count)]
    assert made.waited == count
    assert set(launched) == set(range(count))
    # A failure that is meant for a later average may hit none.
    assert len(told) <= expected_failures
    assert all("Connection closed by peer" in one for one in told)


def test_what_others_have_got_is_taken_over_and_not_made_again() -> None:
    """One has got an average whose last bytes another missed: it gives it to that one."""
    ahead, _, _ = elastic([], kept=2)
    mean = torch.ones(2)
    ahead.launch(mean, 0).wait()
    behind, launched, _ = elastic([], kept=2)
    vectors = [torch.zeros(2), torch.full((2,), 7.0)]
    flights = [behind.launch(vector, number) for number, vector in enumerate(vectors)]
    behind.disconnect()
    behind.connect(None)
    behind.take(ahead.missing(behind.waited))
    assert torch.equal(vectors[0], mean)
    assert flights[0].wait() == 0
    launched.clear()
    behind.launch_again()
    assert launched == [7.0]
    flights[1].wait()
    assert float(vectors[1][0]) == 7 + ABOVE


def test_only_the_last_ones_are_kept() -> None:
    """As many as may be under way on another worker, which may have got none of them."""
    made, _, _ = elastic([], kept=2)
    for number in range(5):
        made.launch(torch.full((1,), float(number)), number).wait()
    assert [float(one[0]) for one in made.missing(3)] == [3 + ABOVE, 4 + ABOVE]
    assert len(made._got) == 2


def test_who_joins_counts_on_from_there() -> None:
    """Averages are numbered alike on all workers."""
    old, _, _ = elastic([], kept=1)
    old.launch(torch.zeros(1), 0).wait()
    old.sent = 12
    new, _, _ = elastic([], kept=1)
    new.load(old.state())
    assert (new.waited, new.sent) == (1, 12)


def test_one_that_cannot_be_launched_fails_when_it_is_waited_for() -> None:
    """Where nothing of the outer step was done yet."""

    class Refusing(Scripted):
        refusals = 1

        def among(self, group: object) -> "Scripted":
            del group
            return Scripted([], [])

        def launch(self, vector: Tensor, number: int) -> Flight:
            del vector, number
            raise RuntimeError("the group is gone")

    told: list[str] = []

    def recover(failure: str) -> None:
        told.append(failure)
        made.disconnect()
        made.connect(None)
        made.launch_again()

    made = ElasticAverage(Refusing([], []), 1, recover)
    vector = torch.zeros(1)
    flight = made.launch(vector, 0)
    assert told == []
    flight.wait()
    assert "the group is gone" in told[0]
    assert float(vector[0]) == ABOVE
