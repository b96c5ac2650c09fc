//! Where frames leave: each port is noted what a batch has for it, and is given that at once.

use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use vnplug_frame::aggregate::{Aggregator, Limits, Made, Outcome, Single};
use vnplug_frame::offload::{self, Pieces};
use vnplug_ring::offload::{Offload, flags, gso};

use crate::batch::Entered;
use crate::counts::Counters;
use crate::edits::{Edits, Forms};
use crate::emulation::Emulation;
use crate::forward::{Number, Way};
use crate::link::{Given, Link, Losses};
use crate::rules::Edit;
use crate::settings::PortSettings;
use crate::vhost::tail::Tail;

/// What went through one port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PortCounters {
    /// Frames that it sent.
    pub(crate) in_frames: u64,
    /// Their bytes.
    pub(crate) in_bytes: u64,
    /// Of those frames, ACKs that one of its own became.
    pub(crate) acks_expanded: u64,
    /// Frames that it was given.
    pub(crate) out_frames: u64,
    /// Their bytes.
    pub(crate) out_bytes: u64,
    /// Frames that it was given within others, beyond one for each of those.
    pub(crate) out_merged: u64,
    /// Those others, which were made for it.
    pub(crate) out_super_frames: u64,
    /// Frames that it was not given: it does not read as fast.
    pub(crate) out_full: u64,
    /// Frames that it was not given: nobody is there.
    pub(crate) out_gone: u64,
    /// Frames that it was not given: the far end cannot carry so long ones.
    pub(crate) out_long: u64,
    /// Frames that were lost on purpose.
    pub(crate) out_lost: u64,
}

impl PortCounters {
    fn gave(&mut self, given: Given, counters: &mut Counters) {
        counters.enqueued += given.enqueued;
        counters.dropped_full += given.full;
        counters.dropped_gone += given.gone;
        counters.dropped_too_long += given.long;
        self.out_frames += given.enqueued;
        self.out_bytes += given.bytes;
        self.out_full += given.full;
        self.out_gone += given.gone;
        self.out_long += given.long;
    }

    /// The last of them are dropped after all.
    fn took_back(&mut self, dropped: Given, counters: &mut Counters) {
        let Given {
            full, gone, long, ..
        } = dropped;
        let all = full + gone + long;
        counters.enqueued -= all;
        counters.dropped_full += full;
        counters.dropped_gone += gone;
        counters.dropped_too_long += long;
        self.out_frames -= all;
        self.out_full += full;
        self.out_gone += gone;
        self.out_long += long;
    }

    /// So many frames less leave, in super-frames.
    fn were_merged(&mut self, gone: u64, made: u64, counters: &mut Counters) {
        counters.merged += gone;
        counters.super_frames += made;
        self.out_merged += gone;
        self.out_super_frames += made;
    }

    /// One of them became so many packets more after all.
    fn was_cut(&mut self, more: u64, counters: &mut Counters) {
        counters.due += more;
        counters.cut += more;
        counters.enqueued += more;
        self.out_frames += more;
    }
}

/// The ports of a switch.
pub(crate) struct Exits {
    /// Watches the links.
    epoll: OwnedFd,
    ports: Vec<Option<Port>>,
    /// Those that are read by themselves, each as often as it is.
    read: Vec<Number>,
    /// Those that have something to be sent.
    touched: Vec<Number>,
    /// What super-frames of the batch became.
    pieces: Pieces,
    /// What became of frames' tags.
    edits: Edits,
    /// Frames on slow wires.
    emulation: Emulation,
    /// Super-frames that were made for a port.
    aggregator: Aggregator,
    /// What a port is given with them; empty between two ports.
    merged: Vec<Item>,
}

/// One port.
pub(crate) struct Port {
    /// None: its frames go through rings, which the fanout fills.
    pub(crate) link: Option<Box<dyn Link>>,
    /// Told when the link cannot serve any longer.
    losses: Option<Losses>,
    /// The link copies the rests of frames from where they are.
    takes_tails: bool,
    /// It may have sent frames.
    pub(crate) is_ready: bool,
    /// It is told when the far end reads.
    is_watched: bool,
    pub(crate) counters: PortCounters,
    /// What it is to be given of the batch.
    todo: Vec<Item>,
    /// Its frames take their time.
    is_slow: bool,
    kept: Kept,
    /// Segments that are merged for it at most; 0: none are.
    gro: u8,
    /// What it sends has ACKs of ours in it.
    expands_acks: bool,
}

