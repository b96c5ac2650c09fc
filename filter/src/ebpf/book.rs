//! What the kernel's instance of a source's filters and the daemon have in common: one array, mapped by the daemon.
//!
//! | bytes | | written by |
//! |---|---|---|
//! | 0 to 7 | the generation in the upper half, a bit for each of filters 0 to 31: whether it is on | the daemon |
//! | 8 to 15 | the same of filters 32 to 63 | the daemon |
//! | 128 + 64 × n, 8 bytes each | frames that nobody wanted, on processor n or of receive queue n | the kernel's programs |
//!
//! A program is made for one generation, and drops only while the generation is this one: with one store in
//! memory everything passes, whatever is in place or on its way to the kernel, and nothing has to be asked. With
//! another store a filter whose last port went does not count any more, without another program.
//!
//! Each word is read and written as one, and says by itself of which generation its bits are. So no order
//! between the two words matters, and a program that was interrupted for long never takes bits for those of
//! other filters. (A generation comes again after 2^32 changes.)

use std::io;
use std::sync::atomic::Ordering;

use vnplug_os::bpf::asm::{Alu, Asm, Cond, Label, Operand, R1, R2, R3, Reg, Size};
use vnplug_os::bpf::{Shape, Shared, possible_cpus};

use Operand::{K, X};

/// The most filters of a program.
pub const MAX_FILTERS: usize = 64;

/// The memory of the two.
#[derive(Debug)]
pub struct Book {
    memory: Shared,
    counters: u32,
}

/// For which filters a program is made: those that the book has at this generation.
#[derive(Debug, Clone, Copy)]
pub struct Gate<'a> {
    /// Where it is said which are on.
    pub book: &'a Book,
    /// At another one everything passes.
    pub generation: u32,
}

impl Book {
    /// One with this many counters, a power of two, in which everything passes.
    ///
    /// # Errors
    /// The system's; `EPERM` without `CAP_BPF`. Linux ≥ 5.5.
    pub fn create(name: &str, counters: u32) -> io::Result<Self> {
        let entry_bytes = COUNTERS as u32 + counters * COUNTER_BYTES;
        let shape = Shape {
            entry_bytes,
            entries: 1,
        };
        let memory = Shared::create(name, shape)?;
        Ok(Self { memory, counters })
    }

    /// One with a counter for each processor; those beyond many share them.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn of_processors(name: &str) -> io::Result<Self> {
        let cpus = possible_cpus()?.next_power_of_two();
        Self::create(name, u32::try_from(cpus).unwrap_or(MOST).min(MOST))
    }

    /// From now on this is the generation, and these filters are on: bit n is filter n. Programs of another
    /// generation pass every frame that comes after this.
    pub fn set(&self, generation: u32, on: u64) {
        for (at, bits) in [(0, on & u64::from(u32::MAX)), (8, on >> 32)] {
            let word = u64::from(generation) << 32 | bits;
            // SeqCst: it is there before whoever waits for it is told.
            self.memory.region().store_u64(at, word, Ordering::SeqCst);
        }
    }

    /// Frames that the kernel dropped under this number.
    pub fn dropped(&self, number: u32) -> u64 {
        let number = number & (self.counters - 1);
        let at = COUNTERS as u64 + u64::from(number) * u64::from(COUNTER_BYTES);
        self.memory.read(at)
    }

    /// All that it dropped.
    pub fn all_dropped(&self) -> u64 {
        let each = (0..self.counters).map(|number| self.dropped(number));
        each.fold(0, u64::wrapping_add)
    }

    /// The number of its map in the kernel, as `bpftool map` shows it.
    ///
    /// # Errors
    /// The system's.
    pub fn id(&self) -> io::Result<u32> {
        self.memory.array().id()
    }

    /// Adds one to the counter whose number is in `number`, one of R0 and R6 to R9, and is lost; so are R1 and R2.
    pub fn count(&self, asm: &mut Asm, number: Reg) {
        // Also for the kernel's verifier.
        asm.alu64(Alu::And, number, K(self.counters - 1));
        asm.alu64(Alu::Mul, number, K(COUNTER_BYTES));
        asm.value(R1, self.memory.map());
        asm.alu64(Alu::Add, R1, X(number));
        asm.alu64(Alu::Mov, R2, K(1));
        // Several processors may have frames of one number at a time.
        asm.atomic_add_at(R1, COUNTERS, R2);
    }
}

impl Gate<'_> {
    /// Goes to `pass` if the generation is another; R2 and R3 are lost.
    pub(super) fn look(self, asm: &mut Asm, pass: Label) {
        self.read(asm, 0, pass);
    }

    /// Goes to `off` if a filter is not on, to `pass` if the generation is another; R2 and R3 are lost.
    pub(super) fn ask(self, asm: &mut Asm, filter: usize, pass: Label, off: Label) {
        let on = asm.label();
        self.read(asm, filter / 32, pass);
        asm.jump32_if(Cond::Set, R3, K(1 << (filter % 32)), on);
        asm.jump(off);
        asm.bind(on);
    }

    /// A word into R3, which is of this generation.
    fn read(self, asm: &mut Asm, word: usize, pass: Label) {
        asm.value(R2, self.book.memory.map());
        asm.load(Size::Double, R3, R2, word as i16 * 8);
        asm.alu64(Alu::Mov, R2, X(R3));
        asm.alu64(Alu::Shr, R2, K(32));
        asm.jump32_if(Cond::Ne, R2, K(self.generation), pass);
    }
}

/// Where the counters begin: the kernel's writes are not in a cache line beside what the daemon writes.
const COUNTERS: i16 = 128;
/// Bytes of a counter: a cache line of its own.
const COUNTER_BYTES: u32 = 64;
/// Processors that are told apart.
const MOST: u32 = 1024;
