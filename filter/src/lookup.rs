//! Keys of many programs, by field and value; a batch is looked up field by field.

use std::collections::HashMap;

use super::analyse::{Base, Key};
use super::field::{Field, Part};
use super::spans::Spans;
use super::table::{Candidate, Table};
use vnplug_frame::Frame;
use vnplug_os::event;

/// The tables of all fields.
#[derive(Debug)]
pub(super) struct Lookup {
    kinds: Vec<Kind>,
    free: Vec<u32>,
    by_field: HashMap<Field, u32>,
    /// By Ethertype: its group, or 0. Empty before the first field with a gate.
    gates: Vec<u16>,
    /// The first has the fields without a gate.
    groups: Vec<Group>,
    /// Groups that frames of the batch belong to.
    present: Vec<u16>,
    asked: Vec<Asked>,
    secret: u64,
}

/// One field.
#[derive(Debug)]
struct Kind {
    field: Field,
    /// By single values, and
    table: Table,
    /// by ranges of them.
    spans: Spans,
}

/// The fields of one Ethertype.
#[derive(Debug, Default)]
struct Group {
    gate: u16,
    kinds: Vec<u32>,
    /// Frames of the batch that have it.
    places: Vec<u16>,
}

/// What a frame has in a field.
#[derive(Debug, Clone, Copy)]
struct Asked {
    value: u64,
    entry: u32,
    place: u16,
}

/// The most fields, and Ethertypes with fields. Each field costs a lookup per frame of its
/// Ethertype; the hub admits far fewer of one owner who is not an operator.
pub(super) const MAX_FIELDS: usize = 16_384;

impl Default for Lookup {
    fn default() -> Self {
        Self {
            kinds: Vec::new(),
            free: Vec::new(),
            by_field: HashMap::new(),
            gates: Vec::new(),
            groups: vec![Group::default()],
            present: Vec::new(),
            asked: Vec::new(),
            secret: event::random(),
        }
    }
}

impl Lookup {
    /// How many fields there are.
    pub(super) fn fields(&self) -> usize {
        self.by_field.len()
    }

    /// Adds the keys of a program, or none of them if there is no room for their fields.
    pub(super) fn insert(&mut self, keys: &[Key], judge: u32) -> bool {
        if !self.has_room(keys) {
            return false;
        }
        for key in keys {
            let at = match self.by_field.get(&key.field) {
                Some(&at) => at,
                None => self.add(&key.field),
            };
            let kind = &mut self.kinds[at as usize];
            let candidate = Candidate::new(judge, key.sure);
            match key.is_range() {
                false => kind.table.insert(key.low, candidate),
                true => kind.spans.insert(key.low, key.high, candidate),
            }
        }
        true
    }

    fn has_room(&self, keys: &[Key]) -> bool {
        let mut fields: Vec<&Field> = keys.iter().map(|key| &key.field).collect();
        fields.sort_unstable();
        fields.dedup();
        fields.retain(|field| !self.by_field.contains_key(*field));
        // There are no more Ethertypes than fields.
        self.by_field.len() + fields.len() <= MAX_FIELDS
    }

    /// Removes the keys of a program.
    pub(super) fn remove(&mut self, keys: &[Key], judge: u32) {
        for key in keys {
            let Some(&at) = self.by_field.get(&key.field) else {
                continue;
            };
            let kind = &mut self.kinds[at as usize];
            let candidate = Candidate::new(judge, key.sure);
            match key.is_range() {
                false => kind.table.remove(key.low, candidate),
                true => kind.spans.remove(key.low, key.high, candidate),
            }
            if kind.table.is_empty() && kind.spans.is_empty() {
                self.drop_field(&key.field, at);
            }
        }
    }

    fn add(&mut self, field: &Field) -> u32 {
        let kind = Kind {
            field: field.clone(),
            table: Table::new(self.secret),
            spans: Spans::default(),
        };
        let at = self.free.pop().unwrap_or(self.kinds.len() as u32);
        match self.kinds.get_mut(at as usize) {
            Some(place) => *place = kind,
            None => self.kinds.push(kind),
        }
        self.by_field.insert(field.clone(), at);
        let group = field.gate.map_or(0, |gate| self.group(gate));
        self.groups[group].kinds.push(at);
        at
    }

