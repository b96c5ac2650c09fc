//! Reads ports and gives the recorder what they deliver, until they end or somebody says stop.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vnplug::{Next, Packet, Port, flags};
use vnplug_ring::control::code::PROTOCOL;
use vnplug_ring::layout::RECORD_HEADER;

use super::{RING_FULL, Recorder, Status, now_ns};

/// A port and the interface that its packets belong to.
#[derive(Debug)]
pub struct Source {
    port: Port,
    interface: usize,
    ended: bool,
    /// Packets said that others were lost before the daemon.
    marked: bool,
    /// Times the port was opened again, of which a packet told.
    reopened: u64,
    rest: Rest,
}

/// Of each ring of a port, by its queue's number: packets that it held at some moment and that were
/// not read since.
#[derive(Debug, Default)]
struct Rest(Vec<(u16, u64)>);

impl Source {
    /// Packets of `port` are the interface's with this number ([`super::Settings::interfaces`]).
    pub fn new(port: Port, interface: usize) -> Self {
        Self {
            port,
            interface,
            ended: false,
            marked: false,
            reopened: 0,
            rest: Rest::default(),
        }
    }
}

/// Ports that are being recorded.
#[derive(Debug)]
pub struct Session {
    sources: Vec<Source>,
    recorder: Recorder,
    began_ns: u64,
    /// What the daemon last said of each interface: packets lost before it.
    source_lost: Vec<u64>,
    /// The books as they were when the daemon was told of them.
    told: u64,
    /// The daemon is too old to be told.
    mute: bool,
}

impl Session {
    /// Nothing is read before [`run`](Self::run).
    pub fn new(sources: Vec<Source>, recorder: Recorder) -> Self {
        let mut session = Self {
            sources,
            source_lost: vec![0; recorder.last_ns.len()],
            recorder,
            began_ns: now_ns(),
            told: 0,
            mute: false,
        };
        session.recorder.ledger.since(now_ns());
        session.look_behind();
        session
    }

    /// Records until every port has ended, or `pulse` says true. It is asked ten times a second or
    /// more often, also while the disk takes nothing. A port that fails has ended; the others go on.
    ///
    /// # Errors
    /// The first failure of a port; what was read is recorded all the same by
    /// [`finish`](Self::finish).
    pub fn run(&mut self, pulse: &mut dyn FnMut() -> bool) -> Result<(), vnplug::Error> {
        let mut failed = Ok(());
        let mut looked = Instant::now();
        let mut asked = looked;
        loop {
            let mut taken = 0;
            for source in &mut self.sources {
                match source.read(&mut self.recorder, pulse) {
                    Ok(Some(packets)) => taken += packets,
                    Ok(None) => return failed,
                    Err(error) => {
                        source.fail(&mut self.recorder, &error, self.began_ns);
                        failed = failed.and(Err(error));
                    }
                }
            }
            self.look_behind();
            let now = Instant::now();
            if now.duration_since(looked) >= LOOK || taken == 0 {
                looked = now;
                self.recorder.ledger.beat(now_ns());
                self.recorder.flush_due(now);
                if pulse() {
                    return failed;
                }
            }
            if now.duration_since(asked) >= ASK {
                asked = now;
                self.ask_for_losses();
                self.tell_daemon();
            }
            if taken == 0 {
                if self.sources.iter().all(|source| source.ended) {
                    return failed;
                }
                self.recorder.idle();
                self.wait()?;
            }
        }
    }

    /// Records what is in the rings at this moment, writes everything and closes the files.
    pub fn finish(mut self) -> Status {
        self.drain();
        self.ask_for_losses();
        for source in &mut self.sources {
            let untold = source.port.dropped() - source.port.counts().lost;
            source.lose(&mut self.recorder, untold, RING_FULL, self.began_ns);
            if source.port.counts().reopened > source.reopened {
                // No packet came since.
                let (from_ns, now_ns) = source.since(&self.recorder, self.began_ns);
                self.recorder.gap(source.interface, from_ns, now_ns, false);
            }
        }
        self.sources.clear();
        self.recorder.finish()
    }

