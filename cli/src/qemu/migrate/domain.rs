//! A domain that libvirt moves: `virsh migrate`, between taking our devices out here and plugging them in there.
//!
//! ```text
//! domstate, domjobinfo        where it is
//! migrate, in a process       sends it; that process goes on if this one is killed
//! domjobabort                 it stays here
//! ```

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;

use serde_json::{Value, json};

use super::super::monitor::{Monitor, MonitorError};
use super::super::virsh::{self, Virsh};
use super::super::{VIRSH_LIMIT, definition};
use super::carrier::Carrier;
use super::{Migrate, Standing};
use crate::failure::Failure;

/// A domain, and where to.
pub(super) struct Domain<'a> {
    virsh: Virsh,
    to: &'a str,
    more: &'a [String],
    moving: Option<(Child, JoinHandle<String>)>,
    /// What `virsh migrate` said when it failed.
    said: String,
    is_cancelled: bool,
}

impl<'a> Domain<'a> {
    /// One that runs here, or has gone.
    pub(super) fn open(migrate: &'a Migrate) -> Result<Self, Failure> {
        let name = migrate.libvirt.as_deref().unwrap_or_default();
        let uri = migrate.connect.as_deref();
        let virsh = match Virsh::open(name, uri, VIRSH_LIMIT) {
            Ok(mut virsh) => {
                // Nobody else attaches or detaches it meanwhile.
                virsh.claim()?;
                virsh
            }
            // Gone, perhaps.
            Err(MonitorError::Libvirt(_)) => Virsh::at(name, uri, VIRSH_LIMIT),
            Err(error) => return Err(error.into()),
        };
        Ok(Self {
            virsh,
            to: &migrate.to,
            more: &migrate.more,
            moving: None,
            said: String::new(),
            is_cancelled: false,
        })
    }

    /// Refuses what libvirt would not move, while nothing was changed.
    pub(super) fn check(&self, name: &str) -> Result<(), Failure> {
        for more in [&[][..], &["--inactive"]] {
            let xml = self.virsh.ask("dumpxml", more, None)?;
            if !definition::own(&xml, name).is_empty() {
                let text = "is in the domain's definition: run `vnplug detach qemu --permanent` first, and `vnplug attach \
                     qemu --permanent` there when it is there; nothing was changed";
                return Err(Failure::about(name, text));
            }
        }
        let there = Virsh::at("", Some(self.to), VIRSH_LIMIT);
        there.uri().map_err(|error| {
            let text = format!(
                "the libvirt at {} is not reached: {error}; nothing was changed",
                self.to
            );
            Failure::about(name, text)
        })?;
        Ok(())
    }

    /// Where it is, by what libvirt says of it.
    fn look(&self) -> Result<Standing, MonitorError> {
        let Some(state) = virsh::state(&self.virsh)? else {
            return Ok(Standing::Gone);
        };
        if state.starts_with("shut off") || state.starts_with("crashed") {
            return Ok(Standing::Gone);
        }
        match self.virsh.ask("domjobinfo", &[], None) {
            Ok(job) if field(&job, "Operation:") == Some("Outgoing migration") => {
                Ok(Standing::Moving)
            }
            Ok(_) => Ok(Standing::Here),
            Err(error) if virsh::is_unknown(&error) => Ok(Standing::Gone),
            Err(error) => Err(error),
        }
    }

    fn abort(&self) {
        if let Err(error) = self.virsh.ask("domjobabort", &[], None) {
            // It may have ended in this moment, or not have begun: what counts is where it is.
            log::debug!("domjobabort: {error}");
        }
    }

    /// `virsh migrate`, with what is not said otherwise.
    fn words(&self) -> Result<Vec<String>, MonitorError> {
        let info = self.virsh.ask("dominfo", &[], None)?;
        let is_persistent = field(&info, "Persistent:") == Some("yes");
        let usual: &[&str] = match is_persistent {
            true => &["--live", "--persistent", "--undefinesource"],
            false => &["--live"],
        };
        let is_new = |word: &&&str| !self.more.iter().any(|it| it == **word);
        let usual = usual.iter().filter(is_new).map(|&it| it.to_owned());
        let uuid = format!("--domain={}", field(&info, "UUID:").unwrap_or_default());
        let to = format!("--desturi={}", self.to);
        let words = std::iter::once("migrate".to_owned()).chain(usual);
        Ok(words
            .chain([uuid, to])
            .chain(self.more.iter().cloned())
            .collect())
    }
}

