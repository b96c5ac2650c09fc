//! Counters as they are told to clients.
//!
//! Every source is snapshot between two batches of its threads, so the identities hold in every
//! answer, also under load:
//!
//! - K: `seen = read + kernel_dropped + early + program + in_kernel`, where `in_kernel` is counted in the receive ring
//!   itself, and so can contradict: 0 at rest
//! - R: `duties = Σ offered of its ports + departed_offered`, where `duties` adds up, for each
//!   frame read, the subscribers of that moment (a cluster is one)
//! - S, for each port: `offered = refused + paused + direction + filtered + ruled_out +
//!   sampled_out + program + delivered + dropped_full + dropped_budget + dropped_quarantine`
//!
//! - T, for each port that sends, and for each source: `send_taken = sent + send_dropped_full +
//!   send_dropped_length + send_dropped_link + send_dropped_unsupported`
//!
//! `source_kernel_dropped` of a port is what the kernel dropped of its queues since it was attached:
//! lost before any port, and so in none of the sums.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Instant;

use vnplug_ring::control::{
    Counted, Device, Direction, ENTRANCE_PREFIX, HOST_PREFIX, Message, Tuning,
};

use super::asking::Heard;
use super::policy::{Policy, Sight};
use super::{Hub, Owed, Peer, Source, Step};
use vnplug_filter::IndexSize;
use vnplug_path::engine::sender::SendCounters;
use vnplug_path::engine::{Asked, Command, PortSnapshot, Snapshot};
use vnplug_path::fanout::FanoutCounters;
use vnplug_path::source::af_packet::Interface;
use vnplug_path::source::{Latency, QueueCounters};

impl Hub {
    /// The sources that a viewer may see.
    pub fn devices(
        &self,
        viewer: &Peer,
        sight: impl Fn(&str, Option<NonZeroU16>) -> Sight,
        policy: &Policy,
    ) -> Vec<Device> {
        let operator = policy.is_operator(viewer);
        // What the host is called on its networks is not the guests' business.
        let is_user = matches!(viewer, Peer::User(_));
        self.inquiry.look(self.interfaces(), is_user);
        let addresses = match is_user {
            true => self.inquiry.addresses(),
            false => Arc::default(),
        };
        let device = |number: usize, source: &Source| {
            let ports = self
                .ports
                .values()
                .filter(|port| port.source == number)
                .count();
            let asked = source.interface.as_ref();
            let facts = asked.map(|it| it.facts()).unwrap_or_default();
            let here = asked.filter(|it| it.is_here());
            let addresses = here.and_then(|it| addresses.get(it.name()));
            Device {
                name: format!("{HOST_PREFIX}{}", source.name),
                kind: source.kind.to_owned(),
                state: words(source.workers.iter().map(|it| it.pulse().state())),
                description: source.about(),
                queues: source.workers.len() as u32,
                ports: if operator { ports as u32 } else { 0 },
                link_type: source.link_type,
                mtu: facts.mtu,
                speed_mbps: facts.speed_mbps,
                mac: facts.mac,
                addresses: addresses.cloned().unwrap_or_default(),
            }
        };
        self.present()
            .flat_map(|(number, source)| {
                let ports = |port| sight(&source.name, Some(port));
                let ports = self.port_devices(number, ports, operator);
                let whole = sight(&source.name, None) != Sight::Nothing;
                let whole = whole.then(|| device(number, source));
                whole.into_iter().chain(ports)
            })
            .collect()
    }

    /// Those of all sources.
    fn interfaces(&self) -> Vec<Arc<Interface>> {
        let all = self.present().filter_map(|(_, it)| it.interface.clone());
        all.collect()
    }

    /// All counters, for an operator, and what else there is to tell.
    pub(crate) fn counters(&mut self, more: Vec<Counted>) -> Step {
        let queues = self.present();
        let queues: Vec<(usize, usize)> = queues
            .flat_map(|(source, it)| (0..it.workers.len()).map(move |queue| (source, queue)))
            .collect();
        self.inquiry.look(self.interfaces(), false);
        self.look(queues, Asked::All, |hub, looked| {
            let mut all = hub.all_counters(&looked);
            all.extend(more);
            all
        })
    }

