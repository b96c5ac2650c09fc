//! Filters for the kernel: classic programs as eBPF, so that the kernel drops a frame that nobody
//! wants on arrival.
//!
//! ```text
//! Program (verified, no loop) -> fragment -> verdict: accept or reject, as Program::run says
//! fragments of all ports      -> one socket filter (af_packet), or one verdict (XDP)
//! ```
//!
//! - A fragment gives the verdict of [`Program::run`] on the bytes that the program sees: scratch
//!   memory is zero, a load beyond the end or a division by zero rejects, shifts of 32 and more give
//!   zero. A root test runs both on thousands of pairs (`filter/tests/ebpf.rs`).
//! - If the kernel's packet is not the one that the judge will see (a VLAN tag beside it, bytes
//!   that a snaplen cuts off), a frame that the judge would accept is accepted. A longer packet
//!   never makes a verdict stricter: the run is the same up to the load that the shorter one does
//!   not have, and that load rejects.
//! - Programs that loop are not translated: only the port's other program limits it then.
//!
//! Filters come from guests. The kernel's own verifier protects the kernel. The daemon is protected
//! because this translation has no state, no recursion and at most a few dozen eBPF instructions
//! per classic one.

mod book;
mod socket;
mod translate;
mod xdp;

use std::fmt;
use std::sync::Arc;

pub use book::{Book, Gate, MAX_FILTERS};
use socket::{SKB_PKT_TYPE, Skb};
use translate::Labels;
use xdp::Xdp;

use super::Program;
use vnplug_os::bpf;
use vnplug_os::bpf::asm::{Alu, Asm, Cond, Label, Operand, R0, R1, R6, Size};
use vnplug_os::bpf::{Insn, LoadError, ProgramKind};

/// A filter that cannot run in the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Untranslatable {
    /// It jumps backwards.
    Loops,
    /// It is too long.
    TooLong,
}

impl fmt::Display for Untranslatable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loops => "a filter loops (protochain)",
            Self::TooLong => "the filters are too long",
        })
    }
}

impl std::error::Error for Untranslatable {}

/// What a port may want of a source: what passes both programs. More than it does is allowed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    guard: Option<Arc<Program>>,
    filter: Option<Arc<Program>>,
}

impl Wanted {
    /// Of a port with these programs; one that loops is left out, as it cannot run in the kernel.
    pub fn new(guard: Option<&Arc<Program>>, filter: Option<&Arc<Program>>) -> Self {
        let straight = |program: &&Arc<Program>| !program.loops();
        Self {
            guard: guard.filter(straight).cloned(),
            filter: filter.filter(straight).cloned(),
        }
    }

    /// What this program wants, no more; one that loops is an error later.
    pub fn exactly(program: &Arc<Program>) -> Self {
        Self {
            guard: None,
            filter: Some(Arc::clone(program)),
        }
    }

    /// Whether it is all there is.
    pub fn is_everything(&self) -> bool {
        self.guard.is_none() && self.filter.is_none()
    }

    /// Classic instructions of both.
    pub fn instructions(&self) -> usize {
        self.programs().map(|it| it.instructions().len()).sum()
    }

    /// Loads of both at offsets that depend on the frame; each is a call in the kernel.
    pub fn variable_loads(&self) -> usize {
        self.programs().map(translate::variable_loads).sum()
    }

    /// The programs in wire form; equal if and only if the programs are.
    pub fn to_bytes(&self) -> Vec<u8> {
        let part = |program: &Option<Arc<Program>>| {
            let bytes = program.as_ref().map_or(Vec::new(), |it| it.to_bytes());
            [&(bytes.len() as u64).to_le_bytes()[..], &bytes].concat()
        };
        [part(&self.guard), part(&self.filter)].concat()
    }

    fn programs(&self) -> impl Iterator<Item = &Program> {
        self.guard.iter().chain(&self.filter).map(Arc::as_ref)
    }
}

/// What a socket's filter does beside judging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketShape {
    /// Frames of the other direction are refused and not counted: `Some(true)` wants what this host
    /// sends, `Some(false)` what it receives.
    pub outbound: Option<bool>,
    /// Bytes that the socket keeps of a frame.
    pub snaplen: u32,
}

