//! An array per CPU (`BPF_MAP_TYPE_PERCPU_ARRAY`), in one array.
//!
//! Each entry has a place for each CPU, and behind them one for each instance in the daemon: a thread of the daemon moves from CPU to
//! CPU in the middle of a frame, so it is a CPU of its own.
//!
//! ```text
//! entry 0: CPU 0 | CPU 1 | … | seat 0 | seat 1 | … | entry 1: CPU 0 | …
//! ```

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vnplug_os::bpf::asm::{Alu, Asm, Cond, FP, Operand, R0, R1, R2, R3, R4, R6, R7, R8, Size};
use vnplug_os::bpf::{Array, Insn};

use crate::object::MapSpec;
use crate::weave::{Access, Side, fail};
use Operand::{K, X};

/// How many instances in the daemon have a place.
pub(crate) const SEATS: u32 = 32;

/// Which seats are taken, of a program and what comes after it on the same maps.
#[derive(Debug, Default)]
pub(crate) struct Seats(AtomicU64);

/// One instance's.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    pub(crate) number: u32,
}

impl Seats {
    /// A seat that nobody has.
    pub(crate) fn take(self: &Arc<Self>) -> io::Result<Seat> {
        for number in 0..SEATS {
            let before = self.0.fetch_or(1 << number, Ordering::AcqRel);
            if before & 1 << number == 0 {
                let seats = Arc::clone(self);
                return Ok(Seat { seats, number });
            }
        }
        let what = format!("its maps per CPU have room for {SEATS} instances in the daemon");
        Err(io::Error::other(what))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats
            .0
            .fetch_and(!(1 << self.number), Ordering::AcqRel);
    }
}

/// Places of an entry, on a machine with this number of `cpus`.
pub(crate) fn places(cpus: u32) -> u32 {
    cpus + SEATS
}

/// The function that is called in place of the kernel's.
pub(crate) fn function(
    access: Access,
    spec: &MapSpec,
    array: &Array,
    side: Side,
) -> Result<Vec<Insn>, String> {
    let each = array.entries() / spec.entries;
    let cpus = each - SEATS;
    let mut asm = Asm::default();
    let none = asm.label();
    asm.load(Size::Word, R6, R2, 0);
    if access == Access::Update {
        asm.alu64(Alu::Mov, R7, X(R3));
        asm.alu64(Alu::Mov, R8, X(R4));
        let known = asm.label();
        asm.jump_if(Cond::Le, R8, K(BPF_EXIST), known);
        fail(&mut asm, EINVAL);
        asm.exit();
        asm.bind(known);
    }
    asm.jump_if(Cond::Ge, R6, K(spec.entries), none);
    match side {
        Side::Kernel => {
            asm.call(GET_SMP_PROCESSOR_ID);
            asm.jump_if(Cond::Ge, R0, K(cpus), none);
        }
        Side::Daemon => {
            asm.call(SEAT);
            asm.alu64(Alu::Add, R0, K(cpus));
        }
    }
    asm.alu64(Alu::Mul, R6, K(each));
    asm.alu64(Alu::Add, R6, X(R0));
    asm.store(Size::Word, FP, KEY, R6);
    asm.alu64(Alu::Mov, R2, X(FP));
    asm.alu64(Alu::Add, R2, K(i32::from(KEY).cast_unsigned()));
    asm.map(R1, array.map());
    match access {
        Access::Lookup => asm.call(LOOKUP),
        Access::Update => {
            asm.alu64(Alu::Mov, R3, X(R7));
            asm.alu64(Alu::Mov, R4, X(R8));
            asm.call(UPDATE);
        }
        // Entries of arrays stay.
        Access::Delete => fail(&mut asm, EINVAL),
    }
    asm.exit();
    asm.bind(none);
    match access {
        Access::Lookup => asm.alu64(Alu::Mov, R0, K(0)),
        Access::Update => fail(&mut asm, E2BIG),
        Access::Delete => fail(&mut asm, EINVAL),
    }
    asm.exit();
    asm.finish().map_err(|_| "is too long".to_owned())
}

/// Where on the stack the number of a place is.
const KEY: i16 = -8;
pub(crate) const LOOKUP: u32 = 1;
pub(crate) const UPDATE: u32 = 2;
const GET_SMP_PROCESSOR_ID: u32 = 8;
/// Of the daemon's own: the instance's seat.
pub(crate) const SEAT: u32 = 0x7fff_0001;
const BPF_EXIST: u32 = 2;
const E2BIG: u32 = 7;
const EINVAL: u32 = 22;
