//! What filters ask of Linux: a process without privileges, executable memory, and loads that are
//! safe under speculation.

pub(crate) mod confine;
pub(crate) mod executable;
pub(crate) mod speculation;
