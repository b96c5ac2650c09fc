//! Classic BPF, the form that a filter has when it runs: verified once, then interpreted.
//!
//! ```text
//!  expression --libpcap--> instructions --Program (verified)--> run(frame): bytes wanted, 0 is none
//! ```
//!
//! - [`Program`]: instructions, verified by the kernel's rules. Nothing in it can fail any more.
//! - [`Program::run`] gives the verdict of libpcap's own interpreter, to the bit; its steps are
//!   bounded, and it never panics.
//! - [`libpcap`]: libpcap's compiler, loaded when it is there. A statically linked program loads
//!   none.
//!
//! This is all that the recorder and the command in guests need of filters. What only the daemon
//! needs (machine code, eBPF, lookup, the compiler for strangers' expressions) is in
//! `vnplug-filter`.

pub mod libpcap;
mod program;
mod run;
mod speculation;

pub use program::{
    INSTRUCTION_BYTES, Instruction, MAX_INSTRUCTIONS, MAX_OWN_INSTRUCTIONS, OutOfSteps, Program,
    SCRATCH_WORDS, Trust, VerifyError, code, instruction_bytes,
};
pub use run::{STEP_BUDGET, calculate};
