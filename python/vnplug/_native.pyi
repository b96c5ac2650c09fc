"""What the native part offers; see docs/python.md."""

from collections.abc import Iterator
from os import PathLike
from types import TracebackType
from typing import Literal, final

__all__ = [
    "BackEnd",
    "BackEndInfo",
    "Batch",
    "Batches",
    "Bundle",
    "Channel",
    "Device",
    "Memory",
    "News",
    "Packet",
    "Port",
    "Stats",
    "back_ends",
    "devices",
    "open",
]

_Path = str | PathLike[str]
_Kind = Literal["joined", "message", "event", "left", "gone", "back", "shared", "withdraw", "released"]

@final
class Device:
    """A device that may be opened."""

    @property
    def name(self) -> str:
        """The name to open it by, with `host:`."""
    @property
    def kind(self) -> str:
        """`af_packet`, `pcap` or `gen`."""
    @property
    def state(self) -> str:
        """`up`, `down`, `gone`, `ended` or `waiting`."""
    @property
    def description(self) -> str:
        """For people: interface, file, rate."""
    @property
    def queues(self) -> int:
        """Receive queues; `NAME@Q` opens queue Q alone."""
    @property
    def ports(self) -> int:
        """Readers that are attached; 0 in guests."""
    @property
    def link_type(self) -> int:
        """Link type of its packets (DLT); 1 is Ethernet."""
    @property
    def mtu(self) -> int | None:
        """Bytes after the Ethernet header that a packet of the interface may have; None: unknown."""
    @property
    def speed_mbps(self) -> int | None:
        """Megabits per second; None: unknown."""
    @property
    def mac(self) -> str | None:
        """The interface's hardware address, as `02:00:00:00:00:01`."""
    @property
    def addresses(self) -> list[str]:
        """The interface's network addresses with their prefix lengths; empty in guests."""

def devices(*, socket: _Path | None = None) -> list[Device]:
    """The devices that may be opened, as `vnplug list` shows them."""

def open(
    device: str,
    *,
    filter: str = "",
    snaplen: int = 0,
    direction: Literal["both", "rx", "tx"] = "both",
    segments: Literal["wire", "merged"] = "wire",
    sample: int = 1,
    program: str = "",
    cluster: str = "",
    balance: Literal["flow", "rr"] = "flow",
    group: str = "",
    arena_bytes: int = 0,
    ring_bytes: int = 0,
    watermark: int = 1,
    max_delay: float = 0.01,
    reconnect: bool = True,
    label: str | None = None,
    bundle: Bundle | None = None,
    socket: _Path | None = None,
) -> Port:
    """Opens a port on a device.

    filter: a pcap-filter(7) expression; the daemon runs it.
    snaplen: captured bytes per packet; 0 is all.
    direction: packets that the interface received, sent, or both.
    segments: super-frames, and frames whose checksum was left to a NIC, as the wire would have carried
        them ("wire"), or as they came, with `Flag.OFFLOAD` ("merged").
    sample: one in this number of the packets that pass the filter.
    program: each packet goes through the operator's program of this name, which may drop it or change it.
    cluster, balance: share the device with the other readers of this cluster, a flow to one reader
        or packet by packet.
    group, arena_bytes: read one copy of each packet with the others of this group, who trust each
        other; the first member says how large their arena is (0 is the daemon's default). A reader
        that is too slow loses what is overwritten before it takes it.
    ring_bytes: size of each ring; 0 is the daemon's default.
    watermark, max_delay: sleep until this many packets are unread, or this many seconds over.
    reconnect: survive a restart of the daemon; the first packet afterwards has `Flag.GAP`.
    label: what the operator sees; the default is the program's name and number.
    bundle: make it a port of this `Bundle`, with the others of which it is waited for.
    socket: of the daemon or agent; the default is $VNPLUG_SOCKET or the usual place.

    Raises UnreachableError, NotFoundError, FilterError, DeniedError, LimitError, InvalidError.
    """

