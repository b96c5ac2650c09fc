//! What filters ask of Linux: a process without privileges.

pub(crate) mod confine;
