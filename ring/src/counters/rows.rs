//! What stands in a row for a source, a port, a virtual machine: figures of the last answer, and rates.

use super::{Course, label, lost, value};
use crate::control::Counted;

/// A source, now. Rates are per second.
#[derive(Debug)]
pub struct SourceRow<'a> {
    /// The source.
    pub thing: &'a Counted,
    /// What it is: `af_packet`, `gen`.
    pub kind: &'a str,
    /// How its queues are.
    pub state: &'a str,
    /// A queue is neither up nor ended.
    pub is_bad: bool,
    /// Frames that arrived.
    pub seen: f64,
    /// Bits that were read.
    pub bits: f64,
    /// Frames that were lost, in a second and in all.
    pub lost: (f64, u64),
    /// Frames that the kernel dropped because nobody wanted them.
    pub early: f64,
    /// For how long the daemon may stand still, if it is known.
    pub patience_ms: Option<u64>,
}

/// A port, now. Rates are per second.
#[derive(Debug)]
pub struct PortRow<'a> {
    /// The port.
    pub thing: &'a Counted,
    /// What it reads; of one that takes part in a switch, its port there.
    pub device: String,
    /// The reader's own words.
    pub reader: &'a str,
    /// The first word about how it is.
    pub state: &'a str,
    /// It is not open.
    pub is_bad: bool,
    /// Frames delivered.
    pub delivered: f64,
    /// Bits delivered.
    pub bits: f64,
    /// Frames that were lost, in a second and in all.
    pub lost: (f64, u64),
    /// For how long the reader may stand still, if it is known.
    pub patience_ms: Option<u64>,
    /// Whose it is: `uid 0`, `vm NAME`.
    pub owner: &'a str,
    /// The group that it is a member of, or nothing.
    pub group: &'a str,
}

/// A virtual machine, now. Rates are per second.
#[derive(Debug)]
pub struct VmRow<'a> {
    /// The machine.
    pub thing: &'a Counted,
    /// How it is attached.
    pub kind: &'a str,
    /// How it is.
    pub state: &'a str,
    /// It is not ready.
    pub is_bad: bool,
    /// Its ports.
    pub ports: u64,
    /// Frames delivered to its ports.
    pub delivered: f64,
    /// Frames that its ports lost.
    pub lost: f64,
    /// Bytes of its pool.
    pub pool_bytes: u64,
    /// Bytes of the pool that are in use.
    pub used_bytes: u64,
}

impl VmRow<'_> {
    /// How much of the pool is in use.
    #[must_use]
    pub fn used_percent(&self) -> f64 {
        self.used_bytes as f64 * 100.0 / self.pool_bytes.max(1) as f64
    }
}

impl Course {
    /// All sources.
    #[must_use]
    pub fn sources(&self) -> Vec<SourceRow<'_>> {
        self.rows("source", |it| {
            let state = label(it, "state");
            let is_well = |word: &str| matches!(word, "up" | "ended");
            SourceRow {
                thing: it,
                kind: label(it, "kind"),
                state,
                is_bad: !state.split(',').all(is_well),
                seen: self.rate(it, |it| of(it, "seen")),
                bits: self.bits(it),
                lost: (self.rate(it, lost), lost(it)),
                early: self.rate(it, |it| of(it, "early")),
                patience_ms: value(it, "patience_ms"),
            }
        })
    }

    /// All ports.
    #[must_use]
    pub fn ports(&self) -> Vec<PortRow<'_>> {
        self.rows("port", |it| {
            let state = label(it, "state").split(':').next().unwrap_or_default();
            PortRow {
                thing: it,
                device: device(it),
                reader: label(it, "label"),
                state,
                is_bad: state != "open",
                delivered: self.rate(it, |it| of(it, "delivered")),
                bits: self.bits(it),
                lost: (self.rate(it, lost), lost(it)),
                patience_ms: value(it, "patience_ms"),
                owner: label(it, "owner"),
                group: label(it, "group"),
            }
        })
    }

    /// All virtual machines.
    #[must_use]
    pub fn vms(&self) -> Vec<VmRow<'_>> {
        self.rows("vm", |it| {
            let owner = format!("vm {}", it.name);
            let is_own = |port: &&Counted| port.kind == "port" && label(port, "owner") == owner;
            let own: Vec<&Counted> = self.now().iter().filter(is_own).collect();
            let sum = |figure: fn(&Counted) -> u64| -> f64 {
                own.iter().map(|port| self.rate(port, figure)).sum()
            };
            let (state, pool_bytes) = (label(it, "state"), of(it, "pool_bytes"));
            VmRow {
                thing: it,
                kind: label(it, "kind"),
                state,
                is_bad: state != "ready",
                ports: own.len() as u64,
                delivered: sum(|it| of(it, "delivered")),
                lost: sum(lost),
                pool_bytes,
                used_bytes: pool_bytes.saturating_sub(of(it, "pool_free")),
            }
        })
    }

    fn rows<'a, T>(&'a self, kind: &str, row: impl Fn(&'a Counted) -> T) -> Vec<T> {
        let things = self.now().iter().filter(|it| it.kind == kind);
        things.map(row).collect()
    }

    fn bits(&self, thing: &Counted) -> f64 {
        self.rate(thing, |it| of(it, "bytes").saturating_mul(8))
    }
}

/// What a port reads; of one that takes part in a switch, its port there.
#[must_use]
pub fn device(port: &Counted) -> String {
    let device = label(port, "device");
    match label(port, "switch_port") {
        "" => device.to_owned(),
        number => format!("{device}/port{number}"),
    }
}

fn of(thing: &Counted, name: &str) -> u64 {
    value(thing, name).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    fn counted(kind: &str, name: &str, labels: &[(&str, &str)], values: &[(&str, u64)]) -> Counted {
        let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into()));
        Counted {
            kind: kind.into(),
            name: name.into(),
            labels: labels.collect(),
            values: values.iter().map(|(k, v)| ((*k).into(), *v)).collect(),
        }
    }

    #[test]
    fn a_machine_has_what_its_ports_have() {
        let at = |n: u64| {
            let port = |id: &str, owner: &str| {
                let labels = [("owner", owner), ("state", "quarantined: it lied")];
                counted(
                    "port",
                    id,
                    &labels,
                    &[("delivered", 10 * n), ("dropped_full", n)],
                )
            };
            let pool = [("pool_bytes", 100), ("pool_free", 25)];
            vec![
                port("1", "vm a"),
                port("2", "vm a"),
                port("3", "uid 0"),
                counted("vm", "a", &[("state", "ready")], &pool),
                counted("vm", "b", &[("state", "waiting")], &[]),
                counted("source", "s", &[("state", "up,behind")], &[]),
                counted("source", "t", &[("state", "up,ended")], &[]),
            ]
        };
        let mut course = Course::default();
        let start = Instant::now();
        course.heard(start, at(0));
        course.heard(start + Duration::from_secs(1), at(1));
        let [a, b] = &course.vms()[..] else { panic!() };
        assert_eq!(
            (a.ports, a.delivered, a.lost, a.is_bad),
            (2, 20.0, 2.0, false)
        );
        assert_eq!((a.used_bytes, a.used_percent()), (75, 75.0));
        assert_eq!((b.ports, b.used_percent(), b.is_bad), (0, 0.0, true));
        let port = &course.ports()[0];
        assert_eq!(
            (port.state, port.is_bad, port.lost),
            ("quarantined", true, (1.0, 1))
        );
        assert_eq!(port.patience_ms, None);
        let bad: Vec<bool> = course.sources().iter().map(|it| it.is_bad).collect();
        assert_eq!(bad, [true, false]);
    }
}