@final
class Bundle:
    """Ports that share one connection and are waited for together; a context manager.

    `open(…, bundle=it)` adds a port. One thread at a time may use a bundle and its ports.
    """

    def __init__(self) -> None: ...
    @property
    def ports(self) -> list[Port]:
        """The open ports, in the order of their opening."""
    @property
    def closed(self) -> bool:
        """True after `close`."""
    def wait(self, timeout: float | None = None) -> bool:
        """Waits until a port has packets or is over; False when `timeout` seconds are over.

        Ends the loans of ports that have news, as those have that lent something; raises LoanError while
        memoryviews or arrays of one are alive. A port that ended or failed makes it return at once: close it.
        """
    def ready(self) -> list[Port]:
        """Those ports that may have something to say, after a wait: they have packets, or are not attached, or
        over. What this and `wait` cost depends on how many those are, and not on how many ports there are.
        """
    def close(self) -> None:
        """Closes the bundle and all its ports.

        Raises LoanError while views of a port's last batch are alive, or another thread uses one of
        them; all stay open then.
        """
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Port]: ...
    def __enter__(self) -> Bundle: ...
    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...

@final
class Port:
    """One attached reader of a device; a context manager and an iterator over packets.

    One thread at a time may use it. Iteration ends when the source ends.
    """

    @property
    def device(self) -> str:
        """The device's name, with `host:`."""
    @property
    def link_type(self) -> int:
        """Link type of the packets (DLT); 1 is Ethernet."""
    @property
    def snaplen(self) -> int:
        """The longest captured length."""
    @property
    def rings(self) -> int:
        """Rings, one per receive queue of the device."""
    @property
    def away(self) -> bool:
        """True while the daemon is gone and the port tries to reopen."""
    @property
    def closed(self) -> bool:
        """True after `close`."""
    def next(self, timeout: float | None = None) -> Packet | None:
        """The next packet; None when `timeout` seconds are over (0: do not wait).

        Raises EndedError when the source ended, GoneError when the port is over.
        """
    def batch(self, max: int = 4096, timeout: float | None = None, copy: bool = False) -> Batch:
        """Packets that are there now, at most `max`, at least one, waiting `timeout` seconds for it.

        An empty batch means that the time is over. Without `copy` their bytes stay in the ring until
        the batch is released: by its `release`, by `with`, or by the port's next call, which raises
        LoanError while memoryviews or arrays of the bytes are alive.

        Raises EndedError when the source ended, GoneError when the port is over.
        """
    def batches(
        self, max: int = 4096, timeout: float | None = None, copy: bool = False
    ) -> Batches:
        """Batches until the source ends; an empty one whenever `timeout` seconds are over."""
    def set_filter(self, filter: str) -> None:
        """Replaces the filter, between two packets. On FilterError the old one stays."""
    def stats(self) -> Stats:
        """The counters, this reader's and the host's."""
    def fileno(self) -> int:
        """A descriptor for select, poll, epoll and asyncio.

        Readable means: call `next(0)` until it gives None. Do not wait before it did so once, and do
        not read the descriptor. It stays the same over a reconnect.
        """
    def close(self) -> None:
        """Closes the port. A thread that waits on it gets a ClosedError.

        Raises LoanError while views of the last batch are alive.
        """
    def __iter__(self) -> Port: ...
    def __next__(self) -> Packet: ...
    def __enter__(self) -> Port: ...
    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...

