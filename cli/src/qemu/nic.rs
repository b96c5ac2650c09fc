//! Network interfaces on a switch, plugged into a running QEMU, and out again.
//!
//! ```text
//! chardev  vnplug-NAME-nchr-SWITCH   socket to the daemon             (vhost-user)
//! netdev   vnplug-NAME-net-SWITCH    the way into the switch
//! device   vnplug-NAME-nic-SWITCH    the card in the guest
//! ```
//!
//! Their names in QEMU are the record of what was plugged: nothing else has to be kept, and what an
//! interrupted command left is found by the next one.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::access::{self, Owner};
use super::monitor::{Monitor, MonitorError};
use super::parts;
use super::slots::DeviceAddress;
use crate::entrances::{Entrances, NicSpec, Via};
use crate::failure::Failure;

/// The way that an interface takes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Choice {
    via: Via,
    path: String,
    /// For people.
    why: &'static str,
    /// What happens when the daemon is restarted.
    after: &'static str,
}

/// What matters of a QEMU.
#[derive(Debug, Clone, Copy)]
struct Abilities {
    /// Major and minor.
    version: (u64, u64),
    /// Others can map the guest's memory.
    shares_memory: bool,
    /// It runs as the user who has the switch's files, or as root.
    is_at_home: bool,
}

/// The names of an interface.
struct Ids {
    chardev: String,
    netdev: String,
    device: String,
}

impl Ids {
    fn of(vm: &str, switch: &str) -> Result<Self, Failure> {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !switch.chars().all(good) {
            let text = "QEMU takes no such name; call the switch by letters, digits, `-`, `_`, `.`";
            return Err(Failure::about(switch, text));
        }
        Ok(Self {
            chardev: format!("vnplug-{vm}-nchr-{switch}"),
            netdev: format!("vnplug-{vm}-net-{switch}"),
            device: device_prefix(vm) + switch,
        })
    }
}

fn device_prefix(vm: &str) -> String {
    format!("vnplug-{vm}-nic-")
}

/// The switches on which this VM has interfaces, by what is in QEMU.
pub(super) fn plugged(monitor: &mut dyn Monitor, vm: &str) -> Result<Vec<String>, MonitorError> {
    let prefix = device_prefix(vm);
    let present = parts::present(monitor)?;
    let mut found = Vec::new();
    for id in present {
        let Some(switch) = id.strip_prefix(&prefix) else {
            continue;
        };
        // Not a piece of another VM whose name begins like this.
        let own = json!({"path": format!("/machine/peripheral/{id}"), "property": "netdev"});
        if monitor.execute("qom-get", own).is_ok() {
            found.push(switch.to_owned());
        }
    }
    Ok(found)
}

/// Chooses the best way that this QEMU and the switch have in common.
///
/// # Errors
/// There is none; the text says what to change.
pub(super) fn choose(
    monitor: &mut dyn Monitor,
    entrances: &Entrances,
    via: Option<Via>,
    owner: Option<Owner>,
) -> Result<Choice, Failure> {
    let told = monitor.execute("query-version", json!({}))?;
    let number = |key| told["qemu"][key].as_u64().unwrap_or_default();
    let us = rustix::process::geteuid().as_raw();
    let abilities = Abilities {
        version: (number("major"), number("minor")),
        shares_memory: shares_memory(monitor)?,
        is_at_home: owner.is_none_or(|owner| owner.uid == 0 || owner.uid == us),
    };
    best(abilities, entrances, via)
}

