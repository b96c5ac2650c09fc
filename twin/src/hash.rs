//! A hash (`BPF_MAP_TYPE_HASH`, `_LRU_HASH`) in one array, which the kernel's instance and the daemon's read and write at the same
//! time.
//!
//! ```text
//! entry 0      how many keys there are
//! entry 1 + n  bucket n: lock | slot 0: state | key | value | slot 1 …
//! entry 1 + n  of one that forgets: lock | clock | slot 0: state | used | key | value | slot 1 …
//! ```
//!
//! A key is in its bucket or nowhere. Who looks for one takes no lock: a slot's state is a sequence whose low bits say
//! whether it is empty, being written, or full, and it is read once more when the key was found. Who inserts or removes has
//! the bucket's lock, for which nobody waits long: then it is refused (`EBUSY`), as the kernel's own hash refuses now and then.
//! A value that is removed may be another key's while somebody still has its address; so it is with the kernel's, too.
//!
//! One that forgets (LRU) has a clock in each bucket, which goes on when another key of the bucket is looked for, inserted or
//! changed than the last time. A key that finds its bucket full takes the slot that was used the longest time ago.

use vnplug_os::bpf::asm::{
    Alu, Asm, Cond, FP, Label, Operand, R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, Reg, Size,
};
use vnplug_os::bpf::{Array, Insn};

use crate::object::MapSpec;
use crate::per_cpu::LOOKUP;
use crate::weave::{Access, copy_in, fail};
use Operand::{K, X};

/// The longest key, and the longest value.
pub(crate) const MAX_KEY: u32 = 64;
pub(crate) const MAX_VALUE: u32 = 128;

/// Slots of a bucket. With four times as many as keys may be there, a bucket of 16 has 4 in the mean, and more than 16 in one of a
/// million.
const SLOTS: u32 = 16;
const ROOM: u32 = 4;
/// Where the oldest is forgotten, a bucket that is full refuses nobody. With twice as many slots as keys, one key of a thousand is
/// forgotten before there are as many as may be.
const ROOM_TO_FORGET: u32 = 2;

/// Where in the array what lies.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    buckets: u32,
    seed: u64,
    forgets: bool,
}

impl Layout {
    /// Of a map with keys of `key_bytes`, which forgets the oldest if it is full, or does not.
    pub(crate) fn of(spec: &MapSpec, key_bytes: u32, forgets: bool) -> Self {
        let room = if forgets { ROOM_TO_FORGET } else { ROOM };
        let slots = u64::from(spec.entries) * u64::from(room);
        let buckets = slots.div_ceil(SLOTS.into()).next_power_of_two();
        Self {
            key_bytes,
            value_bytes: spec.value_bytes,
            entries: spec.entries,
            buckets: u32::try_from(buckets).unwrap_or(u32::MAX),
            seed: spec.seed,
            forgets,
        }
    }

    /// Bytes before a bucket's slots, and before a slot's key.
    fn head(&self) -> u32 {
        if self.forgets { 16 } else { 8 }
    }

    fn key(&self) -> u32 {
        self.key_bytes.next_multiple_of(8)
    }

    /// Bytes of a slot: state, when it was used if that is asked for, key, value.
    pub(crate) fn slot(&self) -> u32 {
        self.head() + self.key() + self.value_bytes.next_multiple_of(8)
    }

    /// Bytes of a bucket, which is an entry of the array.
    pub(crate) fn bucket(&self) -> u32 {
        self.head() + SLOTS * self.slot()
    }

    /// Entries of the array.
    pub(crate) fn array(&self) -> u64 {
        1 + u64::from(self.buckets)
    }

    /// How many slots there are.
    pub(crate) fn slots(&self) -> u32 {
        self.buckets.saturating_mul(SLOTS)
    }

    /// Where a slot is in the array's memory.
    pub(crate) fn place(&self, slot: u32) -> u64 {
        let bucket = u64::from(self.bucket());
        (1 + u64::from(slot / SLOTS)) * bucket + u64::from(self.head() + slot % SLOTS * self.slot())
    }

    fn at(&self, slot: u32) -> i16 {
        (self.head() + slot * self.slot()) as i16
    }

    /// Where in a slot key and value are.
    fn parts(&self) -> [i16; 2] {
        [self.head() as i16, (self.head() + self.key()) as i16]
    }
}

