//! Plugs memory into a QEMU while it runs, for the daemon, which speaks to no QEMU itself.
//!
//! ```text
//! daemon ── Plug + memfd ──▶ this process ── add-fd, object-add, device_add ──▶ QEMU
//!        ── Unplug ────────▶              ── device_del … object-del ─────────▶
//! ```
//!
//! QEMU gets the memory as a descriptor and opens it again by its own `/proc/self/fd`: no file has to be
//! where QEMU's user may open it, and nobody can shorten the memory under the guest.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use vnplug::Client;
use vnplug_ring::control::Grow;

use super::Attach;
use super::monitor::{Monitor, MonitorError, News};
use super::parts;
use super::slots;
use crate::failure::{Failure, OK, Outcome};
use crate::{out, sys};

/// Between tries to reach the daemon again.
const RETRY: Duration = Duration::from_millis(300);
/// Between looks at what QEMU and signals say.
const TURN: Duration = Duration::from_millis(200);
/// How long a guest has to let go of a device before it is said that it does not.
const LETS_GO: Duration = Duration::from_secs(3);

/// The memory of one device and the device, as QEMU calls them.
fn ids(vm: &str, number: u32) -> (String, String) {
    (
        format!("vnplug-{vm}-grow{number}"),
        format!("vnplug-{vm}-growshm{number}"),
    )
}

/// What an earlier process plugged and left, as QEMU calls it.
fn left_over(vm: &str, present: &[String]) -> Vec<(String, String)> {
    let numbers = numbers(vm, present).into_iter();
    numbers.map(|number| ids(vm, number)).collect()
}

/// What was plugged for a VM, by its numbers.
pub(super) fn numbers(vm: &str, present: &[String]) -> BTreeSet<u32> {
    let prefix = format!("vnplug-{vm}-grow");
    let numbers = present.iter().filter_map(|id| {
        let rest = id.strip_prefix(&prefix)?;
        rest.strip_prefix("shm").unwrap_or(rest).parse::<u32>().ok()
    });
    numbers.collect()
}

impl Attach {
    /// Attaches, then plugs what the daemon wants. A daemon that is started again is served again.
    pub(super) fn attach_and_grow(
        &self,
        monitor: &mut dyn Monitor,
        most: u64,
        connect: impl Fn() -> Result<Client, Failure>,
    ) -> Outcome {
        let name = &self.vm.name;
        sys::catch_signals();
        let mut again = false;
        loop {
            let client = match connect() {
                Ok(client) => client,
                Err(_) if again => {
                    if sys::stop().is_some() {
                        return Ok(OK);
                    }
                    std::thread::sleep(RETRY);
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            let mut client = self.attach_pool(monitor, &self.buses, client)?;
            // Programs may map what is there: the daemon knows, or says after a while that it is to go.
            for number in numbers(name, &parts::present(monitor)?) {
                let error = String::new();
                client.tell_growth(Grow::Plugged { number, error })?;
            }
            out::line(&format!(
                "{name}: plugs up to {} MiB while this runs",
                most >> 20
            ))?;
            match serve(monitor, &mut client, name, &self.buses) {
                Ok(Some(ended)) => return Ok(ended),
                Ok(None) => again = true,
                Err(failure) => return Err(failure),
            }
        }
    }
}

/// Takes out what an earlier process left.
///
/// # Errors
/// [`MonitorError`]; devices that the guest does not let go of are none.
pub(super) fn remove_left_over(
    monitor: &mut dyn Monitor,
    vm: &str,
    limit: Duration,
) -> Result<Vec<String>, MonitorError> {
    let left = left_over(vm, &parts::present(monitor)?);
    let devices: Vec<String> = left.iter().map(|(_, device)| device.clone()).collect();
    let stay = parts::unplug(monitor, &devices, limit)?;
    for (memory, device) in &left {
        if !stay.contains(device) {
            forget(monitor, memory)?;
        }
    }
    Ok(stay)
}

/// Plugs and takes out what the daemon says, until a signal comes, or QEMU ends; `None`: the daemon is gone.
fn serve(
    monitor: &mut dyn Monitor,
    client: &mut Client,
    vm: &str,
    buses: &[String],
) -> Result<Option<ExitCode>, Failure> {
    loop {
        if sys::stop().is_some() {
            return Ok(Some(OK));
        }
        loop {
            let (what, memory) = match client.next_growth() {
                Ok(Some(what)) => what,
                Ok(None) => break,
                Err(_) => return Ok(None),
            };
            let answer = match what {
                Grow::Plug {
                    number,
                    len,
                    readonly,
                } => {
                    let plugged = memory
                        .ok_or_else(|| "no memory came with it".to_owned())
                        .and_then(|memory| {
                            plug(monitor, vm, buses, number, &memory, len, readonly)
                        });
                    let error = plugged.err().unwrap_or_default();
                    if error.is_empty() {
                        out::line(&format!("{vm}: plugged {} KiB ({number})", len >> 10))?;
                    } else {
                        out::warn(&format!("{vm}: {error}"));
                    }
                    Grow::Plugged { number, error }
                }
                Grow::Unplug { number } => {
                    let error = match unplug(monitor, vm, number) {
                        Ok(()) => String::new(),
                        Err(error) => error.line(),
                    };
                    if error.is_empty() {
                        out::line(&format!("{vm}: took out {number}"))?;
                    } else {
                        out::warn(&format!("{vm}: {error}"));
                    }
                    Grow::Unplugged { number, error }
                }
                _ => continue,
            };
            if client.tell_growth(answer).is_err() {
                return Ok(None);
            }
        }
        // An event of a QEMU that ended is an error here.
        match monitor.news(Instant::now()) {
            Ok(News::Event(event)) if event.name == "DEVICE_DELETED" => {
                // The guest let go of one at last.
                let device = event.data["device"].as_str().unwrap_or_default();
                let number = left_over(vm, &[device.to_owned()])
                    .pop()
                    .and_then(|(object, _)| {
                        forget(monitor, &object).ok()?;
                        object.rsplit_once("grow")?.1.parse().ok()
                    });
                if let Some(number) = number {
                    let error = String::new();
                    let gone = Grow::Unplugged { number, error };
                    if client.tell_growth(gone).is_err() {
                        return Ok(None);
                    }
                }
                continue;
            }
            Ok(News::Event(_) | News::Look | News::Nothing) => {}
            Err(error) => return Err(Failure::about(vm, error)),
        }
        let fd = client.as_fd();
        let turn = Timespec {
            tv_sec: 0,
            tv_nsec: TURN.subsec_nanos().into(),
        };
        match poll(
            &mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)],
            Some(&turn),
        ) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Failure::about("cannot wait for the daemon", errno)),
        }
    }
}

