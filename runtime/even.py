"""Whether comparing all streams' nodes is worth the time that it takes, or each stream should simply get as many."""

from __future__ import annotations

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


class Even:
    """Two ways to spend a step's nodes. `choice`: all streams' nodes compared by value. `share`: m nodes to every stream, the m that
    the cost curve and the last trees make best.

    A choice brings more tokens, but the host takes 60 to 300 us longer over it, and the device waits: a tenth of a step of a small
    model, a hundredth of one of a large model. Both are priced, at every choice, and the better one is taken until the next.
    """

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._took = {True: Mean(OUTLIER), False: Mean(OUTLIER)}  # seconds of the host, of a share and of a choice
        self._better = Mean()  # rate of a share ÷ that of a choice
        self._since = 0  # steps since the last choice

    def share(self, price: Price, streams: int, most: int) -> tuple[int, float]:
        """Nodes of every stream, and how many of them should be accepted; 0 where the nodes are to be compared."""
        self._since += 1
        if self._since >= LOOK or self._better.count < LEAST or self._better.value <= 1.0:
            self._since = 0
            return 0, 0.0
        return self._outlook.even(price, streams, most)

    def took(self, seconds: float, share: bool) -> None:
        """Hears how long the host was at it."""
        self._took[share].add(seconds)

    def compare(self, price: Price, value: F64, most: int, gain: float, seconds: float) -> None:
        """After a choice among nodes of these values [B, N], which should bring `gain` of them in so many seconds: what the same trees
        would have brought if shared."""
        streams = len(value)
        nodes, _ = self._outlook.even(price, streams, most)
        choice_s = self._took[False].value
        share_s = self._took[True].value if self._took[True].count else choice_s / 2
        share = (price.roots + float(value[:, :nodes].sum())) / (float(price.seconds(nodes * streams, streams)) + share_s)
        self._better.add(share * (seconds + choice_s) / (price.roots + gain))