impl Carrier for Domain<'_> {
    fn monitor(&mut self) -> &mut dyn Monitor {
        &mut self.virsh
    }

    fn standing(&mut self) -> Result<(Standing, Value), Failure> {
        let ended = match &mut self.moving {
            None => None,
            Some((child, _)) => match child.try_wait()? {
                None => {
                    if self.is_cancelled {
                        // It may not have begun when it was told.
                        self.abort();
                    }
                    return Ok((Standing::Moving, json!({})));
                }
                ended => ended,
            },
        };
        if let Some((_, errors)) = self.moving.take() {
            self.said = errors.join().unwrap_or_default();
        }
        match ended {
            Some(status) if status.success() => Ok((Standing::Gone, json!({}))),
            _ => Ok((self.look()?, json!({}))),
        }
    }

    fn send(&mut self) -> Result<(), Failure> {
        let words = self.words()?;
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = self.virsh.command(&words);
        // Of a group of its own: what stops this at a terminal does not stop it; it is stopped by `domjobabort`.
        command.process_group(0).stdin(Stdio::null());
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(MonitorError::NoVirsh)?;
        let errors = child.stderr.take();
        let errors = std::thread::spawn(move || {
            let mut text = Vec::new();
            if let Some(errors) = errors {
                // What is longer is no error of libvirt's.
                let _ = errors.take(MOST_TEXT).read_to_end(&mut text);
            }
            virsh::one_line(&String::from_utf8_lossy(&text))
        });
        self.moving = Some((child, errors));
        Ok(())
    }

    fn cancel(&mut self) -> Result<(), Failure> {
        self.is_cancelled = true;
        self.abort();
        Ok(())
    }

    fn domain(&self) -> Result<Option<String>, Failure> {
        // NB: `virsh domuuid` finds no domain by its UUID. A number that it was named by is another's there.
        let told = self.virsh.ask("dominfo", &[], None)?;
        let uuid = field(&told, "UUID:");
        let uuid = uuid.ok_or_else(|| MonitorError::NotAnswer("dominfo".to_owned()))?;
        Ok(Some(uuid.to_owned()))
    }

    fn why(&self, _: &Value) -> String {
        match self.said.as_str() {
            "" => "libvirt's migration failed, and nobody heard why".to_owned(),
            said => format!("virsh migrate: {said}"),
        }
    }
}

/// What follows this word in a table of virsh's.
fn field<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    table
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(name))
        .map(str::trim)
}

/// The host that a URI of libvirt's reaches by ssh, as ssh takes it.
pub(super) fn ssh_host(uri: &str) -> Option<String> {
    let (scheme, rest) = uri.split_once("://")?;
    if scheme.split_once('+')?.1 != "ssh" {
        return None;
    }
    let host = rest.split(['/', '?']).next().filter(|it| !it.is_empty())?;
    let last = host.rsplit(']').next().unwrap_or_default();
    Some(match last.contains(':') {
        true => format!("ssh://{host}"),
        false => host.to_owned(),
    })
}

const MOST_TEXT: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_by_ssh_names_the_host() {
        for (uri, host) in [
            ("qemu+ssh://root@host2/system", Some("root@host2")),
            ("qemu+ssh://host2/system?keyfile=x", Some("host2")),
            (
                "qemu+ssh://root@host2:2222/system",
                Some("ssh://root@host2:2222"),
            ),
            (
                "qemu+ssh://root@[::1]:22/system",
                Some("ssh://root@[::1]:22"),
            ),
            ("qemu+tls://host2/system", None),
            ("qemu:///system", None),
            ("qemu+ssh:///system", None),
        ] {
            assert_eq!(ssh_host(uri).as_deref(), host, "{uri}");
        }
    }

    #[test]
    fn a_table_of_virshs_is_read_by_its_words() {
        let table = "Id:             1\nUUID:           a-b\nPersistent:     yes\n";
        assert_eq!(field(table, "UUID:"), Some("a-b"));
        assert_eq!(field(table, "Persistent:"), Some("yes"));
        assert_eq!(field(table, "Operation:"), None);
    }
}
