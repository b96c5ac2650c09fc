//! The other end of `vnplug migrate`: a QEMU that waits for a machine is attached when the machine is there.
//!
//! ```text
//! prepared   the daemon knows the VM, its memory and its channel are in QEMU; its devices are not: QEMU takes
//!            none that the stream does not bring                                        says READY
//! awaited    it is told that the machine is about to be sent; of a movable machine the devices are plugged, whose
//!            contents the stream brings                                                 says AWAITED
//! come       the machine runs here: the devices (that are missing) are plugged          says what attach says
//! ```
//!
//! Everything that can be refused is refused before READY, while the machine still runs where it was.
//!
//! If `vnplug migrate` ends without a word (killed, or the connection broke), a machine that is not awaited cannot
//! come: nobody has told its QEMU to send it. One that is awaited may still come: it is given up when QEMU says that
//! what came was no whole machine, or when nothing began to come for [`CONNECTS`]. Even then, and when a signal ends the
//! waiting, its devices stay: QEMU loses a machine that brings the state of a device which is not there. If it comes
//! after all, the next `vnplug migrate` plugs it anew.

use std::collections::BTreeSet;
use std::io::{BufRead, stdin};
use std::path::Path;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use serde_json::json;
use vnplug::Client;
use vnplug_ring::control::{HOST_PREFIX, VmReady};

use super::monitor::{Monitor, MonitorError};
use super::parts::{self, Kind, Left, Part};
use super::slots;
use super::{Attach, access};
use crate::failure::{Failure, OK, Outcome};
use crate::{out, sys};

/// What is said when the machine may come.
pub(super) const READY: &str = "is prepared, the machine may come";
/// What is said to it on its standard input before the machine is sent, and its answer.
pub(super) const SENT: &str = "sent";
pub(super) const AWAITED: &str = "is awaited";
/// What is said to it on its standard input when the machine does not come.
pub(super) const CANCEL: &str = "cancel";
/// Between looks at QEMU, where no event comes.
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// How long QEMU may take to begin to send a machine: it connects when it is told to, and the kernel gives up a TCP
/// connection after 127 s (`tcp_syn_retries`, tcp(7)).
pub(super) const CONNECTS: Duration = Duration::from_secs(130);
/// How long a daemon may take to start.
const STARTS: Duration = Duration::from_secs(10);
/// How long a QEMU is asked to unplug devices in which no machine runs yet: it lets go of none.
const GONE: Duration = Duration::from_secs(1);

/// How the waiting ended.
#[derive(PartialEq, Eq)]
pub(super) enum Waited {
    Come,
    Sent,
    /// Who sends it says that it does not come.
    Cancelled,
    /// Nobody knows whether it comes.
    GivenUp,
}

/// A source without what says which part of it is meant.
pub(super) fn source_of(device: &str) -> &str {
    let name = device.strip_prefix(HOST_PREFIX).unwrap_or(device);
    name.split(['@', '/']).next().unwrap_or(name)
}

