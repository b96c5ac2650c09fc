//! The program at the interface: which frames it takes, when they came, where they go.
//!
//! ```text
//! take   the filter's verdict, if there is a filter: what it does not want passes to the host
//! run    the operator's program, if there is one: what it does not let pass is counted, and goes where it says
//! early  what no port wants of the rest is dropped and counted, if there is early drop
//! stamp  the kernel's clock, into the 16 bytes before the frame
//! send   to the socket of the receive queue; if it has none, the frame passes to the host
//! count  frames that were sent to a socket, by queue
//! ```

use std::sync::Arc;

use super::AfXdpConfig;
use crate::source::SourceError;
use vnplug_filter::Program;
use vnplug_filter::ebpf::{Book, Gate, Untranslatable, Wanted, xdp_verdict};
use vnplug_os::bpf;
use vnplug_os::bpf::asm::{
    self, Alu, Asm, Cond, FP, Operand, R0, R1, R2, R3, R6, R7, R8, R9, Reg, Size, TooFar,
};
use vnplug_os::bpf::{Counters, Insn, LoadError, Map, MapKind, ProgramKind};

use Operand::{K, X};

/// The program's name, as `ip link` and `bpftool` show it.
pub(super) const NAME: &str = "vnplug_xdp";

/// Bytes before a frame that hold its stamp: the time, and its complement as the proof that it is
/// one.
pub(super) const STAMP_BYTES: u32 = 16;

/// What the programs of an interface have in common.
#[derive(Debug)]
pub(crate) struct ProgramPlan {
    pub(super) sockets: Map,
    seen: Counters,
    /// If there is early drop.
    early: Option<Book>,
    stopped: Counters,
    program: Option<Arc<vnplug_twin::Program>>,
    take: Option<Arc<Program>>,
    stamps: bool,
    multi_buffer: bool,
}

/// One program: for frames of one buffer, and for more if the kernel has that.
#[derive(Debug)]
pub(crate) struct Programs {
    pub(super) plain: bpf::Program,
    pub(super) frags: Option<bpf::Program>,
}

impl ProgramPlan {
    /// Room for receive queues below `queues`.
    pub(super) fn new(config: &AfXdpConfig, queues: u32) -> std::io::Result<Self> {
        Ok(Self {
            sockets: Map::create(MapKind::Sockets, "vnplug_sockets", (4, 4), queues)?,
            seen: Counters::create("vnplug_seen", queues)?,
            early: match config.early {
                true => Some(Book::create("vnplug_early", queues)?),
                false => None,
            },
            stopped: Counters::create("vnplug_stopped", queues)?,
            program: config.program.clone(),
            take: config.take.clone(),
            stamps: config.stamps,
            multi_buffer: config.multi_buffer,
        })
    }

    /// Frames that were sent to the sockets of a receive queue, ever.
    pub(super) fn seen(&self, queue: u32) -> u64 {
        self.seen.read(queue)
    }

    /// Frames of a receive queue that were dropped as no port wanted them, ever.
    pub(super) fn early(&self, queue: u32) -> u64 {
        self.early.as_ref().map_or(0, |book| book.dropped(queue))
    }

    /// What early drop's filters and the daemon share.
    pub(crate) fn book(&self) -> Option<&Book> {
        self.early.as_ref()
    }

    /// Frames of a receive queue that the operator's program did not let pass, ever.
    pub(super) fn stopped(&self, queue: u32) -> u64 {
        self.stopped.read(queue)
    }

    /// Loads a program. `wants`: at this generation, drop what nobody wants of what is taken.
    pub(crate) fn load(&self, wants: Option<(&[Wanted], u32)>) -> Result<Programs, LoadError> {
        let plain = self.load_one(wants, false)?;
        // The operator's program must bear frames of several buffers, too.
        let bears = self.program.as_ref().is_none_or(|program| program.frags());
        let frags = match self.multi_buffer && bears {
            // Before Linux 5.18 the kernel does not know of it.
            true => self.load_one(wants, true).ok(),
            false => None,
        };
        Ok(Programs { plain, frags })
    }