    /// The group of an Ethertype.
    fn group(&mut self, gate: u16) -> usize {
        if self.gates.is_empty() {
            self.gates = vec![0; 1 << 16];
        }
        if self.gates[usize::from(gate)] == 0 {
            let unused = |group: &Group| group.kinds.is_empty();
            let at = match self.groups.iter().skip(1).position(unused) {
                Some(at) => at + 1,
                None => {
                    self.groups.push(Group::default());
                    self.groups.len() - 1
                }
            };
            self.groups[at].gate = gate;
            self.gates[usize::from(gate)] = at as u16;
        }
        usize::from(self.gates[usize::from(gate)])
    }

    fn drop_field(&mut self, field: &Field, at: u32) {
        self.by_field.remove(field);
        self.free.push(at);
        let group = field.gate.map_or(0, |gate| self.group(gate));
        let kinds = &mut self.groups[group].kinds;
        kinds.retain(|kind| *kind != at);
        if kinds.is_empty() && group != 0 {
            self.gates[usize::from(self.groups[group].gate)] = 0;
        }
    }

    /// Tells `hit` which program each frame is to be judged by, with the frame's place; the same
    /// program more than once if several of its keys hold.
    pub(super) fn ask(&mut self, frames: &[Frame<'_>], mut hit: impl FnMut(Candidate, usize)) {
        if self.by_field.is_empty() {
            return;
        }
        for group in self.present.drain(..) {
            self.groups[usize::from(group)].places.clear();
        }
        for (place, frame) in (0..).zip(frames) {
            if let Some(gate) = ethertype(frame.bytes)
                && let Some(&group) = self.gates.get(usize::from(gate))
                && group != 0
            {
                let places = &mut self.groups[usize::from(group)].places;
                if places.is_empty() {
                    self.present.push(group);
                }
                places.push(place);
            }
        }
        if !self.groups[0].kinds.is_empty() {
            self.groups[0].places.extend(0..frames.len() as u16);
            self.present.push(0);
        }
        for &group in &self.present {
            let group = &self.groups[usize::from(group)];
            for &kind in &group.kinds {
                let kind = &mut self.kinds[kind as usize];
                kind.spans.settle();
                // NB: all frames' values first, then all lookups: these do not wait for each other's
                // memory.
                kind.collect(frames, &group.places, &mut self.asked);
                if !kind.spans.is_empty() {
                    for asked in &self.asked {
                        let place = usize::from(asked.place);
                        let each = &mut |candidate| hit(candidate, place);
                        kind.spans.find(asked.value, each);
                    }
                }
                if kind.table.is_empty() {
                    continue;
                }
                for asked in &self.asked {
                    let found = kind.table.find(asked.value, asked.entry as usize);
                    if let Some((first, more)) = found {
                        hit(first, usize::from(asked.place));
                        for &other in more {
                            hit(other, usize::from(asked.place));
                        }
                    }
                }
            }
        }
    }
}

impl Kind {
    /// What these frames have in the field.
    fn collect(&self, frames: &[Frame<'_>], places: &[u16], asked: &mut Vec<Asked>) {
        match self.field.parts[..] {
            [
                Part {
                    base: Base::Start,
                    at,
                    len: 4,
                    mask,
                },
            ] => {
                let (at, mask) = (at as usize, mask as u32);
                self.collect_by(frames, places, asked, |bytes| {
                    let word = bytes.get(at..)?.first_chunk()?;
                    Some(u64::from(u32::from_be_bytes(*word) & mask))
                });
            }
            [only] => self.collect_by(frames, places, asked, |bytes| only.load(bytes)),
            _ => self.collect_by(frames, places, asked, |bytes| self.field.of(bytes)),
        }
    }

    #[inline]
    fn collect_by(
        &self,
        frames: &[Frame<'_>],
        places: &[u16],
        asked: &mut Vec<Asked>,
        value: impl Fn(&[u8]) -> Option<u64>,
    ) {
        asked.clear();
        for &place in places {
            if let Some(value) = value(frames[usize::from(place)].bytes) {
                let entry = self.table.place(value) as u32;
                asked.push(Asked {
                    value,
                    entry,
                    place,
                });
            }
        }
    }
}

#[inline]
fn ethertype(bytes: &[u8]) -> Option<u16> {
    bytes
        .get(12..14)
        .map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}
