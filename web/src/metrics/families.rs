//! The daemon's counters as metrics with values.

use std::collections::BTreeSet;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use vnplug::Counted;
use vnplug_ring::control::HOST_PREFIX;
use vnplug_ring::counters::{Account, Counter, accounts, label, value};

use super::known::{self, Fact, GROUP_LABELS, Metric};
use crate::ask::Told;
use crate::text::escape;

/// All metrics, or, if the daemon did not answer, that it did not. `most` is how many ports are shown.
pub(crate) fn text(told: Option<&Told>, most: usize) -> Result<String, fmt::Error> {
    let mut all = Families(vec![gauge(known::UP, one(told.is_some()))]);
    if let Some(told) = told {
        all.tell(told, most);
    }
    let mut registry = Registry::default();
    registry.register_collector(Box::new(all));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

type Labels = Vec<(&'static str, String)>;

#[derive(Debug, Clone, Copy)]
enum Value {
    Grows(u64),
    Now(f64),
}

impl Value {
    fn encode(self, encoder: MetricEncoder<'_>) -> fmt::Result {
        match self {
            Self::Grows(value) => ConstCounter::new(value).encode(encoder),
            Self::Now(value) => ConstGauge::new(value).encode(encoder),
        }
    }
}

#[derive(Debug)]
struct Family {
    /// With the unit, without `_total`.
    name: String,
    unit: Option<&'static str>,
    help: String,
    is_now: bool,
    series: Vec<(Labels, Value)>,
}

#[derive(Debug)]
struct Families(Vec<Family>);

impl Families {
    fn tell(&mut self, told: &Told, most: usize) {
        let (counted, left_out) = bounded(&told.counted, most);
        let of = |kind: &'static str| counted.iter().copied().filter(move |it| it.kind == kind);
        let open = accounts(&told.counted);
        let open = open
            .iter()
            .filter(|it| !it.closes())
            .collect::<Vec<&Account>>();
        self.0.extend([
            gauge(known::ANSWER, told.took.as_secs_f64()),
            gauge(known::ACCOUNTS, open.len() as f64),
            gauge(known::PORTS_LEFT_OUT, left_out as f64),
            gauges(known::DAEMON_INFO, of("daemon"), |_| 1.0),
            gauges(known::SOURCE_INFO, of("source"), |_| 1.0),
            gauges(known::SOURCE_UP, of("source"), is_up),
            gauges(known::PORT_INFO, of("port"), |_| 1.0),
            gauges(known::QUARANTINED, of("port"), |port| {
                one(label(port, "state").starts_with("quarantined"))
            }),
            gauges(known::VM_INFO, of("vm"), |_| 1.0),
            gauges(known::VM_READY, of("vm"), |vm| {
                one(label(vm, "state") == "ready")
            }),
        ]);
        for metric in known::metrics() {
            let family = family(&metric, of(metric.of));
            // A generator's figures are of generators, a switch's of switches.
            self.0
                .extend(Some(family).filter(|it| !it.series.is_empty()));
        }
    }
}

/// The first ports, so that nobody's ports make the answer larger than it may be, and how many were left out.
/// Numbers of ports only rise: those that are shown stay shown.
fn bounded(all: &[Counted], most: usize) -> (Vec<&Counted>, usize) {
    let number = |it: &&Counted| it.name.parse().unwrap_or(u64::MAX);
    let (mut ports, mut rest): (Vec<&Counted>, Vec<&Counted>) =
        all.iter().partition(|it| it.kind == "port");
    ports.sort_by_key(number);
    let (mut shown, mut left_out) = (0, ports.len().saturating_sub(most));
    ports.truncate(most);
    rest.retain(|it| {
        let is_shown = it.kind != "switch_port" || shown < most;
        match (it.kind == "switch_port", is_shown) {
            (true, true) => shown += 1,
            (true, false) => left_out += 1,
            (false, _) => {}
        }
        is_shown
    });
    rest.extend(ports);
    (rest, left_out)
}

fn family<'a>(metric: &Metric, things: impl Iterator<Item = &'a Counted>) -> Family {
    let is_group = metric.labels == GROUP_LABELS;
    let mut seen = BTreeSet::new();
    let mut series = Vec::new();
    for thing in things {
        let labels = labels(thing, metric.labels);
        // Each member of a group tells the group's.
        if is_group && (label(thing, "group").is_empty() || !seen.insert(labels.clone())) {
            continue;
        }
        for counter in &metric.counters {
            let Some(value) = value(thing, counter.name) else {
                continue;
            };
            let mut labels = labels.clone();
            if metric.has_fates() {
                labels.push(("fate", counter.name.to_owned()));
            }
            series.push((labels, shown(counter, value)));
        }
    }
    Family {
        name: metric.name.clone(),
        unit: metric.unit,
        help: metric.help.to_owned(),
        is_now: metric.is_now,
        series,
    }
}

fn shown(counter: &Counter, value: u64) -> Value {
    match counter.is_now {
        true => Value::Now(value as f64 / known::scale(counter.unit)),
        false => Value::Grows(value),
    }
}

fn gauge(fact: Fact, value: f64) -> Family {
    Family {
        name: fact.name.to_owned(),
        unit: fact.unit,
        help: fact.help.to_owned(),
        is_now: true,
        series: vec![(Vec::new(), Value::Now(value))],
    }
}

fn gauges<'a>(
    fact: Fact,
    things: impl Iterator<Item = &'a Counted>,
    value: impl Fn(&Counted) -> f64,
) -> Family {
    let series = things.map(|it| (labels(it, fact.labels), Value::Now(value(it))));
    Family {
        series: series.collect(),
        ..gauge(fact, 0.0)
    }
}