fn plug(
    monitor: &mut dyn Monitor,
    vm: &str,
    buses: &[String],
    number: u32,
    memory: &OwnedFd,
    len: u64,
    readonly: bool,
) -> Result<(), String> {
    let (object, device) = ids(vm, number);
    let told = |error: MonitorError| error.to_string();
    let place = slots::choose(monitor, buses, 1)
        .map_err(told)?
        .map_err(|no_room| no_room.to_string())?;
    let (set, fd) = monitor.add_fd(memory.as_fd()).map_err(told)?;
    let arguments = json!({
        "qom-type": "memory-backend-file", "id": object, "share": true, "readonly": readonly,
        "mem-path": format!("/proc/self/fd/{fd}"), "size": len,
    });
    let added = monitor.execute("object-add", arguments);
    // QEMU has opened it by itself, or never will.
    let removed = monitor.execute("remove-fd", json!({"fdset-id": set}));
    added.map_err(told)?;
    removed.map_err(told)?;
    let mut arguments = json!({"driver": "ivshmem-plain", "memdev": object, "id": device});
    for place in &place {
        place.tell(&mut arguments);
    }
    if let Err(error) = monitor.execute("device_add", arguments) {
        // It was never in use.
        forget(monitor, &object).map_err(told)?;
        return Err(error.to_string());
    }
    Ok(())
}

fn unplug(monitor: &mut dyn Monitor, vm: &str, number: u32) -> Result<(), Failure> {
    let (object, device) = ids(vm, number);
    let left = parts::unplug(monitor, &[device], LETS_GO)?;
    if let Some(device) = left.first() {
        let text = format!("the guest does not let go of {device}; its memory is empty");
        return Err(Failure::new(text));
    }
    forget(monitor, &object)?;
    Ok(())
}

fn forget(monitor: &mut dyn Monitor, object: &str) -> Result<(), MonitorError> {
    match monitor.execute("object-del", json!({"id": object})) {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_earlier_process_left_is_known_by_its_names() {
        let present = [
            "vnplug-a-mem",
            "vnplug-a-grow3",
            "vnplug-a-growshm3",
            "vnplug-a-growshm7",
            "vnplug-ab-grow1",
            "vnplug-a-grows",
        ];
        let present: Vec<String> = present.map(str::to_owned).to_vec();
        assert_eq!(left_over("a", &present), [ids("a", 3), ids("a", 7)]);
    }
}
