//! The transmit rings that one queue's thread serves, between two of its batches.
//!
//! While the thread runs it looks at each ring that is **awake** once per turn (one load). Before it sleeps it
//! arms those, and a sender that finds its ring armed kicks: a process by its socket, whose other end is in
//! the epoll instance that the thread then sleeps on; a VM by a message that the control thread
//! relays as a command. The handshake that loses no kick is that of `ring/src/layout.rs`.
//!
//! A ring in which nothing was found [`PATIENCE`](super::sender::PATIENCE) times is armed at once and not looked at any more until it
//! kicks: it is **asleep**. So ten thousand of which one sends cost what that one costs ([`News`]). While the
//! thread has other work it looks for kicks now and then ([`LOOK_US`]); that is how late a ring that slept is
//! served at most, beyond its turn.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use vnplug_ring::layout::Life;
use vnplug_ring::news::News;

use super::terms::Terms;
use crate::batch::Handle;
use crate::engine::sender::{SendCounters, Sender};
use crate::source::Transmitter;
use vnplug_frame::{Frame, MAX_BATCH};
use vnplug_os::peer_log;
use vnplug_os::socket;
use vnplug_os::socket::Heard;

/// The senders of one queue.
#[derive(Debug)]
pub(super) struct Senders {
    /// By place.
    all: Vec<Option<Sender>>,
    free: Vec<usize>,
    places: HashMap<u32, usize>,
    /// Those that are awake.
    awake: News,
    /// When it was last looked for kicks.
    looked_us: u64,
    /// Whose turn it is.
    next: usize,
    /// It has its bytes for this turn already.
    is_within: bool,
    /// Bytes that a sender of weight 1 may take in its turn.
    quantum: u64,
    /// Those that sent something since all had their turn.
    active: u64,
    /// The thread's own waker and every kick; made with the first kick.
    epoll: Option<OwnedFd>,
    /// The counters of senders that are gone.
    departed: SendCounters,
}

/// The result of a turn.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// Frames taken.
    pub(super) frames: usize,
    /// A port that lied (or, by a fault of ours, cannot be served), and why: to be quarantined.
    pub(super) liar: Option<(u32, String)>,
}

impl Default for Senders {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            free: Vec::new(),
            places: HashMap::new(),
            awake: News::default(),
            looked_us: 0,
            next: 0,
            is_within: false,
            quantum: LEAST_QUANTUM,
            active: 0,
            epoll: None,
            departed: SendCounters::default(),
        }
    }
}

impl Senders {
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Adds a sender; `waker` is what the thread sleeps on otherwise.
    pub(super) fn attach(&mut self, mut sender: Sender, waker: BorrowedFd<'_>) {
        let at = self.free.pop().unwrap_or(self.all.len());
        if let Some(kick) = &sender.kick
            && let Err(error) = watch(&mut self.epoll, waker, kick.as_fd(), at)
        {
            log::error!(target: "port", "port {}: its kicks cannot be heard: {error}", sender.id);
            sender.finish(Life::Failed);
        }
        self.places.insert(sender.id, at);
        self.awake.set(at);
        match self.all.get_mut(at) {
            Some(place) => *place = Some(sender),
            None => self.all.push(Some(sender)),
        }
    }

    /// The frames that a closing sender may still send: a program may write and end.
    pub(super) fn last_of(&mut self, id: u32) -> u64 {
        self.wake(&[id]);
        self.get(id).map_or(0, |sender| sender.counters.taken) + LAST
    }

    /// Whether a closing sender has sent `last` frames, or all that it wrote.
    pub(super) fn is_done(&mut self, id: u32, last: u64) -> bool {
        self.get(id).is_none_or(|sender| {
            // Who closes does not wait for its rate.
            sender.counters.taken >= last || !sender.has_frames() || sender.held_us.is_some()
        })
    }

    fn get(&mut self, id: u32) -> Option<&mut Sender> {
        let at = *self.places.get(&id)?;
        self.all[at].as_mut()
    }

    /// These have news, as far as they are here.
    pub(super) fn wake(&mut self, ids: &[u32]) {
        for id in ids {
            if let Some(at) = self.places.get(id) {
                self.awake.set(*at);
            }
        }
    }

