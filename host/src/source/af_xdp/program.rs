//! The program at the interface: which frames are ours, the time they came, where they go.
//!
//! ```text
//! take   the filter's verdict, if there is a filter: what it does not want passes to the host
//! stamp  the kernel's clock, into the 16 bytes before the frame
//! send   to the socket of the receive queue; if it has none, the frame passes to the host
//! count  frames that were sent to a socket, by queue
//! ```

use std::sync::Arc;

use crate::filter::Program;
use crate::filter::ebpf::{Wanted, xdp_verdict};
use crate::source::SourceError;
use crate::sys::bpf::{
    self, Alu, Counters, If, Insn, LoadError, Map, MapKind, ProgramKind, Reg, Width,
};

/// The program's name, as `ip link` and `bpftool` show it.
pub(super) const NAME: &str = "vnplug_xdp";

/// Bytes before a frame that hold its stamp: the time, and its complement as the proof that it is
/// one.
pub(super) const STAMP_BYTES: u32 = 16;

/// What the program knows: sockets by receive queue, counters by receive queue.
#[derive(Debug)]
pub(super) struct Maps {
    pub(super) sockets: Map,
    seen: Counters,
}

impl Maps {
    /// Room for receive queues below `queues`.
    pub(super) fn new(queues: u32) -> std::io::Result<Self> {
        Ok(Self {
            sockets: Map::create(MapKind::Sockets, "vnplug_sockets", (4, 4), queues)?,
            seen: Counters::create("vnplug_seen", queues)?,
        })
    }

    /// Frames that were sent to the sockets of a receive queue, ever.
    pub(super) fn seen(&self, queue: u32) -> u64 {
        self.seen.read(queue)
    }
}

/// Loads the program.
///
/// `stamps`: each frame carries its time; `frags`: frames of several buffers.
pub(super) fn load(
    maps: &Maps,
    verdict: &[Insn],
    stamps: bool,
    frags: bool,
) -> Result<bpf::Program, LoadError> {
    let code = code(maps, verdict, stamps);
    bpf::Program::load(ProgramKind::Xdp, NAME, &code, frags)
}

/// The instructions that say whether a frame is ours; none: every frame is.
pub(super) fn verdict(take: Option<&Arc<Program>>) -> Result<Vec<Insn>, SourceError> {
    let Some(take) = take else {
        return Ok(Vec::new());
    };
    xdp_verdict(&[Wanted::exactly(take)])
        .map_err(|error| SourceError::new(format!("take cannot be judged in the kernel: {error}")))
}

fn code(maps: &Maps, verdict: &[Insn], stamps: bool) -> Vec<Insn> {
    let mut code = Vec::new();
    if verdict.is_empty() {
        code.push(Insn::alu_reg(Alu::Mov, CONTEXT, 1));
    } else {
        // Leaves 1 or 0 in R0 and the context in R6.
        code.extend_from_slice(verdict);
        code.push(Insn::jump(If::Ne, 0, 0, 2));
        code.push(Insn::alu(Alu::Mov, 0, XDP_PASS));
        code.push(Insn::exit());
    }
    if stamps {
        stamp(&mut code);
    }
    code.push(Insn::load(Width::Word, QUEUE, CONTEXT, MD_RX_QUEUE));
    code.extend(maps.sockets.load_into(1));
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
    count.extend(maps.seen.map().load_into(1));
    count.extend([
        Insn::call(MAP_LOOKUP_ELEM),
        Insn::jump(If::Eq, 0, 0, 2),
        Insn::alu(Alu::Mov, 1, 1),
        // Behind the driver, several CPUs may have frames of one queue at a time.
        Insn::atomic_add(0, 0, 1),
    ]);
    code.push(Insn::jump(If::Ne, ACTION, XDP_REDIRECT, count.len() as i16));
    code.extend(count);
    code.push(Insn::alu_reg(Alu::Mov, 0, ACTION));
    code.push(Insn::exit());
    code
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
