//! A port's ring that transmits, as the one queue's thread sees it that serves it.
//!
//! The sender's application owns the ring's memory and is not trusted: [`Intake`] copies each frame
//! out once, to where the source sends it from or into the buffer here, before anybody looks at it. A turn takes a bounded number of
//! frames (R4), a lie in the ring ends in quarantine (R2), and every frame that was taken is counted
//! exactly once by what became of it.

use std::sync::Arc;

use vnplug_ring::control::Segments;
use vnplug_ring::layout::{Life, RECORD_HEADER};
use vnplug_ring::offload::Offload;
use vnplug_ring::{Intake, Region, SenderLied};

use super::senders::kicks::Kick;
use super::terms::{Refused, Terms};
use crate::batch::Handle;
use crate::bucket::Bucket;
use crate::source::{Flushed, Transmit, Transmitter};
use vnplug_frame::Frame;
use vnplug_frame::lock::Against;
use vnplug_frame::offload::{self, Pieces, Work};
use vnplug_os::closer::PeerFd;
use vnplug_os::memory::Holes;

/// What transmits for one port.
#[derive(Debug)]
pub struct Sender {
    /// The port's number in the daemon.
    pub id: u32,
    /// The ports that its program holds as one with it.
    pub handle: Handle,
    /// Its number on the switch; 0: it takes part in none.
    pub member: u16,
    /// What became of its frames.
    pub counters: SendCounters,
    /// How a process kicks us.
    pub(super) kick: Option<Kick>,
    intake: Intake,
    /// Whether a process freed pages of it, and the bytes read when that was looked at.
    holes: Option<Holes>,
    looked: u64,
    /// The daemon's copy of one frame.
    frame: Box<[u8]>,
    /// Whether its frames may be left to be cut or summed.
    pub segments: Segments,
    /// The packets that one of them becomes.
    pieces: Pieces,
    /// One of those, in one piece.
    packet: Vec<u8>,
    /// What it may send.
    terms: Arc<Terms>,
    /// How much it may send at present, if that is limited.
    bucket: Option<Bucket>,
    /// When it may send again, if it may not now.
    pub(super) held_us: Option<u64>,
    /// Bytes that it may still take in its turn; less than 0: what it took of its next one.
    pub(super) deficit: i64,
    /// It sent something in its last turn, so it is one of those among whom the next ones are shared out.
    pub(super) is_active: bool,
    /// How often nothing was found in turn.
    dry: u32,
    over: bool,
    /// What it has had of its turns: its frames' bytes, and at least those of a record's header for each record. So one that
    /// writes what is no frame is no cheaper than others.
    cost: u64,
}

/// What a sender did in a visit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Visit {
    /// Frames that it took.
    pub frames: usize,
    /// What they cost: their bytes, and for each at least a record's header.
    pub cost: u64,
    /// Nothing waits any more, or it may not send more now.
    pub is_dry: bool,
}

/// What became of each frame taken from transmit rings, or of the packets that it became: `taken` and
/// `cut` are the sum of all the others but `bytes` (point T).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SendCounters {
    /// Frames taken from the ring.
    pub taken: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Handed to the kernel or driver.
    pub sent: u64,
    /// Dropped: the kernel's or the driver's queue was full.
    pub dropped_full: u64,
    /// Dropped: the link does not carry frames of this length.
    pub dropped_length: u64,
    /// Dropped: the link was down or the interface gone.
    pub dropped_link: u64,
    /// Dropped: what was left to do did not fit the frame.
    pub dropped_offload: u64,
    /// Dropped: they were to go on at a place that the sender was not given.
    pub dropped_place: u64,
    /// Dropped: the source cannot send.
    pub dropped_unsupported: u64,
    /// Dropped: they waited when sending was revoked. Only how many they were was looked at.
    pub dropped_revoked: u64,
    /// Dropped: another station's, by the addresses that they say.
    pub dropped_station: u64,
    /// Dropped: of a VLAN in which the port may not send.
    pub dropped_vlan: u64,
    /// Dropped: from a network from which the port may not send.
    pub dropped_network: u64,
    /// Dropped: the operator's filter for what is sent rejects them.
    pub dropped_filter: u64,
    /// Packets that super-frames became, beyond one for each: they are in the fates, and not in `taken`.
    pub cut: u64,
}