    /// Removes a sender, whose ring ends with this life.
    pub(super) fn detach(&mut self, id: u32, life: Life) -> Option<Sender> {
        let at = self.places.remove(&id)?;
        let mut sender = self.all[at].take()?;
        self.awake.clear(at);
        self.free.push(at);
        if at == self.next {
            self.is_within = false;
        }
        self.departed.add(&sender.counters);
        sender.finish(life);
        self.unwatch(&sender);
        if self.is_empty() {
            self.epoll = None;
        }
        Some(sender)
    }

    /// Has a sender send on other terms from now on; returns the old ones, or those if there is no such sender.
    pub(super) fn set_terms(&mut self, id: u32, terms: Arc<Terms>, now_us: u64) -> Arc<Terms> {
        match self.get(id) {
            Some(sender) => sender.set_terms(terms, now_us),
            None => terms,
        }
    }

    /// Ends a sender's ring by an operator's word; it stays, for its counters.
    pub(super) fn revoke(&mut self, id: u32) {
        if let Some(sender) = self.get(id) {
            sender.revoke();
        }
    }

    /// Sends what waits: at most [`MAX_BATCH`] frames in all, and about [`TURN`] bytes. What other readers of the wire
    /// are to see goes to `shown`, with the ports that are of its sender.
    ///
    /// Senders have turns by bytes (deficit round robin): each may take so many, times its weight, and what it takes
    /// too much is missing in its next turn. A turn goes on where the last one ended.
    pub(super) fn serve(
        &mut self,
        out: &mut dyn Transmitter,
        now_us: u64,
        shown: &mut dyn FnMut(&Handle, &[Frame<'_>]),
    ) -> Served {
        let mut served = Served::default();
        let (mut dry, mut bytes) = (0, 0);
        while served.frames < MAX_BATCH && bytes < TURN && dry < self.awake.count() {
            match self.awake.next_from(self.next) {
                Some(at) if at == self.next => {}
                Some(at) => (self.next, self.is_within) = (at, false),
                None => {
                    (self.next, self.is_within) = (0, false);
                    // Known when all had their turn: few that send have long turns, and few flushes.
                    self.quantum = (TURN / self.active.max(1)).max(LEAST_QUANTUM);
                    self.active = 0;
                    continue;
                }
            }
            let Some(sender) = self.all.get_mut(self.next).and_then(Option::as_mut) else {
                self.awake.clear(self.next);
                continue;
            };
            if !self.is_within {
                sender.deficit += (self.quantum * u64::from(sender.weight())) as i64;
                self.is_within = true;
            }
            let most = (sender.deficit.max(0) as u64).min(TURN - bytes);
            let budget = (MAX_BATCH - served.frames, most);
            // A panic here would be a bug of ours that a sender triggers: it costs that port, and
            // nobody else anything (R10).
            let serve = || sender.serve(out, budget, now_us, shown);
            let went = catch_unwind(AssertUnwindSafe(serve));
            let why = match went {
                Ok(Ok(visit)) => {
                    served.frames += visit.frames;
                    bytes += visit.bytes;
                    sender.deficit -= visit.bytes as i64;
                    let is_dry = visit.is_dry && visit.frames == 0;
                    dry = if is_dry { dry + 1 } else { 0 };
                    if visit.is_dry {
                        // Who has nothing to send saves nothing up.
                        sender.deficit = sender.deficit.min(0);
                    }
                    let rests = match is_dry && self.places.len() > FEW {
                        true => sender.rests(),
                        false => sender.goes_on(),
                    };
                    let at = self.next;
                    if visit.is_dry || sender.deficit <= 0 {
                        self.active += u64::from(visit.frames > 0);
                        (self.next, self.is_within) = (at + 1, false);
                    }
                    match rests {
                        Ok(false) => continue,
                        Ok(true) => {
                            self.awake.clear(at);
                            dry -= 1;
                            continue;
                        }
                        Err(lie) => lie.to_string(),
                    }
                }
                Ok(Err(lie)) => lie.to_string(),
                Err(_) => {
                    sender.settle(out.flush(&mut |_| {}));
                    "the daemon failed while sending for it; please report this".to_owned()
                }
            };
            served.liar = Some(quarantine(sender, why));
            (self.next, self.is_within) = (self.next + 1, false);
            break;
        }
        served
    }

    /// When a sender may send again that may not now because of its rate.
    pub(super) fn due_us(&self) -> Option<u64> {
        self.present().filter_map(|sender| sender.held_us).min()
    }

    /// Those that are awake.
    fn present(&self) -> impl Iterator<Item = &Sender> {
        let at = self.awake.iter();
        at.filter_map(|at| self.all.get(at)?.as_ref())
    }

    /// Asks all to kick; those that sleep were asked before. True: one has frames already (or has just been
    /// quarantined), do not sleep.
    pub(super) fn arm(&mut self) -> (bool, Option<(u32, String)>) {
        let mut ready = false;
        for at in self.awake.iter() {
            let Some(sender) = self.all.get_mut(at).and_then(Option::as_mut) else {
                continue;
            };
            // The time wakes it, and no kick.
            if sender.held_us.is_some() {
                continue;
            }
            match sender.arm() {
                Ok(waits) => ready |= waits,
                Err(lie) => return (true, Some(quarantine(sender, lie.to_string()))),
            }
        }
        (ready, None)
    }

    /// While the thread does not sleep: looks now and then whether one that sleeps has kicked.
    #[inline]
    pub(super) fn listen(&mut self, now_us: u64) -> Option<(u32, String)> {
        let sleeps = self.awake.count() < self.places.len();
        if !sleeps || now_us.saturating_sub(self.looked_us) < LOOK_US {
            return None;
        }
        self.looked_us = now_us;
        self.hush()
    }

    /// What to sleep on: `waker` and, if there are any, the kicks.
    pub(super) fn waker<'a>(&'a self, waker: BorrowedFd<'a>) -> BorrowedFd<'a> {
        self.epoll.as_ref().map_or(waker, AsFd::as_fd)
    }

    /// Empties the sockets that were kicked, after a sleep. Bounded: further bytes are found after
    /// the next turn. A sender of anything but bytes is quarantined.
    pub(super) fn hush(&mut self) -> Option<(u32, String)> {
        let epoll = self.epoll.as_ref()?;
        let mut events = [Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 16];
        let now = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let found = epoll::wait(epoll, &mut events, Some(&now)).unwrap_or(0);
        for event in &events[..found] {
            let at = event.data.u64() as usize;
            let Some(sender) = self.all.get_mut(at).and_then(Option::as_mut) else {
                continue;
            };
            self.awake.set(at);
            let Some(kick) = &sender.kick else {
                continue;
            };
            match socket::receive(kick, &mut [0; 256]) {
                Ok(Heard::Bytes(1..) | Heard::Nothing) => {}
                Ok(Heard::Rights) => {
                    let _ = epoll::delete(epoll, kick);
                    let why = "descriptors came with its kicks";
                    return Some(quarantine(sender, why.to_owned()));
                }
                // The other end is closed, and would stay readable for ever.
                Ok(Heard::Bytes(_)) | Err(_) => {
                    let _ = epoll::delete(epoll, kick);
                }
            }
        }
        None
    }

    /// Ends all of them.
    pub(super) fn finish(&mut self, life: Life) {
        for sender in self.all.iter_mut().flatten() {
            sender.finish(life);
        }
    }

    /// The fates of each present sender's frames.
    pub(super) fn counters(&self) -> impl Iterator<Item = (u32, SendCounters)> {
        let all = self.all.iter().flatten();
        all.map(|sender| (sender.id, sender.counters))
    }

    /// The fates of all frames, those of senders that are gone included.
    pub(super) fn total(&self) -> SendCounters {
        let mut total = self.departed;
        let all = self.all.iter().flatten();
        all.for_each(|sender| total.add(&sender.counters));
        total
    }

    fn unwatch(&self, sender: &Sender) {
        if let (Some(epoll), Some(kick)) = (&self.epoll, &sender.kick) {
            // Its other end may be closed, and then it is out already.
            let _ = epoll::delete(epoll, kick);
        }
    }
}

fn quarantine(sender: &mut Sender, why: String) -> (u32, String) {
    peer_log!(
        log::Level::Warn,
        "port",
        "port {} may not send any more: {why}",
        sender.id
    );
    sender.finish(Life::Quarantined);
    (sender.id, why)
}

/// Adds a kick to the epoll instance, which is made now if there is none.
fn watch(
    epoll: &mut Option<OwnedFd>,
    waker: BorrowedFd<'_>,
    kick: BorrowedFd<'_>,
    at: usize,
) -> rustix::io::Result<()> {
    let add = |epoll: &OwnedFd, fd: BorrowedFd<'_>, data| {
        epoll::add(epoll, fd, EventData::new_u64(data), EventFlags::IN)
    };
    if epoll.is_none() {
        let made = epoll::create(CreateFlags::CLOEXEC)?;
        add(&made, waker, OWN)?;
        *epoll = Some(made);
    }
    match epoll {
        Some(epoll) => add(epoll, kick, at as u64),
        None => Ok(()),
    }
}

/// The event of the thread's own waker.
const OWN: u64 = u64::MAX;
/// Frames that are still sent for a port that closes: more than a usual ring holds.
const LAST: u64 = 8_192;
/// So few are looked at every turn: that costs less than a kick.
const FEW: usize = 16;
/// How often a thread that does not sleep looks for kicks, if it has rings that sleep: a system call.
const LOOK_US: u64 = 50;
/// Bytes that are taken in a turn: a copy of some ten microseconds.
const TURN: u64 = 256 << 10;
/// Bytes of one sender's turn, of many.
const LEAST_QUANTUM: u64 = 8 << 10;

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};
    use vnplug_ring::layout::{Geometry, HEAD, Meta, ring_size};

    use vnplug_os::closer::PeerFd;
    use vnplug_ring::{Bell, Intake, Producer, Region};

    use super::*;
    use crate::engine::sender::PATIENCE;
    use crate::source::{Flushed, Transmit};

    /// A link that takes ten frames between two flushes, of which the last is lost, and no frame of
    /// more than 100 bytes; of one byte makes it panic.
    #[derive(Default)]
    struct Link {
        taken: u64,
    }

    impl Transmitter for Link {
        fn transmit(&mut self, bytes: &[u8]) -> Transmit {
            assert!(bytes.len() != 1, "on purpose");
            match bytes.len() {
                101.. => Transmit::BadLength,
                _ if self.taken == 10 => Transmit::Full,
                _ => {
                    self.taken += 1;
                    Transmit::Taken
                }
            }
        }

        fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
            let taken = std::mem::take(&mut self.taken);
            Flushed {
                sent: taken.saturating_sub(1),
                full: taken.min(1),
                ..Flushed::default()
            }
        }
    }

    fn sender(id: u32) -> (Sender, Producer, Region) {
        sender_of(id, 1 << 17, 200)
    }

    fn sender_of(id: u32, capacity: u64, snaplen: u32) -> (Sender, Producer, Region) {
        let geometry = Geometry {
            capacity,
            snaplen,
            link_type: 1,
            epoch: 256,
            port: id,
            queue: 0,
        };
        let region = Region::heap(ring_size(geometry.capacity));
        let intake = Intake::create(region.clone(), geometry).unwrap();
        let producer = Producer::attach(region.clone()).unwrap();
        (Sender::new(id, intake, None, None), producer, region)
    }

    fn write(producer: &mut Producer, frames: usize, len: usize) {
        for _ in 0..frames {
            assert_eq!(producer.push(&Meta::default(), &vec![7; len]), Ok(true));
        }
        producer.publish();
    }

    fn attached(rings: &mut [(Sender, Producer, Region)]) -> Senders {
        let mut senders = Senders::default();
        let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        for (at, ring) in rings.iter_mut().enumerate() {
            let sender = std::mem::replace(&mut ring.0, self::sender(900 + at as u32).0);
            senders.attach(sender, nobody.as_fd());
        }
        senders
    }

    #[test]
    fn a_turn_is_bounded_and_nobody_starves() {
        let mut rings: Vec<_> = (1..=6).map(sender).collect();
        let mut senders = attached(&mut rings);
        for (_, producer, _) in &mut rings {
            write(producer, 500, 60);
        }
        let mut link = Link::default();
        for _ in 0..6 {
            let served = senders.serve(&mut link, 0, &mut |_, _| {});
            assert_eq!(served.frames, MAX_BATCH);
        }
        let each = LEAST_QUANTUM / 60;
        assert!(senders.counters().all(|(_, it)| it.taken >= each));
        while senders.serve(&mut link, 0, &mut |_, _| {}).frames > 0 {}
        let total = senders.total();
        assert_eq!((total.taken, total.accounted()), (3000, 3000));
        assert!(total.sent > 2500 && total.dropped_full > 250, "{total:?}");
    }

    /// A link that takes everything.
    struct Wire;

    impl Transmitter for Wire {
        fn transmit(&mut self, _: &[u8]) -> Transmit {
            Transmit::Taken
        }

        fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
            Flushed::default()
        }
    }

    /// The bytes of each of these senders after so many turns, all of which always have more: lengths of
    /// frames and terms.
    fn shares(senders: &[(usize, Terms)], turns: u64) -> Vec<u64> {
        let ids = 1..=senders.len() as u32;
        let mut rings: Vec<_> = ids.map(|id| sender_of(id, 1 << 18, 1514)).collect();
        let mut all = attached(&mut rings);
        for (id, (_, terms)) in (1..).zip(senders) {
            all.set_terms(id, Arc::new(terms.clone()), 0);
        }
        for turn in 0..turns {
            for ((_, producer, _), (len, _)) in rings.iter_mut().zip(senders) {
                let frame = vec![7; *len];
                while producer.push(&Meta::default(), &frame) == Ok(true) {}
                producer.publish();
            }
            // A turn of 100 us.
            let served = all.serve(&mut Wire, turn * 100, &mut |_, _| {});
            assert!(served.frames <= MAX_BATCH && served.liar.is_none());
        }
        all.counters().map(|(_, it)| it.bytes).collect()
    }

    /// Jain's index of fairness: 1 if all are equal, 1/n if one has all.
    fn jain(shares: impl IntoIterator<Item = f64>) -> f64 {
        let shares: Vec<f64> = shares.into_iter().collect();
        let sum: f64 = shares.iter().sum();
        let squares: f64 = shares.iter().map(|it| it * it).sum();
        sum * sum / (shares.len() as f64 * squares)
    }

    #[test]
    fn senders_have_equal_parts_by_bytes_whatever_the_length_of_their_frames() {
        for count in [1, 2, 3, 8, 32] {
            let equal = vec![(500, Terms::default()); count];
            let mixed = (0..count).map(|at| ([60, 1514][at % 2], Terms::default()));
            let bytes = |it: u64| it as f64;
            let equal = jain(shares(&equal, 2_000).into_iter().map(bytes));
            let mixed = jain(
                shares(&mixed.collect::<Vec<_>>(), 4_000)
                    .into_iter()
                    .map(bytes),
            );
            assert!(equal >= 0.99, "{count} equal: {equal}");
            assert!(mixed >= 0.98, "{count} mixed: {mixed}");
        }
        // The control: by frames, which is what it was, 60 against 1514 bytes is no equal part.
        assert!(jain([60.0, 1514.0]) < 0.55);
    }

    #[test]
    fn weights_are_kept_and_rates_not_exceeded() {
        let weighed = |weight| Terms {
            weight,
            ..Terms::default()
        };
        let senders = [(60, weighed(1)), (1514, weighed(2)), (500, weighed(5))];
        let bytes = shares(&senders, 4_000);
        let parts = bytes.iter().zip([1.0, 2.0, 5.0]);
        let index = jain(parts.map(|(bytes, weight)| *bytes as f64 / weight));
        assert!(index >= 0.98, "{bytes:?}");
        // 4,000 turns are 0.4 s, in which it may send 400 KB, and 64 KiB at once.
        let held = Terms {
            bytes_per_s: 1_000_000,
            ..Terms::default()
        };
        let bytes = shares(&[(1000, held), (1000, Terms::default())], 4_000);
        let most = 400_000 + (64 << 10) + 1000;
        assert!((380_000..=most).contains(&bytes[0]), "{bytes:?}");
        assert!(bytes[1] > 100 * bytes[0], "{bytes:?}");
    }

    #[test]
    fn who_is_held_by_its_rate_wakes_the_thread_in_time_and_not_before() {
        let mut rings = [sender_of(1, 1 << 18, 200)];
        let mut senders = attached(&mut rings);
        let terms = Terms {
            bytes_per_s: 1_000_000,
            ..Terms::default()
        };
        senders.set_terms(1, Arc::new(terms), 0);
        write(&mut rings[0].1, 1_000, 100);
        let mut now_us = 0;
        let mut idle = 0;
        let mut taken = 0;
        while taken < 1_000 {
            let served = senders.serve(&mut Wire, now_us, &mut |_, _| {});
            taken += served.frames;
            if served.frames == 0 {
                // It rests, and nothing but the time ends that.
                assert_eq!(senders.arm(), (false, None));
                let due_us = senders.due_us().unwrap();
                assert!(due_us > now_us);
                (now_us, idle) = (due_us, idle + 1);
            }
        }
        // 100,000 bytes, of which 64 KiB at once.
        assert!((33_000..39_000).contains(&now_us), "{now_us}");
        assert!(idle <= 10, "{idle} times looked in vain");
        // A port that closes does not wait for its rate.
        write(&mut rings[0].1, 1_000, 100);
        while senders.serve(&mut Wire, now_us, &mut |_, _| {}).frames > 0 {}
        assert!(senders.is_done(1, u64::MAX));
    }

    #[test]
    fn long_frames_end_a_turn_sooner() {
        let mut rings = [sender_of(1, 1 << 20, 9000)];
        let mut senders = attached(&mut rings);
        write(&mut rings[0].1, 100, 9000);
        let turn = || {
            senders
                .serve(&mut Link::default(), 0, &mut |_, _| {})
                .frames
        };
        let turns: Vec<usize> = std::iter::repeat_with(turn).take(5).collect();
        assert_eq!(turns, [30, 30, 30, 10, 0]);
    }

    #[test]
    fn every_fate_is_counted_once_and_who_goes_is_served_to_the_end() {
        let mut rings = [sender(1)];
        let mut senders = attached(&mut rings);
        let producer = &mut rings[0].1;
        write(producer, 40, 60);
        write(producer, 5, 150);
        write(producer, 500, 60);
        let mut link = Link::default();
        let last = senders.last_of(1);
        while !senders.is_done(1, last) {
            assert!(senders.serve(&mut link, 0, &mut |_, _| {}).frames <= MAX_BATCH);
        }
        let gone = senders.detach(1, Life::Closed).unwrap();
        assert!(gone.is_over() && producer.life() == Life::Closed);
        let total = senders.total();
        assert_eq!((total.taken, total.dropped_length), (545, 5));
        assert_eq!(total.accounted(), total.taken);
        assert!(senders.is_done(1, 0) && senders.detach(1, Life::Closed).is_none());
    }

    #[test]
    fn who_goes_and_writes_on_is_not_served_for_ever() {
        let mut rings = [sender(1)];
        let mut senders = attached(&mut rings);
        let mut link = Link::default();
        let last = senders.last_of(1);
        let mut turns = 0;
        write(&mut rings[0].1, 1, 60);
        while !senders.is_done(1, last) {
            write(&mut rings[0].1, MAX_BATCH, 60);
            senders.serve(&mut link, 0, &mut |_, _| {});
            turns += 1;
            assert!(turns <= LAST as usize / MAX_BATCH);
        }
        assert_eq!(senders.total().taken, LAST);
    }

    #[test]
    fn what_waits_when_sending_is_revoked_is_counted_and_not_read() {
        let mut rings = [sender(1), sender(2)];
        let mut senders = attached(&mut rings);
        write(&mut rings[0].1, 30, 60);
        write(&mut rings[1].1, 3, 60);
        // What is read of it would be a lie.
        rings[0].2.store_u32(
            vnplug_ring::layout::DATA_OFFSET,
            u32::MAX - 1,
            std::sync::atomic::Ordering::Relaxed,
        );
        senders.revoke(1);
        let mut link = Link::default();
        while senders.serve(&mut link, 0, &mut |_, _| {}).frames > 0 {}
        let of = |id| senders.counters().find(|(it, _)| *it == id).unwrap().1;
        assert_eq!(
            (of(1).taken, of(1).dropped_revoked, of(1).sent),
            (30, 30, 0)
        );
        assert_eq!((of(2).taken, of(2).dropped_revoked), (3, 0));
        assert_eq!(rings[0].1.life(), Life::Revoked);
        assert_eq!(rings[1].1.life(), Life::Open);
        // Whoever writes on writes for nobody, and no second end is put over the first.
        write(&mut rings[0].1, 3, 60);
        assert!(!senders.arm().0 && senders.is_done(1, u64::MAX));
        drop(senders.detach(1, Life::Closed));
        assert_eq!(rings[0].1.life(), Life::Revoked);
        assert_eq!(senders.total().accounted(), senders.total().taken);
    }

    #[test]
    fn a_sender_that_says_how_many_wait_is_believed_as_far_as_there_is_room() {
        let (sender, mut producer, region) = sender(1);
        let mut intake = sender;
        write(&mut producer, 3, 60);
        region.store_u64(
            vnplug_ring::layout::PUBLISHED,
            u64::MAX / 2,
            std::sync::atomic::Ordering::Relaxed,
        );
        intake.revoke();
        // Three records of 60 bytes are as long as nine without any.
        assert_eq!(intake.counters.dropped_revoked, 9);
    }

    #[test]
    fn a_lie_and_a_fault_of_ours_cost_one_port() {
        let mut rings = [sender(1), sender(2), sender(3)];
        let mut senders = attached(&mut rings);
        let mut link = Link::default();
        rings[0]
            .2
            .store_u64(HEAD, 12, std::sync::atomic::Ordering::Release);
        write(&mut rings[1].1, 1, 1);
        write(&mut rings[2].1, 3, 60);
        let mut liars = Vec::new();
        for _ in 0..6 {
            liars.extend(
                senders
                    .serve(&mut link, 0, &mut |_, _| {})
                    .liar
                    .map(|(id, _)| id),
            );
        }
        liars.sort_unstable();
        assert_eq!(liars, [1, 2]);
        let lives: Vec<Life> = rings.iter().map(|ring| ring.1.life()).collect();
        assert_eq!(lives, [Life::Quarantined, Life::Quarantined, Life::Open]);
        let honest = senders.counters().find(|(id, _)| *id == 3).unwrap();
        assert_eq!(honest.1.taken, 3);
        assert_eq!(senders.total().accounted(), senders.total().taken);
        assert_eq!(senders.arm(), (false, None));
    }

    /// A sender that kicks by a socket, as a process does, and the other end of it.
    fn kicking(id: u32) -> (Sender, Producer, UnixStream) {
        let (mut sender, producer, _) = sender_of(id, 1 << 14, 200);
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        sender.kick = Some(PeerFd::alone(ours.into()));
        (sender, producer, theirs)
    }

    fn many(count: u32) -> (Senders, Vec<(Producer, UnixStream)>) {
        let mut senders = Senders::default();
        let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        let mut rings = Vec::new();
        for id in 0..count {
            let (sender, producer, kick) = kicking(id);
            senders.attach(sender, nobody.as_fd());
            rings.push((producer, kick));
        }
        (senders, rings)
    }

    /// Turns until those that have nothing to send sleep.
    fn settle(senders: &mut Senders) {
        for _ in 0..=PATIENCE {
            senders.serve(&mut Wire, 0, &mut |_, _| {});
        }
    }

    #[test]
    fn who_has_nothing_to_send_sleeps_until_it_kicks_and_is_heard_then() {
        let (mut senders, mut rings) = many(1_000);
        settle(&mut senders);
        assert_eq!(senders.awake.count(), 0);
        assert_eq!(senders.arm(), (false, None));
        let (producer, kick) = &mut rings[700];
        write(producer, 3, 60);
        // It is asked to kick, and without a kick nobody looks at it: that is what sleeping saves.
        assert_eq!(producer.bell(0), Bell::Ring);
        let mut now_us = LOOK_US;
        assert_eq!(senders.listen(now_us), None);
        assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 0);
        kick.write_all(&[1]).unwrap();
        now_us += LOOK_US;
        assert_eq!(senders.listen(now_us), None);
        assert_eq!(senders.awake.count(), 1);
        assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 3);
        // By a command, as a VM's kicks come; and when it goes, what it has left is sent.
        write(&mut rings[3].0, 2, 60);
        senders.wake(&[3, 4711]);
        assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 2);
        settle(&mut senders);
        write(&mut rings[5].0, 4, 60);
        let last = senders.last_of(5);
        while !senders.is_done(5, last) {
            senders.serve(&mut Wire, 0, &mut |_, _| {});
        }
        assert_eq!(senders.detach(5, Life::Closed).unwrap().counters.taken, 4);
        // Its place is another's then, which is awake.
        let (sender, ..) = kicking(5_000);
        let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        senders.attach(sender, nobody.as_fd());
        assert!(senders.awake.iter().any(|at| at == 5));
        assert_eq!(senders.all.len(), 1_000);
    }

    /// Threads that write now and then, and kick if they are asked to, against one that serves, looks for
    /// kicks and sleeps; how many frames were not taken.
    fn lost(kicks: bool) -> u64 {
        const SENDERS: u32 = 64;
        const EACH: u64 = 300;
        let (mut senders, rings) = many(SENDERS);
        settle(&mut senders);
        let writers = rings
            .into_iter()
            .enumerate()
            .map(|(nth, (mut producer, mut kick))| {
                std::thread::spawn(move || {
                    let mut dice = nth as u64 + 1;
                    for _ in 0..EACH {
                        dice ^= dice << 13;
                        dice ^= dice >> 7;
                        dice ^= dice << 17;
                        // As often meets the thread before it sleeps, while it does, and after.
                        match dice % 4 {
                            0 => std::thread::sleep(Duration::from_micros(dice >> 8 & 0xff)),
                            1 => std::thread::yield_now(),
                            _ => {}
                        }
                        while producer.push(&Meta::default(), &[7; 60]) != Ok(true) {
                            std::thread::yield_now();
                        }
                        producer.publish();
                        if producer.bell(0) == Bell::Ring && kicks {
                            let _ = kick.write(&[1]);
                        }
                    }
                    (producer, kick)
                })
            });
        let writers: Vec<_> = writers.collect();
        let started = Instant::now();
        let limit = match kicks {
            true => Duration::from_secs(60),
            false => Duration::from_millis(300),
        };
        let all = u64::from(SENDERS) * EACH;
        while senders.total().taken < all && started.elapsed() < limit {
            let now_us = started.elapsed().as_micros() as u64;
            assert_eq!(senders.listen(now_us), None);
            if senders.serve(&mut Wire, now_us, &mut |_, _| {}).frames == 0 && !senders.arm().0 {
                let nobody =
                    rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
                let waker = senders.waker(nobody.as_fd());
                let mut events = [rustix::event::PollFd::new(
                    &waker,
                    rustix::event::PollFlags::IN,
                )];
                let tick = rustix::event::Timespec {
                    tv_sec: 0,
                    tv_nsec: 100_000_000,
                };
                let woken = rustix::event::poll(&mut events, Some(&tick)).unwrap();
                // What was missed would be found by the time alone: it must not be.
                assert!(
                    woken > 0
                        || !kicks
                        || senders.total().taken == all
                        || writers.iter().any(|it| !it.is_finished())
                );
                assert_eq!(senders.hush(), None);
            }
        }
        let left = all - senders.total().taken;
        // A writer without room waits for the thread, which is over.
        let mut gone = Senders::default();
        std::mem::swap(&mut gone, &mut senders);
        for writer in writers {
            while !writer.is_finished() {
                let ids: Vec<u32> = (0..SENDERS).collect();
                gone.wake(&ids);
                gone.serve(&mut Wire, 0, &mut |_, _| {});
            }
            drop(writer.join().unwrap());
        }
        left
    }

    #[test]
    fn no_kick_is_lost_between_looking_arming_and_sleeping() {
        assert_eq!(lost(true), 0);
        // The control: without kicks, what comes for a ring that sleeps stays there.
        assert!(lost(false) > 0);
    }

    /// Nanoseconds of a turn in which one of so many sends a frame.
    fn cost(count: u32) -> f64 {
        const TURNS: u32 = 20_000;
        let mut rings: Vec<_> = (0..count).map(|id| sender_of(id, 1 << 12, 200)).collect();
        let mut senders = attached(&mut rings);
        settle(&mut senders);
        let mut took = Duration::ZERO;
        for _ in 0..TURNS {
            write(&mut rings[count as usize / 2].1, 1, 60);
            let started = Instant::now();
            // As the engine does: a turn, and arming before a sleep.
            senders.wake(&[count / 2]);
            assert_eq!(senders.serve(&mut Wire, 0, &mut |_, _| {}).frames, 1);
            assert_eq!(senders.arm(), (false, None));
            took += started.elapsed();
        }
        took.as_secs_f64() * 1e9 / f64::from(TURNS)
    }

    #[test]
    fn one_of_ten_thousand_costs_what_one_of_ten_costs() {
        let (few, many) = (cost(10), cost(10_000));
        eprintln!("a turn with one active sender: of 10 {few:.0} ns, of 10,000 {many:.0} ns");
        assert!(many <= 2.0 * few, "{few} {many}");
    }
}
