//! Checks that ask the daemon or the agent: does anybody answer, what is there to see, and do packets come,
//! from the wire to the application.

use std::path::{Path, PathBuf};
use std::time::Duration;

use vnplug::{Client, Counted, Device, Error};
use vnplug_ring::counters::{Account, accounts};

use super::Role;
use super::check::{Check, Finding};
use super::machine::Machine;
use crate::failure::Failure;
use crate::text::grouped;

/// What was asked at first.
pub(super) struct Live {
    socket: PathBuf,
    /// `daemon` or `agent`.
    server: &'static str,
    answer: Result<Answer, Refusal>,
    /// Those of sources.
    pub(super) interfaces: Vec<String>,
}

struct Answer {
    name: String,
    devices: Vec<Device>,
    counters: Vec<Counted>,
}

struct Refusal {
    text: String,
    is_permission: bool,
}

/// For so long it counts packets.
const COUNTED: Duration = Duration::from_secs(1);

/// Asks whoever serves readers here.
pub(super) fn ask(socket: &Path, server: &'static str) -> Live {
    let ask = || -> Result<Answer, Error> {
        let mut client = Client::connect_to(socket)?;
        Ok(Answer {
            devices: client.devices()?,
            counters: client.stats()?,
            name: client.server().to_owned(),
        })
    };
    let answer = ask().map_err(|error| Refusal {
        is_permission: matches!(error, Error::Permission { .. }),
        text: Failure::from(error).line(),
    });
    let devices = answer.as_ref().map(|it| it.devices.as_slice());
    let devices = devices.unwrap_or_default().iter();
    let interfaces = devices.filter_map(|it| it.description.strip_prefix("interface "));
    let interfaces = interfaces.filter_map(|it| it.split([' ', ',']).next());
    Live {
        socket: socket.to_owned(),
        server,
        interfaces: interfaces.map(str::to_owned).collect(),
        answer,
    }
}

impl Live {
    /// The checks of what was answered.
    pub(super) fn checks(self, role: Role) -> Vec<Check> {
        let Self {
            socket,
            server,
            answer,
            ..
        } = self;
        let (answer, refusal) = match answer {
            Ok(answer) => (Some(answer), None),
            Err(refusal) => (None, Some(refusal)),
        };
        let shown = socket.display().to_string();
        let name = answer.as_ref().map(|it| it.name.clone());
        let first = Check::new(server, move |_| match refusal {
            None => Finding::ok(format!("{} answers at {shown}", name.unwrap_or_default())),
            Some(refusal) => unanswered(server, &shown, &refusal),
        });
        let mut all = vec![first];
        let Answer {
            devices, counters, ..
        } = answer.unwrap_or(Answer {
            name: String::new(),
            devices: Vec::new(),
            counters: Vec::new(),
        });
        let vms: Vec<_> = counters
            .iter()
            .filter(|it| it.kind == "vm")
            .cloned()
            .collect();
        let before = counters.clone();
        all.push(Check::new("sources", move |_| sources(role, &devices)).after(server));
        let counted = counters.clone();
        all.push(Check::new("accounts", move |_| closing(&counted)).after(server));
        all.push(Check::new("loss", move |_| loss(&counters)).after(server));
        if role == Role::Host {
            all.push(Check::new("guests", move |_| guests(&vms)).after(server));
        }
        let traffic = move |machine: &Machine| {
            let wire = |it: &str| received(machine, it);
            let wires: Vec<_> = self
                .interfaces
                .iter()
                .map(|it| (it.clone(), wire(it)))
                .collect();
            std::thread::sleep(COUNTED);
            let later = Client::connect_to(&socket).and_then(|mut it| it.stats());
            let arrived = wires
                .iter()
                .map(|(name, before)| (name.clone(), wire(name).saturating_sub(*before)));
            let arrived: Vec<_> = arrived.collect();
            match later {
                Ok(later) => traffic(&arrived, &before, &later),
                Err(error) => Finding::skipped(Failure::from(error).line()),
            }
        };
        all.push(Check::new("traffic", traffic).after("sources"));
        all
    }
}

fn unanswered(server: &str, socket: &str, refusal: &Refusal) -> Finding {
    if refusal.is_permission {
        return Finding::fail(
            format!("this user may not open {socket}"),
            "join the socket's group (usermod -aG vnplug USER, then log in again), or be root",
        );
    }
    let cure = match server {
        "daemon" => "systemctl start vnplugd; if it does not stay: journalctl -u vnplugd -n 20",
        _ => "systemctl start vnplug-agent    (or, as root: vnplug agent &)",
    };
    Finding::fail(format!("no {server} answers: {}", refusal.text), cure)
}

fn sources(role: Role, devices: &[Device]) -> Finding {
    if devices.is_empty() {
        return match role {
            Role::Host => Finding::fail(
                "there is no source that this user may see",
                "a [[source]] in /etc/vnplug.toml, then systemctl restart vnplugd; for users who are not root a [[allow]]",
            ),
            Role::Guest => Finding::fail(
                "the host shows this machine no source",
                "on the host: vnplug grant add vm:NAME=SOURCE    (`vnplug list` there has the VM's name)",
            ),
        };
    }
    let ill: Vec<_> = devices
        .iter()
        .filter(|it| !matches!(it.state.as_str(), "up" | "ended" | "waiting"))
        .map(|it| format!("{} is {}", it.name, it.state))
        .collect();
    match ill.is_empty() {
        true => {
            let names: Vec<_> = devices.iter().map(|it| it.name.as_str()).collect();
            Finding::ok(names.join(", "))
        }
        false => Finding::warn(ill.join(", "), "ip link; vnplug stats says why (failure)"),
    }
}