    fn load_one(
        &self,
        wants: Option<(&[Wanted], u32)>,
        frags: bool,
    ) -> Result<bpf::Program, LoadError> {
        let code = self.code(wants, frags).map_err(|error| LoadError {
            cause: std::io::ErrorKind::InvalidInput.into(),
            log: error.to_string(),
        })?;
        bpf::Program::load(ProgramKind::Xdp, NAME, &code, frags)
    }

    fn code(
        &self,
        wants: Option<(&[Wanted], u32)>,
        frags: bool,
    ) -> Result<Vec<Insn>, Untranslatable> {
        let mut asm = Asm::default();
        asm.alu64(Alu::Mov, CONTEXT, X(R1));
        if let Some(take) = &self.take {
            let ours = asm.label();
            // Leaves 1 or 0 in R0 and the context in R6.
            asm.append(&xdp_verdict(&[Wanted::exactly(take)], frags, None)?);
            asm.jump_if(Cond::Ne, R0, K(0), ours);
            asm.alu64(Alu::Mov, R0, K(XDP_PASS));
            asm.exit();
            asm.bind(ours);
        }
        let operators = asm.label();
        if self.program.is_some() {
            self.run(&mut asm, operators);
        }
        if let (Some((wants, generation)), Some(book)) = (wants, &self.early) {
            let gate = Gate { book, generation };
            let verdict = xdp_verdict(wants, frags, Some(gate))?;
            self.drop_early(&mut asm, &verdict, book);
        }
        self.send(&mut asm);
        if let Some(program) = &self.program {
            asm.bind(operators);
            asm.append(program.insns());
        }
        asm.finish().map_err(|TooFar| Untranslatable::TooLong)
    }

    /// Calls the operator's program; ends with what it says, unless it lets the frame pass.
    fn run(&self, asm: &mut Asm, operators: asm::Label) {
        let passes = asm.label();
        // Frames of queues without a socket are the host's.
        asm.load(Size::Word, QUEUE, CONTEXT, MD_RX_QUEUE);
        look_up(asm, &self.sockets);
        asm.jump_if(Cond::Eq, R0, K(0), passes);
        asm.alu64(Alu::Mov, R1, X(CONTEXT));
        asm.call_function(operators);
        asm.jump32_if(Cond::Eq, R0, K(XDP_PASS), passes);
        asm.alu64(Alu::Mov, ACTION, X(R0));
        asm.load(Size::Word, QUEUE, CONTEXT, MD_RX_QUEUE);
        look_up(asm, self.stopped.map());
        let uncounted = asm.label();
        asm.jump_if(Cond::Eq, R0, K(0), uncounted);
        asm.alu64(Alu::Mov, R1, K(1));
        asm.atomic_add(R0, R1);
        asm.bind(uncounted);
        asm.alu64(Alu::Mov, R0, X(ACTION));
        asm.exit();
        asm.bind(passes);
    }

    /// Drops and counts what the verdict does not want; frames of queues without a socket go on.
    fn drop_early(&self, asm: &mut Asm, verdict: &[Insn], book: &Book) {
        let wanted = asm.label();
        // Whether the queue has a socket; Linux ≥ 5.3.
        asm.load(Size::Word, QUEUE, CONTEXT, MD_RX_QUEUE);
        look_up(asm, &self.sockets);
        asm.jump_if(Cond::Eq, R0, K(0), wanted);
        asm.alu64(Alu::Mov, R1, X(CONTEXT));
        asm.append(verdict);
        asm.jump_if(Cond::Ne, R0, K(0), wanted);
        // The verdict used all registers.
        asm.load(Size::Word, QUEUE, CONTEXT, MD_RX_QUEUE);
        book.count(asm, QUEUE);
        asm.alu64(Alu::Mov, R0, K(XDP_DROP));
        asm.exit();
        asm.bind(wanted);
    }

