//! Ports that are lent to lanes, and what those forwarded.

use std::io;

use super::Switch;
use crate::exits::PortCounters;
use crate::forward::Number;
use crate::lanes::Carried;
use crate::link::Given;

impl Switch {
    /// Lends ports to lanes, and takes them back.
    pub(super) fn serve_lanes(&mut self) {
        let is_open = !self.is_watched && !self.forwarder.is_hub;
        if self.lanes.open(is_open) {
            for number in self.lanes.ports() {
                match is_open {
                    true => self.limit_lane(number),
                    false => self.take_back(number),
                }
            }
        }
        if self.lanes.has_work() {
            for number in self.lanes.rested(self.clock.now_us()) {
                self.limit_lane(number);
            }
        }
    }

    /// Lends a port if nothing is done with its frames, and else does not.
    pub(super) fn limit_lane(&mut self, number: Number) {
        if self.lanes.is_empty() {
            return;
        }
        let settings = self.settings.of(number);
        let is_left_alone = !self.forwarder.rules_known(number)
            && settings.wire.is_plain()
            && !(settings.cuts || settings.sums || settings.expands_acks)
            && (settings.gro, settings.police) == (0, 0);
        // Frames that are still on a slow wire must not be overtaken.
        let is_slow = self.exits.is_slow(number);
        self.lanes.set_plain(number, is_left_alone && !is_slow);
        if !is_left_alone || is_slow {
            self.take_back(number);
            if is_left_alone {
                self.lanes.refer(number, self.clock.now_us(), false);
            }
            return;
        }
        let now_us = self.clock.now_us();
        if self.lanes.lend(number, now_us, self.exits.epoll()) {
            if let Some(port) = self.exits.port(number) {
                port.is_ready = false;
            }
            self.ready.retain(|ready| *ready != number);
        }
    }

    /// A port is not lent any more; it may have frames.
    pub(super) fn take_back(&mut self, number: Number) {
        let taken = self.lanes.take_back(number, None, self.exits.epoll());
        self.took_back(number, taken);
    }

    fn took_back(&mut self, number: Number, taken: Option<io::Result<()>>) -> bool {
        let Some(watched) = taken else {
            return false;
        };
        if let Err(error) = watched {
            // Nobody would hear of its frames.
            self.lost.push((number, error));
        }
        if let Some(port) = self.exits.port(number) {
            port.is_ready = true;
            self.ready.push_back(number);
        }
        true
    }

    /// A lane has found what it does not do.
    pub(super) fn refer(&mut self, number: Number, guest: u64, has_failed: bool) {
        let epoll = self.exits.epoll();
        let taken = self.lanes.take_back(number, Some(guest), epoll);
        // Else it was taken back before, or is another guest's.
        if self.took_back(number, taken) {
            let now_us = self.clock.now_us();
            self.lanes.refer(number, now_us, has_failed);
        }
    }

    /// Counts what lanes forwarded.
    pub(super) fn collect(&mut self) {
        for (number, carried) in self.lanes.collect() {
            self.count_carried(number, carried);
        }
    }

    pub(super) fn count_carried(&mut self, number: Number, carried: Carried) {
        let counters = &mut self.forwarder.counters;
        counters.carried(carried.frames);
        self.lane_forwarded += carried.frames;
        let Some(port) = self.exits.port(number) else {
            PortCounters::default().gave(carried.given, counters);
            counters.lost(carried.lost);
            return;
        };
        port.counters.in_frames += carried.frames;
        port.counters.in_bytes += carried.bytes;
        port.counters.gave(carried.given, counters);
        let lost = Given {
            gone: carried.lost,
            ..Given::default()
        };
        port.counters.took_back(lost, counters);
        port.count_lost(counters);
    }
}
