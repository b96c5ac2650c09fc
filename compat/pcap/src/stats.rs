//! `pcap_stats`: exact counts, as Linux's libpcap means them.
//!
//! `ps_recv` counts the packets that passed the filter, those included that found the ring full and
//! those still unread; `ps_drop` those that found it full, and in a group those overwritten before
//! they were read; `ps_ifdrop` what the kernel dropped
//! before the daemon. The daemon counts; a new daemon counts from 0, so what was before is kept
//! here, as the packets themselves told it.

use vnplug::{Counted, Counts, Port};

use crate::abi::PcapStat;

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

    /// The counts now.
    pub(crate) fn stats(&mut self, port: &mut Port) -> PcapStat {
        let host = port.stats().ok().and_then(|stats| stats.host);
        let own = port.counts();
        if own.reopened != self.reopened {
            // Nothing of the new incarnation was taken yet, or its first packet told.
            self.roll(own);
        }
        let (recv, drop, ifdrop) = match host {
            Some(host) => {
                let full = value(&host, "dropped_full") + value(&host, "dropped_quarantine");
                self.last_ifdrop = value(&host, "source_kernel_dropped");
                let recv = self.taken + self.lost + value(&host, "delivered") + full;
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