    fn send(&self, asm: &mut Asm) {
        if self.stamps {
            stamp(asm);
        }
        asm.load(Size::Word, QUEUE, CONTEXT, MD_RX_QUEUE);
        asm.map(R1, &self.sockets);
        asm.alu64(Alu::Mov, R2, X(QUEUE));
        // What to do if the queue has no socket; Linux ≥ 5.3.
        asm.alu64(Alu::Mov, R3, K(XDP_PASS));
        asm.call(REDIRECT_MAP);
        asm.alu64(Alu::Mov, ACTION, X(R0));

        let done = asm.label();
        asm.jump_if(Cond::Ne, ACTION, K(XDP_REDIRECT), done);
        look_up(asm, self.seen.map());
        asm.jump_if(Cond::Eq, R0, K(0), done);
        asm.alu64(Alu::Mov, R1, K(1));
        // After the driver, several CPUs may have frames of one queue at a time.
        asm.atomic_add(R0, R1);
        asm.bind(done);
        asm.alu64(Alu::Mov, R0, X(ACTION));
        asm.exit();
    }
}

/// The address of the queue's value in a map, in R0; 0 if there is none.
fn look_up(asm: &mut Asm, map: &Map) {
    asm.store(Size::Word, FP, KEY, QUEUE);
    asm.alu64(Alu::Mov, R2, X(FP));
    asm.alu64(Alu::Add, R2, K(i32::from(KEY).cast_unsigned()));
    asm.map(R1, map);
    asm.call(MAP_LOOKUP_ELEM);
}

/// Whether the kernel can run this `take` filter.
pub(super) fn check(take: Option<&Arc<Program>>) -> Result<(), SourceError> {
    let wants: Vec<_> = take.map(Wanted::exactly).into_iter().collect();
    xdp_verdict(&wants, true, None)
        .map(drop)
        .map_err(|error| SourceError::new(format!("take cannot be judged in the kernel: {error}")))
}

/// Writes the time before the frame, where the driver leaves room for it.
fn stamp(asm: &mut Asm) {
    let none = asm.label();
    asm.call(KTIME_GET_NS);
    asm.alu64(Alu::Mov, TIME, X(R0));
    asm.alu64(Alu::Mov, R1, X(CONTEXT));
    asm.alu64(Alu::Mov, R2, K(STAMP_BYTES.wrapping_neg()));
    asm.call(XDP_ADJUST_META);
    asm.jump_if(Cond::Ne, R0, K(0), none);
    asm.load(Size::Word, R2, CONTEXT, MD_DATA_META);
    asm.load(Size::Word, R3, CONTEXT, MD_DATA);
    asm.alu64(Alu::Mov, R1, X(R2));
    asm.alu64(Alu::Add, R1, K(STAMP_BYTES));
    asm.jump_if(Cond::Gt, R1, X(R3), none);
    asm.store(Size::Double, R2, 0, TIME);
    asm.alu64(Alu::Xor, TIME, K(u32::MAX));
    asm.store(Size::Double, R2, 8, TIME);
    asm.bind(none);
}

/// The time in the bytes before a frame, in nanoseconds of the monotonic clock; `None`: there is
/// none.
#[inline]
pub(super) fn read_stamp(before: &[u8]) -> Option<u64> {
    let (time, rest) = before.split_first_chunk::<8>()?;
    let time = u64::from_ne_bytes(*time);
    let proof = u64::from_ne_bytes(*rest.first_chunk::<8>()?);
    (time == !proof).then_some(time)
}

// Registers that calls leave alone.
const CONTEXT: Reg = R6;
const QUEUE: Reg = R7;
const ACTION: Reg = R8;
const TIME: Reg = R9;
/// Where on the stack the counter's key is.
const KEY: i16 = -8;

// struct xdp_md
const MD_DATA: i16 = 0;
const MD_DATA_META: i16 = 8;
const MD_RX_QUEUE: i16 = 16;

const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;
const XDP_REDIRECT: u32 = 4;

// enum bpf_func_id
const MAP_LOOKUP_ELEM: u32 = 1;
const KTIME_GET_NS: u32 = 5;
const REDIRECT_MAP: u32 = 51;
const XDP_ADJUST_META: u32 = 54;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_stamp_with_its_proof_is_one() {
        let mut before = [0_u8; 16];
        assert_eq!(read_stamp(&before), None);
        before[..8].copy_from_slice(&77_u64.to_ne_bytes());
        before[8..].copy_from_slice(&(!77_u64).to_ne_bytes());
        assert_eq!(read_stamp(&before), Some(77));
        assert_eq!(read_stamp(&before[1..]), None);
    }
}
