//! The program at the interface: which frames it takes, when they came, where they go.
//!
//! ```text
//! take   the filter's verdict, if there is a filter: what it does not want passes to the host
//! early  what no port wants of the rest is dropped and counted, if there is early drop
//! stamp  the kernel's clock, into the 16 bytes before the frame
//! send   to the socket of the receive queue; if it has none, the frame passes to the host
//! count  frames that were sent to a socket, by queue
//! ```

use std::sync::Arc;

use super::AfXdpConfig;
use crate::source::SourceError;
use vnplug_filter::Program;
use vnplug_filter::ebpf::{Untranslatable, Wanted, xdp_verdict};
use vnplug_os::bpf;
use vnplug_os::bpf::{Alu, Counters, If, Insn, LoadError, Map, MapKind, ProgramKind, Reg, Width};

/// The program's name, as `ip link` and `bpftool` show it.
pub(super) const NAME: &str = "vnplug_xdp";

/// Bytes before a frame that hold its stamp: the time, and its complement as the proof that it is
/// one.
pub(super) const STAMP_BYTES: u32 = 16;

/// What the programs of an interface have in common.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(super) sockets: Map,
    seen: Counters,
    early: Counters,
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

impl Plan {
    /// Room for receive queues below `queues`.
    pub(super) fn new(config: &AfXdpConfig, queues: u32) -> std::io::Result<Self> {
        Ok(Self {
            sockets: Map::create(MapKind::Sockets, "vnplug_sockets", (4, 4), queues)?,
            seen: Counters::create("vnplug_seen", queues)?,
            early: Counters::create("vnplug_early", queues)?,
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
        self.early.read(queue)
    }

    /// Loads a program. `wants`: drop what nobody wants of what is taken.
    pub(crate) fn load(&self, wants: Option<&[Wanted]>) -> Result<Programs, LoadError> {
        let plain = self.load_one(wants, false)?;
        let frags = match self.multi_buffer {
            // Before Linux 5.18 the kernel does not know of it.
            true => self.load_one(wants, true).ok(),
            false => None,
        };
        Ok(Programs { plain, frags })
    }

    fn load_one(&self, wants: Option<&[Wanted]>, frags: bool) -> Result<bpf::Program, LoadError> {
        let code = self.code(wants, frags).map_err(|error| LoadError {
            cause: std::io::ErrorKind::InvalidInput.into(),
            log: error.to_string(),
        })?;
        bpf::Program::load(ProgramKind::Xdp, NAME, &code, frags)
    }

    fn code(&self, wants: Option<&[Wanted]>, frags: bool) -> Result<Vec<Insn>, Untranslatable> {
        let mut code = vec![Insn::alu_reg(Alu::Mov, CONTEXT, 1)];
        if let Some(take) = &self.take {
            // Leaves 1 or 0 in R0 and the context in R6.
            code.extend(xdp_verdict(&[Wanted::exactly(take)], frags)?);
            code.push(Insn::jump(If::Ne, 0, 0, 2));
            code.push(Insn::alu(Alu::Mov, 0, XDP_PASS));
            code.push(Insn::exit());
        }
        if let Some(wants) = wants {
            self.drop_early(&mut code, &xdp_verdict(wants, frags)?)?;
        }
        self.send(&mut code);
        Ok(code)
    }

    /// Drops and counts what the verdict does not want; frames of queues without a socket go on.
    fn drop_early(&self, code: &mut Vec<Insn>, verdict: &[Insn]) -> Result<(), Untranslatable> {
        let key = |code: &mut Vec<Insn>| {
            code.extend([
                Insn::load(Width::Word, QUEUE, CONTEXT, MD_RX_QUEUE),
                Insn::store(Width::Word, 10, KEY, QUEUE),
                Insn::alu_reg(Alu::Mov, 2, 10),
                Insn::alu(Alu::Add, 2, KEY.into()),
            ]);
        };
        let mut refuse = Vec::new();
        key(&mut refuse);
        refuse.extend(self.early.map().load_into(1));
        refuse.extend([
            Insn::call(MAP_LOOKUP_ELEM),
            Insn::jump(If::Eq, 0, 0, 2),
            Insn::alu(Alu::Mov, 1, 1),
            Insn::atomic_add(0, 0, 1),
            Insn::alu(Alu::Mov, 0, XDP_DROP),
            Insn::exit(),
        ]);
        let mut judge = vec![Insn::alu_reg(Alu::Mov, 1, CONTEXT)];
        judge.extend_from_slice(verdict);
        judge.push(Insn::jump(If::Ne, 0, 0, refuse.len() as i16));
        judge.extend(refuse);
        let over = i16::try_from(judge.len()).map_err(|_| Untranslatable::TooLong)?;
        // Whether the queue has a socket; Linux ≥ 5.3.
        key(code);
        code.extend(self.sockets.load_into(1));
        code.extend([Insn::call(MAP_LOOKUP_ELEM), Insn::jump(If::Eq, 0, 0, over)]);
        code.extend(judge);
        Ok(())
    }

    fn send(&self, code: &mut Vec<Insn>) {
        if self.stamps {
            stamp(code);
        }
        code.push(Insn::load(Width::Word, QUEUE, CONTEXT, MD_RX_QUEUE));
        code.extend(self.sockets.load_into(1));
        code.push(Insn::alu_reg(Alu::Mov, 2, QUEUE));
        // What to do if the queue has no socket; Linux ≥ 5.3.
        code.push(Insn::alu(Alu::Mov, 3, XDP_PASS));
        code.push(Insn::call(REDIRECT_MAP));
        code.push(Insn::alu_reg(Alu::Mov, ACTION, 0));

        let mut count = vec![
            Insn::store(Width::Word, 10, KEY, QUEUE),
            Insn::alu_reg(Alu::Mov, 2, 10),
            Insn::alu(Alu::Add, 2, KEY.into()),
        ];
        count.extend(self.seen.map().load_into(1));
        count.extend([
            Insn::call(MAP_LOOKUP_ELEM),
            Insn::jump(If::Eq, 0, 0, 2),
            Insn::alu(Alu::Mov, 1, 1),
            // After the driver, several CPUs may have frames of one queue at a time.
            Insn::atomic_add(0, 0, 1),
        ]);
        code.push(Insn::jump(If::Ne, ACTION, XDP_REDIRECT, count.len() as i16));
        code.extend(count);
        code.push(Insn::alu_reg(Alu::Mov, 0, ACTION));
        code.push(Insn::exit());
    }
}

/// Whether the kernel can run this `take` filter.
pub(super) fn check(take: Option<&Arc<Program>>) -> Result<(), SourceError> {
    let wants: Vec<_> = take.map(Wanted::exactly).into_iter().collect();
    xdp_verdict(&wants, true)
        .map(drop)
        .map_err(|error| SourceError::new(format!("take cannot be judged in the kernel: {error}")))
}

/// Writes the time before the frame, where the driver leaves room for it.
fn stamp(code: &mut Vec<Insn>) {
    let write = [
        Insn::load(Width::Word, 2, CONTEXT, MD_DATA_META),
        Insn::load(Width::Word, 3, CONTEXT, MD_DATA),
        Insn::alu_reg(Alu::Mov, 1, 2),
        Insn::alu(Alu::Add, 1, STAMP_BYTES as i32),
        Insn::jump_reg(If::Gt, 1, 3, 3),
        Insn::store(Width::Double, 2, 0, TIME),
        Insn::alu(Alu::Xor, TIME, -1),
        Insn::store(Width::Double, 2, 8, TIME),
    ];
    code.extend([
        Insn::call(KTIME_GET_NS),
        Insn::alu_reg(Alu::Mov, TIME, 0),
        Insn::alu_reg(Alu::Mov, 1, CONTEXT),
        Insn::alu(Alu::Mov, 2, -(STAMP_BYTES as i32)),
        Insn::call(XDP_ADJUST_META),
        Insn::jump(If::Ne, 0, 0, write.len() as i16),
    ]);
    code.extend(write);
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
const CONTEXT: Reg = 6;
const QUEUE: Reg = 7;
const ACTION: Reg = 8;
const TIME: Reg = 9;
/// Where on the stack the counter's key is.
const KEY: i16 = -8;

// struct xdp_md
const MD_DATA: i16 = 0;
const MD_DATA_META: i16 = 8;
const MD_RX_QUEUE: i16 = 16;

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;
const XDP_REDIRECT: i32 = 4;

// enum bpf_func_id
const MAP_LOOKUP_ELEM: i32 = 1;
const KTIME_GET_NS: i32 = 5;
const REDIRECT_MAP: i32 = 51;
const XDP_ADJUST_META: i32 = 54;

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
