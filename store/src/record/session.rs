//! Reads ports and gives the recorder what they deliver, until they end or somebody says stop.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vnplug::{Next, Port, flags};
use vnplug_ring::control::code::PROTOCOL;

use super::{RING_FULL, Recorder, Status, now_ns};

/// A port and the interface that its packets belong to.
#[derive(Debug)]
pub struct Source {
    port: Port,
    interface: usize,
    ended: bool,
    /// Packets said that others were lost before the daemon.
    marked: bool,
}

impl Source {
    /// Packets of `port` are the interface's with this number ([`super::Settings::interfaces`]).
    pub fn new(port: Port, interface: usize) -> Self {
        Self {
            port,
            interface,
            ended: false,
            marked: false,
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
    pub fn new(sources: Vec<Source>, mut recorder: Recorder) -> Self {
        recorder.ports(sources.len());
        Self {
            sources,
            source_lost: vec![0; recorder.last_ns.len()],
            recorder,
            began_ns: now_ns(),
            told: 0,
            mute: false,
        }
    }

    /// Records until every port has ended, or `pulse` says true. It is asked ten times a second or
    /// more often, also while the disk takes nothing.
    ///
    /// # Errors
    /// A port failed; what was read is recorded all the same by [`finish`](Self::finish).
    pub fn run(&mut self, pulse: &mut dyn FnMut() -> bool) -> Result<(), vnplug::Error> {
        let mut looked = Instant::now();
        let mut asked = looked;
        loop {
            let mut taken = 0;
            for source in &mut self.sources {
                taken += match source.read(&mut self.recorder, pulse)? {
                    Some(packets) => packets,
                    None => return Ok(()),
                };
            }
            let now = Instant::now();
            if now.duration_since(looked) >= LOOK || taken == 0 {
                looked = now;
                self.recorder.flush_due(now);
                if pulse() {
                    return Ok(());
                }
            }
            if now.duration_since(asked) >= ASK {
                asked = now;
                self.ask_for_losses();
                self.tell_daemon();
            }
            if taken == 0 {
                if self.sources.iter().all(|source| source.ended) {
                    return Ok(());
                }
                self.recorder.idle();
                self.wait()?;
            }
        }
    }

    /// Records what came before this moment, writes everything and closes the files.
    pub fn finish(mut self) -> Status {
        let now = now_ns();
        let limit = Instant::now() + LAST_READ;
        for source in &mut self.sources {
            source.drain(&mut self.recorder, now, limit);
        }
        self.ask_for_losses();
        for source in &mut self.sources {
            let untold = source.port.dropped() - source.port.counts().lost;
            if untold > 0 {
                let from = self.recorder.last_ns.get(source.interface).copied();
                let from = from.filter(|&ns| ns > 0).unwrap_or(self.began_ns);
                self.recorder
                    .ledger
                    .lost_in_ring(from, now.max(from), untold, RING_FULL, false);
            }
        }
        self.sources.clear();
        self.recorder.finish()
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
            ("taken", status.taken),
            ("buffered", status.buffered()),
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
        let mut taken = 0;
        for packet in self.port.batch(BATCH) {
            let packet = packet?;
            self.marked |= packet.meta.flags & flags::SOURCE_LOSS != 0;
            if !recorder.take(self.interface, &packet, pulse) {
                return Ok(None);
            }
            taken += 1;
        }
        if taken > 0 {
            return Ok(Some(taken));
        }
        // Empties the doorbell and arms it; says why nothing came.
        match self.port.next()? {
            Next::Packet(packet) => match recorder.take(self.interface, &packet, pulse) {
                true => Ok(Some(1)),
                false => Ok(None),
            },
            Next::Nothing => Ok(Some(0)),
            Next::Ended => {
                self.ended = true;
                Ok(Some(0))
            }
        }
    }

    /// Takes what is in the ring at the end and came before `until_ns`. What is still there at the
    /// limit, since no buffer is free or the clock is another, is read without being taken, and counted.
    fn drain(&mut self, recorder: &mut Recorder, until_ns: u64, limit: Instant) {
        let mut takes = true;
        while !self.ended {
            let now = Instant::now();
            takes &= now < limit;
            if now >= limit + LAST_READ {
                return;
            }
            let mut read = 0;
            for packet in self.port.batch(BATCH) {
                let Ok(packet) = packet else { return };
                if packet.meta.ts_ns > until_ns {
                    return;
                }
                read += 1;
                if takes {
                    takes = recorder.take(self.interface, &packet, &mut || Instant::now() >= limit);
                } else {
                    recorder.refuse(self.interface, &packet, "the recorder ended");
                }
            }
            if read == 0 {
                return;
            }
        }
    }
}

/// How much a counter grew that may have begun anew, with the daemon; zero is also its silence.
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
