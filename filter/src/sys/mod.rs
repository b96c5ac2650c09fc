//! What filters ask of Linux: a process without power, and memory that runs.

pub(crate) mod confine;
pub(crate) mod executable;