/// The function that is called in place of the kernel's: R2 is where the key is, R3 the value, R4 how.
///
/// On the way R6 is the bucket, R7 the value or a time, R8 how, R9 a slot.
pub(crate) fn function(
    access: Access,
    layout: &Layout,
    array: &Array,
) -> Result<Vec<Insn>, String> {
    let mut asm = Asm::default();
    if access == Access::Update {
        asm.alu64(Alu::Mov, R7, X(R3));
        asm.alu64(Alu::Mov, R8, X(R4));
    }
    copy_in(&mut asm, R2, layout.key_bytes, KEY, R1);
    if access == Access::Update {
        let bad = asm.label();
        let good = asm.label();
        asm.jump_if(Cond::Le, R8, K(BPF_EXIST), good);
        asm.bind(bad);
        fail(&mut asm, EINVAL);
        asm.exit();
        asm.bind(good);
        copy_in(&mut asm, R7, layout.value_bytes, VALUE, R1);
    }
    find_bucket(&mut asm, layout, array);
    match access {
        Access::Lookup => lookup(&mut asm, layout),
        Access::Update => update(&mut asm, layout, array),
        Access::Delete => delete(&mut asm, layout, array),
    }
    asm.finish().map_err(|_| "is too long".to_owned())
}

/// R6 is the bucket of the key on the stack.
fn find_bucket(asm: &mut Asm, layout: &Layout, array: &Array) {
    number(asm, 1, layout.seed);
    number(asm, 3, FACTOR);
    for word in 0..layout.key() / 8 {
        asm.load(Size::Double, R2, FP, KEY + 8 * word as i16);
        asm.alu64(Alu::Xor, R1, X(R2));
        asm.alu64(Alu::Mul, R1, X(R3));
        asm.alu64(Alu::Mov, R2, X(R1));
        asm.alu64(Alu::Shr, R2, K(32));
        asm.alu64(Alu::Xor, R1, X(R2));
    }
    // Once more, as the last word's high bits have reached none but high ones.
    asm.alu64(Alu::Mul, R1, X(R3));
    asm.alu64(Alu::Shr, R1, K(40));
    asm.alu64(Alu::And, R1, K(layout.buckets - 1));
    asm.alu64(Alu::Add, R1, K(1));
    entry(asm, array);
    asm.alu64(Alu::Mov, R6, X(R0));
}

/// R0 is the entry of the array that R1 is the number of. There is one: the way without is for the verifier.
fn entry(asm: &mut Asm, array: &Array) {
    let there = asm.label();
    asm.store(Size::Word, FP, NUMBER, R1);
    asm.alu64(Alu::Mov, R2, X(FP));
    asm.alu64(Alu::Add, R2, K(i32::from(NUMBER).cast_unsigned()));
    asm.map(R1, array.map());
    asm.call(LOOKUP);
    asm.jump_if(Cond::Ne, R0, K(0), there);
    asm.exit();
    asm.bind(there);
}

/// Goes to `other` unless the slot is full and has the key; R5 is its state.
fn compare(asm: &mut Asm, layout: &Layout, slot: u32, other: Label) {
    let at = layout.at(slot);
    asm.load(Size::Double, R5, R6, at);
    asm.alu64(Alu::Mov, R1, X(R5));
    asm.alu64(Alu::And, R1, K(3));
    asm.jump_if(Cond::Ne, R1, K(FULL), other);
    for word in 0..layout.key() as i16 / 8 {
        asm.load(Size::Double, R1, R6, at + layout.parts()[0] + 8 * word);
        asm.load(Size::Double, R2, FP, KEY + 8 * word);
        asm.jump_if(Cond::Ne, R1, X(R2), other);
    }
}

fn lookup(asm: &mut Asm, layout: &Layout) {
    for slot in 0..SLOTS {
        let other = asm.label();
        compare(asm, layout, slot, other);
        // Adding nothing is a load that no translator takes for the one before.
        asm.alu64(Alu::Mov, R1, K(0));
        asm.append(&[Insn::new(ATOMIC, 6, 1, layout.at(slot), FETCH_ADD)]);
        asm.jump_if(Cond::Ne, R1, X(R5), other);
        if layout.forgets {
            let is_last = asm.label();
            asm.load(Size::Double, R1, R6, CLOCK);
            asm.load(Size::Double, R2, R6, layout.at(slot) + USED);
            asm.jump_if(Cond::Eq, R1, X(R2), is_last);
            use_slot(asm, R6, layout.at(slot));
            asm.bind(is_last);
        }
        asm.alu64(Alu::Mov, R0, X(R6));
        let value = layout.at(slot) + layout.parts()[1];
        asm.alu64(Alu::Add, R0, K(value as u32));
        asm.exit();
        asm.bind(other);
    }
    asm.alu64(Alu::Mov, R0, K(0));
    asm.exit();
}

