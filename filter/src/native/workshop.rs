//! Makes native code of a batch of programs; belongs to the thread.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::budget::Gauge;
use super::code::{self, Code, Native};
use super::queue::Wanted;
use super::translate::{Translated, Translator};
use super::{Counters, NativeSlot};
use vnplug_bpf::Instruction;
use vnplug_os::executable;

/// Everything that making native code needs.
pub(super) struct Workshop {
    translator: Translator,
    counters: Arc<Counters>,
    limit_bytes: u64,
    /// Code of programs that were translated, while it lives.
    known: HashMap<Arc<[Instruction]>, Weak<Code>>,
    /// Length of `known` at which the dead are removed.
    known_limit: usize,
    /// Bytes of code by owner.
    owners: HashMap<String, Gauge>,
    batch: Vec<Pending>,
    batch_bytes: usize,
    said_full: bool,
}

/// A translated program and all who wait for it.
struct Pending {
    instructions: Arc<[Instruction]>,
    function: Translated,
    owner: Gauge,
    slots: Vec<Arc<NativeSlot>>,
}

impl Workshop {
    pub(super) fn new(translator: Translator, counters: Arc<Counters>, limit_bytes: u64) -> Self {
        Self {
            translator,
            counters,
            limit_bytes,
            known: HashMap::new(),
            known_limit: KNOWN_AT_LEAST,
            owners: HashMap::new(),
            batch: Vec::new(),
            batch_bytes: 0,
            said_full: false,
        }
    }

    /// Bytes of code that wait to be placed.
    pub(super) fn batch_bytes(&self) -> usize {
        self.batch_bytes
    }

    /// Translates a program, or finds what was translated before; [`place`](Self::place) puts it
    /// to use.
    pub(super) fn translate(&mut self, wanted: Wanted) {
        let code = self.known.get(&wanted.instructions);
        if let Some(code) = code.and_then(Weak::upgrade) {
            return self.use_code(&code, &wanted.slot);
        }
        let same = |pending: &&mut Pending| pending.instructions == wanted.instructions;
        if let Some(pending) = self.batch.iter_mut().find(same) {
            return pending.slots.push(wanted.slot);
        }
        let owner = self.owner(&wanted.owner);
        if owner.now() >= self.limit_bytes / OWNER_PART {
            return self.full(
                &wanted.slot,
                &format!("{} has its part of it", wanted.owner),
            );
        }
        let key = random();
        let translator = AssertUnwindSafe(&mut self.translator);
        // The program stays as good as it was; its sender learns nothing.
        let done = catch_unwind(move || {
            let AssertUnwindSafe(translator) = { translator };
            translator
                .translate(&wanted.instructions, key)
                .map(|it| (it, wanted))
        });
        match done {
            Ok(Ok((function, wanted))) => {
                self.batch_bytes += function.bytes().len();
                self.batch.push(Pending {
                    instructions: wanted.instructions,
                    function,
                    owner,
                    slots: vec![wanted.slot],
                });
            }
            Ok(Err(error)) => self.failed(&error),
            Err(_) => {
                self.failed("the translator panicked");
                // What it left half done must not be used again.
                if let Ok(translator) = Translator::new() {
                    self.translator = translator;
                }
            }
        }
    }

    /// Places what was translated, together, and lets the programs use it.
    pub(super) fn place(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        self.batch_bytes = 0;
        let left = self.limit_bytes.saturating_sub(self.counters.bytes.now());
        let mut functions: Vec<Translated> = Vec::new();
        let mut waiting = Vec::new();
        let mut len = 0;
        for pending in batch.drain(..) {
            let end = code::end_of(len, &pending.function);
            if executable::pages(end) as u64 > left {
                for slot in &pending.slots {
                    self.full(slot, "all of it is used");
                }
                continue;
            }
            len = end;
            functions.push(pending.function);
            waiting.push((pending.instructions, pending.owner, pending.slots));
        }
        if functions.is_empty() {
            return;
        }
        let bytes = executable::pages(len) as u64;
        let each = bytes / functions.len() as u64;
        let shares = waiting
            .iter()
            .map(|(_, owner, _)| owner.hold(each))
            .collect();
        let spent = self.counters.bytes.hold(bytes);
        match code::place(&functions, shares, spent) {
            Ok(codes) => {
                for ((instructions, _, slots), code) in waiting.into_iter().zip(codes) {
                    for slot in &slots {
                        self.use_code(&code, slot);
                    }
                    self.known.insert(instructions, Arc::downgrade(&code));
                }
                self.forget_the_dead();
            }
            Err(error) => {
                let slots = waiting.iter().map(|(_, _, slots)| slots.len() as u64);
                self.counters
                    .failed
                    .fetch_add(slots.sum(), Ordering::Relaxed);
                self.say_full(&format!("the system gives no memory for code: {error}"));
            }
        }
    }

    fn use_code(&self, code: &Arc<Code>, slot: &NativeSlot) {
        let native = Native::new(Arc::clone(code), self.counters.programs.hold(1));
        // Set already: it was handed in twice, and either will do.
        let _ = slot.native.set(native);
    }

    fn owner(&mut self, name: &str) -> Gauge {
        if !self.owners.contains_key(name) {
            self.owners.retain(|_, gauge| !gauge.is_idle());
        }
        self.owners.entry(name.to_owned()).or_default().clone()
    }

    /// The program stays interpreted; when it is used again it is tried again.
    fn full(&mut self, slot: &NativeSlot, why: &str) {
        slot.asked.store(false, Ordering::Relaxed);
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        let limit = self.limit_bytes;
        self.say_full(&format!(
            "native filters may take {limit} bytes (jit_bytes), and {why}"
        ));
    }

    fn say_full(&mut self, why: &str) {
        if !std::mem::replace(&mut self.said_full, true) {
            log::warn!(target: "filter", "{why}; some filters stay interpreted, said once");
        }
    }

    fn failed(&self, why: &str) {
        self.counters.failed.fetch_add(1, Ordering::Relaxed);
        vnplug_os::peer_log!(
            log::Level::Error,
            "filter",
            "a filter stays interpreted: {why}"
        );
    }

    fn forget_the_dead(&mut self) {
        if self.known.len() >= self.known_limit {
            self.known.retain(|_, code| code.strong_count() > 0);
            self.known_limit = KNOWN_AT_LEAST.max(2 * self.known.len());
        }
    }
}

/// A key that nobody outside can know; without the system's numbers, the address of a local.
fn random() -> u32 {
    let mut key = [0_u8; 4];
    match rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty()) {
        Ok(4) => u32::from_ne_bytes(key),
        _ => (&raw const key).addr() as u32,
    }
}

/// One owner's code may take this part of the limit: a fourth.
const OWNER_PART: u64 = 4;

const KNOWN_AT_LEAST: usize = 1024;
