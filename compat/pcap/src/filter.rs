//! Filters: compiled by the real library, executed by the daemon.
//!
//! The daemon replaces a filter between two packets. What it published before that may still lie in
//! the ring; libpcap looks at such packets once more with the new filter, and so do we ([`Screen`]).
#![expect(unsafe_code, reason = "programs in the memory of a C program")]

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use vnplug::{FilterSpec, Meta, Port};

use crate::abi::{ERROR, ERROR_NOT_ACTIVATED, Insn, Program};
use crate::devices::describe;
use crate::handle::Handle;
use crate::real::{MISSING, is_missing, real};

/// The packets of before a change, which the new filter must pass too.
#[derive(Debug)]
pub(crate) struct Screen {
    program: Vec<Insn>,
    /// For each ring: its queue, and how many of its packets are left.
    left: Vec<(u16, u64)>,
}

impl Screen {
    /// For what is unread now.
    fn new(program: Vec<Insn>, port: &Port) -> Option<Box<Self>> {
        let left: Vec<_> = port.unread().filter(|&(_, unread)| unread > 0).collect();
        (!left.is_empty()).then(|| Box::new(Self { program, left }))
    }

    /// Whether the program is to see this packet.
    #[cold]
    pub(crate) fn passes(&mut self, meta: &Meta, bytes: &[u8]) -> bool {
        // A ring of a queue alone carries that queue's number, in its packets too.
        let old = self
            .left
            .iter_mut()
            .find(|(queue, left)| *queue == meta.queue && *left > 0);
        let Some((_, left)) = old else {
            return true;
        };
        *left -= 1;
        run(&self.program, meta, bytes) != 0
    }

    /// True while packets of before are left.
    pub(crate) fn is_over(&self) -> bool {
        self.left.iter().all(|&(_, left)| left == 0)
    }
}

/// How many bytes of each packet the program sees, by what its filter returns. Filters that were
/// compiled for the handle return its snaplen; others cut here, as the kernel cuts.
#[derive(Debug)]
pub(crate) enum Cut {
    /// At this many bytes, always.
    At(u32),
    /// At what this program returns for the packet.
    Asked(Vec<Insn>),
}

impl Cut {
    fn of(insns: &[Insn]) -> Self {
        let returns = insns.iter().filter(|insn| insn.code & CLASS == RETURN);
        let mut at = None;
        for insn in returns {
            match (insn.code, insn.k, at) {
                (RETURN, 0, _) => {}
                (RETURN, k, None) => at = Some(k),
                (RETURN, k, Some(before)) if k == before => {}
                _ => return Self::Asked(insns.to_vec()),
            }
        }
        Self::At(at.unwrap_or(u32::MAX))
    }

    #[inline]
    pub(crate) fn apply(&self, meta: &Meta, bytes: &[u8]) -> u32 {
        let len = bytes.len() as u32;
        match self {
            Self::At(at) => len.min(*at),
            // The daemon has judged the whole packet. Of one that is cut the program may think otherwise.
            Self::Asked(program) => match run(program, meta, bytes) {
                0 => len,
                at => len.min(at),
            },
        }
    }
}

/// What the program returns for a packet.
#[cold]
fn run(program: &[Insn], meta: &Meta, bytes: &[u8]) -> u32 {
    let len = bytes.len() as u32;
    // SAFETY: the program was validated when it was set; the bytes have the length given.
    unsafe { (real().bpf_filter)(program.as_ptr(), bytes.as_ptr(), meta.wire_len, len) }
}

/// `pcap_setfilter`.
///
/// # Safety
/// `program` is null or points to a program.
pub(crate) unsafe fn set(handle: &Handle, program: *const Program) -> c_int {
    if !handle.is_active() {
        handle.set_error("This handle hasn't been activated yet");
        return ERROR_NOT_ACTIVATED;
    }
    // SAFETY: the caller's promise.
    let Some(program) = (unsafe { program.as_ref() }) else {
        return fail(handle, "setfilter: No filter specified");
    };
    if program.insns.is_null() || !(1..=MAX_INSNS).contains(&program.len) {
        return fail(handle, "BPF program is not valid");
    }
    // SAFETY: not null, and of this length by the caller's promise.
    let insns = unsafe { std::slice::from_raw_parts(program.insns, program.len as usize) }.to_vec();
    // Without a real library the daemon alone judges the program.
    // SAFETY: the program has the length given.
    let valid = unsafe { (real().bpf_validate)(insns.as_ptr(), program.len as c_int) } != 0;
    if !valid && !is_missing() {
        return fail(handle, "BPF program is not valid");
    }
    let bytes = insns.iter().flat_map(|insn| {
        let ([a, b], k) = (insn.code.to_le_bytes(), insn.k.to_le_bytes());
        [a, b, insn.jt, insn.jf, k[0], k[1], k[2], k[3]]
    });
    let spec = FilterSpec::Program(bytes.collect());
    let _visit = handle.visit();
    let set = handle.live(|live| {
        live.port.set_filter(spec)?;
        live.cut = Cut::of(&insns);
        live.screen = Screen::new(insns, &live.port);
        Ok::<_, vnplug::Error>(())
    });
    match set {
        Some(Ok(())) => 0,
        Some(Err(error)) => fail(handle, &describe(&error)),
        None => fail(handle, INTERRUPTED),
    }
}

/// The program of an empty expression, which needs no compiler: every packet, whole. For programs
/// that set one always, on a machine without a real library.
///
/// # Safety
/// `program` may be written; `text` is null or ends with 0.
pub(crate) unsafe fn compile_nothing(
    program: *mut Program,
    text: *const c_char,
    snaplen: c_int,
) -> bool {
    // SAFETY: not null, and ends with 0 by the caller's promise.
    let blank = text.is_null()
        || unsafe { CStr::from_ptr(text) }
            .to_bytes()
            .trim_ascii()
            .is_empty();
    if !blank || program.is_null() {
        return false;
    }
    // SAFETY: a plain allocation with room for one instruction; the caller's promise.
    unsafe {
        let insns = libc::malloc(size_of::<Insn>()).cast::<Insn>();
        if insns.is_null() {
            return false;
        }
        insns.write(Insn {
            code: RETURN,
            jt: 0,
            jf: 0,
            k: snaplen.unsigned_abs(),
        });
        program.write(Program { len: 1, insns });
    }
    true
}

/// `pcap_freecode` without a real library.
///
/// # Safety
/// `program` is null or points to a program made by [`compile_nothing`], or to an empty one.
pub(crate) unsafe fn free(program: *mut Program) {
    // SAFETY: the caller's promise.
    if let Some(program) = unsafe { program.as_mut() } {
        // SAFETY: made with malloc, or null.
        unsafe { libc::free(program.insns.cast()) };
        *program = Program {
            len: 0,
            insns: ptr::null_mut(),
        };
    }
}

/// Sets the text that the real library has for a call that only it serves, or why it does not.
pub(crate) fn fail(handle: &Handle, text: &str) -> c_int {
    handle.set_error(text);
    ERROR
}

/// The text for a call that the real library cannot serve.
pub(crate) fn missing() -> String {
    MISSING.to_string_lossy().into_owned()
}

/// Of a call by a signal handler that interrupted another one.
pub(crate) const INTERRUPTED: &str = "called by a signal handler within another call";
/// `BPF_RET | BPF_K`.
const RETURN: u16 = 6;
/// The bits of an instruction's class.
const CLASS: u16 = 7;
/// The kernel's limit, and the daemon's.
const MAX_INSNS: u32 = 4096;