/// The bucket's clock goes on, and a slot, so far behind this, has its new time.
fn use_slot(asm: &mut Asm, slot: Reg, at: i16) {
    asm.alu64(Alu::Mov, R1, K(1));
    asm.append(&[Insn::new(ATOMIC, 6, 1, CLOCK, FETCH_ADD)]);
    asm.alu64(Alu::Add, R1, K(1));
    asm.store(Size::Double, slot, at + USED, R1);
}

/// Takes the bucket's lock, or ends.
fn lock(asm: &mut Asm) {
    let locked = asm.label();
    for _ in 0..TRIES {
        asm.alu64(Alu::Mov, R0, K(0));
        asm.alu64(Alu::Mov, R1, K(1));
        asm.compare_exchange(R6, 0, R1);
        asm.jump_if(Cond::Eq, R0, K(0), locked);
    }
    fail(asm, EBUSY);
    asm.exit();
    asm.bind(locked);
}

/// Gives the lock back, and ends with this error, or none.
fn unlock(asm: &mut Asm, error: u32) {
    asm.alu64(Alu::Mov, R1, K(0));
    asm.append(&[Insn::new(ATOMIC, 6, 1, 0, EXCHANGE)]);
    fail(asm, error);
    asm.exit();
}

fn update(asm: &mut Asm, layout: &Layout, array: &Array) {
    let (found, absent, exists) = (asm.label(), asm.label(), asm.label());
    let (unwanted, full, fits) = (asm.label(), asm.label(), asm.label());
    let [key, value] = layout.parts();
    let offset_of_first = layout.at(0) as u32;
    lock(asm);
    asm.alu64(Alu::Mov, R9, K(0));
    for slot in 0..SLOTS {
        let (other, next, taken) = (asm.label(), asm.label(), asm.label());
        compare(asm, layout, slot, other);
        asm.alu64(Alu::Mov, R9, K(layout.at(slot) as u32));
        asm.jump(found);
        asm.bind(other);
        asm.alu64(Alu::And, R5, K(3));
        asm.jump_if(Cond::Ne, R5, K(0), next);
        asm.jump_if(Cond::Ne, R9, K(0), taken);
        asm.alu64(Alu::Mov, R9, K(layout.at(slot) as u32));
        asm.bind(taken);
        asm.bind(next);
    }
    asm.jump(absent);

    asm.bind(found);
    asm.jump_if(Cond::Eq, R8, K(BPF_NOEXIST), exists);
    bound(asm, layout, full);
    put(asm, R9, value, VALUE, layout.value_bytes);
    if layout.forgets {
        use_slot(asm, R9, 0);
    }
    unlock(asm, 0);

    asm.bind(absent);
    asm.jump_if(Cond::Eq, R8, K(BPF_EXIST), unwanted);
    let is_empty = asm.label();
    if layout.forgets {
        asm.jump_if(Cond::Ge, R9, K(offset_of_first), is_empty);
        oldest(asm, layout);
        bound(asm, layout, full);
        // From full to empty, of another sequence; there are as many keys as before.
        asm.alu64(Alu::Mov, R1, K(FULL));
        asm.append(&[Insn::new(ATOMIC, 9, 1, 0, FETCH_ADD)]);
        let taken = asm.label();
        asm.jump(taken);
        asm.bind(is_empty);
        asm.alu64(Alu::Mov, R1, K(0));
        entry(asm, array);
        asm.alu64(Alu::Mov, R1, K(1));
        asm.atomic_add(R0, R1);
        bound(asm, layout, full);
        asm.bind(taken);
        use_slot(asm, R9, 0);
        asm.jump(fits);
        asm.bind(full);
        unlock(asm, E2BIG);
        asm.bind(fits);
    } else {
        asm.jump_if(Cond::Lt, R9, K(offset_of_first), full);
        // One more, if that is not too many.
        asm.alu64(Alu::Mov, R1, K(0));
        entry(asm, array);
        asm.alu64(Alu::Mov, R1, K(1));
        asm.append(&[Insn::new(ATOMIC, 0, 1, 0, FETCH_ADD)]);
        asm.jump_if(Cond::Lt, R1, K(layout.entries), fits);
        asm.alu64(Alu::Mov, R1, K(u32::MAX));
        asm.atomic_add(R0, R1);
        asm.bind(full);
        unlock(asm, E2BIG);
        asm.bind(fits);
        bound(asm, layout, full);
    }
    // Empty, being written, full.
    asm.alu64(Alu::Mov, R1, K(1));
    asm.append(&[Insn::new(ATOMIC, 9, 1, 0, FETCH_ADD)]);
    put(asm, R9, key, KEY, layout.key_bytes);
    put(asm, R9, value, VALUE, layout.value_bytes);
    asm.alu64(Alu::Mov, R1, K(1));
    asm.append(&[Insn::new(ATOMIC, 9, 1, 0, FETCH_ADD)]);
    unlock(asm, 0);

    asm.bind(exists);
    unlock(asm, EEXIST);
    asm.bind(unwanted);
    unlock(asm, ENOENT);
}