/// Work that is done for a port here, whatever its far end could do.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    /// Super-frames are cut.
    cuts: bool,
    /// So they are, and checksums are made.
    sums: bool,
}

impl Kept {
    /// Whether the far end is left what is left to do with such a frame.
    #[inline]
    fn leaves(self, link: &dyn Link, offload: &Offload) -> bool {
        let is_kept = self.sums || (self.cuts && offload.is_super_frame());
        !is_kept && link.takes(offload)
    }
}

impl Port {
    /// What is merged for it, if anything: what its far end takes, and a slow wire carries single frames.
    #[inline]
    fn limits(&self) -> Option<Limits> {
        if self.gro == 0 || self.is_slow {
            return None;
        }
        let link = self.link.as_ref().filter(|link| link.merges())?;
        let takes = |gso_type| {
            self.kept.leaves(
                &**link,
                &Offload {
                    flags: flags::NEEDS_CSUM,
                    gso_type,
                    ..Offload::default()
                },
            )
        };
        let limits = Limits {
            segments: self.gro.into(),
            ipv4: takes(gso::TCPV4),
            ipv6: takes(gso::TCPV6),
        };
        (limits.ipv4 || limits.ipv6).then_some(limits)
    }

    /// Counts what waited and never arrived, and ACKs that came with what it sent.
    #[inline]
    pub(crate) fn count_lost(&mut self, counters: &mut Counters) {
        if self.expands_acks
            && let Some(link) = &mut self.link
        {
            let added = link.added_acks();
            counters.acks_expanded += added;
            self.counters.acks_expanded += added;
        }
        if let Some(gone) = self.link.as_mut().map(|link| link.lost())
            && gone > 0
        {
            let lost = Given {
                gone,
                ..Given::default()
            };
            self.counters.took_back(lost, counters);
        }
    }

    /// What there was for it is given to it.
    #[inline]
    fn done(&mut self) {
        self.todo.clear();
        if self.todo.capacity() > KEPT {
            self.todo.shrink_to(KEPT);
        }
    }
}

/// A frame of the batch, or what became of it.
#[derive(Clone, Copy)]
struct Item {
    place: u32,
    form: Form,
    /// Its other beginning.
    edit: Option<u32>,
}

#[derive(Clone, Copy)]
enum Form {
    /// The frame.
    Whole,
    /// A packet that it became.
    Piece(u32),
    /// A super-frame of several.
    Made(Made),
}

/// What a batch has for one port, in order.
#[derive(Clone, Copy)]
pub(crate) struct Due<'a> {
    todo: &'a [Item],
    entered: &'a [Entered<'a>],
    pieces: &'a Pieces,
    edits: &'a Edits,
    /// Has the super-frames that were made; `None` before.
    aggregator: Option<&'a Aggregator>,
}

/// A frame that leaves: its bytes in two parts, or three.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Out<'a> {
    pub(crate) head: &'a [u8],
    pub(crate) body: &'a [u8],
    /// The rest, for a link that [takes](Link::takes_tails) such.
    pub(crate) tail: Option<Tail<'a>>,
    /// What is left to do with it, if the link [takes](Link::takes) that.
    pub(crate) offload: Option<&'a Offload>,
    /// It was made of segments that have so many bytes of payload.
    pub(crate) merged: Option<u16>,
}

impl Out<'_> {
    /// Bytes of the whole frame.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.head.len() + self.body.len() + self.tail.map_or(0, |tail| tail.len())
    }
}