impl SendCounters {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.taken += other.taken;
        self.bytes += other.bytes;
        self.sent += other.sent;
        self.dropped_full += other.dropped_full;
        self.dropped_length += other.dropped_length;
        self.dropped_link += other.dropped_link;
        self.dropped_offload += other.dropped_offload;
        self.dropped_place += other.dropped_place;
        self.dropped_unsupported += other.dropped_unsupported;
        self.dropped_revoked += other.dropped_revoked;
        self.dropped_station += other.dropped_station;
        self.dropped_vlan += other.dropped_vlan;
        self.dropped_network += other.dropped_network;
        self.dropped_filter += other.dropped_filter;
        self.cut += other.cut;
    }

    fn flushed(&mut self, flushed: Flushed) {
        self.sent += flushed.sent;
        self.dropped_full += flushed.full;
        self.dropped_length += flushed.bad_length;
        self.dropped_link += flushed.link_down;
    }

    /// The counters with their public names.
    pub fn named(&self) -> [(String, u64); 15] {
        [
            ("send_taken".into(), self.taken + self.cut),
            ("send_cut".into(), self.cut),
            ("send_bytes".into(), self.bytes),
            ("sent".into(), self.sent),
            ("send_dropped_full".into(), self.dropped_full),
            ("send_dropped_length".into(), self.dropped_length),
            ("send_dropped_link".into(), self.dropped_link),
            ("send_dropped_offload".into(), self.dropped_offload),
            ("send_dropped_place".into(), self.dropped_place),
            ("send_dropped_unsupported".into(), self.dropped_unsupported),
            ("send_dropped_revoked".into(), self.dropped_revoked),
            ("send_dropped_station".into(), self.dropped_station),
            ("send_dropped_vlan".into(), self.dropped_vlan),
            ("send_dropped_network".into(), self.dropped_network),
            ("send_dropped_filter".into(), self.dropped_filter),
        ]
    }

    /// Packets whose fate is counted; equal to `taken` and `cut` or we have a bug.
    pub fn accounted(&self) -> u64 {
        self.sent
            + self.dropped_full
            + self.dropped_length
            + self.dropped_link
            + self.dropped_offload
            + self.dropped_place
            + self.dropped_unsupported
            + self.dropped_revoked
            + self.dropped_station
            + self.dropped_vlan
            + self.dropped_network
            + self.dropped_filter
    }

    fn refused(&mut self, why: Refused) {
        let counter = match why {
            Refused::Lock(Against::Station) => &mut self.dropped_station,
            Refused::Lock(Against::Vlan) => &mut self.dropped_vlan,
            Refused::Lock(Against::Network) => &mut self.dropped_network,
            Refused::Filter => &mut self.dropped_filter,
        };
        *counter += 1;
    }
}

impl Sender {
    /// Serves `intake` for port `id`; `kick` is our end of a process's socket pair.
    pub fn new(id: u32, intake: Intake, kick: Option<PeerFd>, holes: Option<Holes>) -> Self {
        let frame = vec![0; intake.geometry().snaplen as usize].into_boxed_slice();
        Self {
            id,
            handle: Handle {
                port: id,
                ..Handle::default()
            },
            member: 0,
            counters: SendCounters::default(),
            kick: kick.map(Kick::new),
            intake,
            holes,
            looked: 0,
            frame,
            segments: Segments::Wire,
            pieces: Pieces::default(),
            packet: Vec::new(),
            terms: Arc::default(),
            bucket: None,
            held_us: None,
            deficit: 0,
            is_active: false,
            dry: 0,
            over: false,
            cost: 0,
        }
    }