/// A socket filter that passes frames that some port wants, and counts the rest in the book, which says
/// which filters are on.
///
/// # Errors
/// [`Untranslatable`].
pub fn socket_filter(
    wants: &[Wanted],
    shape: SocketShape,
    gate: Gate<'_>,
) -> Result<Vec<Insn>, Untranslatable> {
    let mut asm = Asm::default();
    let (accept, other) = (asm.label(), asm.label());
    if let Some(outbound) = shape.outbound {
        asm.load(Size::Word, R0, R1, SKB_PKT_TYPE);
        let wrong = if outbound { Cond::Ne } else { Cond::Eq };
        asm.jump32_if(wrong, R0, Operand::K(PACKET_OUTGOING), other);
    }
    gate.look(&mut asm, accept);
    let reach = Skb::new(wants.iter().flat_map(Wanted::programs));
    if !wants.is_empty() {
        reach.prepare(&mut asm, accept);
    }
    // Filters may be off, so all may reject.
    fragments(&mut asm, wants, &reach, accept, Some(gate))?;
    asm.call(GET_SMP_PROCESSOR_ID);
    gate.book.count(&mut asm, R0);
    asm.bind(other);
    asm.alu64(Alu::Mov, R0, Operand::K(0));
    asm.exit();
    asm.bind(accept);
    asm.alu32(Alu::Mov, R0, Operand::K(shape.snaplen));
    asm.exit();
    asm.finish().map_err(|_| Untranslatable::TooLong)
}

/// The verdict of all filters together, for an XDP program; with a gate, of those that are on.
///
/// On entry R1 is the context (`struct xdp_md *`). Execution leaves after the last instruction with
/// R0 = 1 if some port wants the frame, else 0, and R6 = the context. R1 to R9 and the 96
/// bytes below the frame pointer are used. Filters that ask for the length, load at variable
/// offsets or beyond 16 KiB, and `frags` (frames of several buffers), need Linux ≥ 5.18.
///
/// # Errors
/// [`Untranslatable`].
pub fn xdp_verdict(
    wants: &[Wanted],
    frags: bool,
    gate: Option<Gate<'_>>,
) -> Result<Vec<Insn>, Untranslatable> {
    let mut asm = Asm::default();
    let (accept, done) = (asm.label(), asm.label());
    let mut programs = wants.iter().flat_map(Wanted::programs);
    Xdp::prepare(&mut asm, programs.any(translate::asks_length));
    if let Some(gate) = gate {
        gate.look(&mut asm, accept);
    }
    if fragments(&mut asm, wants, &Xdp { frags }, accept, gate)? {
        asm.alu64(Alu::Mov, R0, Operand::K(0));
        asm.jump(done);
    }
    if asm.is_used(accept) {
        asm.bind(accept);
        asm.alu64(Alu::Mov, R0, Operand::K(1));
    }
    asm.bind(done);
    Xdp::context(&mut asm, R6);
    asm.finish().map_err(|_| Untranslatable::TooLong)
}

/// One fragment after the other; execution goes on after them if all reject. False: that cannot
/// happen, because some port wants everything.
fn fragments(
    asm: &mut Asm,
    wants: &[Wanted],
    reach: &impl translate::Reach,
    accept: Label,
    gate: Option<Gate<'_>>,
) -> Result<bool, Untranslatable> {
    if gate.is_some() && wants.len() > MAX_FILTERS {
        return Err(Untranslatable::TooLong);
    }
    for (number, wanted) in wants.iter().enumerate() {
        let reject = asm.label();
        if let Some(gate) = gate {
            gate.ask(asm, number, accept, reject);
        }
        let mut last = None;
        for program in wanted.programs() {
            if program.loops() {
                return Err(Untranslatable::Loops);
            }
            if let Some(before) = last.take() {
                if !asm.is_used(before) {
                    break;
                }
                asm.bind(before);
            }
            let wants = asm.label();
            let labels = Labels {
                accept: wants,
                unsure: accept,
                reject,
            };
            translate::append(asm, program, reach, labels);
            last = Some(wants);
        }
        match last {
            Some(wants) => asm.lead(wants, accept),
            None if wanted.programs().next().is_none() => asm.jump(accept),
            None => {}
        }
        if !asm.is_used(reject) {
            return Ok(false);
        }
        asm.bind(reject);
    }
    Ok(true)
}

