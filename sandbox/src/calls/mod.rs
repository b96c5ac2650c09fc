//! System calls that were handed over: read, judged, done.
//!
//! ```text
//!  call      what the registers say
//!  prepare   what they point to is copied, once; the socket becomes a copy of ours; the act that is to be judged
//!  decide    who makes it is looked up (lookups); the gate judges the act
//!  carry     what was allowed is done: the task, on the copies
//!  held      what waits: for a verdict, or for a socket
//!  serve     the threads, and what they share
//! ```
//!
//! One thread receives calls and does what can be done at once. It never waits but for the next call.
//! What waits belongs to a second thread, and programs that were not seen before are looked up by a third,
//! because the files that they run are read.

mod address;
mod call;
mod carry;
mod control;
mod decide;
mod execute;
mod files;
mod held;
mod lookups;
mod prepare;
mod serve;
mod task;
mod unix;

pub(crate) use serve::{Serving, serve};
