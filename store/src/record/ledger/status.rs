//! A copy of the books, and `NAME.state`, the file that they are kept in.

use serde_json::{Value, json};

use crate::archive::ArchiveStatus;
use crate::name;
use crate::record::dedup::DedupStatus;

/// A copy of the books. Numbers are those of this run of the recorder; [`Status::earlier`] has those
/// before it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// The recording's name.
    pub recording: String,
    /// Which run of the recorder this is.
    pub run: Run,
    /// Grows with every change during a run.
    pub revision: u64,
    /// When the recorder last looked at its rings, or waited for a buffer: nanoseconds since 1970, at most a
    /// second old while it works.
    pub heartbeat_ns: u64,
    /// The number of the next segment.
    pub next_sequence: u64,
    /// Packets read from the ring.
    pub taken: u64,
    /// Their captured bytes.
    pub taken_bytes: u64,
    /// Packets that are on the disk for certain.
    pub durable: u64,
    /// Packets in chunks that are under way to the disk.
    pub buffered: u64,
    /// The durable mark: all packets up to this number are on the disk.
    pub mark: u64,
    /// The mark's time, nanoseconds since 1970: every packet taken so far whose stamp is earlier is on the
    /// disk. 0 before the first packet. It goes back if a packet comes with an
    /// earlier stamp.
    pub mark_ns: u64,
    /// Packets that are on the disk or counted as lost, all up to this number.
    pub settled: u64,
    /// As [`mark_ns`](Self::mark_ns): none of an earlier stamp waits for the disk.
    pub settled_ns: u64,
    /// The most by which a packet's stamp was earlier than the mark's time when the packet came.
    pub late_ns: u64,
    /// Lost because the ring was full: the disk was too slow, or had none.
    pub lost_ring: u64,
    /// Lost before the daemon, by the kernel or the NIC, as the daemon knows.
    pub lost_source: u64,
    /// Taken, and not written: the disk refused.
    pub lost_disk: u64,
    /// Written, and the disk failed to say that it is durable: readable or not.
    pub lost_unknown: u64,
    /// Times an unknown number of packets is missing, since the daemon was started again.
    pub gaps: u64,
    /// With triggers: what they did.
    pub trigger: Option<TriggerStatus>,
    /// With de-duplication: what was left out; those packets were never taken.
    pub duplicates: Option<DedupStatus>,
    /// What became of closed segments, if anything is done with them.
    pub archive: Option<ArchiveStatus>,
    /// The directories.
    pub lanes: Vec<LaneStatus>,
    /// The latest losses, oldest first, those of earlier runs among them.
    pub losses: Vec<Loss>,
    /// Losses of this run that are no longer in that list.
    pub older_losses: u64,
    /// The runs before.
    pub earlier: Earlier,
}

/// From one start of the recorder to its end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Run {
    /// Counted from 1 as long as a `NAME.state` of the run before is there.
    pub number: u64,
    /// When it began, nanoseconds since 1970.
    pub started_ns: u64,
    /// From when on packets are recorded: every ring was open. 0 before.
    pub since_ns: u64,
    /// The number of its first segment.
    pub first_sequence: u64,
    /// It ended, with everything written or counted.
    pub ended: bool,
}

/// The sums of all runs before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Earlier {
    /// How many.
    pub runs: u64,
    /// Of them, those that did not end: killed, or without power.
    pub cut: u64,
    /// Packets taken, as far as the last state of each run tells.
    pub taken: u64,
    /// Their captured bytes.
    pub taken_bytes: u64,
    /// Packets that are, or were before they were recycled, on the disk for certain.
    pub durable: u64,
    /// Lost in the ring.
    pub lost_ring: u64,
    /// Lost before the daemon.
    pub lost_source: u64,
    /// Not taken by the disk.
    pub lost_disk: u64,
    /// Not confirmed by the disk.
    pub lost_unknown: u64,
    /// Times an unknown number is missing.
    pub gaps: u64,
    /// With triggers: what waited in memory and was not asked for.
    pub passed_over: u64,
    /// Taken and not yet confirmed in the last state of runs that were cut: on the disk or not. With
    /// triggers, what waited in memory is among it.
    pub open: u64,
}

/// What triggers did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TriggerStatus {
    /// Events: each has segments of its own.
    pub events: u64,
    /// Packets that matched, and commands; several may be of one event.
    pub triggers: u64,
    /// An event is being recorded.
    pub writing: bool,
    /// Packets that waited in memory and were not asked for.
    pub passed_over: u64,
    /// Of them, those that went before their time since memory was short.
    pub early: u64,
    /// What the latest event says about itself.
    pub last_event: String,
}

