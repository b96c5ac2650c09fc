//! Where frames leave: each port is noted what a batch has for it, and is given that at once.

use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use vnplug_frame::offload::{self, Pieces};
use vnplug_ring::offload::Offload;

use crate::batch::Entered;
use crate::forward::{Counters, Number};
use crate::link::{Link, Losses};

/// What went through one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PortCounters {
    /// Frames that it sent.
    pub(crate) in_frames: u64,
    /// Their bytes.
    pub(crate) in_bytes: u64,
    /// Frames that it was given.
    pub(crate) out_frames: u64,
    /// Their bytes.
    pub(crate) out_bytes: u64,
    /// Frames that it could not be given.
    pub(crate) out_dropped: u64,
}

/// The ports of a switch.
pub(crate) struct Exits {
    /// Watches the links.
    epoll: OwnedFd,
    ports: Vec<Option<Port>>,
    /// Those that have something to be sent.
    touched: Vec<Number>,
    /// What super-frames of the batch became.
    pieces: Pieces,
}

/// One port.
pub(crate) struct Port {
    /// None: its frames go through rings, which the fanout fills.
    pub(crate) link: Option<Box<dyn Link>>,
    /// Told when the link cannot serve any longer.
    losses: Option<Losses>,
    /// It may have sent frames.
    pub(crate) is_ready: bool,
    /// It is told when the far end reads.
    is_watched: bool,
    pub(crate) counters: PortCounters,
    /// What it is to be given of the batch.
    todo: Vec<Item>,
}

/// A frame of the batch, or a packet that one became.
#[derive(Clone, Copy)]
struct Item {
    place: u32,
    piece: Option<u32>,
}

/// What a batch has for one port, in order.
#[derive(Clone, Copy)]
pub(crate) struct Due<'a> {
    todo: &'a [Item],
    entered: &'a [Entered<'a>],
    pieces: &'a Pieces,
}

/// A frame that leaves: its bytes in two parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out<'a> {
    pub(crate) head: &'a [u8],
    pub(crate) body: &'a [u8],
    /// What is left to do with it, if the link [takes](Link::takes) that.
    pub(crate) offload: Option<&'a Offload>,
}

impl<'a> Due<'a> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Out<'a>> + Clone + use<'a> {
        let Self {
            todo,
            entered,
            pieces,
        } = *self;
        todo.iter().map(move |item| {
            let it = &entered[item.place as usize];
            match item.piece {
                None => Out {
                    head: it.bytes,
                    body: &[],
                    offload: it.offload,
                },
                Some(piece) => {
                    let piece = pieces.get(piece as usize, it.bytes);
                    Out {
                        head: piece.head,
                        body: piece.body,
                        offload: None,
                    }
                }
            }
        })
    }
}

/// What was noted of a frame.
#[derive(Default)]
pub(crate) struct Noted {
    /// Ports with rings that it is due to.
    pub(crate) rings: u64,
    /// Packets that it became for the other ports, beyond one for each.
    pub(crate) cut: u64,
}

impl Exits {
    /// Without ports; `epoll` will watch their links.
    pub(crate) fn new(epoll: OwnedFd) -> Self {
        Self {
            epoll,
            ports: Vec::new(),
            touched: Vec::new(),
            pieces: Pieces::default(),
        }
    }

    /// Tells which links have frames or are written to again, each by its port's number.
    pub(crate) fn epoll(&self) -> &OwnedFd {
        &self.epoll
    }

