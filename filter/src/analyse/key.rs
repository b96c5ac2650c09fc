//! Chooses the field by which an index finds a path of a program.

use vnplug_frame::headers::{IPV4, IPV6, MAX_TAGS, is_tag};

use super::known::{Fact, Known, Range};
use super::{Base, Key};
use crate::field::{Field, MAX_PARTS, Part};

/// A value that few frames share has at least this many bits.
const MIN_BITS: u32 = 8;

/// The key of a path with these facts about frames of at least `reached` bytes, and the facts that
/// the key implies.
///
/// In this order: a value that few frames have; a range that is at most half of all values; the
/// protocol and the like; the Ethertype.
pub(super) fn key(known: &Known, reached: u32) -> Option<(Key, Vec<Fact>)> {
    let bytes = compared_bytes(&known.facts);
    let whole = |at: u32| {
        let find = |at| {
            let place = bytes.binary_search_by_key(&(Base::Start, at), |it| (it.base, it.at));
            let byte = bytes[place.ok()?];
            (byte.mask == 0xff).then_some(byte.value)
        };
        Some(u16::from_be_bytes([find(at)?, find(at + 1)?]))
    };
    let common = common_bytes(whole);
    let gate = whole(12);
    let (gates, bytes): (Vec<Fact>, Vec<Fact>) =
        bytes.iter().partition(|byte| is_at(byte, &[12, 13]));
    let (common, rare): (Vec<Fact>, Vec<Fact>) =
        bytes.iter().partition(|byte| is_at(byte, &common));
    let bits: u32 = rare.iter().map(|byte| byte.mask.count_ones()).sum();
    let gates_of_key = if gate.is_some() { gates } else { Vec::new() };
    if bits >= MIN_BITS {
        return Some(equal(gate, rare, gates_of_key, reached));
    }
    if let Some(range) = narrowest(&known.ranges) {
        return Some((within(gate, range), Vec::new()));
    }
    match (common.is_empty(), gate) {
        (false, _) => Some(equal(gate, common, gates_of_key, reached)),
        (true, Some(_)) => Some(equal(gate, gates_of_key, Vec::new(), reached)),
        (true, None) => None,
    }
}

/// The bytes that were compared, in order, with all facts about each.
fn compared_bytes(facts: &[Fact]) -> Vec<Fact> {
    let mut bytes: Vec<Fact> = facts.iter().copied().filter(|fact| fact.compared).collect();
    bytes.sort_unstable_by_key(|byte| (byte.base, byte.at));
    bytes.dedup_by(|next, byte| {
        let same = (next.base, next.at) == (byte.base, byte.at);
        if same {
            byte.mask |= next.mask;
            byte.value |= next.value;
        }
        same
    });
    bytes
}

/// A key for these bytes, and what it implies besides its gate.
fn equal(
    gate: Option<u16>,
    mut bytes: Vec<Fact>,
    gates: Vec<Fact>,
    reached: u32,
) -> (Key, Vec<Fact>) {
    let (parts, values): (Vec<Part>, Vec<u64>) = parts(&bytes, reached).into_iter().unzip();
    let field = Field { gate, parts };
    let value = field.join(&values);
    let covers = |byte: &Fact| {
        let mut parts = field.parts.iter();
        parts.any(|part| part.covers(byte.base, byte.at))
    };
    bytes.retain(covers);
    bytes.extend(gates);
    let key = Key {
        field,
        low: value,
        high: value,
        sure: false,
    };
    (key, bytes)
}

/// A key for a range.
fn within(gate: Option<u16>, Range { bits, low, high }: Range) -> Key {
    let part = Part {
        base: bits.base,
        at: bits.at,
        len: bits.len,
        mask: u64::from(bits.mask),
    };
    let field = Field {
        gate,
        parts: vec![part],
    };
    // A field's value is not shifted.
    let shifted = |value: u32| u64::from(value) << bits.shift;
    Key {
        field,
        low: shifted(low),
        high: shifted(high) | ((1 << bits.shift) - 1),
        sure: false,
    }
}

/// The range that contains the smallest part of all values, unless that is more than half of them.
/// A range with both ends comes first: the path of `portrange` to the second port also says that
/// the first one is below.
fn narrowest(ranges: &[Range]) -> Option<Range> {
    let share = |range: &Range| {
        let left = u64::from(range.high - range.low) + 1;
        let all = u64::from(range.bits.mask >> range.bits.shift) + 1;
        (left << 32) / all
    };
    let most = |range: &Range| range.bits.mask >> range.bits.shift;
    let is_open = |range: &Range| range.low == 0 || range.high == most(range);
    let few = ranges.iter().filter(|range| share(range) <= 1 << 31);
    few.min_by_key(|range| (is_open(range), share(range)))
        .copied()
}

fn is_at(byte: &Fact, places: &[u32]) -> bool {
    byte.base == Base::Start && places.contains(&byte.at)
}

/// Offsets of bytes that most frames share: types of tags and of the payload, and in an IP header
/// the version, the fragment fields, and the protocol.
fn common_bytes(whole: impl Fn(u32) -> Option<u16>) -> Vec<u32> {
    let mut at = 12;
    let mut common = vec![at, at + 1];
    while at < 12 + 4 * MAX_TAGS as u32 && whole(at).is_some_and(is_tag) {
        at += 4;
        common.extend([at, at + 1]);
    }
    let network = at + 2;
    match whole(at) {
        Some(IPV4) => common.extend([0, 6, 7, 9].map(|byte| network + byte)),
        Some(IPV6) => common.extend([0, 6].map(|byte| network + byte)),
        _ => {}
    }
    common
}

/// Loads that cover these bytes, at most [`MAX_PARTS`], with their values.
fn parts(bytes: &[Fact], reached: u32) -> Vec<(Part, u64)> {
    let mut parts: Vec<(Part, u64)> = Vec::new();
    let mut rest = bytes;
    while let Some(first) = rest.first() {
        let follows = |(nth, byte): &(usize, &Fact)| {
            byte.base == first.base && byte.at == first.at + *nth as u32
        };
        let run = rest.iter().enumerate().take_while(follows).count().min(8);
        // A load may be longer than the run if the frame is known to be that long.
        let longer = run.next_power_of_two();
        let end = first.at.checked_add(longer as u32);
        let there = first.base == Base::Start && end.is_some_and(|end| end <= reached);
        let len = if there { longer } else { 1 << run.ilog2() };
        let taken = run.min(len);
        let (mut mask, mut value) = (0_u64, 0_u64);
        for nth in 0..len {
            let byte = rest.get(nth).filter(|_| nth < taken);
            mask = mask << 8 | u64::from(byte.map_or(0, |byte| byte.mask));
            value = value << 8 | u64::from(byte.map_or(0, |byte| byte.value));
        }
        let part = Part {
            base: first.base,
            at: first.at,
            len: len as u8,
            mask,
        };
        parts.push((part, value));
        rest = &rest[taken..];
    }
    if parts.len() > MAX_PARTS {
        parts.sort_by_key(|(part, _)| std::cmp::Reverse(part.mask.count_ones()));
        parts.truncate(MAX_PARTS);
        parts.sort_unstable_by_key(|(part, _)| *part);
    }
    parts
}
