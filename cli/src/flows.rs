//! `vnplug flows`: who spoke with whom in a recording, and how much.

mod ipfix;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vnplug_store::extract::{Extract, Flow, Flows as Table, Query, Step, Sum};
use vnplug_store::filter::Filter;
use vnplug_store::name::time as stamp;

use crate::extract::{Wrong, far, keys, range, tell_losses, time};
use crate::failure::{Failure, Outcome};
use crate::out;
use crate::text::{counted, grouped};

/// Lists the flows of recordings, the largest first.
#[derive(Debug, Args)]
#[command(after_help = "\
A flow is one direction: protocol, addresses, ports. What is not IP is told as `other`.

Example: vnplug flows /data --from -1h -f 'net 10.0.0.0/8' --top 20")]
pub(crate) struct Flows {
    /// Recordings' directories or capture files
    #[arg(required = true, value_name = "DIR")]
    places: Vec<PathBuf>,
    /// Packets from this time on
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    from: Option<u64>,
    /// Packets before this time
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    to: Option<u64>,
    /// Only packets that match this pcap-filter expression
    #[arg(short, long, value_name = "EXPRESSION", default_value = "")]
    filter: String,
    /// File with an age identity (secret key) for encrypted recordings; may be repeated
    #[arg(short, long, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// How many flows
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
    /// What makes a flow large
    #[arg(long, value_enum, default_value = "bytes")]
    by: By,
    /// A line of JSON for each flow
    #[arg(long)]
    json: bool,
    /// All flows as IPFIX instead: into a new file, or to a collector by UDP (port 4739 if none is said)
    #[arg(long, value_name = "FILE|udp://HOST[:PORT]", value_parser = ipfix::target, conflicts_with_all = ["json", "top"])]
    ipfix: Option<ipfix::Target>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    /// Bytes on the wire
    Bytes,
    /// Packets
    Packets,
}

impl Flows {
    pub(crate) fn run(&self) -> Outcome {
        let (from_ns, to_ns) = range(self.from, self.to)?;
        let query = Query {
            from_ns,
            to_ns,
            filter: Filter::new(&self.filter)?,
        };
        let mut wrong = Wrong::default();
        wrong.places(&self.places)?;
        let mut search = Extract::open_with(&self.places, query, &keys(&self.identity)?)?;
        let mut table = Table::default();
        let mut progress = out::Progress::new(self.json);
        loop {
            match search.step()? {
                Step::Packet(packet) => table.add(&packet),
                Step::Looking => {}
                Step::End => break,
            }
            let tally = search.tally();
            progress.tell(|| far(tally));
        }
        progress.end();
        wrong.search(&mut search);
        tell_losses(&search);
        let flows = table.sorted(self.by == By::Packets);
        if let Some(target) = &self.ipfix {
            export(target, &flows, table.other())?;
            return wrong.end("counted");
        }
        for (flow, sum) in flows.iter().take(self.top) {
            self.line(Some(flow), *sum)?;
        }
        if table.other().packets > 0 {
            self.line(None, table.other())?;
        }
        let tally = search.tally();
        if tally.packets == 0 {
            out::note("no packets match");
        } else if !self.json {
            out::note(&format!(
                "{} in {}; {} read",
                counted(tally.packets, "packet"),
                counted(flows.len() as u64, "flow"),
                counted(tally.bytes_read, "byte"),
            ));
        }
        wrong.end("counted")
    }

    fn line(&self, flow: Option<&Flow>, sum: Sum) -> Result<(), Failure> {
        if self.json {
            let icmp = flow.and_then(Flow::icmp);
            let ports = flow.map(|flow| icmp.map_or(flow.ports, |_| (0, 0)));
            let line = json!({
                "protocol": flow.map(|flow| flow.protocol),
                "from": flow.map(|flow| flow.from.to_string()),
                "from_port": ports.map(|it| it.0),
                "to": flow.map(|flow| flow.to.to_string()),
                "to_port": ports.map(|it| it.1),
                "icmp_type": icmp.map(|it| it.0),
                "icmp_code": icmp.map(|it| it.1),
                "community_id": flow.and_then(Flow::community_id),
                "packets": sum.packets,
                "bytes": sum.bytes,
                "ip_bytes": sum.ip_bytes,
                "first_ns": sum.first_ns,
                "last_ns": sum.last_ns,
            });
            return out::line(&line.to_string());
        }
        let name = flow.map_or("other".to_owned(), name);
        let (bytes, packets) = (grouped(sum.bytes), grouped(sum.packets));
        let (first, last) = (stamp(sum.first_ns), stamp(sum.last_ns));
        out::line(&format!(
            "{bytes:>18} bytes {packets:>14} packets  {first} {last}  {name}"
        ))
    }
}

/// How a flow is shown.
fn name(flow: &Flow) -> String {
    let (from, to, word) = (flow.from, flow.to, word(flow.protocol));
    match (flow.icmp(), flow.ports) {
        (Some((kind, code)), _) => format!("{word} {from} > {to} type {kind} code {code}"),
        (None, (0, 0)) => format!("{word} {from} > {to}"),
        (None, ports) => format!("{word} {from} {} > {to} {}", ports.0, ports.1),
    }
}

/// Sends all flows as IPFIX.
fn export(target: &ipfix::Target, flows: &[(Flow, Sum)], other: Sum) -> Result<(), Failure> {
    let mut exporter = ipfix::Exporter::open(target)?;
    for (flow, sum) in flows {
        exporter.add(flow, *sum)?;
    }
    let (records, messages) = exporter.finish()?;
    let messages = counted(messages, "message");
    out::note(&format!(
        "{} in {messages}",
        counted(records.into(), "flow")
    ));
    if other.packets > 0 {
        let packets = counted(other.packets, "packet");
        out::note(&format!("{packets} of other kinds are in no flow"));
    }
    Ok(())
}

/// A protocol's name, or its number.
fn word(protocol: u8) -> String {
    match protocol {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmp6".to_owned(),
        132 => "sctp".to_owned(),
        other => format!("ip-proto-{other}"),
    }
}
