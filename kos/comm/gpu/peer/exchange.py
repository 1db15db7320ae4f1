"""The launch of ``exchange.cu``: how pieces between all ranks are divided among blocks, and those of a broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from kos.comm.contract import Piece
from kos.comm.gpu.memory import NONE

MAX_RANKS = 8

OVERLAPPED_BLOCKS = 8
"""Blocks of a message that goes beside other kernels, of which it may wait for one on another GPU: it must leave them
multiprocessors.  Not measured."""

SHARE = 8192
_SMALL_SHARE = 1024
"""Bytes of a large and of a small exchanged piece, for a channel of its own."""
PACKET_THREADS = 512
"""The largest number of threads of a block that exchanges small pieces. With more than 4 ranks, half of it."""
BOX_PACKETS, PACKET_BYTES = 1024, 8  # as in kernels/pieces.cuh


def exchange_launch(
    rank: int, most_blocks: int, small: int, sends: Sequence[Piece], recvs: Sequence[Piece], overlapped: bool,
    relay: int,
) -> tuple[int, int, dict[str, int], int, list[Any]] | None:  # fmt: skip
    """Blocks, threads, macros, channels and the pieces' parameters; None if there is nothing to exchange.

    The arguments are those of ``PeerEngine.bind_exchange``.
    """
    size = len(sends)
    own = sends[rank][1], recvs[rank][1]
    others = [nbytes for r in range(size) if r != rank for _, nbytes in (sends[r], recvs[r])] or [0]
    if not any((*own, *others)):
        return None
    share = partial(_share, most_blocks, small)
    both = [piece for r in range(size) for piece in (sends[r], recvs[r])]
    pieces = [word for pointer, nbytes in both for word in (pointer, nbytes, share(nbytes))]
    channels = max(-(-nbytes // share(nbytes)) for _, nbytes in both if nbytes)
    by_packets = all(nbytes <= small for nbytes in others) and max(own) <= size * small
    packets = -(-max(*map(share, others), 1) // (32 * PACKET_BYTES)) * 32
    most = PACKET_THREADS // 2 if size > 4 else PACKET_THREADS
    if by_packets and not overlapped:  # each thread sends and receives a packet, or more of them
        blocks, threads = channels, min(packets, most)
        several = packets > most and relay == MAX_RANKS
        macros = {"WHOLE": int(not any(word % PACKET_BYTES for word in pieces)), "SEVERAL": int(several)}
    else:  # half of the threads send and half receive, each a packet or a vector of a large piece
        most, unit = (PACKET_THREADS, PACKET_BYTES) if by_packets else (512, 16)
        blocks = min(channels, OVERLAPPED_BLOCKS) if overlapped else channels
        threads = 2 * min(-(-max(share(nbytes) for _, nbytes in both) // (32 * unit)) * 32, most)
        macros = {"LARGE": 1}
    return blocks, threads, macros, channels, pieces + [0] * (6 * (MAX_RANKS - size))


def _share(most_blocks: int, small: int, nbytes: int) -> int:
    """The bytes of an exchanged piece that each channel carries.  Both ranks divide it in the same way."""
    channels = max(min(-(-nbytes // (_SMALL_SHARE if nbytes <= small else SHARE)), most_blocks), 1)
    return -(-nbytes // (channels * 128)) * 128


def broadcast_pieces(
    rank: int, size: int, send: Piece, recv: Piece, root: int
) -> tuple[list[Piece], list[Piece], int]:
    """What each rank sends and receives, and which rank's pieces go on to the others, of a broadcast that is a
    scatter and an all-gather (van de Geijn) at once.

    Root sends a part to each other rank, which sends it on to the rest as it comes.  So root sends each byte once.
    """
    nbytes = recv[1]
    part = -(-nbytes // max(size - 1, 1) // 128) * 128
    starts = [min((r - (r > root)) * part, nbytes) for r in range(size)]
    lengths = [min(part, nbytes - start) for start in starts]
    if rank == root:
        sends = [send if r == root else (send[0] + starts[r], lengths[r]) for r in range(size)]
        return sends, [recv if r == root else NONE for r in range(size)], MAX_RANKS
    parts = [(recv[0] + starts[r], lengths[r]) for r in range(size)]
    sends = [NONE if r in (rank, root) else parts[rank] for r in range(size)]
    return sends, [NONE if r == rank else parts[rank if r == root else r] for r in range(size)], root
