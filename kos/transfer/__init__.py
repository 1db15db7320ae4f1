"""Weights from M ranks that train to N ranks that serve.

A ``Publisher`` offers named arrays, each with a ``Placement`` that says which elements of which tensors it holds.  A
``Subscriber`` of another job names what it wants in its own placements, and pulls the newest version, which is the one
that was published last, into its arrays.  A publisher waits for subscribers at most ``patience`` seconds.  Subscribers
may start, end, fail and return at any time.
"""

from kos.transfer.names import placements
from kos.transfer.placement import Part, Placement
from kos.transfer.plan import Array, Offers, Plan
from kos.transfer.publisher import Publisher
from kos.transfer.scales import BlockScales
from kos.transfer.subscriber import Subscriber, Update, read_catalogue

__all__ = [
    "Array", "BlockScales", "Offers", "Part", "Placement", "Plan", "Publisher", "Subscriber", "Update", "placements",
    "read_catalogue",
]  # fmt: skip