    /// Asks queues for their counters, tells what these say.
    fn look(
        &mut self,
        queues: Vec<(usize, usize)>,
        asked: Asked,
        tell: impl FnOnce(&mut Self, Looked) -> Vec<Counted> + 'static,
    ) -> Step {
        let ask = |&(source, queue): &(usize, usize)| {
            let line = self.sources[source].workers[queue].line();
            Owed::ask(line, |reply| Command::Snapshot(asked.clone(), reply))
        };
        let owed = queues.iter().map(ask).collect();
        Step::after(owed, move |hub, heard| {
            let mut looked = Looked::new();
            for ((source, queue), heard) in queues.into_iter().zip(heard) {
                let part = hub.part(source, queue, &asked, heard);
                looked.entry(source).or_default().push(part);
            }
            Step::Done(Ok(Message::Counters(tell(hub, looked))))
        })
    }

    /// What a queue told, or what it told last, with a word on how old that is.
    fn part(&mut self, source: usize, queue: usize, asked: &Asked, heard: Heard<Snapshot>) -> Part {
        let now = Instant::now();
        let complaint = match heard {
            Ok(snapshot) => {
                for port in &snapshot.ports {
                    if let (Asked::These(_), Some(it)) = (asked, self.ports.get_mut(&port.id)) {
                        it.last.insert(queue, port.clone());
                    }
                }
                if *asked == Asked::All {
                    self.last.insert((source, queue), (now, snapshot.clone()));
                }
                return Part {
                    snapshot,
                    complaint: None,
                };
            }
            Err(missing) => missing.complaint,
        };
        let (age, mut snapshot) = match self.last.get(&(source, queue)) {
            Some((at, last)) => (
                format!("its figures are {} s old", at.elapsed().as_secs()),
                last.clone(),
            ),
            None => ("it has told no figures yet".into(), Snapshot::default()),
        };
        if let Asked::These(ids) = asked {
            let told = |id: &u32| {
                let own = self.ports.get(id).and_then(|port| port.last.get(&queue));
                own.or_else(|| snapshot.ports.iter().find(|port| port.id == *id))
                    .cloned()
            };
            snapshot.ports = ids.iter().filter_map(told).collect();
        }
        snapshot.state = "stalled".into();
        Part {
            snapshot,
            complaint: Some(format!("{complaint}; {age}")),
        }
    }

    fn all_counters(&self, looked: &Looked) -> Vec<Counted> {
        let mut all = vec![Counted {
            kind: "daemon".into(),
            name: "vnplugd".into(),
            labels: vec![("version".into(), env!("CARGO_PKG_VERSION").into())],
            values: vec![
                ("ports_opened".into(), self.opened),
                ("ports_closed".into(), self.closed),
                ("ports".into(), self.ports.len() as u64),
            ],
        }];
        all[0].values.extend(self.jit.counters());
        for (number, _) in self.present() {
            let snapshots = looked.get(&number).map_or(&[][..], Vec::as_slice);
            all.push(self.source_counters(number, snapshots));
            let parts = ports_of(snapshots);
            for (id, part) in &parts {
                let mut counted = port_counted(part, false);
                tell_sends(&mut counted, snapshots, *id);
                tell_stall(&mut counted.labels, snapshots);
                // One that was closed meanwhile was there when it was counted.
                let only = self.ports.get(id).and_then(|record| record.only);
                let device = self.device_name(number, only);
                counted.labels.push(("device".into(), device));
                if let Some(record) = self.ports.get(id) {
                    let owner = match &record.owner {
                        Peer::User(uid) => format!("uid {uid}"),
                        Peer::Vm(name) => format!("vm {name}"),
                    };
                    let cluster = record
                        .cluster
                        .as_ref()
                        .map_or(String::new(), |(.., name)| name.clone());
                    counted.labels.extend([
                        ("owner".into(), owner),
                        ("label".into(), record.label.clone()),
                        ("filter".into(), record.filter.clone()),
                        ("tuning".into(), tuning(&record.tuning)),
                        ("cluster".into(), cluster),
                    ]);
                    if let Some(revoked) = record.revoked.text() {
                        counted.labels.push(("revoked".into(), revoked.into()));
                    }
                    if let Some(member) = record.member {
                        counted
                            .labels
                            .push(("switch_port".into(), member.to_string()));
                    }
                    if let Some(key) = &record.group {
                        counted.labels.push(("group".into(), key.name.clone()));
                        counted.values.extend(self.group_counters(key));
                    }
                    record.rules.tell(&mut counted);
                    record.tell_notes(&mut counted);
                    counted
                        .values
                        .push(("filter_version".into(), record.filter_version));
                    counted.values.push(("ring_bytes".into(), record.capacity));
                    // A member of a group has descriptors in its ring.
                    if record.group.is_none() {
                        let rings = record.capacity * record.queues.len().max(1) as u64;
                        let patience = record.pace.lasts_ms(&part.counters, rings);
                        counted.values.push(("patience_ms".into(), patience));
                    }
                }
                all.push(counted);
            }
        }
        all
    }