impl<'a> Due<'a> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = Out<'a>> + Clone + use<'a> {
        let due = *self;
        due.todo.iter().map(move |item| due.out(item))
    }

    /// What an item is.
    #[inline]
    fn out(&self, item: &Item) -> Out<'a> {
        let it = &self.entered[item.place as usize];
        let out = match (item.form, self.aggregator) {
            (Form::Made(made), Some(aggregator)) => {
                let (bytes, offload) = aggregator.get(made);
                return Out {
                    head: bytes,
                    body: &[],
                    tail: None,
                    offload: Some(offload),
                    merged: Some(offload.gso_size),
                };
            }
            (Form::Whole | Form::Made(_), _) => Out {
                head: it.bytes,
                body: &[],
                tail: it.tail,
                offload: it.offload,
                merged: None,
            },
            (Form::Piece(piece), _) => {
                let piece = self.pieces.get(piece as usize, it.bytes);
                Out {
                    head: piece.head,
                    body: piece.body,
                    tail: None,
                    offload: None,
                    merged: None,
                }
            }
        };
        match item.edit {
            None => out,
            Some(edit) => self.edits.apply(edit, out),
        }
    }
}

/// What was noted of the frames of a batch.
#[derive(Default)]
pub(crate) struct Noted {
    /// Ports with rings that they are due to.
    pub(crate) rings: u64,
    /// Packets that they became for the other ports, beyond one for each.
    pub(crate) cut: u64,
}

