//! Rules: what may be done, by whom, with whom, for how long.
//!
//! | file | says |
//! |---|---|
//! | `rule` | one rule, and which acts it is about |
//! | `words` | how places, protocols and ports are written |
//! | `glob` | patterns for paths and command lines |
//! | `file`, `edit` | TOML: read strictly, edited without loss |
//! | `policy` | in which order rules of several files decide |

pub mod edit;
pub mod file;
pub mod glob;
pub mod policy;
pub mod rule;
pub mod words;

#[cfg(test)]
mod tests;

pub use file::{BadFile, Sheet};
pub use policy::{Decision, Policy, Reason};
pub use rule::{Direction, Origin, Place, Protocol, Rule, Say};
