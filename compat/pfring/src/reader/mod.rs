//! The ports behind one ring, read as one.
//!
//! Packets are taken from a port in bursts and lent one by one; the room of a burst goes back when
//! the next one is taken. So a packet stays valid until the next call that receives, as PF_RING
//! promises, and no port is asked while some of its packets wait here. In a group a burst is of copies
//! that were whole, which stay as long.

mod rules;

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use vnplug::{Error, Meta, Next, Port, Rule, RuleKey, Tuning};

use crate::device::Target;
use crate::gate::Gate;
use crate::settings::Settings;
use rules::Kept;

/// See the module's comment.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) settings: Settings,
    targets: Vec<Target>,
    ports: Vec<Port>,
    turn: usize,
    burst: Vec<Lent>,
    taken: usize,
    rules: BTreeMap<RuleKey, Kept>,
    /// What happens to packets that no rule decides.
    rule_default: bool,
    /// Some of `rules` are gone on the host.
    purged: bool,
    /// The name changed: the ports are opened again when they are enabled.
    renamed: bool,
    /// Losses of ports that were closed.
    lost_before: u64,
}

/// One packet in a ring. Its bytes are there until the next burst.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lent {
    pub(crate) data: *const u8,
    pub(crate) len: usize,
    pub(crate) meta: Meta,
}

/// What [`Reader::take`] found.
#[derive(Debug)]
pub(crate) enum Found {
    Packet(Lent),
    Nothing,
    /// All sources ended and everything was read.
    Ended,
}

impl Reader {
    /// Opens a port on each target.
    pub(crate) fn open(
        targets: Vec<Target>,
        settings: Settings,
        gate: &Gate,
    ) -> Result<Self, Error> {
        let mut reader = Self {
            settings,
            targets: Vec::new(),
            ports: Vec::new(),
            turn: 0,
            burst: Vec::with_capacity(BURST),
            taken: 0,
            rules: BTreeMap::new(),
            rule_default: true,
            purged: false,
            renamed: false,
            lost_before: 0,
        };
        reader.replace(targets, gate)?;
        Ok(reader)
    }

    /// The names of the ports' devices, as asked for.
    pub(crate) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// The ports.
    pub(crate) fn ports(&mut self) -> &mut [Port] {
        &mut self.ports
    }

    /// Replaces the ports by ports on `targets`, with the settings there are. On an error nothing
    /// changes. What was not read yet is lost.
    pub(crate) fn replace(&mut self, targets: Vec<Target>, gate: &Gate) -> Result<(), Error> {
        self.forget_purged();
        let ports = targets.iter().map(|target| self.open_port(target, gate));
        let ports = ports.collect::<Result<Vec<_>, _>>()?;
        self.lost_before += self.dropped_by_ports();
        (self.ports, self.targets, self.turn) = (ports, targets, 0);
        self.renamed = false;
        self.burst.clear();
        self.taken = 0;
        Ok(())
    }

    /// Opens the ports again, for settings that are fixed when a port is opened.
    pub(crate) fn reopen(&mut self, gate: &Gate) -> Result<(), Error> {
        self.replace(self.targets.clone(), gate)
    }

    /// The ports are to be opened again before packets flow.
    pub(crate) fn rename(&mut self, label: String) {
        self.settings.label = label;
        self.renamed = true;
    }

    /// Lets packets flow, or not.
    pub(crate) fn enable(&mut self, enabled: bool, gate: &Gate) -> Result<(), Error> {
        if enabled && self.renamed {
            self.reopen(gate)?;
        }
        self.tune(Tuning {
            enabled,
            ..self.settings.tuning
        })
    }

    /// Changes direction, sampling or the flow of all ports.
    pub(crate) fn tune(&mut self, tuning: Tuning) -> Result<(), Error> {
        self.each(|port| port.tune(tuning))?;
        self.settings.tuning = tuning;
        Ok(())
    }

    /// Puts the filter of the settings into effect; if it is refused, `old` is there again.
    pub(crate) fn filter(&mut self, old: Settings) -> Result<(), Error> {
        let spec = self.settings.filter_spec();
        let set = self.each(|port| port.set_filter(spec.clone()));
        if set.is_err() {
            self.settings = old;
            let spec = self.settings.filter_spec();
            // Of several ports the first may have taken the new one.
            let _was_in_effect_before = self.each(|port| port.set_filter(spec.clone()));
        }
        set
    }

    /// Puts watermark and delay of the settings into effect, from the next sleep on.
    pub(crate) fn wake_at(&mut self) {
        let (watermark, delay) = (self.settings.watermark(), self.settings.max_delay());
        for port in &mut self.ports {
            port.set_watermark(watermark, delay);
        }
    }