    pub(crate) fn port(&mut self, number: Number) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(number))?.as_mut()
    }

    /// What went through each port.
    pub(crate) fn counters(&self) -> Vec<(Number, PortCounters)> {
        let ports = (0..).zip(&self.ports);
        let counters = |(at, port): (Number, &Option<Port>)| Some((at, port.as_ref()?.counters));
        ports.filter_map(counters).collect()
    }

    /// Adds a port with a link.
    ///
    /// # Errors
    /// The system's, if the link cannot be watched; the entrance is told.
    pub(crate) fn add(
        &mut self,
        number: Number,
        link: Box<dyn Link>,
        losses: Losses,
    ) -> std::io::Result<()> {
        self.remove(number);
        let data = EventData::new_u64(u64::from(number));
        if let Err(error) = epoll::add(&self.epoll, &link, data, EventFlags::IN) {
            losses.tell(number);
            return Err(error.into());
        }
        self.put(number, Some(link), Some(losses));
        Ok(())
    }

    /// Adds a port whose link nobody has to watch here.
    pub(crate) fn add_unwatched(&mut self, number: Number, link: Box<dyn Link>) {
        self.put(number, Some(link), None);
    }

    /// Adds a port whose frames go through rings.
    pub(crate) fn add_ring(&mut self, number: Number) {
        self.put(number, None, None);
    }

    fn put(&mut self, number: Number, link: Option<Box<dyn Link>>, losses: Option<Losses>) {
        let at = usize::from(number);
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, || None);
        }
        self.ports[at] = Some(Port {
            link,
            losses,
            is_ready: false,
            is_watched: false,
            counters: PortCounters::default(),
            todo: Vec::new(),
        });
    }

    /// Removes a port, and says who is to be told if nobody knows it yet.
    pub(crate) fn remove(&mut self, number: Number) -> Option<Losses> {
        let port = self.ports.get_mut(usize::from(number))?.take()?;
        if let Some(link) = port.link {
            // NB: before it is closed, which happens aside.
            let _ = epoll::delete(&self.epoll, &link);
        }
        port.losses
    }

    /// Forgets what the batch before became.
    pub(crate) fn begin(&mut self) {
        self.pieces.clear();
    }

    /// A frame of the batch is due to these ports.
    #[inline]
    pub(crate) fn note(&mut self, place: u32, it: &Entered<'_>, due: &[Number]) -> Noted {
        let mut noted = Noted::default();
        // What it becomes for ports that want the packets of the wire.
        let mut made = None;
        for &number in due {
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            let Some(link) = &port.link else {
                port.counters.out_frames += 1;
                port.counters.out_bytes += it.bytes.len() as u64;
                noted.rings += 1;
                continue;
            };
            if port.todo.is_empty() {
                self.touched.push(number);
            }
            let Some(offload) = it.offload.filter(|offload| !link.takes(offload)) else {
                port.todo.push(Item { place, piece: None });
                continue;
            };
            let pieces = &mut self.pieces;
            let made = made.get_or_insert_with(|| pieces_of(pieces, it.bytes, offload));
            noted.cut += made.len() as u64 - 1;
            let items = made.clone().map(|piece| Item {
                place,
                piece: Some(piece as u32),
            });
            port.todo.extend(items);
        }
        noted
    }

    /// Gives each port what was noted for it of these frames.
    pub(crate) fn send(&mut self, entered: &[Entered<'_>], counters: &mut Counters) {
        while let Some(number) = self.touched.pop() {
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            let Some(link) = &mut port.link else {
                continue;
            };
            let given = link.send(Due {
                todo: &port.todo,
                entered,
                pieces: &self.pieces,
            });
            port.todo.clear();
            counters.enqueued += given.enqueued;
            counters.dropped_full += given.full;
            counters.dropped_gone += given.gone;
            counters.dropped_too_long += given.long;
            port.counters.out_frames += given.enqueued;
            port.counters.out_bytes += given.bytes;
            port.counters.out_dropped += given.full + given.gone + given.long;
            self.watch(number);
        }
    }

    /// The far end of a port may read again.
    pub(crate) fn go_on(&mut self, number: Number, counters: &mut Counters) {
        let Some(port) = self.port(number) else {
            return;
        };
        let Some(link) = port.link.as_mut().filter(|_| port.is_watched) else {
            return;
        };
        let dropped = link.go_on();
        port.counters.out_dropped += dropped;
        port.counters.out_frames -= dropped;
        counters.enqueued -= dropped;
        counters.dropped_gone += dropped;
        self.watch(number);
    }

    /// Waits for a client to read if frames wait for it, and else does not.
    #[inline]
    fn watch(&mut self, number: Number) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
            return;
        };
        let Some(link) = &port.link else {
            return;
        };
        if link.is_waiting() != port.is_watched {
            port.is_watched = !port.is_watched;
            let mut flags = EventFlags::IN;
            flags.set(EventFlags::OUT, port.is_watched);
            let data = EventData::new_u64(u64::from(number));
            // It is in there, so the only error is a lack of memory: then it waits for the next frame.
            let _ = epoll::modify(&self.epoll, link, data, flags);
        }
    }
}

/// What a frame becomes that was left to a NIC. A lie, which is not expected here, leaves it as it is.
fn pieces_of(pieces: &mut Pieces, frame: &[u8], offload: &Offload) -> Range<usize> {
    let len = frame.len() as u32;
    match offload::work(frame, len, offload) {
        Ok(Some(work)) => pieces.make(frame, len, &work),
        _ => pieces.keep(frame, len),
    }
}
