//! What other threads ask of the switch: ports that come and go, settings, how it is.

use std::io;

use super::Switch;
use crate::control::{Change, PortTold, Told};
use crate::counts::{Counters, Reason, Refused};
use crate::exits::PortCounters;
use crate::forward::{HOST, Number};
use crate::link::{Link, Losses};
use crate::police::Police;
use crate::settings::Settings;
use crate::twin::Twin;

impl Switch {
    pub(super) fn change(&mut self, change: Change) {
        match change {
            Change::AddRing(number) => {
                self.exits.add_ring(number);
                self.join(number);
            }
            Change::Add { port, link, losses } => match self.add(port, link, losses) {
                Ok(()) => self.join(port),
                Err(error) => {
                    log::error!(target: "switch", "{}: port {port}: {error}", self.name);
                }
            },
            Change::Plug {
                port,
                uplink,
                queues,
            } => {
                // Whoever was there before is not to be found there.
                self.part(port);
                let link = self.uplinks.plug(*uplink, queues, port);
                self.exits.add_unwatched(port, link);
                self.forwarder.table.set_uplink(port, true);
                self.join(port);
            }
            Change::Remove(number) => {
                self.remove(number);
            }
            Change::Unplug(number, to) => {
                if let Some(twin) = &mut self.twin {
                    twin.remove(number);
                }
                self.remove(number);
                if let Some(gone) = self.uplinks.unplug(number) {
                    // If nobody waits any more, its sockets are closed here.
                    let _ = to.send(gone);
                }
            }
            Change::Anew(number) => self.forwarder.pardon(number),
            Change::Close(number) => {
                if let Some(losses) = self.remove(number) {
                    losses.tell(number);
                }
            }
            Change::Settings(number, settings) => {
                match settings {
                    Some(settings) => self.settings.ports.insert(number, *settings),
                    None => self.settings.ports.remove(&number),
                };
                self.set(number);
            }
            Change::Direct(number, place) => self.directs.set(number, place),
            Change::Read(number, comes) => self.exits.read(number, comes),
            Change::Whole(settings) => self.set_all(*settings),
            Change::Tell(reply) => {
                // Nobody waits any more, if it fails.
                let _ = reply.send(self.told());
            }
            Change::Settle(reply) => {
                let _ = reply.send(());
            }
            Change::Refer {
                port,
                guest,
                has_failed,
            } => self.refer(port, guest, has_failed),
        }
    }

    fn told(&mut self) -> Told {
        self.collect();
        let table = &self.forwarder.table;
        let now_s = self.clock.now_s();
        let port = |(number, counters)| PortTold {
            number,
            counters: self.port_counters(number, counters),
            refused: self.port_refused(number),
            state: match self.forwarder.is_shut(number) {
                (_, true) => "shut",
                (true, _) => "down",
                _ => "up",
            },
        };
        Told {
            counters: self.all_counters(),
            ports: self.exits.counters().into_iter().map(port).collect(),
            stations: table.entries(now_s).take(MAX_TOLD).collect(),
            station_count: table.len() as u64,
            limits: table.limits(),
            is_hub: self.forwarder.is_hub,
        }
    }

    /// What became of all frames, those that the kernel instance forwarded among them.
    pub(super) fn all_counters(&self) -> Counters {
        let mut counters = self.forwarder.counters;
        let (forwarded, policed) = self.twin.as_ref().map_or((0, 0), Twin::frames);
        counters.entered += forwarded + policed;
        counters.refused.add_all(Reason::Police, policed);
        counters.unicast += forwarded;
        counters.due += forwarded;
        counters.enqueued += forwarded;
        if !self.lanes.is_empty() {
            let carried = self.lanes.total();
            counters.carried(carried.frames);
            PortCounters::default().gave(carried.given, &mut counters);
            counters.lost(carried.lost);
        }
        counters
    }

    /// The same of a port.
    fn port_counters(&self, number: Number, mut counters: PortCounters) -> PortCounters {
        if let Some(twin) = &self.twin {
            let forwarded = twin.forwarded(number);
            counters.in_frames += forwarded.in_frames + forwarded.policed;
            counters.in_bytes += forwarded.in_bytes + forwarded.policed_bytes;
            counters.out_frames += forwarded.out_frames;
            counters.out_bytes += forwarded.out_bytes;
        }
        counters
    }