fn one(yes: bool) -> f64 {
    f64::from(u8::from(yes))
}

fn is_up(source: &Counted) -> f64 {
    let mut queues = label(source, "state").split(',');
    // `waiting` is a file or a generator that waits for a reader, or a FIFO for its writer; an interface that is not
    // there is `missing` or `gone`, but for one that is opened for its first reader only (`start=attach`).
    one(queues.all(|state| matches!(state, "up" | "behind" | "ended" | "waiting")))
}

/// Labels of these names, in the words of the daemon, of readers and of whoever named a source; nothing of
/// what they wrote that a terminal would act on.
fn labels(thing: &Counted, names: &[&'static str]) -> Labels {
    let named = |name: &&'static str| (*name, escape(&label_of(thing, name)));
    names.iter().map(named).collect()
}

fn label_of(thing: &Counted, name: &str) -> String {
    let own = match (thing.kind.as_str(), name) {
        ("port", "source") => {
            let device = label(thing, "device");
            let device = device.strip_prefix(HOST_PREFIX).unwrap_or(device);
            device.split('/').next().unwrap_or_default()
        }
        ("switch_port", "switch") => thing.name.split('/').next().unwrap_or_default(),
        ("switch_port", "port") => {
            let port = thing.name.rsplit('/').next().unwrap_or_default();
            port.strip_prefix("port").unwrap_or(port)
        }
        ("source", "source" | "switch")
        | ("port", "port")
        | ("vm", "vm")
        | ("backend", "backend") => &thing.name,
        ("port", "reader") => label(thing, "label"),
        (_, name) => label(thing, name),
    };
    own.to_owned()
}

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in &self.0 {
            let unit = family.unit.map(|unit| Unit::Other(unit.to_owned()));
            // The crate adds the unit.
            let suffix = family.unit.map_or(String::new(), |unit| format!("_{unit}"));
            let name = family.name.strip_suffix(&suffix).unwrap_or(&family.name);
            let kind = match family.is_now {
                true => MetricType::Gauge,
                false => MetricType::Counter,
            };
            let mut encoder = encoder.encode_descriptor(name, &family.help, unit.as_ref(), kind)?;
            match &family.series[..] {
                [(labels, value)] if labels.is_empty() => value.encode(encoder)?,
                all => {
                    for (labels, value) in all {
                        value.encode(encoder.encode_family(labels)?)?;
                    }
                }
            }
        }
        Ok(())
    }
}