impl Attach {
    /// Prepares, says so, waits and attaches; one that has come already is attached at once.
    pub(super) fn attach_incoming(
        &self,
        monitor: &mut dyn Monitor,
        connect: &dyn Fn() -> Result<Client, Failure>,
    ) -> Outcome {
        let name = &self.vm.name;
        self.check_protocol()?;
        let mut client = connect()?;
        if let Some(status) = has_come(monitor)? {
            if !self.come {
                // Another machine's, which would read what this one may.
                let text = format!(
                    "this QEMU waits for no machine, it is {status:?}: start one with -incoming, or name that one's monitor"
                );
                return Err(Failure::about(name, text));
            }
            out::line(&format!("{name}: {READY}"))?;
            self.attach_pool(monitor, &self.buses, client)?;
            return Ok(OK);
        }
        sys::catch_signals();
        let owner = access::identity(monitor)?;
        let mut present = parts::present(monitor)?;
        let mut parts = self.parts(&present);
        if !self.come
            && parts
                .iter()
                .any(|it| it.is_device() && present.contains(&it.id))
        {
            let text = "the QEMU that waits has devices of a move that did not come about, and cannot let go of \
                        them: end it, and start it again";
            return Err(Failure::about(name, text));
        }
        let mut is_prepared = parts.iter().any(|part| present.contains(&part.id));
        let is_missing = |part: &&Part| !present.contains(&part.id);
        let pci = |part: &&Part| part.kind == Kind::Pci;
        let devices = parts.iter().filter(is_missing).filter(pci).count();
        slots::choose(monitor, &self.buses, devices)?
            .map_err(|no_room| Failure::about(name, no_room))?;
        let daemon = client.server_user()?;
        let ready = client.attach_vm(self.spec(owner))?;
        // Of one that is about to come with its devices nothing can go before it is here.
        if !self.come && self.has_lost_memory(monitor, &parts, &present, &ready)? {
            (present, parts) = self.clear(monitor)?;
            is_prepared = false;
        }
        let is_first = |part: &&Part| !part.is_device() && !present.contains(&part.id);
        let first: Vec<&Part> = parts.iter().filter(is_first).collect();
        let prepared = self
            .check_needs(&ready, is_prepared)
            .and_then(|()| self.plug(monitor, &first, (&ready, daemon), Vec::new()));
        if let Err(failure) = prepared {
            self.forget(&mut client, owner);
            return Err(failure);
        }
        out::line(&format!("{name}: {READY}"))?;
        let words = words();
        let mut is_awaited = self.come;
        let mut ended = wait(monitor, &words, is_awaited);
        if let Ok(Waited::Sent) = ended {
            let goes = |it: &&Part| self.movable && it.goes_along() && it.is_device();
            let devices: Vec<&Part> = parts.iter().filter(goes).collect();
            if let Err(failure) =
                self.plug(monitor, &devices, (&ready, daemon), self.places.clone())
            {
                // Why it fails is what is said.
                let _ = self.give_up(monitor, connect, &parts, owner);
                return Err(failure);
            }
            // Who does not hear it sends no machine.
            let is_heard = out::line(&format!("{name}: {AWAITED}"));
            is_awaited = is_heard.is_ok();
            ended = match is_heard {
                Ok(()) => wait(monitor, &words, true),
                Err(_) => Ok(Waited::Cancelled),
            };
        }
        match ended {
            // The daemon may have been restarted meanwhile, and be about to listen.
            Ok(Waited::Come) => {
                let client = patiently(connect)?;
                self.attach_pool(monitor, &self.buses, client)?;
                Ok(OK)
            }
            Ok(Waited::GivenUp) if self.movable && is_awaited => {
                self.forget(&mut patiently(connect)?, owner);
                let text = "the machine is not awaited any more; end the QEMU that waits";
                out::note(&format!("{name}: {text}"));
                Ok(OK)
            }
            Ok(Waited::Cancelled | Waited::GivenUp | Waited::Sent) => {
                let left = self.give_up(monitor, connect, &parts, owner)?;
                let what = match left.is_empty() {
                    true => "nothing is left here",
                    false => "the QEMU that waits cannot let go of its devices: end it",
                };
                out::warn(&format!("{name}: the machine does not come; {what}"));
                Ok(OK)
            }
            Err(error) => {
                self.forget(&mut patiently(connect)?, owner);
                Err(Failure::about(
                    name,
                    format!("the machine did not come: {error}"),
                ))
            }
        }
    }

    /// Refuses a machine whose applications read what it may not see here.
    pub(super) fn check_needs(&self, ready: &VmReady, is_prepared: bool) -> Result<(), Failure> {
        // By a command that was killed: the channel is QEMU's.
        if self.needs.is_empty() || is_prepared {
            return Ok(());
        }
        let name = &self.vm.name;
        let seen = Client::connect_to(Path::new(&ready.control_path))?.devices()?;
        let seen: BTreeSet<&str> = seen.iter().map(|device| source_of(&device.name)).collect();
        let needed: BTreeSet<&str> = self.needs.iter().map(|need| source_of(need)).collect();
        let missing: Vec<&str> = needed.difference(&seen).copied().collect();
        let Some(first) = missing.first() else {
            return Ok(());
        };
        let text = format!(
            "its applications read {}, and the daemon here shows it no such source: `vnplug source list` shows \
             what there is here; `vnplug grant add vm:{name}={first}` or --allow {first} grants it",
            missing.join(", ")
        );
        Err(Failure::about(name, text))
    }