fn best(
    abilities: Abilities,
    entrances: &Entrances,
    asked: Option<Via>,
) -> Result<Choice, Failure> {
    let Abilities {
        version,
        shares_memory,
        is_at_home,
    } = abilities;
    let again = "it connects again by itself when the daemon is restarted";
    let lost = "after a restart of the daemon it has no cable: detach it and attach it again";
    let sockets = version >= (7, 2);
    let reconnects = version >= (8, 0);
    let ways = [
        (
            Via::Vhost,
            shares_memory,
            "the guest's memory is shared, so frames need no copy by QEMU",
            again,
        ),
        (
            Via::Stream,
            reconnects,
            "the guest's memory is not shared, or the switch has no vhost; QEMU sends frames by a socket",
            again,
        ),
        (
            Via::Dgram,
            sockets && is_at_home,
            "this QEMU's streams do not connect again, its datagrams do",
            again,
        ),
        (
            Via::Stream,
            sockets,
            "QEMU sends frames by a socket; before 8.0 it does not connect again",
            lost,
        ),
        (
            Via::Vde,
            true,
            "the switch has nothing else for this QEMU",
            lost,
        ),
    ];
    let asked_for = |via| asked.is_none_or(|asked| asked == via);
    for (via, can, why, after) in ways {
        if let Some(path) = entrances.path(via).filter(|_| can && asked_for(via)) {
            let path = path.to_owned();
            return Ok(Choice {
                via,
                path,
                why,
                after,
            });
        }
    }
    if let Some(via) = asked
        && entrances.path(via).is_some()
    {
        let text = match via {
            Via::Vhost => {
                "vhost-user needs memory that is shared: start QEMU with -object \
                 memory-backend-memfd,id=ram,share=on,size=SIZE -machine memory-backend=ram"
            }
            Via::Bess => "QEMU cannot join by bess, which is for User-mode Linux",
            Via::Dgram if sockets => {
                "QEMU runs as another user and could not make its end of a dgram pair: leave via out"
            }
            _ => "this QEMU is too old for it: stream and dgram need 7.2",
        };
        return Err(Failure::about(&entrances.switch, text));
    }
    let what = match (asked, sockets) {
        (Some(via), _) => format!("give it {}=PATH", via.word()),
        (None, true) => "give it stream=PATH".into(),
        (None, false) => "QEMU before 7.2 needs vde=DIR, or shared memory and vhost=PATH".into(),
    };
    Err(entrances.lacks(&what))
}

/// Whether others can map all of the guest's memory.
fn shares_memory(monitor: &mut dyn Monitor) -> Result<bool, MonitorError> {
    let machine = json!({"path": "/machine", "property": "memory-backend"});
    let backend = monitor.execute("qom-get", machine).unwrap_or_default();
    let backend = backend.as_str().unwrap_or_default();
    let memories = monitor.execute("query-memdev", json!({}))?;
    let memories = memories.as_array().map(Vec::as_slice).unwrap_or_default();
    let id = backend.rsplit('/').next().unwrap_or_default();
    // Without a backend of its own a machine has those of its NUMA nodes. Ours are not its memory.
    let is_ram = |memory: &&Value| {
        let name = memory["id"].as_str().unwrap_or_default();
        match id {
            "" => !name.starts_with("vnplug-"),
            id => name == id,
        }
    };
    let mut ram = memories.iter().filter(is_ram).peekable();
    Ok(ram.peek().is_some() && ram.all(|memory| memory["share"] == true))
}

/// Plugs an interface, for a QEMU of `owner` at an entrance of a daemon that is the user beside it; what was plugged, for people.
///
/// # Errors
/// It could not be plugged; what was done is taken back.
pub(super) fn plug(
    monitor: &mut dyn Monitor,
    vm: &str,
    spec: &NicSpec,
    choice: &Choice,
    owner: Option<(Owner, u32)>,
    place: &DeviceAddress,
) -> Result<String, Failure> {
    let ids = Ids::of(vm, &spec.switch)?;
    // What an interrupted command left.
    forget(monitor, &ids)?;
    if let Some((owner, daemon)) = owner {
        // If it is not possible, QEMU may still be let in by its groups; else it says so.
        let let_in = access::let_in(&choice.path, daemon, owner.uid);
        let_in.unwrap_or_else(|error| log::info!("{}: {error}", choice.path));
    }
    let mac = spec.mac_for(vm);
    let model = spec.model.as_deref().unwrap_or("virtio-net-pci");
    let done = add_netdev(monitor, &ids, choice)
        .and_then(|()| wait_until_connected(monitor, &ids.netdev, choice))
        .and_then(|()| {
            let mut device = json!({
                "driver": model, "id": ids.device, "netdev": ids.netdev, "mac": mac,
            });
            place.tell(&mut device);
            // NB: without KVM the vectors of a vhost-user device are lost in QEMU 7.2.
            if choice.via == Via::Vhost && !super::monitor::has_kvm(monitor) {
                device["vectors"] = json!(0);
            }
            let added = monitor.execute("device_add", device);
            added.map(drop).map_err(|error| {
                let advice = super::advice::advice(&error);
                Failure::new(format!("{error}{advice}"))
            })
        });
    if let Err(failure) = done {
        let taken_back = forget(monitor, &ids);
        if choice.via == Via::Dgram {
            remove_end(&choice.path, &ids);
        }
        let what = match taken_back {
            Ok(()) => "nothing was changed".to_owned(),
            Err(error) => format!("taking back what was done failed too: {error}"),
        };
        return Err(Failure::about(
            format!("{vm}: {}", spec.switch),
            format!("{}; {what}", failure.line()),
        ));
    }
    Ok(format!(
        "{vm}: {model} {mac} on {} by {} ({}): {}; {}",
        spec.switch,
        choice.via.word(),
        choice.path,
        choice.why,
        choice.after
    ))
}

