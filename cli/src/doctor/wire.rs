//! The interface behind a source or an uplink, and whether it is in the network namespace that this process is in.

use std::path::Path;

use vnplug::{DEFAULT_SOCKET, Device};

use super::check::{Check, Finding};
use super::machine::{Identity, Machine};

/// An interface, as the daemon describes it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Wire {
    /// As `ip netns` names it, or its file; `None`: the daemon's own.
    pub(super) namespace: Option<String>,
    pub(super) interface: String,
}

impl Wire {
    /// That of a source, if it has one.
    pub(super) fn of(description: &str) -> Option<Self> {
        let rest = description.strip_prefix("interface ")?;
        let end = rest.find([' ', ',']).unwrap_or(rest.len());
        let (interface, rest) = rest.split_at(end);
        let named = rest.strip_prefix(" in network namespace ");
        let namespace = named.and_then(|it| it.split(',').next());
        Some(Self {
            namespace: namespace.map(str::to_owned),
            interface: interface.to_owned(),
        })
    }

    /// Those of a switch's uplinks, all of which are in the daemon's namespace.
    pub(super) fn of_uplinks(device: &Device) -> impl Iterator<Item = Self> {
        let parts = device.description.split(", ");
        let uplinks = parts.filter_map(|it| it.strip_prefix("uplink ")?.split(' ').next());
        let is_switch = device.kind == "switch";
        uplinks.filter(move |_| is_switch).map(|it| Self {
            namespace: None,
            interface: it.to_owned(),
        })
    }
}

/// The network namespace that this process is in.
pub(super) struct Here<'a> {
    machine: &'a Machine,
    own: Option<Identity>,
    is_daemons: bool,
}

impl<'a> Here<'a> {
    pub(super) fn of(machine: &'a Machine) -> Self {
        let own = machine.identity("/proc/self/ns/net");
        let all = machine.processes().into_iter();
        let daemons = all.filter(|(_, name)| name == "vnplugd");
        // Only root, and the daemon's user, learns where it is.
        let theirs =
            daemons.filter_map(|(pid, _)| machine.identity(&format!("/proc/{pid}/ns/net")));
        let theirs: Vec<_> = theirs.collect();
        let is_daemons = own.is_none_or(|own| theirs.is_empty() || theirs.contains(&own));
        Self {
            machine,
            own,
            is_daemons,
        }
    }

    /// Whether an interface is in it. One of the daemon's own namespace is taken to be if the kernel does not tell.
    pub(super) fn has(&self, wire: &Wire) -> bool {
        let Some(name) = &wire.namespace else {
            return self.is_daemons;
        };
        let named = self.machine.identity(&match is_path(name) {
            true => name.clone(),
            false => format!("/run/netns/{name}"),
        });
        named.is_some() && named == self.own
    }
}

/// Whether a namespace is named by its file, and not as `ip netns` does.
fn is_path(name: &str) -> bool {
    name.starts_with('/')
}

/// For each namespace that is not here: its interfaces, which are not looked at, and what looks at them.
pub(super) fn notes(away: &[Wire], socket: &Path) -> Vec<Check> {
    let mut namespaces: Vec<_> = away.iter().map(|it| &it.namespace).collect();
    namespaces.sort();
    namespaces.dedup();
    let note = |namespace: &Option<String>| {
        let there = away.iter().filter(|it| it.namespace == *namespace);
        let mut names: Vec<_> = there.map(|it| it.interface.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let names = names.join(", ");
        let (check, text) = match namespace {
            Some(name) => {
                let socket = match socket == Path::new(DEFAULT_SOCKET) {
                    true => String::new(),
                    false => format!(" --socket {}", socket.display()),
                };
                let enter = match is_path(name) {
                    true => format!("nsenter --net={name}"),
                    false => format!("ip netns exec {name}"),
                };
                let text = format!(
                    "not looked at from here: {names} in network namespace {name}; as root: {enter} vnplug{socket} doctor"
                );
                (format!("netns-{name}"), text)
            }
            None => (
                "netns".to_owned(),
                format!(
                    "not looked at from here: {names} in the daemon's network namespace; run vnplug doctor there"
                ),
            ),
        };
        Check::new(check, move |_| Finding::skipped(text))
    };
    namespaces.into_iter().map(note).collect()
}