    /// Reads what the rings hold now: this many packets, whatever their stamps say, for they may be of
    /// another clock. What is not read at the limit, since no buffer is free, is counted.
    fn drain(&mut self) {
        let limit = Instant::now() + LAST_READ;
        let mut late = || Instant::now() >= limit;
        for source in self.sources.iter_mut().filter(|source| !source.ended) {
            source.rest = Rest::of(&source.port);
        }
        let mut reads = true;
        while reads && !late() {
            reads = false;
            for source in self.sources.iter_mut().filter(|it| !it.rest.is_empty()) {
                let read = source.read_batch(&mut self.recorder, &mut late);
                // `None`: no buffer was free up to the limit.
                reads |= matches!(read, Ok(Some(1..)));
            }
        }
        for source in &mut self.sources {
            let left = std::mem::take(&mut source.rest).count();
            source.lose(
                &mut self.recorder,
                left,
                "the recorder ended",
                self.began_ns,
            );
        }
    }

    /// Tells the recorder what cannot come any more, where one ring may be behind another.
    fn look_behind(&mut self) {
        let rings: usize = self.sources.iter().map(|it| it.port.ring_count()).sum();
        let is_read = self.sources.iter().all(|source| source.rest.is_empty());
        if rings > 1 && is_read && self.recorder.rings_were_read() {
            for source in self.sources.iter_mut().filter(|source| !source.ended) {
                source.rest = Rest::of(&source.port);
            }
        }
    }

    /// The recorder.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    /// Asks the daemon what was lost before it, where packets say that something was.
    fn ask_for_losses(&mut self) {
        let mut lost = vec![0; self.recorder.last_ns.len()];
        for source in self.sources.iter_mut().filter(|source| source.marked) {
            let host = source.port.stats().ok().and_then(|stats| stats.host);
            let values = host.map(|host| host.values).unwrap_or_default();
            let value = values
                .iter()
                .find(|(key, _)| key == "source_kernel_dropped");
            if let (Some((_, value)), Some(lost)) = (value, lost.get_mut(source.interface)) {
                *lost = *value.max(lost);
            }
        }
        let each = self.source_lost.iter_mut().zip(lost);
        let more = each.map(|(seen, now)| grown(seen, now)).sum();
        self.recorder
            .ledger
            .lost_at_source(self.began_ns, now_ns(), more);
    }

    /// Tells the daemon how far the recording is durable, for `vnplug stats`.
    fn tell_daemon(&mut self) {
        let status = self.recorder.ledger.status();
        if self.mute || status.revision == self.told {
            return;
        }
        self.told = status.revision;
        let paused = status.lanes.iter().filter(|lane| !lane.paused.is_empty());
        let values = [
            ("durable_packets", status.mark),
            ("durable_time_ns", status.mark_ns),
            ("settled_packets", status.settled),
            ("taken", status.taken),
            ("buffered", status.buffered),
            ("lost_ring", status.lost_ring),
            ("lost_source", status.lost_source),
            ("lost_disk", status.lost_disk),
            ("lost_unknown", status.lost_unknown),
            ("paused_directories", paused.count() as u64),
        ];
        for source in self.sources.iter_mut().filter(|source| !source.ended) {
            match source.port.note(&values) {
                Err(vnplug::Error::Refused { code, .. }) if code == PROTOCOL => {
                    log::info!("the daemon is too old to show the durable mark in `vnplug stats`");
                    self.mute = true;
                    return;
                }
                // It is told a second later.
                Ok(()) | Err(_) => {}
            }
        }
    }

    /// Sleeps until a port has something, or it is time to look at other things.
    fn wait(&mut self) -> Result<(), vnplug::Error> {
        let ports = self.sources.iter().filter(|source| !source.ended);
        let mut fds: Vec<PollFd<'_>> = ports
            .map(|source| PollFd::new(&source.port, PollFlags::IN))
            .collect();
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK.as_nanos() as i64,
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(vnplug::Error::System {
                what: "poll",
                errno,
            }),
        }
    }
}