impl Exits {
    /// Without ports; `epoll` will watch their links.
    pub(crate) fn new(epoll: OwnedFd) -> Self {
        Self {
            epoll,
            ports: Vec::new(),
            read: Vec::new(),
            touched: Vec::new(),
            pieces: Pieces::default(),
            edits: Edits::default(),
            emulation: Emulation::default(),
            aggregator: Aggregator::default(),
            merged: Vec::new(),
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
            takes_tails: link.as_ref().is_some_and(|link| link.takes_tails()),
            link,
            losses,
            is_ready: false,
            is_watched: false,
            counters: PortCounters::default(),
            todo: Vec::new(),
            is_slow: false,
            kept: Kept::default(),
            gro: 0,
            expands_acks: false,
        });
    }

    /// How a port is given frames from now on. Of one that goes through rings nothing of it is true.
    pub(crate) fn set(&mut self, number: Number, settings: &PortSettings, now_us: u64) {
        let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
            return;
        };
        port.kept = Kept {
            cuts: settings.cuts,
            sums: settings.sums,
        };
        port.gro = settings.gro;
        port.expands_acks = settings.expands_acks && settings.gro > 0;
        if let Some(link) = &mut port.link {
            link.expand_acks(port.expands_acks);
            // What is on its way stays there, so that no frame overtakes it.
            port.is_slow = self.emulation.set(number, &settings.wire, now_us);
        }
    }

    /// Whether a port's frames go through rings; `None` if there is no such port.
    pub(crate) fn is_ring(&self, number: Number) -> Option<bool> {
        let port = self.ports.get(usize::from(number))?.as_ref()?;
        Some(port.link.is_none())
    }

    /// Frames are on slow wires.
    #[inline]
    pub(crate) fn is_late(&self) -> bool {
        self.emulation.next_us().is_some()
    }

    /// When the next of them arrives.
    pub(crate) fn next_us(&self) -> Option<u64> {
        self.emulation.next_us()
    }

    /// Gives ports what has arrived.
    pub(crate) fn arrive(&mut self, now_us: u64, counters: &mut Counters) {
        for _ in 0..ARRIVALS {
            let Some(number) = self.emulation.take(now_us) else {
                return;
            };
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            let Some(link) = &mut port.link else {
                continue;
            };
            let arrived = self.emulation.arrived();
            let entered: Vec<Entered<'_>> = arrived.iter().map(|it| it.entered()).collect();
            self.pieces.clear();
            for (place, it) in (0..).zip(&entered) {
                let whole = Item {
                    place,
                    form: Form::Whole,
                    edit: None,
                };
                // The far end may take less than when the frame was sent.
                let Some(offload) = it
                    .offload
                    .filter(|offload| !port.kept.leaves(&**link, offload))
                else {
                    port.todo.push(whole);
                    continue;
                };
                let made = pieces_of(&mut self.pieces, it.bytes, offload);
                port.counters.was_cut(made.len() as u64 - 1, counters);
                port.todo.extend(made.map(|piece| Item {
                    form: Form::Piece(piece as u32),
                    ..whole
                }));
            }
            let given = link.send(Due {
                todo: &port.todo,
                entered: &entered,
                pieces: &self.pieces,
                edits: &self.edits,
                aggregator: None,
            });
            port.done();
            port.counters.took_back(given, counters);
            port.count_lost(counters);
            // A wire that is none any more, and is empty.
            port.is_slow = self.emulation.is_slow(number);
            self.watch(number);
        }
    }

    /// Removes a port, and says who is to be told if nobody knows it yet.
    pub(crate) fn remove(&mut self, number: Number) -> Option<Losses> {
        let port = self.ports.get_mut(usize::from(number))?.take()?;
        self.emulation.remove(number);
        if let Some(link) = port.link {
            // NB: before it is closed, which happens aside.
            let _ = epoll::delete(&self.epoll, &link);
        }
        port.losses
    }

    /// Somebody reads this port by itself, in the form in which it is given frames, or does not any more.
    pub(crate) fn read(&mut self, number: Number, comes: bool) {
        match (self.read.iter().position(|it| *it == number), comes) {
            (_, true) => self.read.push(number),
            (Some(at), false) => drop(self.read.swap_remove(at)),
            (None, false) => {}
        }
    }

    /// Whether one of these ports is read by itself.
    #[inline]
    fn is_read(&self, due: &[Number]) -> bool {
        self.read.iter().any(|number| due.contains(number))
    }

    /// Whether a frame can go to all of these ports as it is, with its rest where it came from.
    #[inline]
    pub(crate) fn take_tails(&self, due: &[Number], offload: Option<&Offload>) -> bool {
        let takes = |number: &Number| match self.ports.get(usize::from(*number)) {
            Some(Some(port)) => {
                let takes = |link: &dyn Link| offload.is_none_or(|it| port.kept.leaves(link, it));
                // What is merged must be here.
                let is_super = offload.is_some_and(Offload::is_super_frame);
                let is_copied = port.is_slow || (!is_super && port.limits().is_some());
                port.takes_tails && !is_copied && port.link.as_deref().is_some_and(takes)
            }
            // Nobody has it.
            _ => true,
        };
        self.read.is_empty() && due.iter().all(takes)
    }

    /// The frames of the batch that these ports sent are done with.
    pub(crate) fn release(&mut self, taken: &mut Vec<Number>) {
        for number in taken.drain(..) {
            if let Some(Some(port)) = self.ports.get_mut(usize::from(number))
                && let Some(link) = &mut port.link
            {
                link.release();
            }
        }
    }

    /// Forgets what the batch before became.
    pub(crate) fn begin(&mut self) {
        self.pieces.clear();
        self.edits.clear();
    }

    /// A frame of the batch goes this way. Forms of it that are for rings, and are not as it entered, are made.
    #[inline]
    pub(crate) fn note(
        &mut self,
        place: u32,
        it: &Entered<'_>,
        way: &Way,
        dues: &[Number],
        forms: &mut Forms,
        noted: &mut Noted,
    ) {
        // What it becomes for ports that want the packets of the wire.
        let mut made = None;
        for (edit, due) in way.forms() {
            if due.is_empty() {
                continue;
            }
            let rings = noted.rings;
            self.note_form(place, it, &dues[due.clone()], edit, &mut made, noted);
            let is_shown = noted.rings > rings || self.is_read(&dues[due.clone()]);
            if is_shown && edit != Edit::Keep {
                forms.add(it, edit, due);
            }
        }
    }

    /// Whether something was noted for a port.
    pub(crate) fn has_some(&self) -> bool {
        !self.touched.is_empty()
    }

    #[inline]
    fn note_form(
        &mut self,
        place: u32,
        it: &Entered<'_>,
        due: &[Number],
        edit: Edit,
        made: &mut Option<Range<usize>>,
        noted: &mut Noted,
    ) {
        // The frame's other beginning, and those of what it became.
        let (mut whole, mut parts) = (None, None);
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
            let Some(offload) = it
                .offload
                .filter(|offload| !port.kept.leaves(&**link, offload))
            else {
                if edit != Edit::Keep && whole.is_none() {
                    whole = Some(self.edits.add(edit, it.bytes, &[], it.offload));
                }
                port.todo.push(Item {
                    place,
                    form: Form::Whole,
                    edit: whole,
                });
                continue;
            };
            let pieces = &mut self.pieces;
            let made = made.get_or_insert_with(|| pieces_of(pieces, it.bytes, offload));
            noted.cut += made.len() as u64 - 1;
            if edit != Edit::Keep && parts.is_none() {
                for piece in made.clone() {
                    let piece = self.pieces.get(piece, it.bytes);
                    let part = self.edits.add(edit, piece.head, piece.body, None);
                    parts.get_or_insert(part);
                }
            }
            let items = (0..).zip(made.clone()).map(|(at, piece)| Item {
                place,
                form: Form::Piece(piece as u32),
                edit: parts.map(|first| first + at),
            });
            port.todo.extend(items);
        }
    }

    /// Gives each port what was noted for it of these frames, now.
    pub(crate) fn send(&mut self, entered: &[Entered<'_>], counters: &mut Counters, now_us: u64) {
        while let Some(number) = self.touched.pop() {
            let Some(Some(port)) = self.ports.get_mut(usize::from(number)) else {
                continue;
            };
            let limits = port.limits().filter(|_| port.todo.len() > 1);
            let Some(link) = &mut port.link else {
                continue;
            };
            let due = Due {
                todo: &port.todo,
                entered,
                pieces: &self.pieces,
                edits: &self.edits,
                aggregator: None,
            };
            if port.is_slow {
                let (given, lost) = self.emulation.put(number, due, now_us);
                port.done();
                port.counters.gave(given, counters);
                counters.dropped_loss += lost;
                port.counters.out_lost += lost;
                continue;
            }
            let given = match limits {
                None => link.send(due),
                Some(limits) => {
                    let all = (&mut self.aggregator, &mut self.merged);
                    let (gone, made) = merge(all, &limits, due);
                    port.counters.were_merged(gone, made, counters);
                    link.send(Due {
                        todo: &self.merged,
                        entered,
                        pieces: &self.pieces,
                        edits: &self.edits,
                        aggregator: Some(&self.aggregator),
                    })
                }
            };
            self.merged.clear();
            port.done();
            port.counters.gave(given, counters);
            port.count_lost(counters);
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
        let dropped = Given {
            gone: dropped,
            ..Given::default()
        };
        port.counters.took_back(dropped, counters);
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

/// Merges what can be of what is due to a port. How many frames are gone, and how many super-frames are there.
fn merge(
    (aggregator, merged): (&mut Aggregator, &mut Vec<Item>),
    limits: &Limits,
    due: Due<'_>,
) -> (u64, u64) {
    let gone = aggregator.run(limits, due.todo.len(), |at| {
        let out = due.out(&due.todo[at]);
        Single {
            head: out.head,
            body: out.body,
            missing: out.tail.map_or(0, |tail| tail.len()),
            offload: out.offload,
        }
    });
    let mut made = 0;
    merged.extend(aggregator.outcomes().map(|outcome| match outcome {
        Outcome::Frame(at) => due.todo[at as usize],
        Outcome::Made(it, first) => {
            made += 1;
            Item {
                place: due.todo[first as usize].place,
                form: Form::Made(it),
                edit: None,
            }
        }
    }));
    (gone as u64, made)
}

/// What a frame becomes that was left to a NIC. A lie, which is not expected here, leaves it as it is.
fn pieces_of(pieces: &mut Pieces, frame: &[u8], offload: &Offload) -> Range<usize> {
    let len = frame.len() as u32;
    match offload::work(frame, len, offload) {
        Ok(Some(work)) => pieces.make(frame, len, &work),
        _ => pieces.keep(frame, len),
    }
}

/// Ports of slow wires that are given frames in one turn.
const ARRIVALS: usize = 64;

/// Frames of a batch for one port for which memory is kept.
const KEPT: usize = 4096;
