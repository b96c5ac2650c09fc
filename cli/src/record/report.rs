//! What `vnplug record` says while it works, and at its end.

use std::time::{Duration, Instant};

use vnplug_store::name;
use vnplug_store::record::{LaneStatus, Status};

use super::closed;
use crate::out;
use crate::text::{counted, grouped};

/// Says how it goes, now and then.
pub(super) struct Reports {
    every: Duration,
    /// Only if packets were lost since.
    of_losses: bool,
    at: Instant,
    before: (u64, u64),
    /// Packets that were lost, and gaps of unknown size.
    lost: (u64, u64),
}

impl Reports {
    pub(super) fn new(every: Option<Duration>) -> Self {
        use std::io::IsTerminal;
        let of_losses = every.is_none() && !std::io::stderr().is_terminal();
        let unasked = if of_losses { LOSSES } else { ONCE_A_SECOND };
        Self {
            every: every.unwrap_or(unasked),
            of_losses,
            at: Instant::now(),
            before: (0, 0),
            lost: (0, 0),
        }
    }

    pub(super) fn tick(&mut self, now: Instant, status: impl FnOnce() -> Status) {
        let passed = now.saturating_duration_since(self.at);
        if self.every.is_zero() || passed < self.every {
            return;
        }
        let status = status();
        let lost = (status.lost(), status.gaps);
        let loses = lost != self.lost;
        if loses || !self.of_losses {
            self.say(&status, passed, loses);
        }
        self.at = now;
        self.before = (status.taken, status.taken_bytes);
        self.lost = lost;
    }

    fn say(&self, status: &Status, passed: Duration, loses: bool) {
        let per_second = |count: u64, before: u64| (count - before) as f64 / passed.as_secs_f64();
        let packets = per_second(status.taken, self.before.0);
        let bytes = per_second(status.taken_bytes, self.before.1);
        let line = format!(
            "{}, {} packets/s, {:.1} MB/s, {} lost{}, {}{}{}{}{}",
            counted(status.taken, "packet"),
            grouped(packets as u64),
            bytes / 1e6,
            grouped(status.lost()),
            gaps(status),
            mark(status),
            duplicates(status),
            events(status),
            closed::told(status),
            paused(status),
        );
        match loses {
            true => out::warn(&line),
            false => out::note(&line),
        }
    }
}

/// How often it reports by itself: on a terminal, and elsewhere if packets were lost.
const ONCE_A_SECOND: Duration = Duration::from_secs(1);
const LOSSES: Duration = Duration::from_secs(10);

/// `durable up to packet N (TIME)`.
fn mark(status: &Status) -> String {
    let stopped = match status.mark < status.settled {
        true => " and, but for what was lost, beyond",
        false => "",
    };
    match status.mark {
        0 => "nothing durable yet".into(),
        mark => format!(
            "durable up to packet {} ({}){stopped}",
            grouped(mark),
            name::time(status.mark_ns)
        ),
    }
}

/// What triggers did, if there are any.
fn events(status: &Status) -> String {
    let Some(trigger) = &status.trigger else {
        return String::new();
    };
    let early = match trigger.early {
        0 => String::new(),
        early => format!(", {} too early for want of memory", grouped(early)),
    };
    let writing = if trigger.writing { " (one now)" } else { "" };
    format!(
        "; {}{writing}, {} passed over{early}",
        counted(trigger.events, "event"),
        counted(trigger.passed_over, "packet"),
    )
}

/// What was left out, if that was asked for.
fn duplicates(status: &Status) -> String {
    let Some(duplicates) = &status.duplicates else {
        return String::new();
    };
    let forgotten = match duplicates.forgotten {
        0 => String::new(),
        forgotten => format!(", {} forgotten too early", grouped(forgotten)),
    };
    format!(", {}{forgotten}", counted(duplicates.packets, "duplicate"))
}

/// Where an unknown number is missing.
fn gaps(status: &Status) -> String {
    match status.gaps {
        0 => String::new(),
        1 => ", 1 gap of unknown size".to_owned(),
        gaps => format!(", {} gaps of unknown size", grouped(gaps)),
    }
}

fn paused(status: &Status) -> String {
    let paused = status.lanes.iter().filter(|lane| !lane.paused.is_empty());
    paused
        .map(|lane| format!("; {} PAUSED: {}", lane.directory, lane.paused))
        .collect()
}

pub(super) fn summary(status: &Status) -> String {
    let part = |count: u64, words: &str| match count {
        0 => String::new(),
        _ => format!(", {} {words}", grouped(count)),
    };
    let sum = |of: fn(&LaneStatus) -> u64| status.lanes.iter().map(of).sum();
    format!(
        "{} recorded, {}{}{}{}{}{}{}{}{}{}{}{}",
        counted(status.durable, "packet"),
        mark(status),
        part(status.lost_ring, "lost in the ring"),
        part(status.lost_source, "lost before the daemon"),
        part(status.lost_disk, "not taken by the disk"),
        part(
            status.lost_unknown,
            "written but never confirmed by the disk"
        ),
        gaps(status),
        part(sum(|lane| lane.recycled), "old files recycled"),
        part(
            sum(|lane| lane.recycled_read),
            "of them while somebody read them"
        ),
        part(
            sum(|lane| lane.readers_cut),
            "taken from their readers for want of room"
        ),
        duplicates(status),
        events(status),
        closed::told(status),
    )
}

/// Says what the end waits for, as long as it lasts.
pub(super) fn ending<T>(every: Duration, tell: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
    let (done, is_done) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let tell = &tell;
        scope.spawn(move || {
            while let Err(std::sync::mpsc::RecvTimeoutError::Timeout) = is_done.recv_timeout(every)
            {
                tell();
            }
        });
        let result = work();
        drop(done);
        result
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn an_end_that_lasts_says_what_it_waits_for() {
        let told = AtomicU32::new(0);
        let tell = || {
            told.fetch_add(1, Ordering::Relaxed);
        };
        assert_eq!(ending(Duration::from_secs(60), tell, || 7), 7);
        assert_eq!(told.load(Ordering::Relaxed), 0);
        ending(Duration::from_millis(1), tell, || {
            while told.load(Ordering::Relaxed) < 2 {
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn one_packet_is_singular() {
        let status = Status {
            durable: 1,
            mark: 1,
            ..Status::default()
        };
        let words = summary(&status);
        assert!(
            words.starts_with("1 packet recorded, durable up to packet 1 "),
            "{words}"
        );
    }
}