impl Source {
    /// Reads what is there: how many packets; `None` if it is to stop.
    fn read(
        &mut self,
        recorder: &mut Recorder,
        pulse: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, vnplug::Error> {
        if self.ended {
            return Ok(Some(0));
        }
        match self.read_batch(recorder, pulse)? {
            Some(0) => {}
            read => return Ok(read),
        }
        // Empties the doorbell and arms it; says why nothing came.
        let packet = match self.port.next()? {
            Next::Packet(packet) => packet,
            Next::Nothing => return Ok(Some(0)),
            Next::Ended => {
                self.ended = true;
                return Ok(Some(0));
            }
        };
        self.rest.pass(&packet);
        self.marked |= packet.meta.flags & flags::SOURCE_LOSS != 0;
        let gap = packet.meta.flags & flags::GAP != 0;
        let taken = recorder.take(self.interface, &packet, pulse);
        if gap {
            self.reopened = self.port.counts().reopened;
        }
        Ok(taken.then_some(1))
    }

    /// As many of the packets that are there as are read at once.
    fn read_batch(
        &mut self,
        recorder: &mut Recorder,
        pulse: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, vnplug::Error> {
        let mut taken = 0;
        let reopened = self.port.counts().reopened;
        for packet in self.port.batch(BATCH) {
            let mut packet = packet?;
            self.rest.pass(&packet);
            self.marked |= packet.meta.flags & flags::SOURCE_LOSS != 0;
            if packet.meta.flags & flags::GAP != 0 {
                // Each ring tells of the same restart.
                if self.reopened == reopened {
                    packet.meta.flags &= !flags::GAP;
                }
                self.reopened = reopened;
            }
            if !recorder.take(self.interface, &packet, pulse) {
                return Ok(None);
            }
            taken += 1;
        }
        if taken == 0 {
            // Whatever the rings said: they are others since, after a restart of the daemon.
            self.rest = Rest::default();
        }
        Ok(Some(taken))
    }

    /// The port failed: nothing more comes through it.
    fn fail(&mut self, recorder: &mut Recorder, error: &vnplug::Error, began_ns: u64) {
        self.ended = true;
        self.rest = Rest::default();
        log::error!(
            "{}: {error}; nothing more is recorded of it",
            self.port.device()
        );
        let unread = Rest::of(&self.port).count();
        self.lose(recorder, unread, &error.to_string(), began_ns);
    }

    /// Packets after the last one that was taken are lost.
    fn lose(&self, recorder: &mut Recorder, packets: u64, reason: &str, began_ns: u64) {
        if packets > 0 {
            let (from_ns, now_ns) = self.since(recorder, began_ns);
            let ledger = &recorder.ledger;
            ledger.lost_in_ring(from_ns, now_ns, packets, reason, false);
        }
    }

    /// From the last packet that was taken until now.
    fn since(&self, recorder: &Recorder, began_ns: u64) -> (u64, u64) {
        let last = recorder.last_ns.get(self.interface).copied();
        let from_ns = last.filter(|&ns| ns > 0).unwrap_or(began_ns);
        (from_ns, now_ns().max(from_ns))
    }
}

impl Rest {
    fn of(port: &Port) -> Self {
        // NB: in a ring that was overwritten the count may be anything.
        let most = port.ring_bytes() / RECORD_HEADER;
        let unread = port
            .unread()
            .map(|(queue, unread)| (queue, unread.min(most)));
        Self(unread.filter(|&(_, unread)| unread > 0).collect())
    }

    /// A packet was read.
    #[inline]
    fn pass(&mut self, packet: &Packet<'_>) {
        let of = |(queue, _): &(u16, u64)| *queue == packet.meta.queue;
        if let Some(at) = self.0.iter().position(of) {
            self.0[at].1 -= 1;
            if self.0[at].1 == 0 {
                self.0.swap_remove(at);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|(_, unread)| unread).sum()
    }
}

/// How much a counter grew that may have begun again, with the daemon; zero is also its silence.
fn grown(seen: &mut u64, now: u64) -> u64 {
    let more = now.checked_sub(*seen).unwrap_or(now);
    if now > 0 {
        *seen = now;
    }
    more
}

const BATCH: usize = 256;
/// How long the rest of the rings may take at the end. A disk that stands still has as long.
const LAST_READ: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(50);
const ASK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::grown;

    #[test]
    fn a_counter_that_began_anew_is_added() {
        let mut seen = 0;
        let more: u64 = [0, 5, 5, 12, 0, 3, 4]
            .map(|now| grown(&mut seen, now))
            .iter()
            .sum();
        assert_eq!(more, 12 + 4);
    }
}
