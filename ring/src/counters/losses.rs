//! Where frames were lost on their way from the wire to a reader, and how fast counters grow.

use std::collections::BTreeMap;
use std::time::Duration;

use super::value;
use crate::control::Counted;

/// A place on the way where frames are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stage {
    /// Its name.
    pub name: &'static str,
    /// Things of this kind count it.
    pub kind: &'static str,
    /// The counters that add up to it.
    pub counters: &'static [&'static str],
    /// What a loss there means.
    pub help: &'static str,
}

/// From the wire to the reader. A frame that two readers lose counts twice from `ring` on.
pub const STAGES: [Stage; 6] = [
    Stage {
        name: "NIC",
        kind: "source",
        counters: &["nic_rx_missed", "nic_rx_fifo"],
        help: "before the kernel: a larger ring of the NIC, more queues",
    },
    Stage {
        name: "kernel",
        kind: "source",
        counters: &["kernel_dropped"],
        help: "the daemon does not run as often as it has to",
    },
    Stage {
        name: "ring",
        kind: "port",
        counters: &["dropped_full"],
        help: "the reader is too slow",
    },
    Stage {
        name: "budget",
        kind: "port",
        counters: &["dropped_budget"],
        help: "the reader's owner costs more than his share",
    },
    Stage {
        name: "quarantine",
        kind: "port",
        counters: &["dropped_quarantine"],
        help: "the reader broke the rules of the ring",
    },
    Stage {
        name: "switch",
        kind: "source",
        counters: &["out_dropped_full", "out_dropped_gone", "out_dropped_long"],
        help: "a port of a switch is too slow, or gone",
    },
];

impl Stage {
    /// What one thing lost there; `None` if it cannot.
    #[must_use]
    pub fn of(&self, thing: &Counted) -> Option<u64> {
        let values = self.counters.iter().filter_map(|name| value(thing, name));
        let of_kind = values.reduce(u64::saturating_add);
        of_kind.filter(|_| thing.kind == self.kind)
    }

    /// What all of them lost there.
    #[must_use]
    pub fn of_all(&self, all: &[Counted]) -> u64 {
        all.iter().filter_map(|it| self.of(it)).sum()
    }
}

/// What one thing lost, at all stages.
#[must_use]
pub fn lost(thing: &Counted) -> u64 {
    STAGES.iter().filter_map(|stage| stage.of(thing)).sum()
}

/// Two answers of a daemon, one after the other.
#[derive(Debug, Clone, Default)]
pub struct Growth {
    before: BTreeMap<(String, String), Counted>,
    apart: Duration,
}

impl Growth {
    /// From these counters on, which were asked so long before the next ones.
    #[must_use]
    pub fn since(before: Vec<Counted>, apart: Duration) -> Self {
        let keyed = before
            .into_iter()
            .map(|it| ((it.kind.clone(), it.name.clone()), it));
        Self {
            before: keyed.collect(),
            apart,
        }
    }

    /// How much something of a thing grew in a second; 0 if the thing is new, or began anew.
    pub fn of(&self, now: &Counted, figure: impl Fn(&Counted) -> u64) -> f64 {
        let key = (now.kind.clone(), now.name.clone());
        let before = self.before.get(&key).map(&figure);
        let seconds = self.apart.as_secs_f64();
        match before {
            Some(before) if seconds > 0.0 => figure(now).saturating_sub(before) as f64 / seconds,
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, full: u64) -> Counted {
        Counted {
            kind: "port".into(),
            name: name.into(),
            labels: Vec::new(),
            values: vec![("dropped_full".into(), full), ("dropped_budget".into(), 2)],
        }
    }

    #[test]
    fn losses_are_known_by_their_stage() {
        let all = [port("1", 10), port("2", 5)];
        let of = |name: &str| {
            let stage = STAGES.iter().find(|it| it.name == name).unwrap();
            stage.of_all(&all)
        };
        assert_eq!((of("ring"), of("budget"), of("kernel")), (15, 4, 0));
        assert_eq!(lost(&all[0]), 12);
    }

    #[test]
    fn every_stage_counts_what_a_table_has() {
        for stage in STAGES {
            for name in stage.counters {
                assert!(super::super::find(stage.kind, name).is_some(), "{name}");
            }
        }
    }

    #[test]
    fn growth_is_per_second_and_what_is_new_has_none() {
        let growth = Growth::since(vec![port("1", 10)], Duration::from_secs(2));
        let figure = |it: &Counted| value(it, "dropped_full").unwrap_or(0);
        assert_eq!(growth.of(&port("1", 30), figure), 10.0);
        assert_eq!(growth.of(&port("2", 30), figure), 0.0);
        // Another daemon's: it began anew.
        assert_eq!(growth.of(&port("1", 3), figure), 0.0);
        assert_eq!(Growth::default().of(&port("1", 3), figure), 0.0);
    }
}