    fn port_refused(&self, number: Number) -> Refused {
        let mut refused = self.forwarder.refused(number);
        let policed = self
            .twin
            .as_ref()
            .map_or(0, |it| it.forwarded(number).policed);
        refused.add_all(Reason::Police, policed);
        refused
    }

    /// A port is there.
    pub(super) fn join(&mut self, number: Number) {
        self.forwarder.add(number);
        self.set(number);
    }

    /// A port is from now on as its settings say.
    fn set(&mut self, number: Number) {
        self.directs.settings_changed();
        let is_ring = self.exits.is_ring(number);
        if is_ring.is_none() && number != HOST {
            return;
        }
        let settings = self.settings.of(number);
        self.forwarder.set(number, settings, self.settings.storm);
        let now_us = self.now_us();
        self.exits.set(number, settings, now_us);
        if let Some(twin) = &mut self.twin {
            twin.police(number, Police(settings.police));
        }
        if is_ring == Some(true) && !settings.wire.is_plain() {
            log::warn!(
                target: "switch",
                "{}: port {number} has rings, which delay and lose nothing",
                self.name
            );
        }
        self.limit(number);
    }

    /// What the kernel instance and lanes do not know how to do with a port is this thread's.
    pub(super) fn limit(&mut self, number: Number) {
        self.limit_twin(number);
        self.limit_lane(number);
    }

    fn limit_twin(&mut self, number: Number) {
        let Some(twin) = &mut self.twin else {
            return;
        };
        let settings = self.settings.of(number);
        let is_plain = settings.wire.is_plain() && !settings.cuts && !settings.sums;
        // Where only the kernel has an instance, each would let as much pass.
        let has_two_buckets = settings.police > 0 && self.forwarder.judge.is_none();
        let is_limited = self.forwarder.rules_known(number) || !is_plain || has_two_buckets;
        twin.set_upcall(number, is_limited);
    }

    /// The switch and all its ports are from now on as the settings say.
    pub(super) fn set_all(&mut self, settings: Settings) {
        let before = std::mem::replace(&mut self.settings, settings);
        self.directs.settings_changed();
        let settings = &self.settings;
        self.forwarder.is_hub = settings.is_hub;
        self.forwarder.loops = settings.loops;
        self.forwarder.table.set_age(settings.age_s);
        self.lanes.set_age(settings.age_s);
        if let Some(twin) = &self.twin {
            twin.set_age(settings.age_s);
        }
        self.forwarder.table.set_hold(settings.hold_s);
        if before.statics != settings.statics {
            self.forwarder.set_statics(settings);
        }
        let has_new_storm = before.storm != settings.storm;
        let mut ports = self.forwarder.ports().to_vec();
        ports.push(HOST);
        for number in ports {
            if has_new_storm || before.of(number) != self.settings.of(number) {
                self.set(number);
            }
        }
    }

    /// A port has a link.
    fn add(&mut self, number: Number, link: Box<dyn Link>, losses: Losses) -> io::Result<()> {
        // Whoever was there before is not to be found there.
        self.part(number);
        self.exits.add(number, link, losses)?;
        if !self.lanes.is_empty()
            && let Some(guest) = self.exits.share(number)
        {
            self.lanes.add(number, guest);
        }
        Ok(())
    }

    /// No lane has anything to do with a port any more.
    fn part(&mut self, number: Number) {
        let carried = self.lanes.remove(number);
        self.count_carried(number, carried);
    }

    /// Says who is to be told, if nobody knows it yet.
    pub(super) fn remove(&mut self, number: Number) -> Option<Losses> {
        self.part(number);
        self.forwarder.remove(number);
        self.directs.set(number, None);
        if self.exits.port(number).is_some_and(|port| port.is_ready) {
            self.ready.retain(|ready| *ready != number);
        }
        self.exits.remove(number)
    }
}

/// Stations that are told at once.
const MAX_TOLD: usize = 16_384;
