//! Checks that ask the daemon or the agent: does anybody answer, and what is there to see.

use std::path::{Path, PathBuf};
use std::time::Duration;

use vnplug::{Client, Counted, Device, Error};
use vnplug_ring::counters::{Account, accounts};

use super::Role;
use super::check::{Check, Finding};
use super::machine::Machine;
use super::traffic;
use super::wire::{Here, Wire};
use crate::failure::Failure;
use crate::qemu::MORE_MEMORY;
use crate::text::grouped;

/// What was asked at first.
pub(super) struct Live {
    socket: PathBuf,
    /// `daemon` or `agent`.
    server: &'static str,
    answer: Result<Answer, Refusal>,
    /// Interfaces of sources in this network namespace.
    pub(super) wires: Vec<Wire>,
    /// And of uplinks.
    pub(super) uplinks: Vec<Wire>,
    /// Interfaces in other namespaces.
    pub(super) away: Vec<Wire>,
}

struct Answer {
    name: String,
    devices: Vec<Device>,
    counters: Vec<Counted>,
}

pub(super) struct Refusal {
    pub(super) text: String,
    pub(super) is_permission: bool,
}

/// What a port in quarantine needs.
pub(super) const LEAVE_QUARANTINE: &str =
    "end its reader and start it again; the daemon's log has more";
