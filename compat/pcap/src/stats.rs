//! `pcap_stats`: exact counts, as Linux's libpcap means them.
//!
//! `ps_recv` counts the packets that passed the filter, those included that found the ring full and
//! those still unread; `ps_drop` those that found it full, and in a group those overwritten before
//! they were read; `ps_ifdrop` what the kernel dropped
//! before the daemon. The daemon counts; a new daemon counts from 0, so what was before is kept
//! here, as the packets themselves told it.
//!
//! The daemon is asked while the thread that receives goes on, so the two sides' counts are not of
//! one moment: `ps_recv` is the daemon's.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use vnplug::{Counted, Counts, Port};

use crate::abi::PcapStat;
use crate::handle::Handle;

/// What was said last, for who must not wait.
#[derive(Debug, Default)]
pub(crate) struct Last {
    recv: AtomicU32,
    drop: AtomicU32,
    ifdrop: AtomicU32,
}

impl Last {
    fn set(&self, stats: &PcapStat) {
        self.recv.store(stats.recv, Relaxed);
        self.drop.store(stats.drop, Relaxed);
        self.ifdrop.store(stats.ifdrop, Relaxed);
    }

    fn get(&self) -> PcapStat {
        PcapStat {
            recv: self.recv.load(Relaxed),
            drop: self.drop.load(Relaxed),
            ifdrop: self.ifdrop.load(Relaxed),
        }
    }
}

/// `pcap_stats`; `None` before activation.
///
/// A signal handler that interrupts this thread within the library gets the last answer.
pub(crate) fn of(handle: &Handle) -> Option<PcapStat> {
    let _visit = handle.visit();
    let stats = asking(|| ask(handle)).flatten();
    if let Some(stats) = &stats {
        handle.last.set(stats);
    }
    stats.or_else(|| handle.is_active().then(|| handle.last.get()))
}

/// Runs a question to the daemon that is no turn of the handle's. `None`: a signal handler comes here,
/// and this thread is in one already, with the connection locked.
pub(crate) fn asking<T>(ask: impl FnOnce() -> T) -> Option<T> {
    struct Over;
    impl Drop for Over {
        fn drop(&mut self) {
            ASKING.set(false);
        }
    }
    if ASKING.replace(true) {
        return None;
    }
    let _over = Over;
    Some(ask())
}

fn ask(handle: &Handle) -> Option<PcapStat> {
    let asker = handle.live(|live| live.port.asker())?;
    for _ in 0..ATTEMPTS {
        // A daemon that does not answer is not waited for: programs ask when they are to end.
        let host = asker.ask(PATIENCE).ok().flatten();
        let stats = handle.live(|live| {
            let number = live.port.number();
            match &host {
                // The port was reopened meanwhile.
                Some((asked, _)) if *asked != number => None,
                Some((_, host)) => Some(live.base.stats(&live.port, Some(host))),
                None => Some(live.base.stats(&live.port, None)),
            }
        })?;
        if stats.is_some() {
            return stats;
        }
    }
    handle.live(|live| live.base.stats(&live.port, None))
}

thread_local! {
    /// This thread is in [`asking`].
    static ASKING: Cell<bool> = const { Cell::new(false) };
}

/// More often than a port is reopened.
const ATTEMPTS: u32 = 3;
/// Longest wait for the daemon's counters.
const PATIENCE: Duration = Duration::from_secs(1);

/// What came before the port's present incarnation.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Base {
    reopened: u64,
    taken: u64,
    lost: u64,
    ifdrop: u64,
    last_ifdrop: u64,
}

impl Base {
    /// The first packet of a new incarnation was taken; `counts` has it already, and the `lost`
    /// before it.
    #[cold]
    pub(crate) fn restarted(&mut self, counts: Counts, lost: u32) {
        if counts.reopened != self.reopened {
            self.roll(Counts {
                received: counts.received - 1,
                lost: counts.lost - u64::from(lost),
                ..counts
            });
        }
    }

    fn roll(&mut self, counts: Counts) {
        self.reopened = counts.reopened;
        self.taken = counts.received;
        self.lost = counts.lost;
        self.ifdrop += std::mem::take(&mut self.last_ifdrop);
    }

    /// The counts now, with those of the host.
    fn stats(&mut self, port: &Port, host: Option<&Counted>) -> PcapStat {
        let own = port.counts();
        if own.reopened != self.reopened {
            // Nothing of the new incarnation was taken yet, or its first packet told.
            self.roll(own);
        }
        let (recv, drop, ifdrop) = match host {
            Some(host) => {
                let kinds = ["dropped_full", "dropped_budget", "dropped_quarantine"];
                let full: u64 = kinds.iter().map(|kind| value(host, kind)).sum();
                self.last_ifdrop = value(host, "source_kernel_dropped");
                let recv = self.taken + self.lost + value(host, "delivered") + full;
                // A member of a group loses packets that the daemon has delivered.
                let drop = (self.lost + full).max(port.dropped());
                (recv, drop, self.ifdrop + self.last_ifdrop)
            }
            // Nobody to ask: what the packets told, which is all that will ever come.
            None => {
                let unread: u64 = port.unread().map(|(_, unread)| unread).sum();
                let ifdrop = self.ifdrop + self.last_ifdrop;
                (own.received + own.lost + unread, own.lost, ifdrop)
            }
        };
        PcapStat {
            recv: recv as u32,
            drop: drop as u32,
            ifdrop: ifdrop as u32,
        }
    }
}

fn value(counted: &Counted, name: &str) -> u64 {
    let found = counted.values.iter().find(|(key, _)| key == name);
    found.map_or(0, |(_, value)| *value)
}