    /// The next packet, without waiting. `arm`: if there is none, the gate's descriptors tell when
    /// there is.
    #[inline]
    pub(crate) fn take(&mut self, arm: bool, gate: &Gate) -> Result<Found, Error> {
        if let Some(lent) = self.burst.get(self.taken) {
            self.taken += 1;
            return Ok(Found::Packet(*lent));
        }
        match self.fill(arm, gate)? {
            Some(found) => Ok(found),
            None => {
                self.taken = 1;
                Ok(Found::Packet(self.burst[0]))
            }
        }
    }

    /// The packet that [`take`](Self::take) would return.
    pub(crate) fn peek(&mut self, arm: bool, gate: &Gate) -> Result<Found, Error> {
        let found = self.take(arm, gate)?;
        if matches!(found, Found::Packet(_)) {
            self.taken -= 1;
        }
        Ok(found)
    }

    /// The packet that was taken last, until the next burst.
    pub(crate) fn last(&self) -> Option<Lent> {
        self.burst.get(self.taken.checked_sub(1)?).copied()
    }

    /// Packets of one burst that are still to be taken, without asking any port.
    pub(crate) fn rest(&mut self, max: usize) -> &[Lent] {
        let end = self.burst.len().min(self.taken + max);
        let rest = &self.burst[self.taken..end];
        self.taken = end;
        rest
    }

    /// Packets that were published and not taken yet.
    pub(crate) fn queued(&self) -> u64 {
        let unread = self.ports.iter().flat_map(Port::unread);
        let unread: u64 = unread.map(|(_queue, packets)| packets).sum();
        unread + (self.burst.len() - self.taken) as u64
    }

    /// Packets that were lost for want of room, by all ports this ring ever had.
    pub(crate) fn dropped(&self) -> u64 {
        self.lost_before + self.dropped_by_ports()
    }

    /// Packets of the longest captured length that fit the smallest ring.
    pub(crate) fn slots(&self) -> u32 {
        let slots = self.ports.iter().map(|port| {
            let longest = port.snaplen().min(FULL_FRAME);
            port.ring_bytes() / (RECORD_HEADER + u64::from(longest))
        });
        let least = slots.min().unwrap_or(0);
        u32::try_from(least).unwrap_or(u32::MAX)
    }

    /// Half of what fits the ring: a reader that sleeps longer loses packets.
    pub(crate) fn largest_watermark(&self) -> u32 {
        (self.slots() / 2).max(1)
    }

    /// Takes a burst. `None`: there is one now.
    #[cold]
    fn fill(&mut self, arm: bool, gate: &Gate) -> Result<Option<Found>, Error> {
        self.burst.clear();
        self.taken = 0;
        let count = self.ports.len();
        for step in 1..=count {
            let index = (self.turn + step) % count;
            for packet in self.ports[index].batch(BURST) {
                let packet = packet?;
                self.burst.push(Lent::of(&packet));
            }
            if !self.burst.is_empty() {
                self.turn = index;
                return Ok(None);
            }
        }
        self.idle(arm, gate)
    }

    /// No port had a packet: asks each what else it has to say.
    fn idle(&mut self, arm: bool, gate: &Gate) -> Result<Option<Found>, Error> {
        let mut ended = 0;
        for (index, port) in self.ports.iter_mut().enumerate() {
            let next = if arm { port.next() } else { port.poll_next() };
            match next? {
                Next::Packet(packet) => {
                    self.burst.push(Lent::of(&packet));
                    self.turn = index;
                    gate.set_ready(true);
                    return Ok(None);
                }
                Next::Nothing => {}
                Next::Ended => ended += 1,
            }
        }
        gate.set_dropped(self.dropped());
        if ended > 0 && ended == self.ports.len() {
            gate.set_ready(true);
            return Ok(Some(Found::Ended));
        }
        if arm {
            gate.set_ready(false);
        }
        Ok(Some(Found::Nothing))
    }

    fn open_port(&self, target: &str, gate: &Gate) -> Result<Port, Error> {
        let mut port = self.settings.options(target).open()?;
        if !self.rule_default {
            port.set_rule_default(false)?;
        }
        let rules: Vec<Rule> = self.rules.values().map(|kept| kept.rule).collect();
        port.add_rules(&rules)?;
        gate.add(port.as_fd()).map_err(|errno| Error::System {
            what: "cannot watch a port",
            errno,
        })?;
        Ok(port)
    }

    fn dropped_by_ports(&self) -> u64 {
        self.ports.iter().map(Port::dropped).sum()
    }

    fn each(&mut self, act: impl FnMut(&mut Port) -> Result<(), Error>) -> Result<(), Error> {
        self.ports.iter_mut().try_for_each(act)
    }
}

impl Lent {
    fn of(packet: &vnplug::Packet<'_>) -> Self {
        Self {
            data: packet.bytes.as_ptr(),
            len: packet.bytes.len(),
            meta: packet.meta,
        }
    }
}

/// Bytes of a record beside the packet's.
const RECORD_HEADER: u64 = 40;
/// Bytes of a usual longest frame.
const FULL_FRAME: u32 = 1518;
/// Packets taken from a port at once.
const BURST: usize = 64;