/// R9 is the place of the slot that was used the longest time ago.
fn oldest(asm: &mut Asm, layout: &Layout) {
    for slot in 0..SLOTS {
        let younger = asm.label();
        let at = layout.at(slot);
        asm.load(Size::Double, R1, R6, at + USED);
        if slot > 0 {
            asm.jump_if(Cond::Ge, R1, X(R7), younger);
        }
        asm.alu64(Alu::Mov, R7, X(R1));
        asm.alu64(Alu::Mov, R9, K(at as u32));
        asm.bind(younger);
    }
}

/// R9 becomes the address of the slot whose place it is.
fn bound(asm: &mut Asm, layout: &Layout, otherwise: Label) {
    let last = layout.at(SLOTS - 1) as u32;
    asm.jump_if(Cond::Gt, R9, K(last), otherwise);
    asm.alu64(Alu::Add, R9, X(R6));
}

/// Copies words from the stack.
fn put(asm: &mut Asm, to: Reg, at: i16, from: i16, bytes: u32) {
    for word in 0..bytes.div_ceil(8) as i16 {
        asm.load(Size::Double, R1, FP, from + 8 * word);
        asm.store(Size::Double, to, at + 8 * word, R1);
    }
}

fn delete(asm: &mut Asm, layout: &Layout, array: &Array) {
    let found = asm.label();
    lock(asm);
    for slot in 0..SLOTS {
        let other = asm.label();
        compare(asm, layout, slot, other);
        // Empty again, of another sequence.
        asm.alu64(Alu::Mov, R1, K(FULL));
        asm.append(&[Insn::new(ATOMIC, 6, 1, layout.at(slot), FETCH_ADD)]);
        asm.jump(found);
        asm.bind(other);
    }
    unlock(asm, ENOENT);
    asm.bind(found);
    asm.alu64(Alu::Mov, R1, K(0));
    entry(asm, array);
    asm.alu64(Alu::Mov, R1, K(u32::MAX));
    asm.atomic_add(R0, R1);
    unlock(asm, 0);
}

/// A number of 64 bits, in a register by its number.
fn number(asm: &mut Asm, register: u8, value: u64) {
    let (low, high) = (value as u32, (value >> 32) as u32);
    asm.append(&[
        Insn::new(LD_DOUBLE, register, 0, 0, low.cast_signed()),
        Insn::new(0, 0, 0, 0, high.cast_signed()),
    ]);
}

/// Where on the stack the key, the value and a number of an entry are.
const KEY: i16 = -(MAX_KEY as i16);
const VALUE: i16 = KEY - MAX_VALUE as i16;
const NUMBER: i16 = VALUE - 8;

/// Where in a bucket that forgets its clock is, and in its slots when they were used.
const CLOCK: i16 = 8;
const USED: i16 = 8;

/// The low bits of a state: 0 is empty, 1 being written.
const FULL: u32 = 2;
/// How often the lock is tried.
const TRIES: u32 = 32;
/// The golden ratio, as a number that is odd.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const LD_DOUBLE: u8 = 0x18;
const ATOMIC: u8 = 0xdb;
const FETCH_ADD: i32 = 0x01;
const EXCHANGE: i32 = 0xe1;
const BPF_NOEXIST: u32 = 1;
const BPF_EXIST: u32 = 2;
const ENOENT: u32 = 2;
const E2BIG: u32 = 7;
const EBUSY: u32 = 16;
const EEXIST: u32 = 17;
const EINVAL: u32 = 22;
