//! Direct mode: which stations members of trust groups may send to without the switch.
//!
//! Members read it from a table that only the daemon writes ([`vnplug_ring::direct`]). Only ports of which
//! nothing was set are in there: what a port's settings forbid or change is done here, so its frames come
//! here.

use vnplug_ring::direct::{Stations, Table};

use crate::forward::{Forwarder, Number};
use crate::settings::{PortSettings, Settings};

/// A member's place: the table of its group, and its slot there.
pub(crate) type Place = (u64, Table, usize);

/// The ports that are members of trust groups.
#[derive(Default)]
pub(crate) struct Directs {
    members: Vec<(Number, Place)>,
    stations: Stations,
    /// The stations' changes that the tables have.
    seen: u64,
    /// Members or settings changed.
    is_stale: bool,
    /// When the tables were written last.
    at_us: u64,
}

impl Directs {
    /// A port is a member, or none any more.
    pub(crate) fn set(&mut self, port: Number, place: Option<Place>) {
        if let Some(at) = self.members.iter().position(|(it, _)| *it == port) {
            let (_, (group, table, _)) = self.members.swap_remove(at);
            if !self.members.iter().any(|(_, (it, ..))| *it == group) {
                self.stations.begin(&table);
                table.set_stations(&self.stations);
            }
        }
        self.members.extend(place.map(|place| (port, place)));
        self.is_stale = true;
    }

    /// Settings changed.
    pub(crate) fn settings_changed(&mut self) {
        self.is_stale = true;
    }

    /// When the tables are to be written again.
    #[inline]
    pub(crate) fn next_us(&self, forwarder: &Forwarder) -> Option<u64> {
        let has_news = self.is_stale || self.seen != forwarder.table.changes();
        (has_news && !self.members.is_empty()).then_some(self.at_us + PAUSE_US)
    }

    /// Writes the tables, if something changed and not just now.
    #[inline]
    pub(crate) fn tell(&mut self, forwarder: &Forwarder, settings: &Settings, now_us: u64) {
        if self.next_us(forwarder).is_some_and(|at| now_us >= at) {
            self.write(forwarder, settings, now_us);
        }
    }

    #[cold]
    fn write(&mut self, forwarder: &Forwarder, settings: &Settings, now_us: u64) {
        (self.is_stale, self.at_us) = (false, now_us);
        self.seen = forwarder.table.changes();
        let mut done: Vec<u64> = Vec::new();
        for (_, (group, table, _)) in &self.members {
            if done.contains(group) {
                continue;
            }
            done.push(*group);
            self.stations.begin(table);
            let of_group = self.members.iter().filter(|(_, (it, ..))| it == group);
            let plain = PortSettings::default();
            let is_plain = |port| !settings.is_hub && *settings.of(port) == plain;
            for (port, (_, _, slot)) in of_group.filter(|(port, _)| is_plain(*port)) {
                for key in forwarder.table.of_port(*port).take(MAX_OF_ONE) {
                    if key.vlan() == 0 {
                        self.stations.add(key.address(), *slot);
                    }
                }
            }
            table.set_stations(&self.stations);
        }
    }
}

/// Microseconds between two writings: a port that makes up addresses costs no more.
const PAUSE_US: u64 = 5_000;
/// Stations of one port that are in a table; a bridge behind it may have more.
const MAX_OF_ONE: usize = 256;

#[cfg(test)]
mod tests {
    use vnplug_ring::Region;
    use vnplug_ring::direct::{TABLE_SIZE, TableReader};

    use super::*;
    use crate::table::Limits;

    fn heard(forwarder: &mut Forwarder, port: Number, last: u8) {
        let frame = [2, 0, 0, 0, 0, 99, 2, 0, 0, 0, 0, last, 8, 0];
        let mut frame = frame.to_vec();
        frame.resize(60, 0);
        forwarder.begin(1_000_000);
        forwarder.decide(port, (&frame, 60), None);
    }

    #[test]
    fn stations_of_members_without_settings_are_told_and_no_others() {
        let mut forwarder = Forwarder::new(Limits::default());
        let mut settings = Settings::default();
        let mut directs = Directs::default();
        let region = Region::heap(TABLE_SIZE);
        let table = Table::create(region.clone(), 12_345).unwrap();
        let reader = TableReader::attach(region).unwrap();
        for port in 1..=4 {
            forwarder.add(port);
            heard(&mut forwarder, port, port as u8);
        }
        // Without members nothing is to be done.
        assert_eq!(directs.next_us(&forwarder), None);
        for port in 1..=3 {
            directs.set(port, Some((7, table.clone(), usize::from(port))));
        }
        let station = |last| [2, 0, 0, 0, 0, last];
        let mut now_us = 0;
        let mut tell = |directs: &mut Directs, forwarder: &Forwarder, settings: &Settings| {
            now_us += PAUSE_US;
            directs.tell(forwarder, settings, now_us);
            [1, 2, 3, 4].map(|last| reader.find(&station(last)))
        };
        let all = [Some(1), Some(2), Some(3), None];
        assert_eq!(tell(&mut directs, &forwarder, &settings), all);
        assert_eq!(directs.next_us(&forwarder), None);
        // Who has settings is served by the switch.
        settings.apply("port.2.isolated=yes").unwrap();
        directs.settings_changed();
        let but_two = [Some(1), None, Some(3), None];
        assert_eq!(tell(&mut directs, &forwarder, &settings), but_two);
        // Who moves to somebody else is not at the member any more.
        forwarder.table.set_hold(0);
        heard(&mut forwarder, 4, 3);
        assert!(directs.next_us(&forwarder).is_some());
        let moved = [Some(1), None, None, None];
        assert_eq!(tell(&mut directs, &forwarder, &settings), moved);
        settings.is_hub = true;
        directs.settings_changed();
        assert_eq!(tell(&mut directs, &forwarder, &settings), [None; 4]);
        settings.is_hub = false;
        directs.settings_changed();
        assert_eq!(tell(&mut directs, &forwarder, &settings), moved);
        for port in 1..=3 {
            directs.set(port, None);
        }
        assert_eq!(reader.find(&station(1)), None);
    }
}