/// What is known of one directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LaneStatus {
    /// The directory.
    pub directory: String,
    /// The segment that is being written, or was last.
    pub segment: String,
    /// It is being written; not kept in the file.
    pub open: bool,
    /// Its bytes that are durable.
    pub offset: u64,
    /// Its packets that are durable.
    pub packets: u64,
    /// The latest stamp of those.
    pub last_ns: u64,
    /// Segments that were recycled.
    pub recycled: u64,
    /// Of them, those that somebody was reading.
    pub recycled_read: u64,
    /// Of those, the ones that were taken from their readers, since their room was needed.
    pub readers_cut: u64,
    /// Why nothing is written now; empty = it is.
    pub paused: String,
    /// Segments that were given up because of an error.
    pub poisoned: u64,
}

/// Packets that are missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loss {
    /// The run it happened in.
    pub run: u64,
    /// Between this stamp, nanoseconds since 1970,
    pub from_ns: u64,
    /// and this one.
    pub to_ns: u64,
    /// How many; nobody knows of a `gap`, and it is 0.
    pub packets: u64,
    /// `ring`, `disk`, `unknown`, `source`, `gap`.
    pub kind: String,
    /// The segment that they may be in; empty = in none.
    pub segment: String,
    /// Why, in words.
    pub reason: String,
}

impl Loss {
    /// As a comment in a capture file.
    pub fn words(&self) -> String {
        let place = match self.segment.as_str() {
            "" => "are missing".to_owned(),
            segment => format!("may be missing in {segment}"),
        };
        let (from, to) = (name::time(self.from_ns), name::time(self.to_ns));
        let (packets, reason) = (self.packets, &self.reason);
        let packets = match self.is_gap() {
            true => "an unknown number of".to_owned(),
            false => packets.to_string(),
        };
        format!("{packets} packets between {from} and {to} {place}: {reason}")
    }

    /// Whether nobody knows how many they are.
    pub fn is_gap(&self) -> bool {
        self.kind == GAP
    }

    /// Whether both are one, since they came soon after each other.
    pub(super) fn is_with(&self, other: &Self) -> bool {
        self.run == other.run
            && self.kind == other.kind
            && self.segment == other.segment
            && self.reason == other.reason
            && other.from_ns <= self.to_ns.saturating_add(SAME_NS)
            && self.from_ns <= other.to_ns.saturating_add(SAME_NS)
    }

    pub(super) fn join(&mut self, other: &Self) {
        self.packets += other.packets;
        self.from_ns = self.from_ns.min(other.from_ns);
        self.to_ns = self.to_ns.max(other.to_ns);
    }

    fn to_json(&self) -> Value {
        json!({
            "run": self.run,
            "from": name::time(self.from_ns), "to": name::time(self.to_ns),
            "packets": (!self.is_gap()).then_some(self.packets), "kind": self.kind,
            "segment": self.segment, "reason": self.reason,
        })
    }

    fn of(value: &Value) -> Self {
        let time = |key| name::parse_time(&text(value, key)).unwrap_or(0);
        Self {
            run: number(value, "/run"),
            from_ns: time("/from"),
            to_ns: time("/to"),
            packets: number(value, "/packets"),
            kind: text(value, "/kind"),
            segment: text(value, "/segment"),
            reason: text(value, "/reason"),
        }
    }
}

impl TriggerStatus {
    fn to_json(&self) -> Value {
        json!({
            "events": self.events, "triggers": self.triggers, "writing": self.writing,
            "passed_over": self.passed_over, "passed_over_early": self.early,
            "last_event": self.last_event,
        })
    }

    fn of(value: &Value) -> Self {
        Self {
            events: number(value, "/events"),
            triggers: number(value, "/triggers"),
            writing: value.pointer("/writing").and_then(Value::as_bool) == Some(true),
            passed_over: number(value, "/passed_over"),
            early: number(value, "/passed_over_early"),
            last_event: text(value, "/last_event"),
        }
    }
}

impl DedupStatus {
    fn to_json(self) -> Value {
        json!({
            "packets": self.packets, "bytes": self.bytes, "forgotten": self.forgotten,
        })
    }

    fn of(value: &Value) -> Self {
        Self {
            packets: number(value, "/packets"),
            bytes: number(value, "/bytes"),
            forgotten: number(value, "/forgotten"),
        }
    }
}