@final
class Packet:
    """A packet, which owns its bytes: `bytes(p)`, `memoryview(p)`, `p.data`."""

    @property
    def data(self) -> bytes:
        """The captured bytes, Ethernet header included."""
    @property
    def ts_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC."""
    @property
    def time(self) -> float:
        """Seconds since 1970-01-01 UTC, rounded to what a float holds."""
    @property
    def wire_len(self) -> int:
        """Length on the wire in bytes, FCS excluded."""
    @property
    def caplen(self) -> int:
        """Captured bytes."""
    @property
    def vlan(self) -> int | None:
        """Outermost 802.1Q tag (TCI); the bytes hold it too."""
    @property
    def flags(self) -> int:
        """Bits of `Flag`."""
    @property
    def outbound(self) -> bool:
        """True if the host's interface sent it."""
    @property
    def flow_hash(self) -> int:
        """The same for both directions of a flow."""
    @property
    def lost(self) -> int:
        """Packets that this port lost just before this one."""
    @property
    def source(self) -> int:
        """The daemon's number of the source."""
    @property
    def queue(self) -> int:
        """Receive queue of the source."""
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Batch:
    """Packets that were taken together; `batch[i]` is the bytes of one.

    The columns are memoryviews, for numpy.asarray; they are the batch's own and outlive its release.
    `data` and `batch[i]` look into the ring, unless `is_copy`; see `Port.batch`.
    """

    @property
    def records(self) -> memoryview:
        """All columns as one: a structured array for numpy.asarray, of 40-byte rows."""
    @property
    def data(self) -> memoryview:
        """The bytes of all packets; packet i is `data[offset[i] : offset[i] + caplen[i]]`."""
    @property
    def ts_ns(self) -> memoryview[int]:
        """int64: nanoseconds since 1970-01-01 UTC."""
    @property
    def offset(self) -> memoryview[int]:
        """uint64: where in `data` a packet begins."""
    @property
    def caplen(self) -> memoryview[int]:
        """uint32: captured bytes."""
    @property
    def wire_len(self) -> memoryview[int]:
        """uint32: bytes on the wire."""
    @property
    def flow_hash(self) -> memoryview[int]:
        """uint32: the same for both directions of a flow."""
    @property
    def lost(self) -> memoryview[int]:
        """uint32: packets that this port lost just before."""
    @property
    def vlan(self) -> memoryview[int]:
        """uint16: outermost 802.1Q tag, where `flags` has `Flag.VLAN`."""
    @property
    def flags(self) -> memoryview[int]:
        """uint16: bits of `Flag`."""
    @property
    def source(self) -> memoryview[int]:
        """uint16: the daemon's number of the source."""
    @property
    def queue(self) -> memoryview[int]:
        """uint16: receive queue of the source."""
    @property
    def is_copy(self) -> bool:
        """True if the bytes are the batch's own, and may be kept."""
    @property
    def released(self) -> bool:
        """True if the bytes were in the ring and are not there any more."""
    def copy(self) -> Batch:
        """The same packets, with bytes of its own."""
    def release(self) -> None:
        """Gives the room in the ring back. Raises LoanError while views of the bytes are alive."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> memoryview: ...
    def __iter__(self) -> Iterator[memoryview]: ...
    def __enter__(self) -> Batch: ...
    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...

@final
class Batches:
    """Batches until the source ends; see `Port.batches`."""

    def __iter__(self) -> Batches: ...
    def __next__(self) -> Batch: ...

@final
class Stats:
    """Counters of a port since it was opened."""

    @property
    def received(self) -> int:
        """Packets taken."""
    @property
    def bytes(self) -> int:
        """Their captured bytes."""
    @property
    def lost(self) -> int:
        """Packets this port lost, also those that no packet has told of yet."""
    @property
    def gaps(self) -> int:
        """Packets with `Flag.GAP`."""
    @property
    def reopened(self) -> int:
        """Times the port was reopened."""
    @property
    def host(self) -> dict[str, int] | None:
        """The daemon's counters of this port (docs/vnplugd.md); None while it cannot be reached."""

@final
class News:
    """What happened to a back-end or a channel; `kind` says which fields count."""

    @property
    def kind(self) -> _Kind:
        """`joined`, `message`, `event`, `left`, `gone`, `back`, `shared`, `withdraw` or `released`."""
    @property
    def channel(self) -> int:
        """To a back-end: the channel's number."""
    @property
    def event(self) -> int:
        """The event's number."""
    @property
    def count(self) -> int:
        """How often the event happened since it was told last."""
    @property
    def region(self) -> int:
        """The memory's number."""
    @property
    def version(self) -> int:
        """What the program says that it speaks."""
    @property
    def within(self) -> float:
        """Seconds that there are to let go of memory."""
    @property
    def text(self) -> str:
        """Who joined, in the daemon's words; or why something ended."""
    @property
    def label(self) -> str:
        """What a program calls itself: not to be believed."""
    @property
    def data(self) -> bytes:
        """A message."""

