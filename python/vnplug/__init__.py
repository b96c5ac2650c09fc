"""Reads the wire of a host, on the host and in its virtual machines.

    import vnplug

    with vnplug.open("host:eth1", filter="udp port 53") as port:
        for packet in port:
            print(packet.ts_ns, packet.wire_len, bytes(packet)[:16].hex())

`devices` lists what may be opened, `open` opens a `Port`. A port gives packets one by one, or in
batches (`Port.batch`) whose columns and bytes NumPy uses without a copy. On a host the daemon
(`vnplugd`) serves, in a guest the agent (`vnplug agent`); the program is the same.

`BackEnd` offers something to programs in guests, containers and elsewhere; they open a `Channel`.
"""

import enum as _enum

from ._errors import (
    ClosedError,
    DeniedError,
    EndedError,
    Error,
    FilterError,
    FullError,
    GoneError,
    InvalidError,
    LimitError,
    LoanError,
    NotFoundError,
    UnreachableError,
)
from ._native import (
    BackEnd,
    BackEndInfo,
    Batch,
    Batches,
    Bundle,
    Channel,
    Device,
    Memory,
    News,
    Packet,
    Port,
    Stats,
    back_ends,
    devices,
    open,
)

__all__ = [
    "BackEnd",
    "BackEndInfo",
    "Batch",
    "Batches",
    "Bundle",
    "Channel",
    "ClosedError",
    "DeniedError",
    "Device",
    "EndedError",
    "Error",
    "FilterError",
    "Flag",
    "FullError",
    "GoneError",
    "InvalidError",
    "LimitError",
    "LoanError",
    "Memory",
    "News",
    "NotFoundError",
    "Packet",
    "Port",
    "Stats",
    "UnreachableError",
    "back_ends",
    "devices",
    "open",
]


class Flag(_enum.IntFlag):
    """Bits of `Packet.flags` and `Batch.flags`."""

    OUTBOUND = 1
    """The host's interface sent the packet."""
    VLAN = 2
    """`vlan` is valid: the outermost 802.1Q tag."""
    HW_TIMESTAMP = 4
    """The NIC took the time."""
    GAP = 8
    """The daemon was restarted: packets may be missing before this one that no counter knows of."""
    SOURCE_LOSS = 16
    """Packets were lost before this one in the kernel or the NIC."""
    CSUM_NOT_READY = 32
    OFFLOAD = 64
    """The sender left the transport checksum to the NIC; it is not valid in the bytes."""