impl ArchiveStatus {
    fn to_json(&self) -> Value {
        json!({
            "segments": self.segments, "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after, "waiting": self.waiting, "left": self.left,
            "encrypted_only": self.hurried, "trouble": self.trouble,
        })
    }

    fn of(value: &Value) -> Self {
        Self {
            segments: number(value, "/segments"),
            bytes_before: number(value, "/bytes_before"),
            bytes_after: number(value, "/bytes_after"),
            waiting: number(value, "/waiting"),
            left: number(value, "/left"),
            hurried: number(value, "/encrypted_only"),
            trouble: text(value, "/trouble"),
        }
    }
}

impl LaneStatus {
    fn to_json(&self) -> Value {
        json!({
            "directory": self.directory, "segment": self.segment, "offset": self.offset,
            "packets": self.packets, "last_ns": self.last_ns, "recycled": self.recycled,
            "recycled_while_read": self.recycled_read, "taken_from_readers": self.readers_cut,
            "poisoned": self.poisoned, "paused": self.paused,
        })
    }

    fn of(value: &Value) -> Self {
        Self {
            directory: text(value, "/directory"),
            segment: text(value, "/segment"),
            open: false,
            offset: number(value, "/offset"),
            packets: number(value, "/packets"),
            last_ns: number(value, "/last_ns"),
            recycled: number(value, "/recycled"),
            recycled_read: number(value, "/recycled_while_read"),
            readers_cut: number(value, "/taken_from_readers"),
            poisoned: number(value, "/poisoned"),
            paused: text(value, "/paused"),
        }
    }
}

impl Earlier {
    /// With the run that a state file is of.
    pub(super) fn with(last: &Status) -> Self {
        let mut all = last.earlier.clone();
        all.runs += 1;
        all.cut += u64::from(!last.run.ended);
        all.taken += last.taken;
        all.taken_bytes += last.taken_bytes;
        all.durable += last.durable;
        all.lost_ring += last.lost_ring;
        all.lost_source += last.lost_source;
        all.lost_disk += last.lost_disk;
        all.lost_unknown += last.lost_unknown;
        all.gaps += last.gaps;
        let trigger = last.trigger.as_ref();
        all.passed_over += trigger.map_or(0, |status| status.passed_over);
        all.open += last.buffered;
        all
    }
}

impl Status {
    /// By how much the account does not close: taken packets of which nobody knows what became of them,
    /// or, below zero, packets that were counted twice. Anything but 0 is a defect.
    pub fn unexplained(&self) -> i64 {
        let passed_over = self.trigger.as_ref().map_or(0, |status| status.passed_over);
        let lost = self.lost_disk + self.lost_unknown;
        let explained = self.durable + self.buffered + lost + passed_over;
        self.taken.wrapping_sub(explained) as i64
    }

    /// All of this run that is known to be missing.
    pub fn lost(&self) -> u64 {
        self.lost_ring + self.lost_source + self.lost_disk + self.lost_unknown
    }

    /// The state file's text; `now_ns` is when it is written.
    pub fn to_json(&self, now_ns: u64) -> String {
        let lost = |ring: u64, source: u64, disk: u64, unknown: u64| json!({ "ring": ring, "source": source, "disk": disk, "unknown": unknown });
        let earlier = &self.earlier;
        let value = json!({
            "version": 1,
            "recording": self.recording,
            "run": {
                "number": self.run.number,
                "started_ns": self.run.started_ns, "started": name::time(self.run.started_ns),
                "since_ns": self.run.since_ns,
                "since": (self.run.since_ns > 0).then(|| name::time(self.run.since_ns)),
                "first_sequence": self.run.first_sequence, "ended": self.run.ended,
            },
            "revision": self.revision,
            "written_ns": now_ns,
            "heartbeat_ns": self.heartbeat_ns,
            "next_sequence": self.next_sequence,
            "durable_mark": { "packets": self.mark, "time_ns": self.mark_ns, "time": name::time(self.mark_ns) },
            "settled_mark": { "packets": self.settled, "time_ns": self.settled_ns, "time": name::time(self.settled_ns) },
            "late_ns": self.late_ns,
            "taken": self.taken,
            "taken_bytes": self.taken_bytes,
            "durable": self.durable,
            "buffered": self.buffered,
            "unexplained": self.unexplained(),
            "lost": lost(self.lost_ring, self.lost_source, self.lost_disk, self.lost_unknown),
            "gaps": self.gaps,
            "trigger": self.trigger.as_ref().map(TriggerStatus::to_json),
            "duplicates": self.duplicates.map(DedupStatus::to_json),
            "archive": self.archive.as_ref().map(ArchiveStatus::to_json),
            "disks": self.lanes.iter().map(LaneStatus::to_json).collect::<Vec<_>>(),
            "losses": self.losses.iter().map(Loss::to_json).collect::<Vec<_>>(),
            "older_losses": self.older_losses,
            "earlier": {
                "runs": earlier.runs, "cut": earlier.cut, "taken": earlier.taken,
                "taken_bytes": earlier.taken_bytes, "durable": earlier.durable,
                "passed_over": earlier.passed_over, "open": earlier.open, "gaps": earlier.gaps,
                "lost": lost(
                    earlier.lost_ring, earlier.lost_source, earlier.lost_disk, earlier.lost_unknown,
                ),
            },
        });
        format!("{value:#}\n")
    }