    /// The counters of these ports as their readers may see them: what the operator's filter
    /// refused was never there.
    pub(crate) fn port_counters(&mut self, ids: Vec<u32>) -> Step {
        let ports = ids.iter().filter_map(|id| self.ports.get(id));
        let queues: BTreeSet<(usize, usize)> = ports
            .flat_map(|port| port.queues.iter().map(|&queue| (port.source, queue)))
            .collect();
        let queues = queues.into_iter().collect();
        self.look(queues, Asked::These(ids.clone()), move |hub, looked| {
            hub.own_counters(&ids, &looked)
        })
    }

    fn own_counters(&self, ids: &[u32], looked: &Looked) -> Vec<Counted> {
        let mut all = Vec::new();
        for (&source, snapshots) in looked {
            let here = |id: &&u32| self.ports.get(id).is_some_and(|it| it.source == source);
            let own: Vec<u32> = ids.iter().filter(here).copied().collect();
            let parts = ports_of(snapshots);
            for id in &own {
                if let (Some(part), Some(record)) = (parts.get(id), self.ports.get(id)) {
                    let mut counted = port_counted(part, true);
                    tell_sends(&mut counted, snapshots, *id);
                    tell_stall(&mut counted.labels, snapshots);
                    let device = self.device_name(record.source, record.only);
                    counted.labels.push(("device".into(), device));
                    counted
                        .labels
                        .push(("filter".into(), record.filter.clone()));
                    if let Some(revoked) = record.revoked.text() {
                        counted.labels.push(("revoked".into(), revoked.into()));
                    }
                    record.rules.tell(&mut counted);
                    record.tell_notes(&mut counted);
                    // The library tells it when the ring's life is `Failed`.
                    if let Some(failure) = failure_of(snapshots) {
                        counted.labels.push(("failure".into(), failure));
                    }
                    all.push(counted);
                }
            }
        }
        all
    }

    fn source_counters(&self, number: usize, snapshots: &[Part]) -> Counted {
        let source = &self.sources[number];
        let mut queue = QueueCounters::default();
        let mut fanout = FanoutCounters::default();
        let mut sends = SendCounters::default();
        for Part { snapshot, .. } in snapshots {
            queue.add(&snapshot.queue);
            fanout.add(&snapshot.fanout);
            sends.add(&snapshot.sends);
        }
        let mut labels = vec![
            ("kind".into(), source.kind.into()),
            (
                "state".into(),
                words(snapshots.iter().map(|it| it.snapshot.state.as_str())),
            ),
            ("description".into(), source.about()),
        ];
        let entrances = source.board.iter().flat_map(|board| board.entrances());
        labels.extend(entrances.map(|(name, path)| {
            let path = path.display().to_string();
            (format!("{ENTRANCE_PREFIX}{name}"), path)
        }));
        let early = source.early.standing();
        if !early.is_empty() {
            labels.push(("early_drop".into(), early));
        }
        tell_stall(&mut labels, snapshots);
        if let Some(failure) = failure_of(snapshots) {
            labels.push(("failure".into(), failure));
        }
        // A port has its filter in each of its queues.
        let filters = |what: fn(&IndexSize) -> usize| {
            let sizes = snapshots.iter().map(|it| what(&it.snapshot.filters));
            sizes.max().unwrap_or(0) as u64
        };
        let ports = snapshots.iter().flat_map(|it| &it.snapshot.ports);
        let cut = ports.map(|port| port.counters.cut).sum::<u64>() + fanout.departed.cut;
        let mut values = queue.named();
        values.extend([
            ("read".into(), fanout.read),
            ("bytes".into(), fanout.bytes),
            ("filters_keyed".into(), filters(|size| size.keyed)),
            ("filters_scanned".into(), filters(|size| size.scanned)),
            ("filter_fields".into(), filters(|size| size.fields)),
            // What a super-frame became, its port had to judge and its port accounts for.
            ("duties".into(), fanout.duties + cut),
            (
                "departed_offered".into(),
                fanout.departed.offered + fanout.departed.cut,
            ),
            (
                "departed_accounted".into(),
                fanout.departed.accounted() + fanout.departed.cut,
            ),
            ("departed_delivered".into(), fanout.departed.delivered),
            ("departed_dropped_full".into(), fanout.departed.dropped_full),
            (
                "departed_dropped_budget".into(),
                fanout.departed.dropped_budget,
            ),
        ]);
        values.extend(source.interface.iter().flat_map(|it| it.counters()));
        if source.transmits {
            values.extend(sends.named());
        }
        let measured = snapshots.iter().filter_map(|it| it.snapshot.latency);
        let latency = measured.reduce(|mut all, more| {
            all.add(&more);
            all
        });
        values.extend(latency.iter().flat_map(Latency::named));
        // A source that has such counters has one queue.
        let own = snapshots.iter().map(|it| &it.snapshot.own);
        values.extend(own.flatten().cloned());
        Counted {
            kind: "source".into(),
            name: source.name.clone(),
            labels,
            values,
        }
    }
}