fn add_netdev(monitor: &mut dyn Monitor, ids: &Ids, choice: &Choice) -> Result<(), Failure> {
    let id = &ids.netdev;
    let path = &choice.path;
    let unix = |path: String| json!({"type": "unix", "path": path});
    let netdev = match choice.via {
        Via::Vhost => {
            parts::connect(monitor, &ids.chardev, path, true)?;
            json!({"type": "vhost-user", "id": id, "chardev": ids.chardev})
        }
        Via::Dgram => {
            let name = format!("{path}/{id}");
            json!({
                "type": "dgram", "id": id,
                "remote": unix(format!("{name}.port")), "local": unix(name),
            })
        }
        Via::Vde => json!({"type": "vde", "id": id, "sock": path}),
        Via::Stream | Via::Bess => {
            json!({"type": "stream", "id": id, "addr": unix(path.clone()), "server": false})
        }
    };
    if choice.via != Via::Stream {
        monitor.execute("netdev_add", netdev)?;
        return Ok(());
    }
    // In QEMU 9.2 the first one is called the second, and before 8.0 there is none.
    for option in [Some(("reconnect", 1)), Some(("reconnect-ms", 1000)), None] {
        let mut netdev = netdev.clone();
        if let Some((name, value)) = option {
            netdev[name] = json!(value);
        }
        match monitor.execute("netdev_add", netdev) {
            Err(MonitorError::Refused { text, .. }) if text.contains("is unexpected") => {}
            other => return Ok(other.map(drop)?),
        }
    }
    Err(Failure::new(
        "this QEMU has no -netdev stream: it needs 7.2",
    ))
}

