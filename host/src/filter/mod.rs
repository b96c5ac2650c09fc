//! Which frames a port wants: the pcap-filter language, executed here, before the copy.
//!
//! - [`Program`]: a verified classic BPF program, and how it runs on a frame.

mod program;
mod run;

pub use program::{
    INSTRUCTION_BYTES, Instruction, MAX_INSTRUCTIONS, OutOfSteps, Program, Trust, VerifyError,
};
pub use run::STEP_BUDGET;