    /// Sends at most this many frames of those that wait, and stops when it has taken this many bytes. What other
    /// readers of the wire are to see of them goes to `shown`.
    ///
    /// # Errors
    /// [`SenderLied`]; what was taken before is sent and counted. Quarantine the port.
    pub fn serve(
        &mut self,
        out: &mut dyn Transmitter,
        (frames, mut bytes): (usize, u64),
        now_us: u64,
        shown: &mut dyn FnMut(&Handle, &[Frame<'_>]),
    ) -> Result<Visit, SenderLied> {
        let dry = Visit {
            is_dry: true,
            ..Visit::default()
        };
        if self.over {
            return Ok(dry);
        }
        if !self.intake.is_whole() {
            return Err(SenderLied::Words);
        }
        if !self.intake.has_news()? {
            return Ok(dry);
        }
        if let Some(bucket) = &mut self.bucket {
            let room = bucket.room(now_us);
            if room == 0 {
                self.held_us = Some(bucket.due_us(HELD, now_us));
                return Ok(dry);
            }
            self.held_us = None;
            bytes = bytes.min(room);
        }
        let before = (self.counters.taken, self.cost);
        out.sends(self.member);
        let handle = self.handle;
        let shown = &mut |frames: &[Frame<'_>]| shown(&handle, frames);
        let went = self.take(out, frames, bytes, shown);
        self.counters.flushed(out.flush(shown));
        self.intake.release();
        let visit = Visit {
            frames: (self.counters.taken - before.0) as usize,
            cost: self.cost - before.1,
            is_dry: false,
        };
        if let Some(bucket) = &mut self.bucket {
            bucket.spend(visit.cost);
        }
        let read = self.counters.bytes + self.counters.taken * RECORD_HEADER;
        if read - self.looked >= UNLOOKED {
            self.looked = read;
            // A peer that frees pages while they are read makes the reader wait.
            if self.holes.as_ref().is_some_and(Holes::are_there) {
                return Err(SenderLied::Holes);
            }
        }
        let is_dry = visit.frames < frames && visit.cost < bytes;
        went.map(|()| Visit { is_dry, ..visit })
    }

    fn take(
        &mut self,
        out: &mut dyn Transmitter,
        budget: usize,
        bytes: u64,
        shown: &mut dyn FnMut(&[Frame<'_>]),
    ) -> Result<(), SenderLied> {
        let most = self.cost + bytes;
        let (takes_offload, is_open) = (out.takes_offload(), self.terms.are_open());
        for _ in 0..budget {
            if self.cost >= most {
                break;
            }
            let mut is_placed = false;
            let (own, placed, there) = (&mut self.frame, &mut is_placed, &mut *out);
            let taken = self.intake.take_to(self.segments, move |len| {
                let place = there.place(len);
                *placed = place.is_some();
                place.unwrap_or(own)
            });
            let (copied, sent) = match taken {
                Ok(Some(taken)) => taken,
                Ok(None) => break,
                Err(SenderLied::Place(_)) => {
                    self.counters.taken += 1;
                    self.counters.dropped_place += 1;
                    self.cost += RECORD_HEADER;
                    continue;
                }
                Err(lie) => return Err(lie),
            };
            // Nobody but us can change it there either: what is judged is what is sent.
            let frame = &copied[sent.start..sent.end];
            self.counters.taken += 1;
            self.counters.bytes += frame.len() as u64;
            self.cost += RECORD_HEADER.max(frame.len() as u64);
            let fate = match is_open && sent.start == 0 {
                // Nothing is left to do, and it may be any.
                true => Fate::Goes(Offload::default()),
                false => Fate::of(frame, &sent.offload, &self.terms, takes_offload),
            };
            if let (Fate::Cut(_), true) = (&fate, is_placed) {
                let Some(place) = out.place(sent.end) else {
                    self.counters.dropped_full += 1;
                    continue;
                };
                self.frame[..sent.end].copy_from_slice(&place[..sent.end]);
            }
            let frame = &self.frame[sent.start..sent.end];
            let mut way = Way {
                out: &mut *out,
                shown: &mut *shown,
                counters: &mut self.counters,
                terms: (!is_open).then_some(&*self.terms),
            };
            match fate {
                Fate::Goes(left) if is_placed => {
                    let said = way.out.placed(sent.start..sent.end, &left);
                    way.count(said);
                }
                Fate::Goes(left) if takes_offload => {
                    way.give(|out| out.transmit_offloaded(frame, &left));
                }
                Fate::Goes(_) => way.give(|out| out.transmit(frame)),
                Fate::Cut(work) => {
                    self.pieces.clear();
                    let made = self.pieces.make(frame, frame.len() as u32, &work);
                    way.counters.cut += made.len() as u64 - 1;
                    for at in made {
                        let piece = self.pieces.get(at, frame);
                        self.packet.clear();
                        self.packet.extend_from_slice(piece.head);
                        self.packet.extend_from_slice(piece.body);
                        way.send(&self.packet);
                    }
                }
                Fate::Refused(why) => way.counters.refused(why),
                Fate::Lie => way.counters.dropped_offload += 1,
            }
        }
        Ok(())
    }

    /// Makes the counters exact after a panic in [`serve`](Self::serve): what was taken and not
    /// counted is dropped.
    #[cold]
    pub fn settle(&mut self, flushed: Flushed) {
        self.counters.flushed(flushed);
        let owed = self.counters.taken + self.counters.cut;
        self.counters.dropped_unsupported += owed.saturating_sub(self.counters.accounted());
    }

    /// Whether frames wait, as far as the sender is to be believed.
    pub fn has_frames(&mut self) -> bool {
        !self.over && self.intake.has_news().unwrap_or(false)
    }

    /// Asks to be kicked at the next frame; true if one is there already.
    ///
    /// # Errors
    /// [`SenderLied`]; quarantine the port.
    pub fn arm(&mut self) -> Result<bool, SenderLied> {
        if self.over {
            return Ok(false);
        }
        self.intake.arm()
    }

    /// Nothing was found: whether it need not be looked at before it kicks, for which it is asked then.
    ///
    /// # Errors
    /// [`SenderLied`]; quarantine the port.
    pub(super) fn rests(&mut self) -> Result<bool, SenderLied> {
        self.dry += 1;
        if self.dry < PATIENCE || self.held_us.is_some() {
            return Ok(false);
        }
        self.dry = 0;
        Ok(!self.arm()?)
    }

    /// It is looked at again.
    pub(super) fn goes_on(&mut self) -> Result<bool, SenderLied> {
        self.dry = 0;
        Ok(false)
    }

    /// Ends the ring: nothing is taken any more.
    pub fn finish(&mut self, life: Life) {
        if !self.over {
            self.over = true;
            self.intake.finish(life);
        }
    }

    /// Sends on these terms from now on; the old ones are for the caller to free.
    pub fn set_terms(&mut self, terms: Arc<Terms>, now_us: u64) -> Arc<Terms> {
        self.bucket = terms.bucket(now_us);
        self.held_us = None;
        std::mem::replace(&mut self.terms, terms)
    }

    /// Its frames may be posted in these record areas of another port, too; what had their numbers before is for the
    /// caller to free.
    pub(super) fn lend(&mut self, port: u32, first: u16, areas: Vec<Region>) -> Vec<Region> {
        self.intake.lend_of(port, first, areas)
    }

    /// Nothing of that port may be posted any more; its record areas are for the caller to free.
    pub(super) fn withdraw(&mut self, port: u32) -> Vec<Region> {
        self.intake.withdraw(port)
    }

    /// Its part in proportion to those of others.
    pub(super) fn weight(&self) -> u32 {
        self.terms.weight
    }

    /// Ends the ring by an operator's word: what waits is counted, and nothing of it is read.
    pub fn revoke(&mut self) {
        if !self.over {
            let waiting = self.intake.pending();
            self.counters.taken += waiting;
            self.counters.dropped_revoked += waiting;
            self.finish(Life::Revoked);
        }
    }

    /// Whether its ring is over.
    pub fn is_over(&self) -> bool {
        self.over
    }
}

/// What is to become of a frame.
enum Fate {
    /// It is sent with this left to do.
    Goes(Offload),
    /// It is cut or summed here, and what it becomes is judged.
    Cut(Work),
    Refused(Refused),
    /// What is left to do does not fit it.
    Lie,
}

impl Fate {
    #[inline]
    fn of(frame: &[u8], offload: &Offload, terms: &Terms, takes_offload: bool) -> Self {
        match offload::work(frame, frame.len() as u32, offload) {
            Ok(None) => match terms.judge(frame) {
                Ok(()) => Self::Goes(Offload::default()),
                Err(why) => Self::Refused(why),
            },
            // NB: what is judged is what is sent. A checksum that somebody else fills in later could be put over
            // what was judged.
            Ok(Some(work)) if terms.are_open() && takes_offload && work.is_for_linux() => {
                Self::Goes(*offload)
            }
            Ok(Some(work)) => Self::Cut(work),
            Err(_) => Self::Lie,
        }
    }
}

/// The way out of one frame.
struct Way<'a> {
    out: &'a mut dyn Transmitter,
    shown: &'a mut dyn FnMut(&[Frame<'_>]),
    counters: &'a mut SendCounters,
    /// What it may be, if not anything.
    terms: Option<&'a Terms>,
}

impl Way<'_> {
    /// Has a whole packet transmitted, if it may be.
    #[inline]
    fn send(&mut self, packet: &[u8]) {
        match self.terms.map_or(Ok(()), |terms| terms.judge(packet)) {
            Ok(()) => self.give(|out| out.transmit(packet)),
            Err(why) => self.counters.refused(why),
        }
    }

    /// Has a frame transmitted, if need be after a flush, and counts what became of it if that is known.
    #[inline]
    fn give(&mut self, transmit: impl Fn(&mut dyn Transmitter) -> Transmit) {
        let mut said = transmit(self.out);
        if said == Transmit::Full {
            self.counters.flushed(self.out.flush(self.shown));
            said = transmit(self.out);
        }
        self.count(said);
    }

    /// Counts what became of a frame, if that is known.
    #[inline]
    fn count(&mut self, said: Transmit) {
        match said {
            // The flush says what becomes of it.
            Transmit::Taken => {}
            Transmit::Full => self.counters.dropped_full += 1,
            Transmit::BadLength => self.counters.dropped_length += 1,
            Transmit::LinkDown => self.counters.dropped_link += 1,
            Transmit::Unsupported => self.counters.dropped_unsupported += 1,
        }
    }
}

/// How often nothing is found in a ring before it need not be looked at: a kick costs its sender a system call.
pub(super) const PATIENCE: u32 = 64;
/// Bytes for which there is room before a sender that was held is looked at again: some frames, so that the thread does
/// not wake for each.
const HELD: u64 = 4 << 10;
/// Bytes of a ring between two looks for freed pages: some 30 pages, of which each costs a reader a microsecond or two,
/// and the look is a system call.
const UNLOOKED: u64 = 128 << 10;