    /// Reads what [`to_json`](Self::to_json) wrote, or an earlier version of it; `None` if it is no
    /// recording's state.
    pub fn from_json(bytes: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        if value.get("version")?.as_u64()? != 1 {
            return None;
        }
        let list = |key: &str| value.get(key).and_then(Value::as_array);
        Some(Self {
            recording: value.get("recording")?.as_str()?.to_owned(),
            run: Run {
                number: number(&value, "/run/number"),
                started_ns: number(&value, "/run/started_ns"),
                since_ns: number(&value, "/run/since_ns"),
                first_sequence: number(&value, "/run/first_sequence"),
                ended: value.pointer("/run/ended").and_then(Value::as_bool) == Some(true),
            },
            revision: number(&value, "/revision"),
            heartbeat_ns: number(&value, "/heartbeat_ns"),
            next_sequence: number(&value, "/next_sequence"),
            taken: number(&value, "/taken"),
            taken_bytes: number(&value, "/taken_bytes"),
            durable: number(&value, "/durable"),
            buffered: number(&value, "/buffered"),
            mark: number(&value, "/durable_mark/packets"),
            mark_ns: number(&value, "/durable_mark/time_ns"),
            settled: number(&value, "/settled_mark/packets"),
            settled_ns: number(&value, "/settled_mark/time_ns"),
            late_ns: number(&value, "/late_ns"),
            lost_ring: number(&value, "/lost/ring"),
            lost_source: number(&value, "/lost/source"),
            lost_disk: number(&value, "/lost/disk"),
            lost_unknown: number(&value, "/lost/unknown"),
            gaps: number(&value, "/gaps"),
            trigger: value
                .get("trigger")
                .filter(|value| value.is_object())
                .map(TriggerStatus::of),
            duplicates: value
                .get("duplicates")
                .filter(|value| value.is_object())
                .map(DedupStatus::of),
            archive: value
                .get("archive")
                .filter(|value| value.is_object())
                .map(ArchiveStatus::of),
            lanes: list("disks").map_or(Vec::new(), |all| all.iter().map(LaneStatus::of).collect()),
            losses: list("losses").map_or(Vec::new(), |all| all.iter().map(Loss::of).collect()),
            older_losses: number(&value, "/older_losses"),
            earlier: Earlier {
                runs: number(&value, "/earlier/runs"),
                cut: number(&value, "/earlier/cut"),
                taken: number(&value, "/earlier/taken"),
                taken_bytes: number(&value, "/earlier/taken_bytes"),
                durable: number(&value, "/earlier/durable"),
                gaps: number(&value, "/earlier/gaps"),
                passed_over: number(&value, "/earlier/passed_over"),
                open: number(&value, "/earlier/open"),
                lost_ring: number(&value, "/earlier/lost/ring"),
                lost_source: number(&value, "/earlier/lost/source"),
                lost_disk: number(&value, "/earlier/lost/disk"),
                lost_unknown: number(&value, "/earlier/lost/unknown"),
            },
        })
    }
}

/// What is not there was zero before it had a name.
fn number(value: &Value, pointer: &str) -> u64 {
    let number = value.pointer(pointer).and_then(Value::as_u64);
    number.unwrap_or(0)
}

fn text(value: &Value, pointer: &str) -> String {
    let text = value.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_default().to_owned()
}

/// The kind of a loss whose number nobody knows.
pub(super) const GAP: &str = "gap";
/// Losses of one kind within a second are one.
const SAME_NS: u64 = 1_000_000_000;