/// A daemon that lives answers within milliseconds; all checks wait for this.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks whoever serves readers here.
pub(super) fn ask(machine: &Machine, socket: &Path, server: &'static str) -> Live {
    let ask = || -> Result<Answer, Error> {
        let mut client = Client::connect_to_within(socket, PATIENCE)?;
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
    let told = answer.as_ref().ok();
    let devices = || told.into_iter().flat_map(|it| &it.devices);
    let sources = devices().filter_map(|it| Wire::of(&it.description));
    let uplinks = devices().flat_map(Wire::of_uplinks);
    let here = Here::of(machine);
    let is_here = |it: &Wire| here.has(it);
    let (mut wires, mut away): (Vec<_>, Vec<_>) = sources.partition(is_here);
    let (mut uplinks, others): (Vec<_>, Vec<_>) = uplinks.partition(is_here);
    away.extend(others);
    // Two sources may have the same.
    for all in [&mut wires, &mut uplinks] {
        all.sort();
        all.dedup();
    }
    uplinks.retain(|it| !wires.contains(it));
    Live {
        socket: socket.to_owned(),
        server,
        wires,
        uplinks,
        away,
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
            wires,
            uplinks,
            ..
        } = self;
        let interfaces = [wires, uplinks].concat();
        let (answer, refusal) = match answer {
            Ok(answer) => (Some(answer), None),
            Err(refusal) => (None, Some(refusal)),
        };
        let shown = socket.display().to_string();
        let name = answer.as_ref().map(|it| it.name.clone());
        let first = Check::new(server, move |_| match refusal {
            None => answered(&name.unwrap_or_default(), &shown),
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
        let shown_devices = devices.clone();
        all.push(Check::new("sources", move |_| sources(role, &devices)).after(server));
        let counted = counters.clone();
        all.push(Check::new("accounts", move |_| closing(&counted)).after(server));
        all.push(Check::new("loss", move |_| loss(&counters)).after(server));
        if role == Role::Host {
            all.push(Check::new("guests", move |_| guests(&vms)).after(server));
        }
        let traffic = move |machine: &Machine| {
            traffic::look(machine, &socket, role, &interfaces, &before, &shown_devices)
        };
        all.push(Check::new("traffic", traffic).after("sources"));
        all
    }
}

pub(super) fn answered(name: &str, socket: &str) -> Finding {
    Finding::ok(format!("{name} answers at {socket}"))
}

pub(super) fn unanswered(server: &str, socket: &str, refusal: &Refusal) -> Finding {
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

/// States of sources that need nobody. `behind`: a generator makes as many frames as it can, which are fewer than it was told.
/// `waiting`: a file or a generator waits for its first reader, a FIFO for bytes, a port of a switch for its holder. One whose
/// interface is not there is `missing` or `gone`.
const WELL: [&str; 4] = ["up", "ended", "waiting", "behind"];

pub(super) fn sources(role: Role, devices: &[Device]) -> Finding {
    if devices.is_empty() {
        return match role {
            Role::Host => Finding::fail(
                "there is no source that this user may see",
                "as root: vnplug source add eth1; for a user who is not root: vnplug grant add uid:NUMBER=eth1",
            ),
            Role::Guest => Finding::fail(
                "the host shows this machine no source",
                "on the host: vnplug grant add vm:NAME=SOURCE    (`vnplug list` there has the VM's name)",
            ),
        };
    }
    // A word of each queue, where they differ.
    let is_well = |it: &&Device| it.state.split(',').all(|word| WELL.contains(&word));
    let ill: Vec<_> = devices
        .iter()
        .filter(|it| !is_well(it))
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

pub(super) fn closing(counters: &[Counted]) -> Finding {
    let all = accounts(counters);
    if all.is_empty() {
        return Finding::skipped("this user is shown no account");
    }
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
pub(super) fn loss(counters: &[Counted]) -> Finding {
    let lost = |one: &Counted, names: &[&str]| {
        let values = one
            .values
            .iter()
            .filter(|(name, _)| names.contains(&name.as_str()));
        values.map(|(_, value)| value).sum::<u64>()
    };
    let mut told = Vec::new();
    let (mut kernel, mut readers, mut quarantined) = (false, false, false);
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
                let count = lost(one, &["dropped_quarantine"]);
                if count > 0 {
                    quarantined = true;
                    told.push(format!(
                        "port {} lost {} in quarantine, its reader broke the rules of the ring",
                        one.name,
                        grouped(count)
                    ));
                }
            }
            _ => {}
        }
    }
    let cure = match (kernel, readers, quarantined) {
        (false, false, false) => return Finding::ok("nothing was lost since the daemon started"),
        (true, ..) => {
            "more queues or threads for the source, a CPU of its own (cpus=), a larger ring (block=)"
        }
        (false, true, _) => "a larger ring (--ring), a filter, several readers in a cluster",
        (false, false, true) => LEAVE_QUARANTINE,
    };
    Finding::warn(told.join("; "), cure)
}

/// It has a doorbell device, and its agent listens to none of its vectors.
fn is_deaf(vm: &Counted) -> bool {
    let mut values = vm.values.iter();
    values.any(|(name, heard)| name == "doorbell_vectors_heard" && *heard == 0)
}

pub(super) fn guests(vms: &[Counted]) -> Finding {
    let state = |vm: &Counted| {
        let found = vm.labels.iter().find(|(name, _)| name == "state");
        found.map_or(String::new(), |(_, state)| state.clone())
    };
    let locked = vms.iter().filter(|it| state(it) == "locked-down");
    let locked: Vec<_> = locked.map(|it| it.name.as_str()).collect();
    if !locked.is_empty() {
        return Finding::fail(
            format!(
                "the kernel of {} is locked down (Secure Boot) and maps nothing of what is plugged",
                locked.join(", ")
            ),
            format!(
                "run `vnplug attach qemu` for it again: it gets memory that it may map, if the machine was started with {MORE_MEMORY}"
            ),
        );
    }
    let silent: Vec<_> = vms.iter().filter(|it| state(it) != "ready").collect();
    let deaf: Vec<_> = vms.iter().filter(|it| is_deaf(it)).collect();
    if silent.is_empty() && !deaf.is_empty() {
        let names: Vec<_> = deaf.iter().map(|it| it.name.as_str()).collect();
        return Finding::warn(
            format!(
                "the doorbell of {} is not heard: its readers are woken through the channel",
                names.join(", ")
            ),
            "start the machine with -device intel-iommu,intremap=on (q35), and load vfio-pci in the guest; or attach it \
             without --doorbell",
        );
    }
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

#[cfg(test)]
mod tests {
    use super::super::check::State;
    use super::*;

    #[test]
    fn what_keeps_guests_from_reading_is_told_first() {
        let vm = |name: &str, state: &str, heard: Option<u64>| Counted {
            kind: "vm".into(),
            name: name.into(),
            labels: vec![("state".into(), state.into())],
            values: heard
                .map(|heard| ("doorbell_vectors_heard".into(), heard))
                .into_iter()
                .collect(),
        };
        let well = vm("a", "ready", Some(8));
        let found = |more: &[Counted]| {
            let found = guests(&[std::slice::from_ref(&well), more].concat());
            (found.state, found.text)
        };
        assert_eq!(found(&[]).0, State::Ok);
        let (state, text) = found(&[vm("deaf", "ready", Some(0))]);
        assert_eq!(state, State::Warn);
        assert!(text.contains("the doorbell of deaf is not heard"), "{text}");
        let (_, text) = found(&[vm("b", "waiting", Some(0))]);
        assert!(text.contains("no agent speaks for b (waiting)"), "{text}");
        let all = [vm("b", "waiting", None), vm("c", "locked-down", None)];
        let (state, text) = found(&all);
        assert_eq!(state, State::Fail);
        assert!(text.contains("the kernel of c is locked down"), "{text}");
    }
}