/// Filters in the kernel without a source, run on frames by hand: for tests and measurements.
///
/// Needs `CAP_BPF` or root.
#[derive(Debug)]
pub struct KernelJudge {
    program: bpf::Program,
    /// Where a socket filter counts what it rejects.
    book: Option<Arc<Book>>,
}

impl KernelJudge {
    /// As a socket filter.
    ///
    /// # Errors
    /// A text: it cannot be translated, or the kernel does not accept it.
    pub fn socket(wants: &[Wanted]) -> Result<Self, String> {
        let book = Book::of_processors("vnplug_judge").map_err(|error| error.to_string())?;
        book.set(1, u64::MAX);
        Self::socket_by(&Arc::new(book), 1, wants)
    }

    /// As a socket filter that was made for a generation of a book.
    ///
    /// # Errors
    /// As [`socket`](Self::socket).
    pub fn socket_by(book: &Arc<Book>, generation: u32, wants: &[Wanted]) -> Result<Self, String> {
        let shape = SocketShape {
            outbound: None,
            snaplen: u32::MAX,
        };
        let gate = Gate { book, generation };
        let code = socket_filter(wants, shape, gate).map_err(|error| error.to_string())?;
        let book = Some(Arc::clone(book));
        Self::load(ProgramKind::SocketFilter, &code, false, book)
    }

    /// As an XDP program that passes (`XDP_PASS`, 2) what is wanted, and drops the rest; `frags`: for
    /// frames of several buffers too.
    ///
    /// # Errors
    /// As [`socket`](Self::socket).
    pub fn xdp(wants: &[Wanted], frags: bool) -> Result<Self, String> {
        let mut code = xdp_verdict(wants, frags, None).map_err(|error| error.to_string())?;
        let mut end = Asm::default();
        end.alu64(Alu::Add, R0, Operand::K(1));
        end.exit();
        code.extend(
            end.finish()
                .map_err(|_| Untranslatable::TooLong.to_string())?,
        );
        Self::load(ProgramKind::Xdp, &code, frags, None)
    }

    fn load(
        kind: ProgramKind,
        code: &[Insn],
        frags: bool,
        book: Option<Arc<Book>>,
    ) -> Result<Self, String> {
        let loaded = bpf::Program::load(kind, "vnplug_judge", code, frags);
        let program = loaded.map_err(|error: LoadError| error.to_string())?;
        Ok(Self { program, book })
    }

    /// Whether the kernel lets a frame of at most about 3,500 bytes through, longer with `frags`; for
    /// XDP, of 14 at least.
    ///
    /// # Errors
    /// The system's.
    pub fn wants(&self, frame: &[u8]) -> std::io::Result<bool> {
        if self.book.is_none() {
            return Ok(self.program.test(frame)? == XDP_PASS);
        }
        Ok(self.program.test(&framed(frame))? != 0)
    }

    /// Nanoseconds that one of `times` runs of a socket filter on a frame takes, the kernel's loop
    /// around it included.
    ///
    /// # Errors
    /// The system's.
    pub fn nanoseconds(&self, frame: &[u8], times: u32) -> std::io::Result<u32> {
        Ok(self.program.test_repeatedly(&framed(frame), times)?.1)
    }

    /// How many frames a socket filter has counted as dropped.
    pub fn rejected(&self) -> u64 {
        self.book.as_ref().map_or(0, |book| book.all_dropped())
    }
}

/// The kernel takes a link header off before it runs a socket filter by hand.
fn framed(frame: &[u8]) -> Vec<u8> {
    let mut framed = vec![0; 14];
    framed.extend_from_slice(frame);
    framed
}

/// `skb->pkt_type` of what this host sends.
const PACKET_OUTGOING: u32 = 4;
/// `bpf_get_smp_processor_id`; Linux ≥ 4.1.
const GET_SMP_PROCESSOR_ID: u32 = 8;
const XDP_PASS: u32 = 2;
