//! Memory of devices that were plugged while the guest runs, for ports: found, waited for, and never taken for
//! another's.
//!
//! Who has the descriptor of a device may write its first page, by which it is known. So one that was handed
//! out is not looked at again: it could say that it is another's memory.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use vnplug_ring::control::{ArenaHome, Opened, RingPlace, code};

use super::app::Hangup;
use super::arena::{self, Handed};
use super::find::Pool;
use super::places::places_of;
use super::relay::Pending;
use super::serve::Agent;

/// Why a port's memory is not there.
pub(super) enum Missing {
    /// A device was plugged for it, and the guest's kernel has not found it yet.
    Awaited,
    /// A group of the host has a device that this guest has not.
    Group,
}

/// A port that is open on the host, and whose memory the guest's kernel has not found yet.
#[derive(Debug)]
pub(super) struct AwaitedPort {
    pending: Pending,
    opened: Opened,
    next: Instant,
    until: Instant,
}

/// The descriptors of a port's rings (`None`: there are no descriptors left), and of its group's arenas if
/// those lie apart.
pub(super) fn memory_of(
    pools: &[Pool],
    handed: &mut Handed,
    opened: &Opened,
) -> Result<(Option<OwnedFd>, Option<OwnedFd>), Missing> {
    let root = Path::new("/");
    let pool = || pools.first().and_then(|pool| pool.memory.try_clone().ok());
    let arenas = match (opened.arenas.home, opened.arenas.memory) {
        (ArenaHome::Apart, 0) => pool(),
        (ArenaHome::Apart, epoch) => {
            let found = arena::find(root, handed, epoch);
            Some(found.ok_or(Missing::Group)?)
        }
        (ArenaHome::Plugged, epoch) => {
            let found = arena::find(root, handed, epoch);
            Some(found.ok_or(Missing::Awaited)?)
        }
        (ArenaHome::None | ArenaHome::WithTheRings, _) => None,
    };
    let memory = match opened.memory {
        0 => pool(),
        number => {
            let found = arena::find_plugged(root, handed, number, true);
            Some(found.ok_or(Missing::Awaited)?)
        }
    };
    Ok((memory, arenas))
}

impl Agent {
    /// A port is answered when its memory is there.
    pub(super) fn await_port(&mut self, pending: Pending, opened: Opened) {
        let now = Instant::now();
        if let Some(app) = self.apps.get_mut(&pending.app) {
            app.pending += 1;
        }
        self.awaited_ports.push(AwaitedPort {
            pending,
            opened,
            next: now + LOOK,
            until: now + PLUGGED,
        });
    }

    /// Looks for the memory of ports that wait for it. When to look again.
    pub(super) fn look_for_memory(&mut self, now: Instant) -> Option<Instant> {
        let due = self.awaited_ports.extract_if(.., |it| it.next <= now);
        let due: Vec<AwaitedPort> = due.collect();
        for mut awaited in due {
            let found = memory_of(&self.pools, &mut self.handed, &awaited.opened);
            let is_missing = matches!(found, Err(Missing::Awaited));
            if is_missing && now < awaited.until {
                awaited.next = now + LOOK;
                self.awaited_ports.push(awaited);
                continue;
            }
            let AwaitedPort {
                pending, opened, ..
            } = awaited;
            if let Some(app) = self.apps.get_mut(&pending.app) {
                app.pending -= 1;
            }
            let answered = match is_missing {
                true => {
                    let text = "memory for the port was plugged, and the guest finds no device: is there \
                                room for it? (dmesg says why not)";
                    self.give_up(pending, &opened, code::UNAVAILABLE, text)
                }
                // NB: by what was found now; what is handed out is not found again.
                false => self.opened_with(pending, opened, found),
            };
            match answered {
                Ok(()) => self.serve_requests(pending.app),
                Err(hangup) => self.drop_app(pending.app, &hangup),
            }
        }
        self.awaited_ports.iter().map(|it| it.next).min()
    }

    /// An application is gone: the places of ports that it was to get.
    pub(super) fn forget_awaited(&mut self, app: u32) -> Vec<RingPlace> {
        let gone = self
            .awaited_ports
            .extract_if(.., |it| it.pending.app == app);
        gone.flat_map(|it| places_of(&it.opened)).collect()
    }

    /// The host closed a port that waits for its memory.
    pub(super) fn end_awaited(&mut self, port: u32, reason: &str) {
        let at = self
            .awaited_ports
            .iter()
            .position(|it| it.opened.port == port);
        let Some(awaited) = at.map(|at| self.awaited_ports.remove(at)) else {
            return;
        };
        let pending = awaited.pending;
        if let Some(app) = self.apps.get_mut(&pending.app) {
            app.pending -= 1;
        }
        self.release(places_of(&awaited.opened));
        let refused = self.refuse(pending.app, pending.id, code::UNAVAILABLE, reason);
        if let Err(hangup) = refused {
            self.drop_app(pending.app, &hangup);
        }
    }

    /// The host knows none of the ports any more.
    pub(super) fn lose_awaited(&mut self, reason: &str, hangups: &mut Vec<(u32, Hangup)>) {
        for AwaitedPort { pending, .. } in std::mem::take(&mut self.awaited_ports) {
            if let Some(app) = self.apps.get_mut(&pending.app) {
                app.pending -= 1;
            }
            let refused = self.refuse(pending.app, pending.id, code::UNAVAILABLE, reason);
            if let Err(hangup) = refused {
                hangups.push((pending.app, hangup));
            }
        }
    }
}

/// Between looks for a device.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// How long one is looked for: a PCIe port takes five seconds to show it.
pub(super) const PLUGGED: Duration = Duration::from_secs(20);
