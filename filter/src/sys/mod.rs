//! What filters ask of Linux: a process without privileges, and executable memory.

pub(crate) mod confine;
pub(crate) mod executable;