fn closing(counters: &[Counted]) -> Finding {
    let all = accounts(counters);
    match all.iter().find(|it| !it.closes()) {
        None => Finding::ok(format!(
            "all {} close: no frame is unaccounted for",
            all.len()
        )),
        Some(open) => Finding::fail(
            format!(
                "the account of {} differs by {}",
                open.about,
                Account::difference(open)
            ),
            "vnplug stats; please report it, it is a bug",
        ),
    }
}

/// What was lost since the daemon's start, and where.
fn loss(counters: &[Counted]) -> Finding {
    let lost = |one: &Counted, names: &[&str]| {
        let values = one
            .values
            .iter()
            .filter(|(name, _)| names.contains(&name.as_str()));
        values.map(|(_, value)| value).sum::<u64>()
    };
    let mut told = Vec::new();
    let (mut kernel, mut readers) = (false, false);
    for one in counters {
        match one.kind.as_str() {
            "source" => {
                let count = lost(one, &["kernel_dropped"]);
                if count > 0 {
                    kernel = true;
                    told.push(format!(
                        "{} lost {} before the daemon",
                        one.name,
                        grouped(count)
                    ));
                }
            }
            "port" => {
                let count = lost(one, &["dropped_full", "dropped_budget"]);
                if count > 0 {
                    readers = true;
                    told.push(format!(
                        "port {} lost {}, its reader was too slow",
                        one.name,
                        grouped(count)
                    ));
                }
            }
            _ => {}
        }
    }
    let cure = match (kernel, readers) {
        (false, false) => return Finding::ok("nothing was lost since the daemon started"),
        (true, _) => {
            "more queues or threads for the source, a CPU of its own (cpus=), a larger ring (block=)"
        }
        (false, true) => "a larger ring (--ring), a filter, several readers in a cluster",
    };
    Finding::warn(told.join("; "), cure)
}

fn guests(vms: &[Counted]) -> Finding {
    let state = |vm: &Counted| {
        let found = vm.labels.iter().find(|(name, _)| name == "state");
        found.map_or(String::new(), |(_, state)| state.clone())
    };
    let silent: Vec<_> = vms.iter().filter(|it| state(it) != "ready").collect();
    if silent.is_empty() {
        return Finding::ok(match vms.len() {
            0 => "no virtual machine is attached".to_owned(),
            count => format!("all {count} attached machines have their agent"),
        });
    }
    let told: Vec<_> = silent
        .iter()
        .map(|it| format!("{} ({})", it.name, state(it)))
        .collect();
    Finding::warn(
        format!("no agent speaks for {}", told.join(", ")),
        "in the guest: systemctl start vnplug-agent, then `vnplug doctor` there",
    )
}

/// What an interface has received.
fn received(machine: &Machine, interface: &str) -> u64 {
    let text = machine.read(&format!("/sys/class/net/{interface}/statistics/rx_packets"));
    text.ok().and_then(|it| it.parse().ok()).unwrap_or(0)
}

/// Where packets stop, from the wire to the application. `arrived`: what interfaces of sources received
/// meanwhile.
pub(super) fn traffic(arrived: &[(String, u64)], before: &[Counted], later: &[Counted]) -> Finding {
    let grown = |one: &Counted, name: &str| {
        let value = |it: &Counted| {
            it.values
                .iter()
                .find(|(key, _)| key == name)
                .map_or(0, |(_, value)| *value)
        };
        let was = before
            .iter()
            .find(|it| it.kind == one.kind && it.name == one.name);
        value(one).saturating_sub(was.map_or(0, value))
    };
    let of = |kind: &'static str| later.iter().filter(move |it| it.kind == kind);
    let seen: u64 = of("source").map(|it| grown(it, "seen")).sum();
    let delivered: u64 = of("port").map(|it| grown(it, "delivered")).sum();
    let on_wires: u64 = arrived.iter().map(|(_, count)| count).sum();
    let ports = of("port").count();
    let summary = format!(
        "in 1 s: {} on the wires, {} at the sources, {} to {ports} ports",
        grouped(on_wires),
        grouped(seen),
        grouped(delivered)
    );
    if of("source").count() > 0 && seen == 0 {
        return match on_wires {
            0 => Finding::warn(
                format!("{summary}: nothing comes"),
                "is the mirror port on, is the cable in the right place? tcpdump -ni INTERFACE shows the same nothing",
            ),
            _ => Finding::fail(
                format!("{summary}: they do not reach the daemon"),
                "an XDP program may take them (see xdp-…); journalctl -u vnplugd",
            ),
        };
    }
    let starved = of("port").find(|it| grown(it, "offered") > 0 && grown(it, "delivered") == 0);
    match starved {
        None => Finding::ok(summary),
        Some(port) => {
            let lost = grown(port, "dropped_full") + grown(port, "dropped_budget");
            let (why, cure) = match lost {
                0 => (
                    "its filter, or its grant's, takes none",
                    "vnplug list shows the filter; vnplug grant list that of the grant",
                ),
                _ => (
                    "its reader does not read",
                    "look at the process that has the port (vnplug list)",
                ),
            };
            Finding::warn(
                format!("{summary}; port {} gets nothing: {why}", port.name),
                cure,
            )
        }
    }
}
