//! What filters ask of Linux: a process without power, memory that runs, processors that guess.

pub(crate) mod confine;
pub(crate) mod executable;
pub(crate) mod speculation;