@final
class Memory:
    """Memory that a back-end and a program share; bytes are copied out and in.

    The other side may change it at any time. What was taken back or is over raises InvalidError, or reads as zeros.
    """

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes from `offset` on."""
    def write(self, offset: int, data: bytes) -> None:
        """Copies bytes there."""
    def load(self, offset: int) -> int:
        """The 64-bit word at `offset`, a multiple of 8: reads after it see what was written before it was stored."""
    def store(self, offset: int, value: int) -> None:
        """Stores a 64-bit word: who loads it sees what was written before."""
    @property
    def region(self) -> int:
        """Its number."""
    @property
    def writable(self) -> bool:
        """True if this side may write it."""
    def __len__(self) -> int: ...

@final
class BackEnd:
    """A back-end: programs in guests and elsewhere open channels to it. A context manager and an iterator over News.

    `id` and `name` are those of the operator's grant. One thread at a time may use it.
    """

    def __new__(
        cls,
        id: int,
        name: str,
        *,
        version: int = 0,
        events_in: int = 0,
        events_out: int = 0,
        socket: _Path | None = None,
    ) -> BackEnd: ...
    def next(self, timeout: float | None = None) -> News | None:
        """What happened next; None when `timeout` seconds are over."""
    def send(self, channel: int, data: bytes) -> None:
        """Says something to the program at a channel, at most 65,536 bytes.

        Raises FullError if it has not taken what was said before: call `next`, then try again.
        """
    def event(self, channel: int, event: int, count: int = 1) -> None:
        """An event happened `count` times."""
    def share(self, channel: int, size: int, writable: bool = False) -> int:
        """Shares zeros with the program at a channel, rounded up to whole pages. Returns the memory's number."""
    def memory(self, region: int) -> Memory:
        """Memory that is shared, by its number."""
    def withdraw(self, region: int, timeout: float = 10.0) -> bool:
        """Takes memory back, and waits until the program lets go. False if it did not; it maps zeros then."""
    def hang_up(self, channel: int, reason: str = "") -> None:
        """Ends a channel; the program is told the reason."""
    @property
    def channels(self) -> list[int]:
        """The numbers of the channels that are open."""
    @property
    def closed(self) -> bool:
        """True after `close`."""
    def fileno(self) -> int:
        """A descriptor for select: call `next(0)` until it gives None before each wait.

        It changes with News of `gone` and `back`; in between it is never readable.
        """
    def close(self) -> None:
        """Ends all channels, and the back-end."""
    def __iter__(self) -> BackEnd: ...
    def __next__(self) -> News: ...
    def __enter__(self) -> BackEnd: ...
    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...

@final
class Channel:
    """A channel to a back-end. A context manager and an iterator over News.

    `backend` is its name or its number. `wait=True` opens also if nobody is the back-end yet; News of `back` says when.
    One thread at a time may use it. It is opened again by itself.
    """

    def __new__(
        cls,
        backend: str | int,
        *,
        label: str = "",
        version: int = 0,
        wait: bool = False,
        socket: _Path | None = None,
    ) -> Channel: ...
    def next(self, timeout: float | None = None) -> News | None:
        """What happened next; None when `timeout` seconds are over."""
    def send(self, data: bytes) -> None:
        """Says something to the back-end, at most 65,536 bytes.

        Raises FullError if it has not taken what was said before: call `next`, then try again. Raises
        UnreachableError while the channel is not open.
        """
    def event(self, event: int, count: int = 1) -> None:
        """An event happened `count` times."""
    def memory(self, region: int) -> Memory:
        """Memory that is shared, or was and is not released, by its number."""
    def release(self, region: int) -> None:
        """Lets go of memory."""
    @property
    def regions(self) -> list[int]:
        """The numbers of the memory that is shared, or was and is not released."""
    @property
    def version(self) -> int | None:
        """The version that the back-end says that it speaks; None while the channel is not open."""
    @property
    def closed(self) -> bool:
        """True after `close`."""
    def fileno(self) -> int:
        """A descriptor for select: call `next(0)` until it gives None before each wait.

        It changes with News of `gone` and `back`; in between it is never readable.
        """
    def close(self) -> None:
        """Ends the channel."""
    def __iter__(self) -> Channel: ...
    def __next__(self) -> News: ...
    def __enter__(self) -> Channel: ...
    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None: ...

@final
class BackEndInfo:
    """A back-end that may be used from here."""

    @property
    def id(self) -> int:
        """Its number."""
    @property
    def name(self) -> str:
        """Its name."""
    @property
    def is_there(self) -> bool:
        """True if a process is it now."""
    @property
    def version(self) -> int:
        """Its version, if it is there."""
    @property
    def channels(self) -> int:
        """Channels that it has; told to operators, else 0."""

def back_ends(*, socket: _Path | None = None) -> list[BackEndInfo]:
    """The back-ends that may be used from here, as `vnplug backends` shows them."""
