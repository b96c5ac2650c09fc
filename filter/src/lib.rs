//! Which frames a port wants: the pcap-filter language, executed here, before the copy.
//!
//! # What runs where
//!
//! ```text
//!  guest, operator                 daemon                        child of the daemon
//!  expression ------------> Compiler (worker thread) ---------> service --fork--> confined copy
//!  or program (bytes)            | cache                          no power         libpcap
//!       |                        | verify again <------------------ program ----------'
//!       `------------------> Program -> run(frame): data path, one per port
//! ```
//!
//! - [`Program`]: classic BPF, verified once by the kernel's rules (`vnplug-bpf`, which also
//!   interprets it). It is the only thing the data path knows; a client that sends a program in wire
//!   form needs no libpcap anywhere.
//! - [`Program::run`] gives libpcap's own verdict (`pcap_offline_filter`), to the bit; a test
//!   compares the two over generated frames. It cannot panic, and its steps are bounded.
//! - [`Jit`]: makes machine code of programs in the background; until then, and if it cannot, they
//!   are interpreted, with the same verdicts.
//! - [`Compiler`]: expression to program by libpcap itself, so the language is the whole language
//!   and the messages are the ones people know.
//!
//! # Why a child
//!
//! libpcap's scanner, parser and optimiser are C code, and guests write what they read. A guest's
//! expression therefore meets libpcap in a process that may do nothing but compute, read public
//! files and answer; the answer is verified like a guest's own program. Each expression gets a
//! process of its own (a fork, about 0.2 ms), so neither a crash nor a take-over reaches the next
//! guest's expression. The price for names: only files resolve (`/etc/hosts`, `/etc/services`,
//! `/etc/protocols`, `/etc/networks`, `/etc/ethers`), never DNS, because making a socket fails in
//! there at once. A guest could otherwise make the host send queries of its choice.
//!
//! # Costs and limits
//!
//! An expression may have [`MAX_EXPRESSION_BYTES`], take [`CPU_LIMIT`] of processor time and
//! [`WALL_LIMIT`] in all, and give [`MAX_INSTRUCTIONS`]. A caller that takes expressions from
//! guests must also limit how many a guest may send: each one that fails may cost those limits.

mod analyse;
mod child;
mod compile;
pub mod ebpf;
mod field;
mod frames;
mod index;
mod lookup;
mod native;
mod program;
mod spans;
mod sys;
mod table;

pub use analyse::{Analysis, Base, Key};
pub use child::compile_child_main;
pub use compile::{
    COMPILE_FILTER_ARG, CPU_LIMIT, Compiler, FilterError, MAX_EXPRESSION_BYTES, WALL_LIMIT,
};
pub use field::Field;
pub use frames::FrameSet;
pub use index::{Index, IndexSize, JudgeId, Totals};
pub use native::{DEFAULT_LIMIT_BYTES, Jit, translate_now};
pub use program::Program;
pub use vnplug_bpf::{
    INSTRUCTION_BYTES, Instruction, MAX_INSTRUCTIONS, OutOfSteps, STEP_BUDGET, Trust, VerifyError,
    libpcap,
};

#[cfg(test)]
mod differential;
#[cfg(test)]
mod packets;