/// QEMU connects a stream in the background, and says nothing if it cannot.
fn wait_until_connected(
    monitor: &mut dyn Monitor,
    netdev: &str,
    choice: &Choice,
) -> Result<(), Failure> {
    if choice.via != Via::Stream {
        return Ok(());
    }
    let deadline = Instant::now() + CONNECTS;
    loop {
        // HMP: there is no command of QMP that tells.
        let command = json!({"command-line": "info network"});
        let told = monitor.execute("human-monitor-command", command)?;
        let state = state_of(told.as_str().unwrap_or_default(), netdev);
        if state.contains("error") {
            return Err(Failure::new(format!(
                "QEMU cannot connect to {}; let its user in (options mode and group of the switch, \
                 directories above, AppArmor or SELinux)",
                choice.path
            )));
        }
        if !state.is_empty() || Instant::now() >= deadline {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// What `info network` says of a stream after its type: where it is connected to, an error, or nothing.
fn state_of<'a>(told: &'a str, netdev: &str) -> &'a str {
    let line = told.lines().find_map(|line| {
        let (name, rest) = line.trim_start_matches([' ', '\\']).split_once(": ")?;
        (name == netdev).then_some(rest)
    });
    let state = line.and_then(|line| line.split_once("type=stream,"));
    state.map_or("", |(_, state)| state.trim())
}

/// Takes back what is behind a card that is not there (any more).
fn forget(monitor: &mut dyn Monitor, ids: &Ids) -> Result<(), MonitorError> {
    for (command, id) in [
        ("netdev_del", &ids.netdev),
        ("chardev-remove", &ids.chardev),
    ] {
        match monitor.execute(command, json!({"id": id})) {
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// QEMU leaves its end of a pair where it is.
fn remove_end(dir: &str, ids: &Ids) {
    // Most interfaces have none.
    let _ = std::fs::remove_file(Path::new(dir).join(&ids.netdev));
}

/// Unplugs the interfaces of these switches; those whose cards the guest has not let go of. `pairs_of` says
/// where a switch has its pairs of datagram sockets.
///
/// # Errors
/// The monitor's, or a name that none can have.
pub(super) fn unplug(
    monitor: &mut dyn Monitor,
    vm: &str,
    switches: &[String],
    limit: Duration,
    mut pairs_of: impl FnMut(&str) -> Option<String>,
) -> Result<Vec<String>, Failure> {
    let ids: Vec<Ids> = switches
        .iter()
        .map(|switch| Ids::of(vm, switch))
        .collect::<Result<_, _>>()?;
    let devices: Vec<String> = ids.iter().map(|ids| ids.device.clone()).collect();
    let left = parts::unplug(monitor, &devices, limit)?;
    for (ids, switch) in ids.iter().zip(switches) {
        if left.contains(&ids.device) {
            continue;
        }
        forget(monitor, ids)?;
        if let Some(dir) = pairs_of(switch) {
            remove_end(&dir, ids);
        }
    }
    Ok(left)
}

/// How long a connection may take.
const CONNECTS: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Abilities = Abilities {
        version: (7, 2),
        shares_memory: false,
        is_at_home: true,
    };
    const NEW: Abilities = Abilities {
        version: (9, 0),
        ..OLD
    };

    fn chosen(abilities: Abilities, has: &[Via], asked: Option<Via>) -> Result<Via, String> {
        let has: Vec<_> = has.iter().map(|via| (*via, "/p")).collect();
        let choice = best(abilities, &Entrances::made(&has), asked);
        choice
            .map(|choice| choice.via)
            .map_err(|failure| failure.line())
    }

    #[test]
    fn the_best_way_is_taken_that_both_have() {
        use Via::*;
        let all = [Vhost, Stream, Dgram, Bess, Vde];
        let shared = Abilities {
            shares_memory: true,
            ..OLD
        };
        let away = Abilities {
            is_at_home: false,
            ..OLD
        };
        for (abilities, has, expected) in [
            (shared, &all[..], Vhost),
            (OLD, &all, Dgram),
            (away, &all, Stream),
            (NEW, &all, Stream),
            (shared, &all[1..], Dgram),
            (OLD, &[Stream, Vde], Stream),
            (OLD, &[Vde], Vde),
            (NEW, &[Dgram], Dgram),
        ] {
            assert_eq!(chosen(abilities, has, None), Ok(expected), "{abilities:?}");
        }
        assert_eq!(chosen(OLD, &all, Some(Stream)), Ok(Stream));
    }

    #[test]
    fn what_is_missing_is_said_and_how_to_get_it() {
        use Via::*;
        let older = Abilities {
            version: (5, 2),
            ..OLD
        };
        for (abilities, has, asked, part) in [
            (OLD, &[][..], None, "it has none): give it stream=PATH"),
            (OLD, &[Bess], None, "it has bess): give it stream=PATH"),
            (older, &[Stream], None, "before 7.2"),
            (older, &[Stream], Some(Stream), "too old"),
            (OLD, &[Vhost], Some(Vhost), "share=on"),
            (OLD, &[Bess], Some(Bess), "User-mode Linux"),
            (OLD, &[Stream], Some(Dgram), "give it dgram=PATH"),
        ] {
            let error = chosen(abilities, has, asked).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_streams_state_is_found_in_qemus_words() {
        let told = "n1: index=0,type=stream,connection error\r\n\
                    d0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:57\r\n \
                    \\ n0: index=0,type=stream,unix:/s\r\n \\ n2: index=0,type=stream,\r\n";
        let states = ["n0", "n1", "n2", "n"].map(|id| state_of(told, id));
        assert_eq!(states, ["unix:/s", "connection error", "", ""]);
    }
}
