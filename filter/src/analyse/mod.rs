//! What a frame must have for a program to accept it.
//!
//! [`analyse`] walks every path through a program, with symbols instead of the frame: a register is
//! a constant, some bits of the frame, or unknown. Each path to an accepting return collects what
//! its comparisons say about single bytes. A path that contradicts itself does not exist. Each of
//! the others gives one [`Key`]: a field of the frame and the value that it must have. So
//!
//! > the program accepts a frame ⇒ one of the keys holds on the frame
//!
//! and a frame on which none holds need not be judged. Nothing else follows from a key, unless it
//! is `sure`: then a second walk, with only the key's bytes known, reaches no rejecting return and
//! no load beyond them, and the program accepts every frame on which the key holds.
//!
//! If a path tests a value that few frames have (addresses, ports, labels), that is its key; else a
//! range that it tests (`portrange 1-9`); else a value that many frames have (`tcp`, `arp`). A key
//! with a rare value leaves out bytes that most frames share (protocol, fragment offset), and the
//! Ethertype is the field's gate, so that fewer fields are looked up. A program with a path that
//! tests nothing of the kind (`not host A`, `greater 500`), with a loop or with too many paths has
//! no keys and is run on every frame.

mod key;
mod known;
mod walk;

use std::collections::HashSet;

use vnplug_bpf::Instruction;

use super::field::Field;
use super::program::Program;
use key::key;
use known::Fact;
use walk::{End, Walk};

/// When a program must be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Analysis {
    /// On every frame.
    Always,
    /// On frames on which one of these holds. Without keys it accepts nothing.
    If(Vec<Key>),
}

/// One thing that a frame may have for a program to accept it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Where to look.
    pub field: Field,
    /// What is there: no less than this,
    pub low: u64,
    /// and no more than this.
    pub high: u64,
    /// The program accepts every frame that has it.
    pub sure: bool,
}

/// What an offset counts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Base {
    /// The first byte of the frame.
    Start,
    /// 4 times the low four bits of the byte at this offset: the length of an IPv4 header there.
    Header(u32),
}

/// The most instructions that all paths of a program may have together.
const MAX_STEPS: usize = 20_000;
/// The same for the check whether a key is sure, for all keys together.
const MAX_SURE_STEPS: usize = 1_000;
const MAX_ALL_SURE_STEPS: usize = 150_000;
/// Steps that finding the key of a path counts as.
const KEY_STEPS: usize = 16;
/// A program with more keys is judged on every frame.
pub(super) const MAX_KEYS: usize = 512;

impl Key {
    /// Whether more than one value is meant.
    pub fn is_range(&self) -> bool {
        self.low != self.high
    }
}

/// Finds the keys of a program.
pub(super) fn analyse(program: &Program) -> Analysis {
    if program.loops() {
        return Analysis::Always;
    }
    let list = program.instructions();
    let mut keys: Vec<Key> = Vec::new();
    let mut seen = HashSet::new();
    let mut walk = Walk::new(list, MAX_STEPS);
    let mut sure_steps = MAX_ALL_SURE_STEPS;
    while let Some(end) = walk.next_end() {
        match end {
            End::TooLong => return Analysis::Always,
            End::Returns { accepts: false, .. } => continue,
            End::Returns { .. } => {}
        }
        if !walk.charge(KEY_STEPS + walk.known.size() / 4) {
            return Analysis::Always;
        }
        let Some((mut key, facts)) = key(&walk.known, walk.reached) else {
            return Analysis::Always;
        };
        if !seen.insert((key.field.clone(), key.low, key.high)) {
            continue;
        }
        if keys.len() == MAX_KEYS {
            return Analysis::Always;
        }
        key.sure = !key.is_range()
            && key.field.is_exact()
            && accepts_all_with(list, &key.field, facts, &mut sure_steps);
        keys.push(key);
    }
    Analysis::If(keys)
}

/// Whether a program accepts every frame that has these bytes in this field; uses up steps that are
/// left.
fn accepts_all_with(
    list: &[Instruction],
    field: &Field,
    facts: Vec<Fact>,
    steps_left: &mut usize,
) -> bool {
    let steps = MAX_SURE_STEPS.min(*steps_left);
    let mut walk = Walk::with_only(list, field, facts, steps);
    let certain = loop {
        match walk.next_end() {
            Some(End::Returns {
                accepts: true,
                certain: true,
            }) => {}
            other => break other.is_none(),
        }
    };
    *steps_left -= steps - walk.steps_left;
    certain
}

#[cfg(test)]
mod tests;