/// What a queue told, now or some time ago.
struct Part {
    snapshot: Snapshot,
    /// Why it is not of now.
    complaint: Option<String>,
}

/// By source what its queues told.
type Looked = BTreeMap<usize, Vec<Part>>;

/// Says of figures that they are old, and why.
fn tell_stall(labels: &mut Vec<(String, String)>, snapshots: &[Part]) {
    let mut complaints = snapshots.iter().filter_map(|it| it.complaint.as_ref());
    labels.extend(complaints.next().map(|it| ("stalled".into(), it.clone())));
}

fn failure_of(snapshots: &[Part]) -> Option<String> {
    let mut failures = snapshots.iter().map(|it| &it.snapshot.failure);
    failures.find_map(Clone::clone)
}

/// Each port as one, over its queues.
fn ports_of(snapshots: &[Part]) -> BTreeMap<u32, PortSnapshot> {
    let mut ports: BTreeMap<u32, PortSnapshot> = BTreeMap::new();
    for part in snapshots.iter().flat_map(|it| &it.snapshot.ports) {
        let port = ports.entry(part.id).or_default();
        port.id = part.id;
        port.counters.add(&part.counters);
        port.kernel_dropped += part.kernel_dropped;
        port.quarantined = port.quarantined.take().or_else(|| part.quarantined.clone());
    }
    ports
}

/// Adds what became of the frames that a port sent, if it sends.
fn tell_sends(counted: &mut Counted, snapshots: &[Part], id: u32) {
    let mut all = snapshots.iter().flat_map(|it| &it.snapshot.senders);
    if let Some((_, counters)) = all.find(|(sender, _)| *sender == id) {
        counted.values.extend(counters.named());
    }
}

fn port_counted(port: &PortSnapshot, hide_refused: bool) -> Counted {
    let counters = &port.counters;
    let hidden = if hide_refused { counters.refused } else { 0 };
    let offered = counters.offered + counters.cut - hidden;
    let mut values = vec![("offered".to_owned(), offered)];
    if !hide_refused {
        values.push(("refused".into(), counters.refused));
    }
    values.extend([
        ("paused".into(), counters.paused),
        ("direction".into(), counters.direction),
        ("filtered".into(), counters.filtered),
        ("ruled_out".into(), counters.ruled_out),
        ("sampled_out".into(), counters.sampled_out),
        ("program".into(), counters.program),
        ("delivered".into(), counters.delivered),
        ("dropped_full".into(), counters.dropped_full),
        ("dropped_budget".into(), counters.dropped_budget),
        ("dropped_quarantine".into(), counters.dropped_quarantine),
        ("cut".into(), counters.cut),
        ("bytes".into(), counters.bytes),
        ("rings".into(), counters.rings),
        ("source_kernel_dropped".into(), port.kernel_dropped),
    ]);
    let state = match &port.quarantined {
        None => "open".to_owned(),
        Some(why) => format!("quarantined: {why}"),
    };
    Counted {
        kind: "port".into(),
        name: port.id.to_string(),
        labels: vec![("state".into(), state)],
        values,
    }
}

/// How a port is tuned, as far as that is not the usual.
fn tuning(tuning: &Tuning) -> String {
    let direction = match tuning.direction {
        Direction::Both => None,
        Direction::Rx => Some("received only".to_owned()),
        Direction::Tx => Some("sent only".to_owned()),
    };
    let sample = (tuning.sample > 1).then(|| format!("one in {}", tuning.sample));
    let paused = (!tuning.enabled).then(|| "paused".to_owned());
    let words: Vec<String> = [paused, direction, sample].into_iter().flatten().collect();
    words.join(", ")
}

/// The words of a source's queues, each once where they are alike.
fn words<'a>(of: impl Iterator<Item = &'a str>) -> String {
    let mut words: Vec<&str> = of.collect();
    words.dedup();
    if words.is_empty() {
        "stopped".to_owned()
    } else {
        words.join(",")
    }
}
