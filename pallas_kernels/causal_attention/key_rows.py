"""Where groups of query rows stand among the keys that they attend to."""

from typing import NamedTuple

from jaxtyping import Array, Int32


class KeyRows(NamedTuple):
    """One entry for every group of neighbouring query rows, all of one sequence.

    Attributes:
        first: row of the keys that the group's first row is; its other rows follow.
        count: keys of its sequence; rows of the group from there on are padding.
        sequence: number of its sequence.
    """

    first: Int32[Array, " groups"]
    count: Int32[Array, " groups"]
    sequence: Int32[Array, " groups"]
