//! What may this program say to the network? Ask, remember, prove.
//!
//! ```text
//!  program ── system call ──> calls ──> act ──> gate ──> rules, questions
//!                               │                 │
//!                               └── done on a copy of its arguments, if allowed
//!  program ── frames ──> wire ──> gate            (only with a switch port of its own)
//! ```
//!
//! A program runs below a filter of system calls that hands each network act to this process (seccomp
//! user notification). The arguments are copied once, become an [`act::Act`], and are judged; what is allowed
//! is done here, on the copy, with the program's own socket. Nothing is looked at and then done by
//! the program, which could change it in between.
//!
//! This crate is used by `vnplug sandbox`; it needs no root and no daemon.

pub mod act;
pub mod ask;
pub mod chronicle;
pub mod dns;
pub mod floor;
pub mod gate;
pub mod interface;
pub mod judging;
pub mod learn;
pub mod learned;
pub mod name;
pub mod profile;
pub mod rules;
pub mod run;
pub mod session;
pub mod wire;

mod calls;
mod filter;
mod keeper;
mod program;
mod supervise;
mod sys;
mod who;

#[cfg(test)]
mod chronicle_tests;