    /// The machine does not come: takes out of QEMU what it lets go of, and has the daemon forget the VM, whatever
    /// QEMU says.
    fn give_up(
        &self,
        monitor: &mut dyn Monitor,
        connect: &dyn Fn() -> Result<Client, Failure>,
        parts: &[Part],
        owner: u64,
    ) -> Result<Left, Failure> {
        let left = parts::remove(monitor, parts, GONE);
        self.forget(&mut patiently(connect)?, owner);
        Ok(left?)
    }

    pub(super) fn forget(&self, client: &mut Client, owner: u64) {
        let name = &self.vm.name;
        if let Err(error) = client.detach_own_vm(name, owner) {
            out::warn(&format!("{name}: the daemon did not forget it: {error}"));
        }
    }
}

/// A connection to a daemon that may just be starting.
pub(super) fn patiently(connect: &dyn Fn() -> Result<Client, Failure>) -> Result<Client, Failure> {
    let until = Instant::now() + STARTS;
    loop {
        match connect() {
            Err(_) if Instant::now() < until => std::thread::sleep(LOOK),
            other => return other,
        }
    }
}

/// What the machine does in this QEMU, if there is one.
fn has_come(monitor: &mut dyn Monitor) -> Result<Option<String>, MonitorError> {
    let answer = monitor.execute("query-status", json!({}))?;
    let status = answer["status"].as_str().unwrap_or("unknown");
    let waits = ["inmigrate", "prelaunch", "finish-migrate"].contains(&status);
    Ok((!waits).then(|| status.to_owned()))
}

/// Whether a machine may come of which nobody says any more that it does not; `silent` is for how long nobody does.
fn may_come(monitor: &mut dyn Monitor, silent: Duration) -> Result<bool, MonitorError> {
    let answer = monitor.execute("query-migrate", json!({}))?;
    Ok(match answer["status"].as_str() {
        // QEMU listens.
        None | Some("none" | "setup") => silent < CONNECTS,
        Some(status) => !["failed", "cancelled"].contains(&status),
    })
}

/// Waits for the machine, which is `awaited` when it was said that it is sent.
fn wait(
    monitor: &mut dyn Monitor,
    words: &Receiver<String>,
    awaited: bool,
) -> Result<Waited, MonitorError> {
    let mut orphan = None;
    loop {
        if has_come(monitor)?.is_some() {
            return Ok(Waited::Come);
        }
        let is_over = match words.try_recv() {
            Ok(word) if word == SENT => return Ok(Waited::Sent),
            Ok(word) if word == CANCEL => return Ok(Waited::Cancelled),
            Ok(_) | Err(TryRecvError::Empty) => false,
            Err(TryRecvError::Disconnected) => {
                let since: &mut Instant = orphan.get_or_insert_with(Instant::now);
                !awaited || !may_come(monitor, since.elapsed())?
            }
        };
        if is_over || sys::stop().is_some() {
            return Ok(Waited::GivenUp);
        }
        monitor.news(Instant::now() + LOOK)?;
    }
}

/// The lines of standard input, as they come.
pub(super) fn words() -> Receiver<String> {
    let (sender, words) = channel();
    std::thread::spawn(move || {
        let lines = stdin().lock().lines().map_while(Result::ok);
        lines
            .take_while(|line| sender.send(line.clone()).is_ok())
            .for_each(drop);
    });
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_source_needs_the_source() {
        for (device, source) in [
            ("host:eth1", "eth1"),
            ("eth1@3", "eth1"),
            ("host:lan0/port4", "lan0"),
        ] {
            assert_eq!(source_of(device), source);
        }
    }
}
