//! Reads ports and gives the recorder what they deliver, until they end or somebody says stop.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vnplug::{Next, Port, flags};

use super::{Recorder, Status, now_ns};

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
}

impl Session {
    /// Nothing is read before [`run`](Self::run).
    pub fn new(sources: Vec<Source>, recorder: Recorder) -> Self {
        Self {
            sources,
            recorder,
            began_ns: now_ns(),
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
            }
            if taken == 0 {
                if self.sources.iter().all(|source| source.ended) {
                    return Ok(());
                }
                self.wait()?;
            }
        }
    }

    /// Writes everything and closes the files.
    pub fn finish(mut self) -> Status {
        self.ask_for_losses();
        let now = now_ns();
        for source in &mut self.sources {
            let untold = source.port.dropped() - source.port.counts().lost;
            if untold > 0 {
                let from = self.recorder.last_ns.get(source.interface).copied();
                let from = from.filter(|&ns| ns > 0).unwrap_or(self.began_ns);
                self.recorder
                    .ledger
                    .lost_in_ring(from, now.max(from), untold);
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
        let total = lost.iter().sum();
        self.recorder
            .ledger
            .lost_at_source(self.began_ns, now_ns(), total);
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
}

const BATCH: usize = 256;
const LOOK: Duration = Duration::from_millis(50);
const ASK: Duration = Duration::from_secs(1);
