"""Whether comparing all streams' nodes is worth the time that it takes, or each stream should simply get as many."""

from __future__ import annotations

from collections import defaultdict

from runtime.host_cost import HostCost
from runtime.outlook import Outlook
from runtime.price import F64, Price

LOOK = 32  # every so many steps the nodes are compared whatever the answer was: that is how it changes
LEAST = 8  # comparisons before there is an answer
RECENT = 24  # comparisons, and steps whose host time counts
OUTLIER = 2.0  # a host time counts at most this many times the mean one: a pause of the machine is none of the method


class Mean:
    """A moving mean over the last RECENT values or so."""

    def __init__(self, bound: float | None = None) -> None:
        self._bound = bound
        self.count = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        if self.count and self._bound is not None:
            value = min(value, self._bound * self.value)
        self.count += 1
        self.value += (value - self.value) / min(self.count, RECENT)


class _Case:
    """What was seen with so many streams."""

    def __init__(self) -> None:
        self.choice = Mean(OUTLIER)  # seconds of the host
        self.came = {True: (Mean(), Mean()), False: (Mean(), Mean())}  # accepted and expected nodes, of a share and of a choice
        self.better = Mean()  # rate of a share ÷ that of a choice
        self.since = 0  # steps since the last choice

    def trust(self, share: bool) -> float:
        """What came of a node that was expected. The best of many values are partly those that were overestimated."""
        accepted, expected = self.came[share]
        return accepted.value / expected.value if accepted.count >= LEAST and expected.value > 0 else 1.0


class Even:
    """Two ways to spend a step's nodes. `choice`: all streams' nodes compared by value. `share`: m nodes to every stream, the m that
    the cost curve and the last trees make best.

    A choice brings more tokens, but the host takes 60 to 300 us longer over it, and the device waits: a tenth of a step of a small
    model, a hundredth of one of a large model. Both are priced, at every choice, and the better one is taken until the next.
    Streams are told apart by the power of two that holds them.
    """

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._shares = HostCost(0.0)  # seconds in which trees of a share are grown
        self._cases = defaultdict[int, _Case](_Case)

    def share(self, price: Price, streams: int, most: int) -> tuple[int, float]:
        """Nodes of every stream, and how many of them should be accepted; 0 where the nodes are to be compared."""
        case = self._of(streams)
        case.since += 1
        if case.since >= LOOK or case.better.count < LEAST or case.better.value <= 1.0:
            case.since = 0
            return 0, 0.0
        return self._outlook.even(price, streams, most, self._shares)

    def hear(self, streams: int, share: int, seconds: float, accepted: float, expected: float) -> None:
        """What came of a share, or of a choice (0): how long the host was at it, how many nodes were accepted and should have been."""
        for mean, value in zip(self._of(streams).came[share > 0], (accepted, expected), strict=True):
            mean.add(value)
        if share:
            self._shares.observe(streams, share * streams, True, seconds)
        else:
            self._of(streams).choice.add(seconds)

    def compare(self, price: Price, value: F64, most: int, gain: float, seconds: float) -> None:
        """After a choice among nodes of these values [B, N], which should bring `gain` of them in so many seconds: what the same trees
        would have brought if shared."""
        streams = len(value)
        case = self._of(streams)
        nodes, _ = self._outlook.even(price, streams, most, self._shares)
        choice_s = case.choice.value
        share_s = float(self._shares.at(streams, nodes * streams, True)) if self._shares.seen else choice_s / 2
        shared = float(value[:, :nodes].sum()) * case.trust(True)
        share = (price.roots + shared) / (float(price.seconds(nodes * streams, streams)) + share_s)
        case.better.add(share * (seconds + choice_s) / (price.roots + gain * case.trust(False)))

    def _of(self, streams: int) -> _Case:
        return self._cases[(streams - 1).bit_length()]
