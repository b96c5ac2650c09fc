//! Twin programs: one verified eBPF program, two instances, one data.
//!
//! The kernel runs a program at a hook of an interface. The daemon runs the same instructions on frames that
//! it has in its hands. Both work on the same maps: arrays whose memory both map, so that nothing is copied
//! and nothing is told twice.
//!
//! ```text
//! FILE.o -> Object -> Program -> Instance, one a thread
//!            |          |          |
//!            |          |          runs it on frames, confined to its area
//!            |          maps made, accepted by the kernel's verifier, translated
//!            what the ELF file says
//! ```
//!
//! - [`Object`]: what a compiler left (`clang -target bpf`, aya's).
//! - Maps of other kinds than arrays are made of arrays, and functions that use them (`weave`).
//! - [`Code`]: instructions as machine code; [`check`] says which the daemon can run.
//! - [`Instance`]: an area of memory, and the program in it. Every access of the machine code lies in the area,
//!   whatever the program does: addresses are numbers of bytes within it, and are cut to its size.
//!
//! The kernel's verifier has the first word: what it refuses is not run here either. So the confinement of
//! this side need not be clever; it is the second wall. What it does not rely on the verifier for: memory
//! outside the area, endless loops, deep calls, helpers.

mod area;
pub mod check;
mod code;
mod emit;
mod hash;
mod helpers;
mod instance;
mod layout;
mod object;
mod per_cpu;
mod program;
mod section;
mod weave;

pub use check::{Context, Unfit};
pub use code::{Code, CodeError, SharedMap};
pub use instance::{Instance, Meta, Run};
pub use layout::MAX_FRAME;
pub use object::{MapKind, MapSpec, Object, ObjectError};
pub use program::{MapView, Program, ProgramError};
